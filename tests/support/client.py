"""What the conductor does, without router or retries: one request over two workers."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.support.tiny import RunningWorker


def sampling_pb(**values: Any) -> common_pb2.SamplingParams:
    defaults = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "n": 1, "seed": 1}
    return common_pb2.SamplingParams(**{**defaults, "max_tokens": 16, **values})


@dataclass
class Served:
    """What came back: tokens per choice and the bookkeeping events."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    started: prefill_pb2.PrefillStarted | None = None
    prefill_done: prefill_pb2.PrefillDone | None = None
    decode_done: decode_pb2.GenerateDone | None = None

    def add(self, token: common_pb2.Token) -> None:
        mine = self.tokens.setdefault(token.choice, [])
        assert token.index == len(mine), "a token is missing or came twice"
        mine.append(token.token_id)
        if token.HasField("logprobs"):
            self.logprobs.setdefault(token.choice, []).append(token.logprobs.logprob)
        if token.finish_reason:
            assert token.choice not in self.reasons, "two finish reasons"
            self.reasons[token.choice] = token.finish_reason

    def texts(self) -> list[list[int]]:
        return [self.tokens[choice] for choice in sorted(self.tokens)]


class PairClient:
    """Talks to one prefill and one decode worker."""

    def __init__(self, prefill: RunningWorker, decode: RunningWorker) -> None:
        self._channels = [grpc.aio.insecure_channel(w.address) for w in (prefill, decode)]
        self.prefill = prefill_pb2_grpc.PrefillStub(self._channels[0])
        self.decode = decode_pb2_grpc.DecodeStub(self._channels[1])

    async def __aenter__(self) -> "PairClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def reserve(
        self,
        prompt: list[int],
        sampling: common_pb2.SamplingParams,
        salt: str = "",
        continuation: common_pb2.Continuation | None = None,
    ) -> tuple[Any, common_pb2.Reservation]:
        request = decode_pb2.GenerateRequest(
            request_id="r",
            prompt_token_ids=prompt,
            sampling=sampling,
            cache_salt=salt,
            continuation=continuation,
        )
        call = self.decode.Generate(request, timeout=60)
        try:
            event = await anext(aiter(call))
        except asyncio.CancelledError:
            call.cancel()  # gRPC does not when the call has only just begun
            raise
        return call, event.reserved.reservation

    async def serve(
        self,
        prompt: list[int],
        sampling: common_pb2.SamplingParams,
        salt: str = "",
        continuation: common_pb2.Continuation | None = None,
    ) -> Served:
        """With `continuation` the result begins with the tokens it names."""
        served = Served()
        if continuation is not None:
            served.tokens[continuation.choice] = list(continuation.output_token_ids)
        call, reservation = await self.reserve(prompt, sampling, salt, continuation)
        request = prefill_pb2.PrefillRequest(
            request_id="r",
            prompt_token_ids=prompt,
            sampling=sampling,
            destination=reservation,
            cache_salt=salt,
            continuation=continuation,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(call.cancel)
            prefill = self.prefill.Prefill(request, timeout=60)
            stack.callback(prefill.cancel)
            async for event in prefill:
                if event.HasField("started"):
                    served.started = event.started
                elif event.HasField("first_tokens"):
                    for token in event.first_tokens.tokens:
                        served.add(token)
                else:
                    served.prefill_done = event.done
            if served.prefill_done is not None and not served.prefill_done.finished:
                async for event in call:
                    if event.HasField("tokens"):
                        for token in event.tokens.tokens:
                            served.add(token)
                    elif event.HasField("done"):
                        served.decode_done = event.done
        return served

    async def serve_on_decode(
        self,
        prompt: list[int],
        sampling: common_pb2.SamplingParams,
        max_uncached: int | None = None,
    ) -> Served:
        served = Served()
        request = decode_pb2.GenerateRequest(
            request_id="r",
            prompt_token_ids=prompt,
            sampling=sampling,
            prefill_here=True,
            max_uncached_tokens=max_uncached,
        )
        async for event in self.decode.Generate(request, timeout=60):
            if event.HasField("tokens"):
                for token in event.tokens.tokens:
                    served.add(token)
            elif event.HasField("done"):
                served.decode_done = event.done
        return served
