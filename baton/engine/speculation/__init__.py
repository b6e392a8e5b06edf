"""Speculative decoding: guess the next tokens cheaply, check them all in one step.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). Since a draw depends on
(seed, choice, position) alone, a drafted token is right exactly when it is the one that the
sequence draws there anyway: whatever is drafted, the tokens are those of decoding one by one.
"""
