"""With drafts every text is what it is without, and every block is where it should be."""

import random
from collections import Counter

import pytest
import torch

from baton.block_hash import block_hashes, root_hash
from baton.engine.engine import Engine
from baton.engine.pins import Pins
from baton.engine.sampler import Sampler
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import FinishReason, ScheduledBatch, ScheduledSequence, Sequence
from tests.support.drafts import Foresight, foreseeing
from tests.support.toy import run_to_end, solo, texts, toy_engine

KINDS_OF_CACHE = ((None, 0), (1, 0), (9, 0), (None, 2), (9, 1))
"""(window, tail blocks)"""


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(length)]


def foreseen(tokens: list[int], sampling: SamplingParams, wrong: float = 0.0) -> Foresight:
    foresight = Foresight(wrong=wrong)
    foresight.texts = [tokens + text for text in solo(tokens, sampling).values()]
    return foresight


class SureForesight(Foresight):
    def __init__(self, known: list[list[int]]) -> None:
        super().__init__(wrong=0.0)
        self.texts = known

    def propose(self, token_ids, count):  # type: ignore[no-untyped-def]
        size = len(token_ids)
        return next(t[size : size + count] for t in self.texts if t[:size] == list(token_ids))


def published(engine: Engine) -> set[bytes]:
    return {digest for digest, _ in engine.blocks.published()}


@pytest.mark.parametrize("trial", range(15))
def test_random_load_in_a_tiny_pool_keeps_every_text_and_every_block(trial: int) -> None:
    window, tail = KINDS_OF_CACHE[trial % len(KINDS_OF_CACHE)]
    rng, foresight = random.Random(trial), Foresight(trial)
    drafting = foreseeing(foresight)
    engine, _ = toy_engine(
        num_blocks=24,
        window=window,
        num_tail_blocks=tail,
        max_num_seqs=6,
        chunk_size=8,
        drafting=drafting,
    )
    shared = [prompt(rng.randrange(1, 30), 50 + i) for i in range(3)]
    expected, outputs = {}, []
    for _ in range(12):
        tokens = rng.choice(shared)[: rng.randrange(1, 30)] + prompt(rng.randrange(0, 8), trial)
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            seed=rng.randrange(1000),
            max_tokens=rng.randrange(1, 20),
            min_tokens=rng.choice([0, 5]),
            stop_token_ids=(rng.randrange(97), rng.randrange(97)),
            n=rng.choice([1, 1, 3]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.5]),
        )
        seq = Sequence(tokens, sampling)
        expected[seq.group] = tokens, solo(tokens, sampling, window)
        foresight.texts += [tokens + text for text in expected[seq.group][1].values()]
        engine.add(seq)
        for _ in range(rng.randrange(6)):
            outputs += engine.step() or []
            engine.blocks.check_integrity([s.held_blocks for s in engine.scheduler.sequences()])
    outputs += run_to_end(engine)
    got = texts(outputs)
    for group, (_, mine) in expected.items():
        assert {c: t for (g, c), t in got.items() if g == group} == mine
    assert engine.blocks.num_free == 24
    assert 0 < drafting.tokens_accepted < drafting.tokens_drafted
    root, real = root_hash("", "bfloat16", ""), set()
    for tokens, mine in expected.values():
        for text in mine.values():
            real |= set(block_hashes(root, tokens + text, 4))
    assert published(engine) <= real, "a block with a rejected token can be found"


def test_a_right_draft_takes_one_step_and_its_blocks_are_published_as_without_it() -> None:
    sampling = SamplingParams(temperature=0, max_tokens=13)
    drafting = foreseeing(SureForesight(foreseen(prompt(6), sampling).texts))
    engine, runner = toy_engine(drafting=drafting)
    plain, plain_runner = toy_engine()
    for each in (engine, plain):
        each.add(Sequence(prompt(6), sampling))
        run_to_end(each)
    assert published(engine) == published(plain)
    assert drafting.tokens_accepted == drafting.tokens_drafted == 10
    # The prompt, 1 + 6 and 1 + 4 tokens; without drafts 13 steps.
    assert (len(runner.batches), len(plain_runner.batches)) == (3, 13)
    assert runner.tokens_computed == plain_runner.tokens_computed == 6 + 12
    assert engine.tokens_generated == 13


def test_a_stop_token_within_a_draft_ends_the_choice_there() -> None:
    free = solo(prompt(6), SamplingParams(temperature=0, max_tokens=9))[0]
    stop = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=(free[3],))
    engine, _ = toy_engine(drafting=foreseeing(SureForesight([prompt(6) + free])))
    engine.add(Sequence(prompt(6), stop))
    outputs = [o for o in run_to_end(engine) if o.token]
    assert [o.token.token_id for o in outputs if o.token] == free[:4]
    assert [o.finish_reason for o in outputs] == [None] * 3 + [FinishReason.STOP]
    assert engine.blocks.num_free == 64


def test_log_probabilities_of_drafted_tokens_are_those_of_drawn_ones() -> None:
    sampling = SamplingParams(temperature=0.9, seed=5, max_tokens=12, logprobs=3)
    foresight = foreseen(prompt(9), sampling, wrong=0.3)

    def tokens(engine: Engine) -> list[object]:
        engine.add(Sequence(prompt(9), sampling))
        return [output.token for output in run_to_end(engine) if output.token]

    plain = tokens(toy_engine()[0])
    assert tokens(toy_engine(drafting=foreseeing(foresight))[0]) == plain
    assert len(plain) == 12


def test_drafts_take_no_block_that_was_promised() -> None:
    sampling = SamplingParams(temperature=0, max_tokens=12)
    foresight = SureForesight(foreseen(prompt(3), sampling).texts)
    engine, runner = toy_engine(num_blocks=8, drafting=foreseeing(foresight))
    engine.add(Sequence(prompt(3), sampling))
    engine.step()
    engine.blocks.promise(engine.blocks.num_available - 1)
    engine.step()  # one block for the next token, none for what lies beyond it
    assert runner.batches[-1][0][1] == 4 * 2 - 3
    assert engine.blocks.num_available >= 0


def test_drafts_break_no_pin() -> None:
    sampling = SamplingParams(temperature=0, max_tokens=12)
    foresight = SureForesight(foreseen(prompt(3), sampling).texts)
    engine, runner = toy_engine(num_blocks=8, drafting=foreseeing(foresight))
    blocks = engine.blocks
    blocks.pins = Pins(8, 8)
    pinned = block_hashes(root_hash("pinned"), list(range(28)), 4)
    table = blocks.allocate(7)
    for block, digest in zip(table, pinned, strict=True):
        blocks.publish(block, digest)
    blocks.pin("", pinned, expires_at=float("inf"))
    blocks.release(table)
    engine.add(Sequence(prompt(3), sampling))
    engine.step()
    engine.step()
    assert runner.batches[-1][0][1] == 1, "the block of the draft would have been a pinned one"
    run_to_end(engine)
    assert blocks.num_pins_broken == 3, "the sequence itself needs four blocks"


def test_no_draft_reaches_the_end_of_a_block_of_a_quantized_cache() -> None:
    """The exact tokens of the tail are overwritten when a block is full: a draft that is
    rejected after that could not be taken back."""
    sampling = SamplingParams(temperature=0, max_tokens=30)
    foresight = SureForesight(foreseen(prompt(3), sampling).texts)
    engine, runner = toy_engine(num_tail_blocks=1, drafting=foreseeing(foresight))
    engine.add(Sequence(prompt(3), sampling))
    run_to_end(engine)
    end = 0
    for ((_, size),) in runner.batches:
        end += size
        assert end % 4 != 0 or size == 1
    assert max(size for ((_, size),) in runner.batches[1:]) == 3


def test_tokens_drawn_with_a_draft_follow_the_true_distribution() -> None:
    """The first token, whatever was drafted for it, and the second where the draft was right."""
    first, second = (0.5, 0.25, 0.125, 0.125), (0.125, 0.5, 0.125, 0.25)
    items = [
        ScheduledSequence(Sequence([7], SamplingParams(seed=seed)), 1, [0]) for seed in range(4000)
    ]
    logits = torch.tensor([first, second] * len(items)).log()
    runs = [[t.token_id for t in run] for run in Sampler().sample(logits, ScheduledBatch(items))]
    assert all((len(run) == 2) == (run[0] == 0) for run in runs)
    for drawn, chances in (
        ([run[0] for run in runs], first),
        ([run[1] for run in runs if len(run) == 2], second),
    ):
        counts = Counter(drawn)
        expected = [chance * len(drawn) for chance in chances]
        chi2 = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected))
        assert chi2 < 16.3, counts  # 3 degrees of freedom: passed by chance 1 time in 1000
