"""The sending end of a torch.distributed group with one decode worker, made on first use.

The group lives as long as the Join call: whoever dies, lets go or meets a failed operation
ends the call, and both sides forget the group.
"""

import asyncio
import contextlib
import socket

import grpc

from baton.engine.transfer.base import TransportFailed
from baton.engine.transfer.plan import DEFAULT_FRAME_BYTES
from baton.engine.transfer.torch_dist import SENDER, PairGroup, TorchLink, backends, connect_store
from baton.v1 import kv_pb2, kv_pb2_grpc


class TorchPair:
    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        offered: list[str],
        device: str,
        timeout_s: float,
    ) -> None:
        self.group: PairGroup | None = None
        self._stub = kv_pb2_grpc.KVTransferStub(channel)
        self._host = address.rpartition(":")[0].strip("[]")
        self._backend = next((b for b in backends(device) if b in offered), "")
        self._timeout_s = timeout_s
        self._joining: asyncio.Task[None] | None = None
        self._lives: set[asyncio.Task[None]] = set()
        self._life: asyncio.Task[None] | None = None

    async def link(self) -> TorchLink:
        """Raises TransportFailed."""
        if self.group is None or self.group.ended.is_set():
            if self._joining is None:
                self.close()
                self._joining = asyncio.create_task(self._join())
            # Not cancelled with the hand-off that asked first: others will want the group.
            await asyncio.shield(self._joining)
        if self.group is None:
            raise TransportFailed("the group has ended")
        return TorchLink(self.group, self._timeout_s)

    def retire(self) -> None:
        """A message may be left unmatched: nobody else uses the group, and it ends when that
        message has timed out."""
        group, self.group, self._life = self.group, None, None
        if group is not None:
            asyncio.get_running_loop().call_later(2 * self._timeout_s, group.close)

    def close(self) -> None:
        for task in (self._life, self._joining):
            if task is not None:
                task.cancel()
        self.group = self._life = None

    async def _join(self) -> None:
        try:
            call, self.group = await self._new_group()
            self._life = asyncio.create_task(_live(call, self.group))
            self._lives.add(self._life)
            self._life.add_done_callback(self._lives.discard)
        finally:
            self._joining = None

    async def _new_group(self) -> tuple[grpc.aio.UnaryStreamCall, PairGroup]:
        request = kv_pb2.JoinRequest(backend=self._backend, max_bytes=DEFAULT_FRAME_BYTES)
        call = self._stub.Join(request)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await call.read()
            if answer is grpc.aio.EOF:
                raise TransportFailed("decode ended the call to join")
            return call, await self._connect(answer)
        except BaseException as error:
            call.cancel()
            if isinstance(error, TimeoutError):
                raise TransportFailed(f"no answer to join for {self._timeout_s} s") from None
            if isinstance(error, grpc.aio.AioRpcError):
                raise TransportFailed(f"join: {error.details()}") from error
            raise

    async def _connect(self, answer: kv_pb2.JoinResponse) -> PairGroup:
        port = answer.store_port
        store = await asyncio.to_thread(connect_store, self._host, port, self._timeout_s)
        mine = await asyncio.to_thread(_address_towards, self._host, port)
        return await PairGroup.open(
            store, answer.group, SENDER, self._backend, DEFAULT_FRAME_BYTES, mine, self._timeout_s
        )


async def _live(call: grpc.aio.UnaryStreamCall, group: PairGroup) -> None:
    """Until either end lets go."""

    async def hear_the_end() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()

    ends = {asyncio.create_task(hear_the_end()), asyncio.create_task(group.ended.wait())}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
        call.cancel()
        group.close()


def _address_towards(host: str, port: int) -> str:
    """This machine's address as `host` sees it; sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
