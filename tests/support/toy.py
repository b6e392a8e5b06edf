"""A toy model whose KV cache is checked on every read.

The "KV" of a token is the token itself, stored in its slot. A forward pass writes the new
tokens through the block table, reads the whole context back the same way and fails loudly
when it reads anything but the sequence's own tokens. The logits are a fixed function of
that context, so the text depends on every cached token.
"""

import hashlib

import torch

from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.engine import Engine
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.engine.sampler import Sampler
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import (
    NO_BLOCK,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
    StepOutput,
)
from baton.engine.speculation.drafting import Drafting

VOCAB = 97


class ToyRunner:
    """Counts what it computed; `batches` holds (seq_id, num_new_tokens) per item per step."""

    def __init__(
        self, num_blocks: int, block_size: int, window: int | None = None, num_tail_blocks: int = 0
    ) -> None:
        self.num_tail_blocks = num_tail_blocks
        self.window = window
        self.block_size = block_size
        self.kv = [[-1] * block_size for _ in range(num_blocks)]
        self.tokens_computed = 0
        self.batches: list[list[tuple[int, int]]] = []

    def run(self, batch: ScheduledBatch) -> torch.Tensor:
        for source, target in batch.block_copies:
            self.kv[target] = list(self.kv[source])
        sizes = [item.num_new_tokens for item in batch.items]
        assert sizes == sorted(sizes, key=lambda n: n > 1), "decodes come first"
        self.batches.append([(item.seq.seq_id, item.num_new_tokens) for item in batch.items])
        for item in batch.items:
            self._write(item)
        rows = [toy_logits(context) for item in batch.items for context in self._contexts(item)]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _write(self, item: ScheduledSequence) -> None:
        seq = item.seq
        self.tokens_computed += item.num_new_tokens
        for position, token in enumerate(item.new_token_ids, start=seq.num_computed_tokens):
            block = seq.block_table[position // self.block_size]
            newest = seq.tail_blocks[-1] if self.num_tail_blocks else block
            self.kv[newest][position % self.block_size] = token
            if (position + 1) % self.block_size == 0:
                self.kv[block] = list(self.kv[newest])

    def _contexts(self, item: ScheduledSequence) -> list[list[int]]:
        """What each token to be drawn depends on."""
        if not item.samples:
            return []
        end = item.seq.num_computed_tokens + item.num_new_tokens
        drafted = range(len(item.draft), -1, -1)
        return [self._read(item, end - back) for back in drafted]

    def _read(self, item: ScheduledSequence, end: int) -> list[int]:
        seq = item.seq
        window = end if self.window is None else self.window
        first = max(0, seq.num_computed_tokens + 1 - window)
        tables = [seq.block_table[p // self.block_size] for p in range(first, end)]
        if self.num_tail_blocks:
            assert len(seq.tail_blocks) == self.num_tail_blocks
            rest = end % self.block_size
            tables[len(tables) - rest :] = [seq.tail_blocks[-1]] * min(rest, len(tables))
        assert NO_BLOCK not in tables, f"sequence {seq.seq_id} gave back what it still sees"
        slots = zip(tables, range(first, end), strict=True)
        tokens = [self.kv[block][p % self.block_size] for block, p in slots]
        known = (seq.token_ids + item.draft)[first:end]
        assert tokens == known, f"sequence {seq.seq_id} read foreign KV"
        return tokens[-window:]


def toy_logits(context: list[int]) -> torch.Tensor:
    digest = hashlib.blake2b(repr(context).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(VOCAB, generator=generator) * 3


def toy_engine(
    role: str = "decode",
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    window: int | None = None,
    num_tail_blocks: int = 0,
    drafting: Drafting | None = None,
    **config: object,
) -> tuple[Engine[Scheduler], ToyRunner]:
    settings = {"chunk_size": 16, "max_num_seqs": 8, **config}
    sizes = {"num_blocks": num_blocks, "num_tail_blocks": num_tail_blocks, **settings}
    engine_config = EngineConfig(block_size=block_size, **sizes)  # type: ignore[arg-type]
    prefix_cache = engine_config.enable_prefix_cache
    blocks = BlockManager(num_blocks, block_size, prefix_cache, window, num_tail_blocks)
    scheduler_type = {"decode": DecodeScheduler, "prefill": PrefillScheduler}[role]
    runner = ToyRunner(num_blocks, block_size, window, num_tail_blocks)
    scheduler = scheduler_type(engine_config, blocks)
    if isinstance(scheduler, DecodeScheduler):
        scheduler.drafting = drafting
    return Engine(scheduler, blocks, runner, Sampler(engine_config.eos_token_ids)), runner


def run_to_end(engine: Engine[Scheduler], max_steps: int = 2000) -> list[StepOutput]:
    """Steps until nothing is left; checks the books after every step."""
    outputs: list[StepOutput] = []
    for _ in range(max_steps):
        step = engine.step()
        engine.blocks.check_integrity([s.held_blocks for s in engine.scheduler.sequences()])
        if step is None:
            assert not engine.scheduler.has_work(), "work is left but nothing can run"
            return outputs
        outputs += step
    raise AssertionError(f"not finished after {max_steps} steps")


def texts(outputs: list[StepOutput]) -> dict[tuple[int, int], list[int]]:
    """Token ids per (group, choice), checking that indices have no gap or repeat."""
    result: dict[tuple[int, int], list[int]] = {}
    for output in outputs:
        if output.token is not None:
            tokens = result.setdefault((output.seq.group, output.choice), [])
            assert output.index == len(tokens), "a token is missing or came twice"
            tokens.append(output.token.token_id)
    return result


def solo(
    prompt: list[int], sampling: SamplingParams, window: int | None = None
) -> dict[int, list[int]]:
    """Choice → tokens of the request alone in a fresh engine without prefix cache."""
    engine, _ = toy_engine(num_blocks=512, window=window, enable_prefix_cache=False)
    engine.add(Sequence(prompt, sampling))
    return {choice: tokens for (_, choice), tokens in texts(run_to_end(engine)).items()}
