"""A server hears nothing of a client that gave up beyond a cut link; it has to ask."""

import asyncio

import pytest

from baton.cluster.rpc import make_server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
"""An empty frame of that type."""


@pytest.mark.timeout(30)
async def test_a_connection_without_calls_ends_when_its_client_falls_silent() -> None:
    """A connection whose client had closed it while the link was down stayed open for ever: one
    socket of decode for every few faults."""
    server, port = await make_server([], "127.0.0.1:0", [], peer_timeout_s=0.3)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + SETTINGS)
        async with asyncio.timeout(10):
            while await reader.read(1 << 10):
                continue
        writer.close()
    finally:
        await server.stop(0)
