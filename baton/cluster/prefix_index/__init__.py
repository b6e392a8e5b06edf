"""Which worker holds which leading blocks of a prompt.

Workers publish the blocks of their prefix cache to Redis, routers look prompts up. Knows blocks by
their hashes only, never their content. Redis may vanish at any moment: nothing here waits for it.
"""

from baton.cluster.prefix_index.index import PrefixIndex
from baton.cluster.prefix_index.matches import PrefixMatches, WorkerKey
from baton.cluster.prefix_index.prompt_blocks import PromptBlocks
from baton.cluster.prefix_index.publisher import PrefixPublisher
from baton.cluster.prefix_index.store import PrefixStore

__all__ = [
    "PrefixIndex",
    "PrefixMatches",
    "PrefixPublisher",
    "PrefixStore",
    "PromptBlocks",
    "WorkerKey",
]
