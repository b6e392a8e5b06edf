"""What a hand-off promises holds on every transport."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine import model_runner
from baton.engine.llm import LLM
from baton.engine.transfer.base import HandoffDamaged, HandoffError, HandoffRefused
from baton.engine.transfer.landing import Landing
from baton.engine.transfer.plan import FramePlan
from baton.engine.transfer.shm import ShmLink
from baton.engine.transfer.torch_dist import TorchLink
from baton.worker.prompt_cache import add_pinned
from decode_service.inbox import Inbox
from decode_service.incoming import IncomingHandoff
from prefill_service import wire_policy
from prefill_service.handoff import Handoff
from prefill_service.inline import InlineLink
from tests.integration.test_services import prefill_request
from tests.support.client import sampling_pb
from tests.support.handoffs import FIRST, LAYERS, by_hand, lying, until, whole_block
from tests.support.transport_pair import NAMES, Pair, offline, random_prompt, run_pair, transport_of


@pytest.fixture(params=["shm", "torch", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def pair(
    tiny_llama: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    async with run_pair(tiny_llama, transport, monkeypatch) as running:
        yield running


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(tiny_llama, "float32", num_blocks=256, block_size=4, enable_prefix_cache=False)


async def test_many_frames_give_the_offline_tokens_and_the_transport_is_shown(
    pair: Pair, llm: LLM, transport: str
) -> None:
    for length in (1, 9, 70, 150):
        prompt = random_prompt(length, length)
        served = await pair.client.serve(prompt, sampling_pb(max_tokens=12, ignore_eos=True))
        assert served.texts() == offline(llm, prompt, max_tokens=12, ignore_eos=True)
        assert transport_of(served) == NAMES[transport]
        assert served.prefill_done and served.prefill_done.bytes_sent == -(-length // 4) * 1024
    (link,) = pair.prefill.status.record().links
    assert (link.peer, link.transport, link.degraded) == (
        pair.decode.address,
        NAMES[transport],
        (),
    )
    await pair.settle()


async def test_concurrent_hand_offs_share_slots_and_buffers_and_keep_their_text(
    pair: Pair, llm: LLM
) -> None:
    prompts = [random_prompt(40 + i, i) for i in range(8)]

    async def serve(prompt: list[int]) -> None:
        served = await pair.client.serve(prompt, sampling_pb(max_tokens=4, ignore_eos=True))
        assert served.texts() == offline(llm, prompt, max_tokens=4, ignore_eos=True)

    for half in (prompts[:4], prompts[4:]):
        await asyncio.gather(*map(serve, half))
    await pair.settle()


FAULTS = {
    "a byte flips": None,
    "a frame is dropped": lambda n, plan: (n + (n >= 2), plan),
    "a frame is repeated": lambda n, plan: (n - (n == 2), plan),
    "two frames change places": lambda n, plan: ({1: 2, 2: 1}.get(n, n), plan),
    "a block is not the hand-off's": lambda n, plan: (n, whole_block(77) if n == 2 else plan),
    "a block comes twice": lambda n, plan: (n, whole_block(0) if n == 2 else plan),
    "a layer does not exist": lambda n, plan: (
        n,
        FramePlan(LAYERS, LAYERS, plan.positions) if n == 2 else plan,
    ),
    "a frame is larger than it says": lambda n, plan: (
        n,
        FramePlan(0, 1, plan.positions) if n == 2 else plan,
    ),
    "the commit comes early": None,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_faulty_hand_off_is_refused_and_a_new_attempt_gives_the_text(
    pair: Pair, llm: LLM, fault: str
) -> None:
    """The sender learns why, also while it writes: a write on the ended call hid the reason, and
    the fault counted as a lost decode worker."""
    prompt = random_prompt(20)
    call, reservation = await pair.client.reserve(prompt, sampling_pb(ignore_eos=True))
    sender = by_hand(pair.prefill, reservation, 5, flip_at=2 if fault == "a byte flips" else -1)
    with pytest.raises((HandoffDamaged, HandoffRefused)), lying(FAULTS[fault]):
        for position in range(3 if fault == "the commit comes early" else 5):
            await sender.send(whole_block(position))
        await sender.commit(FIRST)
    await sender.abort()
    assert not pair.decode.parts.engine.scheduler.running
    reservation.generation = 1
    await until(lambda: pair.decode.status.activity.transfers.handoffs_failed == 1)
    assert (
        await _finish(pair, call, prompt, reservation) == offline(llm, prompt, ignore_eos=True)[0]
    )
    await pair.settle()


async def _finish(pair: Pair, call: Any, prompt: list[int], reservation: Any) -> list[int]:
    from tests.integration.test_services import prefill_request

    tokens: list[int] = []
    request = prefill_request(prompt, reservation, ignore_eos=True)
    async for event in pair.client.prefill.Prefill(request):
        tokens += [t.token_id for t in event.first_tokens.tokens]
    async for event in call:
        tokens += [t.token_id for t in event.tokens.tokens]
    return tokens


async def test_frames_of_a_hand_off_that_has_ended_change_no_block(pair: Pair) -> None:
    """A stopped prefill that is resumed goes on sending into blocks that are others' by now."""
    call, reservation = await pair.client.reserve(random_prompt(20), sampling_pb())
    sender = by_hand(pair.prefill, reservation, 5)
    await sender.send(whole_block(0))
    await until(lambda: not sender._frames)
    call.cancel()
    await pair.decode.wait_idle()
    before = pair.decode.parts.cache.data.clone()
    with pytest.raises(HandoffError):
        for position in range(1, 5):
            await sender.send(whole_block(position))
        await sender.commit(FIRST)
    await sender.abort()
    assert bool((pair.decode.parts.cache.data == before).all())
    await pair.settle()


async def test_a_short_frame_behind_a_long_one_does_not_hold_up_the_event_loop(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written at once, where it waited for the thread that wrote the long one."""
    long, short = (0,), (1,)
    began, gate, written = threading.Event(), threading.Event(), []

    def write(self: Landing, plan: FramePlan, *_: Any) -> None:
        began.set()
        assert gate.wait(5), "the event loop could not open it"
        written.append(plan.positions)

    monkeypatch.setattr(Landing, "write", write)
    work = {long: 8 << 20, short: 512}
    monkeypatch.setattr(Landing, "work", lambda self, plan: work[plan.positions])
    async with run_pair(tiny_llama, "grpc", monkeypatch) as pair:
        call, reservation = await pair.client.reserve(random_prompt(8), sampling_pb())
        sender = by_hand(pair.prefill, reservation, 2)
        for position in (*long, *short):
            await sender.send(whole_block(position))
        both = 2 * pair.decode.parts.cache.layout.bytes_per_block
        await until(lambda: pair.decode.transfer.resources().in_flight_bytes == both)
        assert began.is_set() and not written
        gate.set()
        await sender.commit(FIRST)
        assert written == [long, short]
        call.cancel()
        await pair.settle()


async def test_a_newer_attempt_fences_one_that_is_still_open(pair: Pair, llm: LLM) -> None:
    """A stopped prefill keeps its hand-off open; its replacement was once refused for it."""
    prompt = random_prompt(20)
    call, reservation = await pair.client.reserve(prompt, sampling_pb(ignore_eos=True))
    stopped = by_hand(pair.prefill, reservation, 5)
    await stopped.send(whole_block(0))
    await until(lambda: not stopped._frames)
    reservation.generation = 1
    tokens = await _finish(pair, call, prompt, reservation)
    assert tokens == offline(llm, prompt, ignore_eos=True)[0]
    with pytest.raises(HandoffError):
        for position in range(1, 5):
            await stopped.send(whole_block(position))
        await stopped.commit(FIRST)
    await stopped.abort()
    counters = pair.decode.status.activity.transfers
    assert (counters.handoffs, counters.handoffs_failed) == (1, 1)
    await pair.settle()


async def test_an_old_attempt_that_comes_after_the_newer_one_is_refused(
    pair: Pair, llm: LLM
) -> None:
    prompt = random_prompt(20)
    call, reservation = await pair.client.reserve(prompt, sampling_pb(ignore_eos=True))
    bytes_before = pair.decode.status.activity.transfers.bytes
    late = by_hand(pair.prefill, reservation, 5)
    newer = by_hand(pair.prefill, _generation(reservation, 1), 5)
    await newer.send(whole_block(0))
    await until(lambda: not newer._frames)
    with pytest.raises(HandoffError):
        for position in range(5):
            await late.send(whole_block(position))
        await late.commit(FIRST)
    for sender in (late, newer):
        await sender.abort()
    await until(lambda: pair.decode.status.activity.transfers.handoffs_failed == 1)
    assert pair.decode.status.activity.transfers.bytes - bytes_before == 1024, "newer's alone"
    last = _generation(reservation, 2)
    assert await _finish(pair, call, prompt, last) == offline(llm, prompt, ignore_eos=True)[0]
    await pair.settle()


def _generation(reservation: Any, generation: int) -> Any:
    copy = type(reservation)()
    copy.CopyFrom(reservation)
    copy.generation = generation
    return copy


async def test_clients_that_leave_at_random_moments_leak_nothing(pair: Pair, llm: LLM) -> None:
    rng = random.Random(4)

    async def one(seed: int) -> None:
        request = sampling_pb(max_tokens=rng.randrange(1, 40), n=rng.choice([1, 2]))
        prompt = random_prompt(rng.randrange(1, 200), seed)
        task = asyncio.create_task(pair.client.serve(prompt, request))
        await asyncio.wait({task}, timeout=rng.random() * 0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for batch in range(6):
        await asyncio.gather(*(one(batch * 10 + i) for i in range(6)))
    await pair.settle()
    served = await pair.client.serve(random_prompt(40, 3), sampling_pb(ignore_eos=True))
    assert served.texts() == offline(llm, random_prompt(40, 3), ignore_eos=True)
    await pair.settle()


async def test_a_slow_decode_holds_prefill_back_and_leaves_room_for_others(
    pair: Pair, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, deliver = asyncio.Event(), Inbox.deliver

    async def slow(self: Inbox, *args: Any) -> None:
        await gate.wait()
        await deliver(self, *args)

    monkeypatch.setattr(Inbox, "deliver", slow)
    _, reservation = call = await pair.client.reserve(random_prompt(80), sampling_pb())
    sender = by_hand(pair.prefill, reservation, 20)

    async def send_all() -> None:
        for position in range(20):
            await sender.send(whole_block(position))
        await sender.commit(FIRST)

    sending = asyncio.create_task(send_all())
    await until(lambda: sender._link and sender.num_frames == sender._link.depth)
    await asyncio.sleep(0.05)  # time in which more could be written
    assert sender._link and sender.num_frames == sender._link.depth <= 3
    (link,) = pair.prefill.status.record().links
    block_bytes = pair.prefill.parts.cache.layout.bytes_per_block
    assert link.in_flight_bytes == sender.num_frames * block_bytes
    gate.set()
    await sending
    assert pair.decode.status.activity.transfers.blocks == 20
    call[0].cancel()
    await pair.settle()


async def test_frames_are_short_until_their_link_has_shown_what_it_carries(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame as long as a fast link likes once took a slow one longer than any deadline."""
    least = pair.prefill.parts.cache.layout.bytes_per_block
    monkeypatch.setattr(wire_policy, "LEAST_BYTES", least)
    monkeypatch.setattr(wire_policy, "FRAME_S", 1e9)  # whatever was measured, it is fast
    for link in (ShmLink, InlineLink, TorchLink):
        monkeypatch.setattr(link, "frame_bytes", 1 << 20)
    counts = []
    for seed in range(2):
        prompt = random_prompt(80, seed)
        _, reservation = call = await pair.client.reserve(prompt, sampling_pb())
        sender = by_hand(pair.prefill, reservation, 20)
        await sender.send(FramePlan(0, LAYERS, tuple(range(20))))
        await sender.commit(FIRST)
        counts.append(sender.num_frames)
        call[0].cancel()
    (known,) = pair.prefill.transfer._pairs.values()
    assert sender._link and counts[0] >= sender._link.depth and counts[1] == 1
    known.failed(sender._link, "broken on purpose")
    assert known.frame_bytes(sender._link) == least
    await pair.settle()


async def test_no_layer_is_done_before_its_hand_off_knows_of_it(
    pair: Pair, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread once computed a prompt before its hand-off was there: on a busy machine
    nothing left early."""
    monkeypatch.setattr(model_runner, "_REPORT_BYTES", 1)
    reported, told = threading.Event(), list[range | None]()
    engine, advance = pair.prefill.parts.engine, Handoff.advance
    layers_done = engine._runner.on_layers

    def add_and_compute(*args: Any) -> None:
        add_pinned(*args)
        assert reported.wait(10), "the engine computes nothing"

    def report(batch: Any, layers: range) -> None:
        layers_done(batch, layers)
        if layers.stop == LAYERS:
            reported.set()

    def tell(self: Handoff, num_tokens: int, layers: range | None = None) -> None:
        told.append(layers)
        advance(self, num_tokens, layers)

    monkeypatch.setattr("prefill_service.worker.add_pinned", add_and_compute)
    monkeypatch.setattr(engine._runner, "on_layers", report)
    monkeypatch.setattr(Handoff, "advance", tell)
    served = await pair.client.serve(random_prompt(20), sampling_pb(ignore_eos=True))
    assert served.texts() == offline(llm, random_prompt(20), ignore_eos=True)
    assert told == [range(1), range(1, 2)]
    await pair.settle()


@pytest.mark.slow
async def test_layers_leave_while_later_ones_are_computed(
    pair: Pair, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk's first layers are at decode before its last ones have been computed."""
    monkeypatch.setattr(model_runner, "_REPORT_BYTES", 1)
    arrived = threading.Event()
    model = pair.prefill.parts.engine._runner.model
    expect, last_layer = IncomingHandoff.expect, model.layers[-1]

    def expect_and_tell(self: IncomingHandoff, sequence: int, plan: FramePlan) -> Any:
        arrived.set()
        return expect(self, sequence, plan)

    class Waiting:
        def __call__(self, *args: Any) -> Any:
            assert arrived.wait(10), "no frame came before the last layer"
            return last_layer(*args)

    monkeypatch.setattr(IncomingHandoff, "expect", expect_and_tell)
    prompt = random_prompt(33)
    expected = offline(llm, prompt, ignore_eos=True)
    with monkeypatch.context() as waiting:
        waiting.setattr(model, "layers", [*model.layers[:-1], Waiting()])
        call, reservation = await pair.client.reserve(prompt, sampling_pb(ignore_eos=True))
        request = prefill_request(prompt, reservation, ignore_eos=True)
        tokens = [
            token.token_id
            async for event in pair.client.prefill.Prefill(request)
            for token in event.first_tokens.tokens
        ]
    async for event in call:
        tokens += [token.token_id for token in event.tokens.tokens]
    assert [tokens] == expected
    await pair.settle()
