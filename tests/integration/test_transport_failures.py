"""A transport that fails is left for the next, and what its peer held is given back."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.llm import LLM
from baton.engine.transfer.base import HandoffRefused, TorchMessage, TransportFailed
from baton.engine.transfer.plan import FramePlan
from baton.engine.transfer.torch_dist import MESSAGE_BYTES
from baton.v1 import kv_pb2
from baton.worker import kv_wire
from tests.support.client import PairClient, sampling_pb
from tests.support.handoffs import FIRST, FlippingReader, by_hand, until, whole_block
from tests.support.tiny import RunningWorker, run_decode, run_prefill
from tests.support.transport_pair import NAMES, Pair, offline, random_prompt, run_pair, transport_of


@pytest.fixture(params=["shm", "torch"])
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


# --- a transport that fails -------------------------------------------------------------------


def break_after(monkeypatch: pytest.MonkeyPatch, pair: Pair, transport: str, count: int) -> None:
    """Decode cannot read payloads any more after `count` of them."""
    inbox = pair.decode.transfer
    target, name = (inbox.pools, "find") if transport == "shm" else (inbox.groups, "take")
    read, reads = getattr(target, name), iter(range(count))

    def fail_or_read(carrier: Any, *write: Any) -> Any:
        if next(reads, None) is None:
            raise TransportFailed("broken on purpose")
        return read(carrier, *write)

    monkeypatch.setattr(target, name, fail_or_read)


@pytest.mark.parametrize("frames", [0, 1, 7])
async def test_a_transport_that_fails_midway_is_replaced_for_the_request_and_tried_again_later(
    pair: Pair, llm: LLM, transport: str, frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(150)
    with monkeypatch.context() as broken:
        break_after(broken, pair, transport, frames)
        served = await pair.client.serve(prompt, sampling_pb(ignore_eos=True))
    assert served.texts() == offline(llm, prompt, ignore_eos=True)
    assert transport_of(served) == "grpc"
    assert pair.prefill.status.record().links[0].degraded == (transport,)
    at_once = await pair.client.serve(random_prompt(30, 1), sampling_pb())
    assert transport_of(at_once) == "grpc", "it rests"
    await until(lambda: not pair.prefill.status.record().links[0].degraded)
    later = await pair.client.serve(random_prompt(30, 2), sampling_pb(ignore_eos=True))
    assert transport_of(later) == NAMES[transport]
    assert later.texts() == offline(llm, random_prompt(30, 2), ignore_eos=True)
    await pair.settle()


async def test_automatic_choice_goes_from_shared_memory_to_torch_to_grpc(
    tiny_llama: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        run_prefill(tiny_llama) as prefill,
        run_decode(tiny_llama) as decode,
        PairClient(prefill, decode) as client,
    ):
        pair, used = Pair(prefill, decode, client), []
        for seed, broken in enumerate(["", "shm", "torch"]):
            if broken:
                break_after(monkeypatch, pair, broken, 0)
            served = await client.serve(random_prompt(30, seed), sampling_pb(ignore_eos=True))
            assert served.texts() == offline(llm, random_prompt(30, seed), ignore_eos=True)
            used.append(transport_of(served))
        assert used == ["shm", "torch:gloo", "grpc"]
        await pair.settle()


async def test_the_commit_leaves_when_no_payload_is_read_any_more(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever commits may lose the blocks at once; decode must not get what is written there."""
    gate, reading, kinds = threading.Event(), threading.Event(), []
    read, serialize = FlippingReader.read, kv_wire.serialize

    def slow(self: FlippingReader, plan: FramePlan, out: Any) -> int | None:
        reading.set()
        assert gate.wait(10)
        return read(self, plan, out)

    def tell(frame: kv_pb2.KVFrame) -> bytes:
        kinds.append(frame.WhichOneof("frame"))
        return serialize(frame)

    async with run_pair(tiny_llama, "torch", monkeypatch) as pair:
        monkeypatch.setattr(FlippingReader, "read", slow)
        monkeypatch.setattr(kv_wire, "serialize", tell)
        call, reservation = await pair.client.reserve(random_prompt(4), sampling_pb())
        sender = by_hand(pair.prefill, reservation, 1)
        await sender.send(whole_block(0))
        committing = asyncio.create_task(sender.commit(FIRST))
        await until(lambda: reading.is_set() and "data" in kinds)
        await pair.client.reserve(random_prompt(4), sampling_pb())  # time for a commit to leave
        assert kinds == ["open", "data"]
        gate.set()
        await committing
        assert kinds == ["open", "data", "commit"]
        call.cancel()


async def test_a_hand_off_that_ends_before_its_header_is_written_gives_its_group_up(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message stayed unmatched in the group that the next hand-offs were given."""
    async with run_pair(tiny_llama, "torch", monkeypatch) as pair:
        leaving, reservation = await pair.client.reserve(random_prompt(16), sampling_pb())
        sender = by_hand(pair.prefill, reservation, 4)
        sender.open()
        monkeypatch.setattr(sender._call, "write", lambda message: asyncio.sleep(60))
        sending = asyncio.create_task(sender.send(whole_block(0)))
        torch_pair = pair.prefill.transfer._pairs[reservation.address].torch
        await until(lambda: torch_pair.group and torch_pair.group._lanes.qsize() == 2)
        group = torch_pair.group
        sending.cancel()
        await asyncio.wait({sending})
        await sender.abort()
        assert torch_pair.group is None and not group.ended.is_set(), "it ends when it is empty"
        served = await pair.client.serve(random_prompt(16, 9), sampling_pb())
        assert transport_of(served) == "torch:gloo" and torch_pair.group is not group
        leaving.cancel()
        await until(group.ended.is_set)
        await pair.settle()


async def test_a_frame_that_becomes_no_message_takes_no_room(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was loaded for it was kept for ever."""

    def fail(*_: Any) -> bytes:
        raise ValueError("on purpose")

    async with run_pair(tiny_llama, "grpc", monkeypatch) as pair:
        call, reservation = await pair.client.reserve(random_prompt(16), sampling_pb())
        sender = by_hand(pair.prefill, reservation, 4)
        monkeypatch.setattr(kv_wire, "message_of", fail)
        with pytest.raises(ValueError, match="on purpose"):
            await sender.send(whole_block(0))
        await sender.abort()
        assert sender.num_frames == 0
        call.cancel()
        await pair.settle()


async def test_who_waits_for_a_group_is_not_refused_with_the_request_that_asked_first(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They went by gRPC, though decode knew their own reservations."""
    async with run_pair(tiny_llama, "torch", monkeypatch) as pair:
        reserved = [await pair.client.reserve(random_prompt(8, n), sampling_pb()) for n in range(2)]
        ended, lives = (by_hand(pair.prefill, reservation, 2) for _, reservation in reserved)
        reserved[0][0].cancel()
        await until(lambda: len(pair.decode.work._reservations) == 1)
        first = asyncio.create_task(ended.send(whole_block(0)))
        torch_pair = pair.prefill.transfer._pairs[reserved[0][1].address].torch
        await until(lambda: torch_pair._joining)
        await lives.send(whole_block(0))
        with pytest.raises(HandoffRefused, match="unknown or has ended"):
            await first
        assert lives.transport == "torch:gloo"
        assert not pair.prefill.status.record().links[0].degraded
        for sender, (call, _) in zip((ended, lives), reserved, strict=True):
            await sender.abort()
            call.cancel()


async def test_groups_are_bounded_and_who_gets_none_uses_grpc(tiny_llama: Path) -> None:
    async with (
        run_decode(tiny_llama, transport="torch", max_torch_groups=1) as decode,
        run_prefill(tiny_llama, transport="torch") as first,
        run_prefill(tiny_llama, transport="torch") as second,
    ):
        used = []
        for prefill in (first, second):
            async with PairClient(prefill, decode) as client:
                served = await client.serve(random_prompt(30, len(used)), sampling_pb())
                used.append(transport_of(served))
        assert used == ["torch:gloo", "grpc"]
        resources = decode.status.activity.transfers.resources()
        assert resources.torch_groups == 1 and resources.staging_bytes == 3 * 2 * MESSAGE_BYTES
        await first.transfer.close()
        await until(lambda: len(decode.transfer.groups) == 0)


# --- a peer that dies or stops ----------------------------------------------------------------

SENDER = """
import asyncio, sys, grpc
from baton.v1 import common_pb2
from prefill_service.torch_pair import TorchPair
async def main(address, reservation_id, secret):
    channel = grpc.aio.insecure_channel(address)
    pair = TorchPair(lambda: channel, address, ["gloo"], "cpu", 5.0)
    known = common_pb2.Reservation(id=reservation_id, secret=bytes.fromhex(secret))
    link = await pair.link(known)
    print(pair.group.name, flush=True)
    await asyncio.sleep(60)
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def joined(
    tiny_llama: Path,
) -> AsyncIterator[tuple[RunningWorker, asyncio.subprocess.Process, str]]:
    async with (
        run_decode(tiny_llama, transport="torch", transport_timeout_s=1.0) as decode,
        PairClient(decode, decode) as client,
    ):
        generating, reservation = await client.reserve(random_prompt(8), sampling_pb())
        known = (reservation.id, reservation.secret.hex())
        command = [sys.executable, "-c", SENDER, decode.address, *known]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            yield decode, process, (await process.stdout.readline()).decode().strip()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            generating.cancel()


async def test_a_killed_sender_ends_its_group(joined: Any) -> None:
    decode, process, group = joined
    await until(lambda: group in decode.transfer.groups._groups)
    receiving = asyncio.create_task(_fetch(decode, group))
    process.kill()
    with pytest.raises(TransportFailed):
        async with asyncio.timeout(10):
            await receiving
    await until(lambda: len(decode.transfer.groups) == 0)


async def test_a_stopped_sender_costs_one_deadline_and_its_group(joined: Any) -> None:
    decode, process, group = joined
    await until(lambda: group in decode.transfer.groups._groups)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(TransportFailed):
        async with asyncio.timeout(15):
            await _fetch(decode, group)
    await until(lambda: len(decode.transfer.groups) == 0)


async def _fetch(decode: RunningWorker, group: str) -> Any:
    class Room:
        plan, work = FramePlan(0, 1, (0,)), 1024

        def num_bytes(self, part: FramePlan) -> int:
            return 1024

        def write(self, *_: Any) -> None:
            raise AssertionError("nothing came")

    message = TorchMessage(group, 1, 1024, has_checksum=False)
    return await decode.transfer.deliver(message, None, Room())
