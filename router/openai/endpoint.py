"""A generating endpoint: one HTTP exchange from body to last byte, streamed or not.

Ties parsing, preparing, conducting and formatting together and turns every failure into the
right answer: a status while nothing is sent, an in-band error event after that. Invariant:
when the client leaves, everything that was started for it is cancelled.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic

import orjson
from starlette.types import Receive, Scope, Send

from baton.cluster.errors import BatonError
from baton.cluster.ledger import Ledger
from baton.cluster.logging import current_request
from router.access import Caller, caller_of
from router.conductor import Conductor
from router.exchange import ClientGone, Exchange
from router.gateway import Gateway
from router.generation import Generation
from router.job import Job, Output, Served
from router.notes import timed
from router.openai import errors
from router.openai.deadline import HEADER, time_allowed
from router.openai.errors import ApiError, invalid
from router.openai.format import ChatFormat, CompletionFormat, Format, Head, usage_of
from router.openai.outputs import Gathered, Streamed
from router.openai.prepare import Limits, Prepared, prepare_chat, prepare_completion
from router.openai.schema import Body, ChatBody, CompletionBody, parse
from router.openai.slo import Wishes, wishes
from router.openai.sse import DONE, error_event
from router.placement.explain import explained, foreseen
from router.text import TextModel

_log = logging.getLogger(__name__)
CLIENT_GONE = 499
TIMING_HEADER = "x-baton-timing"


@dataclass(frozen=True)
class Kind(Generic[Body]):
    """What differs between chat and text completions."""

    name: str
    id_prefix: str
    body: type[Body]
    prepare: Callable[[Body, TextModel, Limits], Awaitable[Prepared]]
    format: Callable[[Head, bool, int | None], Format]


CHAT = Kind("chat", "chatcmpl", ChatBody, prepare_chat, ChatFormat)
COMPLETIONS = Kind("completions", "cmpl", CompletionBody, prepare_completion, CompletionFormat)


@dataclass(frozen=True)
class Call:
    """A prepared request with everything that its answer needs."""

    prepared: Prepared
    conductor: Conductor
    model: TextModel
    format: Format
    jobs: list[Job]
    ledger: Ledger
    timing: bool
    """The answer says where its time went."""


class Endpoint:
    """An ASGI application for one path."""

    def __init__(self, gateway: Gateway, kind: Kind[Any]) -> None:
        self._gateway = gateway
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, caller = Exchange(scope, receive, send), caller_of(scope)
        ledger = Ledger(exchange.request_id, self._kind.name, time.monotonic(), time.time())
        ledger.traceparent = exchange.header("traceparent")
        current_request.set(exchange.request_id)
        status = CLIENT_GONE
        try:
            try:
                await self._answer(exchange, caller, ledger)
            except ApiError as error:
                await self._refuse(exchange, error)
            except BatonError as error:
                await self._refuse(exchange, errors.from_baton(error, exchange.request_id))
            except TimeoutError:
                await self._refuse(exchange, errors.timed_out())
            except Exception as error:
                if isinstance(error, ClientGone):
                    raise
                _log.exception("request %s failed", exchange.request_id)
                await self._refuse(exchange, errors.internal(exchange.request_id))
            status = exchange.status
        except ClientGone:
            _log.debug("the client of request %s left", exchange.request_id)
        finally:
            self._gateway.metrics.requests.labels(self._kind.name, str(status)).inc()
            ledger.end(status, time.monotonic())
            self._gateway.ledgers.add(ledger)

    async def _answer(self, exchange: Exchange, caller: Caller, ledger: Ledger) -> None:
        arrived = asyncio.get_running_loop().time()
        body = await exchange.read_body()
        deadline = arrived + time_allowed(exchange.header(HEADER), self._gateway.settings)
        started = time.monotonic()
        ledger.own.span("receive", ledger.started, started)
        await caller.count_request(started)
        async with exchange.while_client_waits():
            async with asyncio.timeout_at(deadline):
                with timed(ledger.own, "tokenise"):
                    payload = _decode_json(body)
                    call = await self._prepare(payload, deadline, exchange, caller, ledger)
                await caller.count_prompt(sum(map(len, call.prepared.prompts)), time.monotonic())
                answer = self._stream if call.prepared.stream else self._gather
                outputs, served = await answer(exchange, call, caller)
        self._measure(started, call, outputs, served)

    async def _prepare(
        self, payload: Any, deadline: float, exchange: Exchange, caller: Caller, ledger: Ledger
    ) -> Call:
        gateway, kind = self._gateway, self._kind
        body = parse(kind.body, payload)
        asked = wishes(exchange.header, body.slo)
        tenant = caller.tenant(asked.tenant)
        model, conductor = gateway.ready_model()
        if body.model not in (None, gateway.served_name, gateway.settings.model):
            raise errors.model_not_found(body.model)
        prepared = await kind.prepare(body, model, gateway.limits(model))
        head = Head(
            f"{kind.id_prefix}-{secrets.token_hex(12)}", int(time.time()), gateway.served_name
        )
        format = kind.format(head, prepared.include_usage, prepared.logprobs)
        ledger.answer_id, ledger.model = head.id, head.model
        ledger.stream, ledger.n = prepared.stream, prepared.sampling[0].n
        ledger.num_prompt_tokens = sum(map(len, prepared.prompts))
        timing = prepared.timing or _switch(exchange, TIMING_HEADER)
        salt = caller.cache_salt(tenant, prepared.cache_salt)
        jobs = self._jobs(prepared, salt, deadline, asked, tenant, ledger)
        return Call(prepared, conductor, model, format, jobs, ledger, timing)

    def _jobs(
        self,
        prepared: Prepared,
        cache_salt: str,
        deadline: float,
        asked: Wishes,
        tenant: str,
        ledger: Ledger,
    ) -> list[Job]:
        gateway, settings = self._gateway, self._gateway.settings
        targets = gateway.default_targets.targets(
            asked.targets, asked.priority, gateway.served_name, tenant
        )
        ledger.aims(tenant, targets.ttft_s, targets.tpot_s)
        now = asyncio.get_running_loop().time()
        return [
            Job(
                request_id=f"{ledger.answer_id}-{i}",
                prompt_token_ids=prompt,
                sampling=sampling,
                cache_salt=cache_salt,
                cache_key=prepared.cache_key,
                pins=tuple(pins),
                kv_policy=prepared.kv_policy,
                queue_deadline=now + settings.queue_timeout_s,
                deadline=deadline,
                trail=ledger.trail(),
                arrived_at=ledger.started,
                targets=targets,
                tenant=tenant,
                explain=asked.explain,
            )
            for i, (prompt, sampling, pins) in enumerate(
                zip(prepared.prompts, prepared.sampling, prepared.pins, strict=True)
            )
        ]

    async def _gather(
        self, exchange: Exchange, call: Call, caller: Caller
    ) -> tuple[Sequence[Output], list[Served]]:
        prepared = call.prepared
        outputs = [Gathered(_generation(call, i)) for i in range(len(call.jobs))]
        with _paid(caller, call.jobs, outputs):
            served = await _run_all(call, outputs)
        choices = [
            choice
            for output, echo in zip(outputs, prepared.echoes, strict=True)
            for choice in output.best(prepared.num_choices, echo, prepared.logprobs is not None)
        ]
        with timed(call.ledger.own, "flush"):
            fields = self._closing(call, served, {"usage": _usage(call, outputs, served)})
            await exchange.send_json(200, call.format.whole(choices, fields))
        return outputs, served

    async def _stream(
        self, exchange: Exchange, call: Call, caller: Caller
    ) -> tuple[Sequence[Output], list[Served]]:
        prepared, n = call.prepared, call.prepared.num_choices
        outputs = [
            Streamed(
                _generation(call, i),
                exchange,
                call.format,
                i * n,
                echo,
                len(prompt) if prepared.continuous_usage else None,
            )
            for i, (echo, prompt) in enumerate(zip(prepared.echoes, prepared.prompts, strict=True))
        ]
        with _paid(caller, call.jobs, outputs):
            served = await _run_all(call, outputs)
        with timed(call.ledger.own, "flush"):
            usage = {"usage": _usage(call, outputs, served)} if prepared.include_usage else {}
            fields = self._closing(call, served, usage)
            last = call.format.closing(fields) if fields else b""
            await exchange.send_events(last + DONE, last=True)
        return outputs, served

    def _closing(
        self, call: Call, served: Sequence[Served], fields: dict[str, Any]
    ) -> dict[str, Any]:
        """With whatever the client asked to be told."""
        decisions = [
            explained(self._gateway.settings.policy, job.targets, found.plan, found.alternatives)
            | {"measured_ttft_ms": round((found.first_token_at - job.arrived_at) * 1e3, 3)}
            for job, found in zip(call.jobs, served, strict=True)
            if job.explain and found.plan is not None
        ]
        if decisions:
            fields["placement"] = decisions
        if call.timing:
            fields["timing"] = call.ledger.timing(time.monotonic())
        return fields

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        if error.status >= 500:
            _log.warning("request %s: %d %s", exchange.request_id, error.status, error.message)
        if not exchange.started:
            await exchange.send_error(error)
            return
        # No [DONE] follows: the stream did not end well.
        exchange.status = error.status
        await exchange.break_events(error_event(error.body(exchange.request_id)))

    def _measure(
        self, started: float, call: Call, outputs: Sequence[Output], served: Sequence[Served]
    ) -> None:
        metrics, now = self._gateway.metrics, time.monotonic()
        metrics.e2e.observe(now - started)
        call.ledger.placement = foreseen(served[0].plan, served[0].alternatives)
        for job, output, found in zip(call.jobs, outputs, served, strict=True):
            metrics.prompt_tokens.inc(len(job.prompt_token_ids))
            metrics.cached_tokens.inc(found.num_cached_tokens)
            metrics.output_tokens.inc(output.generation.num_tokens)
            ttft_s, tpot_s = found.first_token_at - started, 0.0
            metrics.ttft.observe(ttft_s)
            longest = max(choice.num_tokens for choice in output.generation.choices)
            if longest > 1:
                tpot_s = (found.last_token_at - found.first_token_at) / (longest - 1)
                metrics.tpot.observe(tpot_s)
            metrics.count_targets(job.targets, ttft_s, tpot_s)
            self._gateway.planner.saw_output(longest)


def _decode_json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from error


def _switch(exchange: Exchange, name: str) -> bool:
    """A header that is on or off."""
    value = (exchange.header(name) or "0").lower()
    if value not in ("0", "1", "false", "true"):
        raise invalid(name, f"{name} must be 1 or 0.", "invalid_value")
    return value in ("1", "true")


def _generation(call: Call, i: int) -> Generation:
    prepared = call.prepared
    n = prepared.sampling[i].n
    return Generation(n, call.model.tokenizer, prepared.stops, prepared.min_tokens)


def _usage(call: Call, outputs: Sequence[Output], served: Sequence[Served]) -> dict[str, Any]:
    return usage_of(
        sum(len(prompt) for prompt in call.prepared.prompts),
        sum(output.generation.num_tokens for output in outputs),
        sum(found.num_cached_tokens for found in served),
    )


@contextmanager
def _paid(caller: Caller, jobs: Sequence[Job], outputs: Sequence[Output]) -> Iterator[None]:
    """Whatever ends the request, what it has generated is paid for, and a prompt that no worker
    began with is not."""
    try:
        yield
    finally:
        now = time.monotonic()
        caller.count_output(sum(o.generation.num_tokens for o in outputs), now)
        refused = (len(job.prompt_token_ids) for job in jobs if not job.trail.accepted)
        caller.return_prompt(sum(refused), now)


async def _run_all(call: Call, outputs: Sequence[Output]) -> list[Served]:
    """All prompts at once; the first failure cancels the others and is raised."""
    if len(call.jobs) == 1:
        return [await call.conductor.run(call.jobs[0], outputs[0])]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(call.conductor.run(job, output))
                for job, output in zip(call.jobs, outputs, strict=True)
            ]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]
