"""A hand-off inside one process: the sender calls the receiver. For tests and offline use."""

from baton.engine.transfer.base import Commit, KVFrame, KVReceiver


class LocalSender:
    """A `KVSender` whose link is a function call."""

    def __init__(self, receiver: KVReceiver) -> None:
        self._receiver = receiver
        self._committed = False

    async def send(self, frame: KVFrame) -> None:
        await self._receiver.receive(frame)

    async def commit(self, commit: Commit) -> None:
        await self._receiver.commit(commit)
        self._committed = True

    async def abort(self) -> None:
        if not self._committed:
            await self._receiver.abort()
