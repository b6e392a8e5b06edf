"""Baton on Ray: who runs where, and who is started again. Tokens and KV never go through Ray.

Every router and worker is the process that `baton up` starts elsewhere too, kept by an actor.
"""
