"""The sending end of a torch.distributed group with one decode worker, made on first use.

The group lives as long as the Join call: whoever dies, lets go or meets a failed operation
ends the call, and both sides forget the group.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from baton.engine.transfer.base import HandoffRefused, TransportFailed
from baton.engine.transfer.pair_group import SENDER, PairGroup
from baton.engine.transfer.torch_dist import MESSAGE_BYTES, TorchLink, backends
from baton.v1 import common_pb2, kv_pb2, kv_pb2_grpc
from baton.worker.rendezvous import Rendezvous


class TorchPair:
    def __init__(
        self,
        channel: Callable[[], grpc.aio.Channel],
        address: str,
        offered: list[str],
        device: str,
        timeout_s: float,
    ) -> None:
        self.group: PairGroup | None = None
        self._channel = channel
        host, _, self._port = address.rpartition(":")
        self._host = host.strip("[]")
        self._backend = next((b for b in backends(device) if b in offered), "")
        self._timeout_s = timeout_s
        self._joining: asyncio.Task[None] | None = None
        self._lives: set[asyncio.Task[None]] = set()
        self._life: asyncio.Task[None] | None = None

    async def link(self, reservation: common_pb2.Reservation) -> TorchLink:
        """`reservation`: proof that decode knows us. Raises TransportFailed, or HandoffRefused when
        decode does not know it any more."""
        while self._joining is not None and not self._joining.done():
            with contextlib.suppress(HandoffRefused):  # of whoever began it: ours may be good
                await _joined(self._joining)
        if self.group is None or self.group.ended.is_set():
            self.close()
            self._joining = asyncio.create_task(self._join(reservation))
            await _joined(self._joining)
        if self.group is None:
            raise TransportFailed("the group has ended")
        return TorchLink(self.group, self._timeout_s)

    def failed(self, link: TorchLink) -> None:
        """Its group ends. One that has taken its place, or is about to, has no part in it."""
        if link.uses(self.group):
            self.close()

    def abandoned(self, link: TorchLink) -> None:
        """A message may be left unmatched: nobody else uses the group, and it ends when that
        message has timed out."""
        if self.group is not None and link.uses(self.group):
            asyncio.get_running_loop().call_later(2 * self._timeout_s, self.group.close)
            self.group = self._life = None

    def close(self) -> None:
        for task in (self._life, self._joining):
            if task is not None:
                task.cancel()
        self.group = self._life = self._joining = None

    async def _join(self, reservation: common_pb2.Reservation) -> None:
        opened: asyncio.Future[PairGroup] = asyncio.get_running_loop().create_future()
        life = asyncio.create_task(self._live(reservation, opened))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                self.group = await opened
            self._life = life
        except TimeoutError:
            raise TransportFailed(f"no group within {2 * self._timeout_s} s") from None
        finally:
            if self._life is not life:
                life.cancel()

    async def _live(
        self, reservation: common_pb2.Reservation, opened: "asyncio.Future[PairGroup]"
    ) -> None:
        """The Join call, from its first message until either end lets go."""
        call = kv_pb2_grpc.KVTransferStub(self._channel()).Join()
        try:
            async with Rendezvous(self._timeout_s) as rendezvous:
                group = await self._open(call, reservation, rendezvous)
                try:
                    if not opened.done():
                        opened.set_result(group)
                        await rendezvous.over(group.ended.wait())
                finally:
                    group.close()
        except (TransportFailed, grpc.aio.AioRpcError) as error:
            if not opened.done():
                opened.set_exception(_failure(error))
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)
        finally:
            call.cancel()

    async def _open(
        self,
        call: grpc.aio.StreamStreamCall,
        reservation: common_pb2.Reservation,
        rendezvous: Rendezvous,
    ) -> PairGroup:
        request = kv_pb2.JoinRequest(
            backend=self._backend,
            max_bytes=MESSAGE_BYTES,
            reservation_id=reservation.id,
            secret=reservation.secret,
        )
        await call.write(request)
        answer: Any = await call.read()
        if answer is grpc.aio.EOF:
            raise TransportFailed("decode ended the call to join")
        rendezvous.talk(
            lambda key: call.write(kv_pb2.JoinRequest(key=key)),
            _heard(call),
        )
        mine = await asyncio.to_thread(_address_towards, self._host, int(self._port))
        return await PairGroup.open(
            rendezvous.store,
            answer.group,
            SENDER,
            self._backend,
            MESSAGE_BYTES,
            mine,
            self._timeout_s,
        )


async def _joined(joining: "asyncio.Task[None]") -> None:
    """It is not cancelled with the hand-off that asked first, since others will want the group;
    nor are they cancelled with it when the pair is closed."""
    try:
        await asyncio.shield(joining)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not joining.cancelled() or (task is not None and task.cancelling()):
            raise
        raise TransportFailed("the group was closed while it was made") from None


def _failure(error: TransportFailed | grpc.aio.AioRpcError) -> Exception:
    """Why there is no group."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return TransportFailed(f"join: {error}")
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return HandoffRefused(f"join: {error.details()}")
    return TransportFailed(f"join: {error.details()}")


async def _heard(call: grpc.aio.StreamStreamCall) -> AsyncIterator[kv_pb2.RendezvousKey]:
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response.key  # type: ignore[attr-defined]


def _address_towards(host: str, port: int) -> str:
    """This machine's address as `host` sees it; sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
