"""Batching policy on a toy model whose cache notices any block mix-up."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.engine import Engine, StepFailed
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import QueueFull, Scheduler
from baton.engine.sequence import FinishReason, ScheduledBatch, Sequence, SequenceStatus
from tests.support.toy import run_to_end, solo, texts, toy_engine

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 15, 16, 17, 3 * 16 + 7])
def test_a_prompt_of_any_length_around_block_and_chunk_borders_gives_its_text(length: int) -> None:
    engine, runner = toy_engine()
    seq = Sequence(prompt(length), GREEDY)
    engine.add(seq)
    assert texts(run_to_end(engine))[seq.group, 0] == solo(prompt(length), GREEDY)[0]
    assert runner.tokens_computed == length + 8 - 1
    assert max(new for batch in runner.batches for _, new in batch) <= 16


def test_a_repeated_prompt_computes_only_what_is_not_cached() -> None:
    engine, runner = toy_engine()
    outputs = []
    for _ in range(3):
        engine.add(Sequence(prompt(16), GREEDY))
        outputs.append(texts(run_to_end(engine)).popitem()[1])
    assert outputs[0] == outputs[1] == outputs[2]
    # 16 tokens are exactly 4 blocks: 3 come from the cache, the last one is computed again.
    assert runner.tokens_computed == (16 + 7) + 2 * (4 + 7)
    assert engine.scheduler.prefill_tokens_cached == 2 * 12


def test_different_salts_never_share_blocks() -> None:
    engine, _runner = toy_engine()
    for salt in ("a", "b", ""):
        engine.add(Sequence(prompt(16), GREEDY, cache_salt=salt))
        run_to_end(engine)
    assert engine.scheduler.prefill_tokens_cached == 0


def test_decodes_run_every_step_while_a_long_prompt_is_chunked() -> None:
    engine, runner = toy_engine()
    first = Sequence(prompt(4), SamplingParams(temperature=0, max_tokens=20))
    engine.add(first)
    engine.step()
    engine.add(Sequence(prompt(60, 1), GREEDY))
    run_to_end(engine)
    steps = [
        batch for batch in runner.batches if any(seq_id == first.seq_id for seq_id, _ in batch)
    ]
    assert len(steps) == 20
    mixed = [b for b in runner.batches if len(b) == 2 and b[1][1] > 1]
    assert [b[1][1] for b in mixed] == [15, 15, 15, 15], "the prompt gets what decodes leave"


def test_choices_of_one_prompt_compute_it_once_and_copy_on_first_write() -> None:
    sampling = SamplingParams(temperature=1, max_tokens=9, n=4, seed=7)
    engine, runner = toy_engine()
    seq = Sequence(prompt(10), sampling)
    engine.add(seq)
    got = texts(run_to_end(engine))
    assert {c: t for (_, c), t in got.items()} == solo(prompt(10), sampling)
    assert len({tuple(t) for t in got.values()}) == 4
    assert runner.tokens_computed == 10 + 4 * 8


def test_two_requests_that_each_want_most_of_the_pool_both_finish_with_their_solo_text() -> None:
    """The smallest preemption case: 10 blocks, two sequences that each grow to 7."""
    sampling = SamplingParams(temperature=0, max_tokens=12)
    engine, _ = toy_engine(num_blocks=10)
    for seed in (1, 2):
        engine.add(Sequence(prompt(16, seed), sampling))
    outputs = run_to_end(engine)
    got = list(texts(outputs).values())
    assert got == [solo(prompt(16, seed), sampling)[0] for seed in (1, 2)]
    assert engine.scheduler.num_preemptions >= 1  # type: ignore[attr-defined]
    assert engine.scheduler.tokens_recomputed >= 1  # type: ignore[attr-defined]
    assert engine.scheduler.prefill_tokens_computed == 32, "a recompute is not a prefill"
    assert engine.blocks.num_free == 10


def test_the_youngest_is_preempted_and_the_oldest_never_is() -> None:
    sampling = SamplingParams(temperature=0, max_tokens=12)
    engine, _ = toy_engine(num_blocks=10)
    seqs = [Sequence(prompt(16, seed), sampling) for seed in (1, 2)]
    for seq in seqs:
        engine.add(seq)
    run_to_end(engine)
    assert next(seq.num_preemptions for seq in seqs) == 0
    assert seqs[1].num_preemptions >= 1


def test_the_queue_is_bounded() -> None:
    engine, _ = toy_engine(max_queue=2)
    engine.add(Sequence(prompt(4), GREEDY))
    engine.add(Sequence(prompt(4), GREEDY))
    with pytest.raises(QueueFull, match="2"):
        engine.add(Sequence(prompt(4), GREEDY))


def test_prefill_holds_a_computed_prompt_until_it_is_ended() -> None:
    engine, _ = toy_engine("prefill")
    seq = Sequence(prompt(20), SamplingParams(temperature=1, seed=3, max_tokens=5, n=3))
    engine.add(seq)
    outputs = run_to_end(engine)
    assert [len(t) for t in texts(outputs).values()] == [1, 1, 1]
    assert seq.status is SequenceStatus.HELD and engine.blocks.num_free == 64 - 5
    assert engine.end(seq.group) == [seq]
    assert engine.blocks.num_free == 64


def test_a_stop_token_ends_a_choice_with_reason_stop_only_after_min_tokens() -> None:
    free = solo(prompt(6), GREEDY)[0]
    stop = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(free[2],))
    engine, _ = toy_engine()
    engine.add(Sequence(prompt(6), stop))
    outputs = [o for o in run_to_end(engine) if o.token]
    assert [o.token.token_id for o in outputs if o.token] == free[:3]
    assert outputs[-1].finish_reason is FinishReason.STOP
    later = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(free[2],), min_tokens=5)
    tokens = solo(prompt(6), later)[0]
    assert len(tokens) >= 6 and free[2] not in tokens[:5]


KINDS_OF_CACHE = ((1, 0), (4, 0), (9, 0), (None, 2), (9, 1))
"""(window, tail blocks)"""
LOADS = [(trial, None, 0) for trial in range(20)]
LOADS += [(trial, *kind) for trial in range(20, 25) for kind in KINDS_OF_CACHE]  # type: ignore[misc]


@pytest.mark.parametrize(("trial", "window", "tail"), LOADS)
def test_random_load_with_aborts_and_a_tiny_pool_keeps_every_text_and_every_block(
    trial: int, window: int | None, tail: int
) -> None:
    rng = random.Random(trial)
    engine, _ = toy_engine(
        num_blocks=24, window=window, num_tail_blocks=tail, max_num_seqs=6, chunk_size=8
    )
    shared = [prompt(rng.randrange(1, 30), 50 + i) for i in range(3)]
    expected, aborted, outputs = {}, set(), []
    for _ in range(60):
        action = rng.random()
        if action < 0.35 and len(engine.scheduler.waiting) < 20:
            tokens = rng.choice(shared)[: rng.randrange(1, 30)] + prompt(rng.randrange(0, 8), trial)
            sampling = SamplingParams(
                temperature=rng.choice([0.0, 0.8]),
                seed=rng.randrange(1000),
                max_tokens=rng.randrange(1, 20),
                n=rng.choice([1, 1, 3]),
                repetition_penalty=rng.choice([1.0, 1.3]),
            )
            seq = Sequence(tokens, sampling)
            engine.add(seq)
            expected[seq.group] = (tokens, sampling)
        elif action < 0.42 and expected:
            group = rng.choice(list(expected))
            if engine.end(group):
                aborted.add(group)
        else:
            outputs += engine.step() or []
            engine.blocks.check_integrity([s.held_blocks for s in engine.scheduler.sequences()])
    outputs += run_to_end(engine)
    got = texts([o for o in outputs if o.seq.group not in aborted])
    for group, (tokens, sampling) in expected.items():
        if group not in aborted:
            mine = {c: t for (g, c), t in got.items() if g == group}
            assert mine == solo(tokens, sampling, window)
    assert engine.blocks.num_free == 24


def test_a_sequence_ended_while_its_step_runs_keeps_its_blocks_until_the_step_is_booked() -> None:
    """Freed at once, the blocks could be given to a hand-off while the step still writes."""
    engine, runner = toy_engine(num_blocks=8)
    seq = Sequence(prompt(8), GREEDY)
    engine.add(seq)
    compute = runner.run
    seen = []

    def end_meanwhile(batch):  # type: ignore[no-untyped-def]
        engine.end(seq.group)
        seen.append(engine.blocks.num_free)
        return compute(batch)

    runner.run = end_meanwhile  # type: ignore[method-assign]
    assert engine.step() == []
    assert seen == [6]
    assert engine.blocks.num_free == 8


def engine_that_copies_from_a_victim(
    meanwhile: Callable[[Engine[Scheduler], ScheduledBatch], None], choices: int = 2
) -> tuple[Engine[Scheduler], list[int]]:
    """Choices that share a tail, and room for the first one to go on, not for the last. The next
    step calls `meanwhile` when it is scheduled, before it copies; the list: blocks held beside."""
    engine, runner = toy_engine(num_blocks=16, num_tail_blocks=1)
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=6, n=choices)
    engine.add(Sequence(prompt(8), sampling))
    engine.step()
    held = engine.blocks.allocate(engine.blocks.num_available - choices)
    compute = runner.run

    def run(batch: ScheduledBatch) -> Any:
        runner.run = compute  # type: ignore[method-assign]
        meanwhile(engine, batch)
        return compute(batch)

    runner.run = run  # type: ignore[method-assign]
    return engine, held


def holders(engine: Engine[Scheduler], *others: list[int]) -> list[list[int]]:
    scheduler = engine.scheduler
    assert isinstance(scheduler, DecodeScheduler)
    tables = [seq.held_blocks for seq in scheduler.sequences()]
    return [*tables, scheduler.pending_sources, *others]


@pytest.mark.parametrize("victim_ends", [False, True])
def test_a_block_that_is_still_to_be_copied_belongs_to_nobody_else(victim_ends: bool) -> None:
    """The last other holder of a copy's source was preempted: the block was free while the copy
    was pending, a hand-off was given it and wrote, and a choice went on with foreign KV."""
    taken: list[int] = []

    def hand_off(engine: Engine[Scheduler], batch: ScheduledBatch) -> None:
        (source,) = {source for source, _ in batch.block_copies}
        (victim,) = engine.scheduler.waiting
        if victim_ends:
            assert engine.end(victim.group, victim.choice) == [victim]
        taken.extend(engine.blocks.allocate(engine.blocks.num_available))
        assert source not in taken
        engine.blocks.check_integrity(holders(engine, held, taken))

    engine, held = engine_that_copies_from_a_victim(hand_off)
    outputs = engine.step() or []
    engine.blocks.check_integrity(holders(engine, held, taken))
    assert engine.blocks.num_available == 1, "the source is free when it has been copied"
    engine.blocks.release(held + taken)
    outputs += run_to_end(engine)
    expected = solo(prompt(8), SamplingParams(temperature=0.8, seed=3, max_tokens=6, n=2))
    lives = [0] if victim_ends else [0, 1]
    found = [[o.token.token_id for o in outputs if o.token and o.choice == c] for c in lives]
    assert found == [expected[choice][1:] for choice in lives]
    assert engine.blocks.num_free == 16


def test_a_step_that_fails_gives_back_what_it_was_to_copy_from() -> None:
    def break_down(engine: Engine[Scheduler], batch: ScheduledBatch) -> None:
        engine.blocks.check_integrity(holders(engine, held))
        raise RuntimeError("broken on purpose")

    engine, held = engine_that_copies_from_a_victim(break_down)
    with pytest.raises(StepFailed):
        engine.step()
    engine.blocks.check_integrity(holders(engine, held))
    engine.blocks.release(held)
    run_to_end(engine)
    assert engine.blocks.num_free == 16


def test_who_holds_a_copied_block_when_its_other_holders_are_gone_writes_it_in_place() -> None:
    copies: list[tuple[int, int]] = []
    engine, held = engine_that_copies_from_a_victim(
        lambda engine, batch: copies.extend(batch.block_copies), choices=3
    )
    engine.step()
    assert len(copies) == 1 and len(engine.scheduler.running) == 2
    engine.blocks.release(held)
    run_to_end(engine)
    assert engine.blocks.num_free == 16
