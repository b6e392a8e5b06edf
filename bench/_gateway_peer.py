"""The other side of the gateway's benchmark, as processes: scripted workers, or the bare floor.

    python bench/_gateway_peer.py workers            prints "PREFILL_ADDRESS DECODE_ADDRESS"
    python bench/_gateway_peer.py floor P D PORT     the same calls and chunks without our code

Workers answer every request with 16 tokens, a token per step for all that run, and tell their
steps, as real ones do; a prompt of one token gets them slowly. Nothing is computed and no KV moves:
what is left is the cost of the calls. The floor's calls are plain ones, as those of whoever has no
stream of replies.
"""

import asyncio
import sys
import time
from functools import partial
from typing import Any

import grpc
import grpc.aio
import orjson
import uvicorn
from _common import Report  # first: it makes way for the router's package
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from baton.cluster.rpc import ChannelPool, make_server
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2_grpc,
)
from baton.worker.replies import ReplyStreams

TOKENS = 16
PROMPT = 8
STEP_S = 0.01
SLOW_S = 0.5
__all__ = ["Report"]


def _token(index: int) -> common_pb2.Token:
    finish = common_pb2.FINISH_REASON_LENGTH if index == TOKENS - 1 else 0
    return common_pb2.Token(token_id=100 + index, index=index, finish_reason=finish)


def _step(index: int) -> common_pb2.Step:
    """As if it had ended just now."""
    now = time.monotonic()
    return common_pb2.Step(
        start=now - 1e-6, end=now, batch_size=8, num_tokens=1, context=PROMPT + index
    )


class Worker(
    prefill_pb2_grpc.PrefillServicer,
    decode_pb2_grpc.DecodeServicer,
    worker_pb2_grpc.WorkerServicer,
):
    """Of either role; a reservation is an event in `landed` that prefill sets."""

    def __init__(self, landed: dict[str, asyncio.Event]) -> None:
        self.landed = landed
        self._replies = ReplyStreams()
        self._stepped = asyncio.Event()
        self._count = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            self._stepped.set()
            self._stepped = asyncio.Event()

    async def Replies(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        await self._replies.serve(request.stream, context)

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        self._count += 1
        now = time.monotonic()
        name, slow = str(self._count), len(request.prompt_token_ids) == 1
        landed = self.landed[name] = asyncio.Event()
        answer = await self._replies.answers(request, context)
        try:
            reservation = common_pb2.Reservation(id=name, lease_s=30)
            reserved = decode_pb2.Reserved(
                reservation=reservation, received_at=now, sent_at=now + 1e-6
            )
            await answer(decode_pb2.GenerateEvent(reserved=reserved))
            await landed.wait()
            for index in range(1, TOKENS):
                await (asyncio.sleep(SLOW_S) if slow else self._stepped.wait())
                tokens = decode_pb2.Tokens(tokens=[_token(index)], step=_step(index))
                await answer(decode_pb2.GenerateEvent(tokens=tokens))
            await answer(decode_pb2.GenerateEvent(done=decode_pb2.GenerateDone()))
        finally:
            del self.landed[name]

    async def Prefill(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        now, answer = time.monotonic(), await self._replies.answers(request, context)
        started = prefill_pb2.PrefillStarted(
            received_at=now, started_at=now + 1e-6, sent_at=now + 2e-6
        )
        await answer(prefill_pb2.PrefillEvent(started=started))
        first = prefill_pb2.FirstTokens(tokens=[_token(0)], steps=[_step(0)])
        await answer(prefill_pb2.PrefillEvent(first_tokens=first))
        self.landed[request.destination.id].set()
        await answer(prefill_pb2.PrefillEvent(done=prefill_pb2.PrefillDone()))


async def workers() -> None:
    landed: dict[str, asyncio.Event] = {}
    prefill, decode = Worker(landed), Worker(landed)
    servers = []  # a server runs as long as it is kept
    for worker, add in (
        (prefill, prefill_pb2_grpc.add_PrefillServicer_to_server),
        (decode, decode_pb2_grpc.add_DecodeServicer_to_server),
    ):
        adders = [add, worker_pb2_grpc.add_WorkerServicer_to_server]
        server, port = await make_server([partial(a, worker) for a in adders], "127.0.0.1:0", [])
        await server.start()
        servers.append(server)
        print(f"127.0.0.1:{port}", end=" ", flush=True)
    print(flush=True)
    await decode.run()


def floor(prefill: str, decode: str, port: int) -> None:
    """FastAPI and gRPC as their tutorials use them."""
    app, channels = FastAPI(), ChannelPool()

    @app.post("/v1/completions")
    async def complete(request: Request) -> StreamingResponse:
        body = orjson.loads(await request.body())
        return StreamingResponse(answer(body["prompt"]), media_type="text/event-stream")

    async def answer(prompt: list[int]) -> Any:
        sampling = common_pb2.SamplingParams(max_tokens=TOKENS, n=1, seed=1)
        generate = decode_pb2_grpc.DecodeStub(channels.get(decode)).Generate(
            decode_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=sampling)
        )
        reserved = await generate.read()
        fill = prefill_pb2_grpc.PrefillStub(channels.get(prefill)).Prefill(
            prefill_pb2.PrefillRequest(
                prompt_token_ids=prompt,
                sampling=sampling,
                destination=reserved.reserved.reservation,
            )
        )
        while (event := await fill.read()) is not grpc.aio.EOF:
            if event.HasField("first_tokens"):
                yield chunk(event.first_tokens.tokens[0])
        while (event := await generate.read()) is not grpc.aio.EOF:
            if event.HasField("tokens"):
                yield chunk(event.tokens.tokens[0])
        yield b"data: [DONE]\n\n"

    def chunk(token: common_pb2.Token) -> bytes:
        choice = {"index": 0, "text": chr(token.token_id), "finish_reason": None}
        return b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    if sys.argv[1] == "workers":
        asyncio.run(workers())
    else:
        floor(sys.argv[2], sys.argv[3], int(sys.argv[4]))
