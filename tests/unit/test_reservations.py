"""A promise of room, beside sequences that have not started yet."""

from pathlib import Path
from typing import Any

import pytest

from baton.cluster.settings import DecodeSettings
from baton.engine.block_manager import NoFreeBlocks
from baton.engine.decode_scheduler import DecodeScheduler
from baton.engine.engine import Engine
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import Sequence
from decode_service.reservations import Reservations
from tests.support.tiny import make_parts

BLOCKS, BLOCK, MOST_SEQS = 16, 4, 3


@pytest.fixture
def engine(tiny_llama: Path) -> Engine[DecodeScheduler]:
    """That makes no step unless it is told to."""
    values: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK, "chunk_size": 64}
    settings = DecodeSettings.build(**values, num_blocks=BLOCKS, max_num_seqs=MOST_SEQS)
    return make_parts(tiny_llama, settings, DecodeScheduler).engine


def prompt(num_blocks: int, first: int) -> Sequence:
    token_ids = [first] * (num_blocks * BLOCK - 1)
    return Sequence(token_ids, SamplingParams(max_tokens=4), fingerprint="tiny")


def test_prompts_that_wait_for_a_step_turn_no_hand_off_away(
    engine: Engine[DecodeScheduler],
) -> None:
    """A decode worker that had just been given a prompt refused for want of blocks, all free."""
    engine.add(prompt(4, 3))
    reservation = Reservations(engine).reserve(prompt(6, 4))
    assert reservation.num_promised == 7
    assert engine.blocks.num_available == BLOCKS - 7


def test_a_hand_off_takes_no_blocks_that_who_waits_will_need(
    engine: Engine[DecodeScheduler],
) -> None:
    engine.add(prompt(8, 3))
    reservations = Reservations(engine)
    with pytest.raises(NoFreeBlocks, match="9 blocks needed, 8 by who waits, 16 available"):
        reservations.reserve(prompt(8, 4))
    assert engine.blocks.num_available == BLOCKS and len(reservations) == 0
    engine.step()
    assert not engine.scheduler.waiting
    with pytest.raises(NoFreeBlocks, match="9 blocks needed, 0 by who waits"):
        reservations.reserve(prompt(8, 4))
    reservations.reserve(prompt(6, 4))


def test_who_waits_counts_among_the_sequences(engine: Engine[DecodeScheduler]) -> None:
    for first in range(3, 3 + MOST_SEQS):
        engine.add(prompt(1, first))
    with pytest.raises(NoFreeBlocks, match="3 sequences run, wait or are promised"):
        Reservations(engine).reserve(prompt(1, 9))
