"""Prompts are computed by urgency, chunk by chunk, and no block of them twice at once."""

from collections.abc import Callable

import pytest

from baton.engine.block_manager import BlockManager
from baton.engine.config import EngineConfig
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import SampledToken, Sequence

CHUNK = 16


class Harness:
    """Steps a scheduler without a model and notes who was computed in each step."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.blocks = BlockManager(num_blocks, 4)
        config = EngineConfig(num_blocks, 4, max_num_seqs=8, chunk_size=CHUNK)
        self.scheduler = PrefillScheduler(config, self.blocks)
        self.names: dict[int, str] = {}
        self.steps: list[dict[str, int]] = []

    def add(self, name: str, tokens: list[int], due_at: float = float("inf")) -> Sequence:
        seq = Sequence(tokens, SamplingParams(max_tokens=1), due_at=due_at)
        self.names[seq.seq_id] = name
        self.scheduler.add(seq)
        return seq

    def step(self) -> dict[str, int]:
        batch = self.scheduler.schedule()
        assert batch is not None
        done = {self.names[item.seq.seq_id]: item.num_new_tokens for item in batch.items}
        self.scheduler.postprocess(
            batch, [[SampledToken(1)] if item.samples else [] for item in batch.items]
        )
        self.steps.append(done)
        return done

    def run(self) -> list[dict[str, int]]:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
        return self.steps


@pytest.fixture
def harness() -> Harness:
    return Harness()


def tokens(start: int) -> Callable[[int], list[int]]:
    return lambda count: list(range(start, start + count))


def test_the_earliest_deadline_is_computed_first(harness: Harness) -> None:
    harness.add("none", tokens(0)(16))
    harness.add("late", tokens(100)(16), due_at=9.0)
    harness.add("soon", tokens(200)(16), due_at=5.0)
    assert harness.run() == [{"soon": 16}, {"late": 16}, {"none": 16}]


def test_an_urgent_prompt_goes_between_the_chunks_of_a_long_one(harness: Harness) -> None:
    harness.add("long", tokens(0)(48), due_at=60.0)
    harness.step()
    harness.add("urgent", tokens(100)(20), due_at=1.0)
    assert harness.run()[1:] == [
        {"urgent": 16},
        {"urgent": 4, "long": 12},
        {"long": 16},
        {"long": 4},
    ]
    harness.blocks.check_integrity([seq.held_blocks for seq in harness.scheduler.held])


def test_without_deadlines_it_is_first_come_first_served(harness: Harness) -> None:
    for number in range(3):
        harness.add(str(number), tokens(number * 100)(12))
    assert harness.run() == [{"0": 12, "1": 4}, {"1": 8, "2": 8}, {"2": 4}]


def test_a_prefix_that_is_being_computed_is_waited_for(harness: Harness) -> None:
    """Two equal prompts in one step were computed twice."""
    shared = tokens(0)(12)
    harness.add("first", [*shared, 50])
    second = harness.add("second", [*shared, 60, 61])
    assert harness.run() == [{"first": 13}, {"second": 2}]
    assert second.num_cached_tokens == 12
    assert harness.scheduler.prefill_tokens_computed == 15


def test_who_is_waited_for_moves_up_to_the_urgent_ones_place(harness: Harness) -> None:
    shared = tokens(0)(32)
    harness.add("other", tokens(500)(16), due_at=8.0)
    harness.add("first", [*shared, 50], due_at=5.0)
    harness.step()
    harness.add("between", tokens(900)(16), due_at=4.0)
    harness.add("urgent", [*shared, 60], due_at=1.0)
    order = [next(iter(step)) for step in harness.run()[1:]]
    assert order.index("urgent") < order.index("between")
    assert harness.scheduler.prefill_tokens_computed == 16 + 33 + 16 + 1


def test_an_urgent_prompt_without_room_is_not_overtaken_by_newcomers() -> None:
    harness = Harness(num_blocks=8)
    harness.add("long", tokens(0)(24), due_at=9.0)
    harness.step()
    harness.add("big", tokens(100)(20), due_at=1.0)
    harness.add("small", tokens(200)(4), due_at=2.0)
    assert harness.step() == {"long": 8}
    for seq in list(harness.scheduler.held):
        harness.scheduler.end(seq)
    assert list(harness.step()) == ["big"]
