"""Who knows the id of a reservation, but not its secret, gets nothing."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from baton.engine.transfer.base import HandoffError
from baton.engine.transfer.pair_store import MAX_KEYS, MAX_VALUE_BYTES, PairStore
from baton.v1 import kv_pb2, kv_pb2_grpc
from tests.support.client import sampling_pb
from tests.support.handoffs import FIRST, by_hand, whole_block
from tests.support.transport_pair import Pair, random_prompt, run_pair


@pytest.fixture(params=["shm", "torch", "grpc"])
async def pair(
    tiny_llama: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Pair]:
    async with run_pair(tiny_llama, request.param, monkeypatch) as running:
        yield running


@pytest.mark.parametrize("secret", [b"", bytes(range(16))], ids=["none", "another"])
async def test_a_hand_off_with_a_wrong_secret_is_refused_and_disturbs_nobody(
    pair: Pair, secret: bytes
) -> None:
    call, reservation = await pair.client.reserve(random_prompt(8), sampling_pb())
    stranger = type(reservation)()
    stranger.CopyFrom(reservation)
    stranger.secret = secret
    stranger.generation = 7  # would fence the rightful one
    sender = by_hand(pair.prefill, stranger, 2)
    with pytest.raises(HandoffError):
        await sender.send(whole_block(0))
        await sender.commit(FIRST)
    await sender.abort()
    rightful = by_hand(pair.prefill, reservation, 2)
    for position in range(2):
        await rightful.send(whole_block(position))
    await rightful.commit(FIRST)
    call.cancel()
    await pair.settle()


@pytest.mark.parametrize("known_id", [True, False])
async def test_a_stranger_joins_no_group_and_there_is_no_store_to_connect_to(
    tiny_llama: Path, known_id: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_pair(tiny_llama, "torch", monkeypatch) as pair:
        call, reservation = await pair.client.reserve(random_prompt(8), sampling_pb())
        async with grpc.aio.insecure_channel(pair.decode.address) as channel:
            join = kv_pb2_grpc.KVTransferStub(channel).Join()
            wrong = secrets.token_bytes(16)
            name = reservation.id if known_id else "f" * 32
            await join.write(
                kv_pb2.JoinRequest(
                    backend="gloo", max_bytes=1024, reservation_id=name, secret=wrong
                )
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await join.read()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "unknown or has ended" in (refused.value.details() or "")
        assert len(pair.decode.transfer.groups) == 0
        call.cancel()
        await pair.settle()


def test_the_secret_is_not_in_what_a_reservation_prints_as() -> None:
    from baton.engine.sampling_params import SamplingParams
    from baton.engine.sequence import Sequence
    from decode_service.reservations import Reservation

    reservation = Reservation(Sequence([1], SamplingParams()), 0, 1)
    assert len(reservation.secret) == 16
    assert "secret" not in repr(reservation)


def test_the_other_end_cannot_fill_the_rendezvous() -> None:
    store = PairStore(lambda key, value: None, 0.01)
    with pytest.raises(ValueError, match="more than a rendezvous needs"):
        store.put("key", bytes(MAX_VALUE_BYTES + 1))
    for number in range(MAX_KEYS):
        store.put(f"key{number}", b"")
    with pytest.raises(ValueError, match="more than a rendezvous needs"):
        store.put("one more", b"")
    with pytest.raises(RuntimeError, match="did not tell"):
        store.get("never told")
