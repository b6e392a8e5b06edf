"""How many blocks a sequence needs under its KV policy, and how far one step may go.

Plain arithmetic over `baton.kv_policy`. A sequence takes all that it needs when it starts, so
that it never waits for blocks in the middle of a prompt. One that may be endless takes what its
window and one chunk need, and goes on with the blocks that it gives back.
"""

from typing import NamedTuple

from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.sequence import Sequence
from baton.kv_policy import KVPolicy, Streaming


class Need(NamedTuple):
    """`table` for keys and values, `compact` for what will be kept of the prompt, `tail` for the
    newest tokens of a quantized cache or the policy's own numbers."""

    table: int
    compact: int = 0
    tail: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def need(config: EngineConfig, seq: Sequence, num_tokens: int) -> Need:
    """To compute the first `num_tokens` tokens from nothing."""
    return _need(config, seq.kv_policy, seq.num_prompt_tokens, num_tokens)


def num_tail_blocks(config: EngineConfig, seq: Sequence) -> int:
    return need(config, seq, seq.num_initial_tokens).tail


def step_end(config: EngineConfig, blocks: BlockManager, seq: Sequence, end: int) -> int:
    """The last position, at most `end`, up to which the next step may compute."""
    start, size = seq.num_computed_tokens, blocks.block_size
    end = int(min(end, seq.kv_policy.step_end(start, seq.num_prompt_tokens)))
    if seq.kv_policy.is_endless:
        wanted = blocks.blocks_for(end - seq.num_dropped_tokens)
        most = need(config, seq, len(seq.token_ids)).table
        grow = min(wanted, most) - len(seq.block_table)
        seq.block_table += blocks.allocate(max(0, min(grow, blocks.num_available)))
    return min(end, seq.num_dropped_tokens + len(seq.block_table) * size)


def refusal(
    config: EngineConfig, policy: KVPolicy, num_prompt_tokens: int, num_tokens: int
) -> str | None:
    """Why a sequence that grows to `num_tokens` can never be served here; None if it can."""
    if num_tokens > config.max_model_len and not policy.is_endless:
        return f"{num_tokens} tokens are more than the {config.max_model_len} of the context"
    wanted = _need(config, policy, num_prompt_tokens, num_tokens).total
    if wanted > config.num_blocks:
        return f"{num_tokens} tokens need {wanted} blocks, there are {config.num_blocks}"
    return None


def drop(blocks: BlockManager, seq: Sequence) -> None:
    """Follows the policy after a step: the table becomes that of what is kept."""
    dropped = seq.dropped_of(seq.num_computed_tokens, blocks.block_size)
    more, seq.num_dropped_tokens = dropped - seq.num_dropped_tokens, dropped
    if isinstance(seq.kv_policy, Streaming) and more:
        first = blocks.blocks_for(seq.kv_policy.sinks)
        end = first + more // blocks.block_size
        blocks.release(seq.block_table[first:end])
        del seq.block_table[first:end]
    if seq.num_computed_tokens < seq.num_prompt_tokens:
        return
    seq.retention = None
    if seq.compact_blocks:
        blocks.release(seq.block_table)
        seq.block_table, seq.compact_blocks = seq.compact_blocks, []


def trim(blocks: BlockManager, seq: Sequence) -> None:
    """Gives back blocks of the table that hold nothing yet."""
    end = blocks.blocks_for(seq.num_kept_tokens)
    blocks.release(seq.block_table[end:])
    del seq.block_table[end:]


def _need(config: EngineConfig, policy: KVPolicy, num_prompt_tokens: int, num_tokens: int) -> Need:
    size = config.block_size
    table, compact, states = policy.blocks(num_tokens, num_prompt_tokens, size)
    tail = config.num_tail_blocks + -(-states // config.states_per_block)
    if policy.is_endless:
        whole, chunk = -(-num_tokens // size), -(-config.chunk_size // size)
        table = max(table, min(whole, table + chunk, config.num_blocks - tail))
    return Need(table, compact, tail)
