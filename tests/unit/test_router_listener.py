"""The socket that the gateway listens on."""

import asyncio
import socket

from router.__main__ import _listen


async def test_a_clients_connection_sends_small_writes_at_once() -> None:
    """Nagle's algorithm held the first token of a stream back until the client's delayed
    acknowledgement of the headers, 40 ms."""
    no_delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def accepted(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        no_delay.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = _listen("127.0.0.1", 0, shared=False)
    async with await asyncio.start_server(accepted, sock=listener) as server, asyncio.timeout(10):
        host, port = server.sockets[0].getsockname()
        _reader, writer = await asyncio.open_connection(host, port)
        assert await no_delay
        writer.close()
        await writer.wait_closed()
