"""Which worker holds which leading blocks of a prompt.

Knows blocks by their hashes only, never their content.
"""

from baton.cluster.prefix_index.matches import PrefixMatches, WorkerKey
from baton.cluster.prefix_index.prompt_blocks import PromptBlocks

__all__ = ["PrefixMatches", "PromptBlocks", "WorkerKey"]
