"""The socket that the gateway listens on."""

import asyncio
import socket

import uvicorn

from router.__main__ import _listen, _Server


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


async def test_what_is_said_of_the_socket_is_said_when_it_listens() -> None:
    async def no_application(scope: object, receive: object, send: object) -> None:
        raise AssertionError("nobody asks")

    config = uvicorn.Config(no_application, lifespan="off")
    config.load()
    server = _Server(config)
    server.lifespan = config.lifespan_class(config)
    listening: list[bool] = []
    with _listen("127.0.0.1", 0, shared=True) as listener:

        def say() -> None:
            with socket.create_connection(listener.getsockname(), timeout=10):
                listening.append(True)

        server.when_listening(say)
        assert not listening
        await server.startup(sockets=[listener])
        assert listening == [True]
        server.when_listening(say)
        assert listening == [True, True]
        await server.shutdown(sockets=[listener])
