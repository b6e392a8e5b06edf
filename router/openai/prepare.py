"""From a parsed body to what the conductor needs: token ids, sampling parameters, text rules.

Makes every check that needs the model or the limits of the live workers, so that a request
which cannot be served is refused here, before a worker sees it. The seed is always filled in.
"""

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.cluster.workers import Role, WorkerRecord
from baton.kv_policy import KVPolicy
from baton.v1 import common_pb2
from router.openai.cache_control import take_marks
from router.openai.errors import ApiError, invalid
from router.openai.fields import Message, Prompt
from router.openai.policies import PolicyOptions
from router.openai.schema import MAX_TOKENS, ChatBody, CompletionBody, GenerationBody
from router.text import StopPatterns, TemplateError, TextModel

DEFAULT_COMPLETION_TOKENS = 16
NO_CHOICE = PolicyOptions()
# The sampler keeps at least one token: this keeps exactly the most likely one.
LEAST_TOP_P = 1e-6


@dataclass(frozen=True)
class Limits:
    """Longest prompt, and longest prompt plus output, that somebody can hold."""

    prompt: int
    total: int
    context: int = MAX_TOKENS
    """The model's own."""
    policies: PolicyOptions = NO_CHOICE
    workers: Sequence[WorkerRecord] = ()
    choices: float = math.inf
    """That a decode worker can run at a time."""

    def can_hold(self, policy: KVPolicy, num_prompt_tokens: int, num_tokens: int) -> bool:
        """Whether some prefill worker can hold the prompt, and some decode worker all of it."""
        longest = {Role.PREFILL: num_prompt_tokens, Role.DECODE: num_tokens}
        roles = {worker.role for worker in self.workers}
        return roles == {
            worker.role
            for worker in self.workers
            if worker.can_hold(policy, num_prompt_tokens, longest[worker.role])
        }


class Pinned(NamedTuple):
    """The beginning of a prompt that is to stay cached."""

    num_tokens: int
    ttl_s: int


@dataclass(frozen=True)
class Prepared:
    prompts: list[list[int]]
    sampling: list[common_pb2.SamplingParams]
    echoes: list[str]
    num_choices: int
    stops: StopPatterns
    min_tokens: int
    logprobs: int | None
    cache_salt: str
    cache_key: str
    pins: list[list[Pinned]]
    kv_policy: KVPolicy
    stream: bool
    include_usage: bool
    continuous_usage: bool
    timing: bool


def limits_of(model: TextModel, workers: Iterable[WorkerRecord]) -> Limits:
    own = [w for w in workers if w.layout.fingerprint == model.fingerprint]
    decode = max((w.max_model_len for w in own if w.role is Role.DECODE), default=math.inf)
    prefill = max((w.max_model_len for w in own if w.role is Role.PREFILL), default=math.inf)
    total = int(min(model.max_model_len, decode))
    return Limits(
        prompt=int(min(total, prefill)),
        total=total,
        context=model.max_model_len,
        policies=PolicyOptions.of(own),
        workers=own,
        choices=max((w.max_num_seqs for w in own if w.role is Role.DECODE), default=math.inf),
    )


async def prepare_chat(body: ChatBody, model: TextModel, limits: Limits) -> Prepared:
    prompt, pins = await _render(body.messages, model)
    if not prompt:
        raise invalid("messages", "messages must not render to an empty prompt.", "invalid_value")
    asked = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prepared = _prepare(body, [prompt], model, limits, asked, None, logprobs, "messages")
    prepared.pins[0] += pins
    return prepared


async def prepare_completion(body: CompletionBody, model: TextModel, limits: Limits) -> Prepared:
    prompts = [await _encode(prompt, model) for prompt in body.prompt]
    echoes = [_echo(prompt, model) if body.echo else "" for prompt in body.prompt]
    prepared = _prepare(
        body,
        prompts,
        model,
        limits,
        body.max_tokens,
        DEFAULT_COMPLETION_TOKENS,
        body.logprobs,
        "prompt",
        best_of=body.best_of,
    )
    prepared.echoes[:] = echoes
    return prepared


async def _render(messages: Sequence[Message], model: TextModel) -> tuple[list[int], list[Pinned]]:
    plain = [dict(message) for message in messages]
    marks = take_marks(plain)
    try:
        if not marks:
            return await model.encode_chat(plain), []
        places = [(mark.message, mark.offset) for mark in marks]
        token_ids, counts = await model.encode_marked_chat(plain, places)
        pairs = zip(counts, marks, strict=True)
        return token_ids, [Pinned(count, mark.ttl_s) for count, mark in pairs if count]
    except TemplateError as error:
        raise invalid("messages", f"messages: {error}.", "invalid_value") from error


async def _encode(prompt: Prompt, model: TextModel) -> list[int]:
    if isinstance(prompt, str):
        token_ids = await model.encode_prompt(prompt)
    else:
        token_ids = prompt
        _check_token_ids("prompt", token_ids, model)
    if not token_ids:
        raise invalid("prompt", "prompt must not be empty.", "invalid_value")
    return token_ids


def _echo(prompt: Prompt, model: TextModel) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)


def _prepare(
    body: GenerationBody,
    prompts: list[list[int]],
    model: TextModel,
    limits: Limits,
    asked: int | None,
    default: int | None,
    logprobs: int | None,
    param: str,
    best_of: int | None = None,
) -> Prepared:
    _check_token_ids("logit_bias", body.logit_bias, model)
    _check_token_ids("stop_token_ids", body.stop_token_ids or (), model)
    n = body.num_choices if body.use_beam_search else max(best_of or 1, body.num_choices)
    if (width := max(n, body.beam_width if body.use_beam_search else 1)) > limits.choices:
        field = "n" if width == body.num_choices else "best_of"
        told = f"{field} must not be above {limits.choices}, what a worker can run at a time."
        raise invalid(field, told, "invalid_value")
    ranked = n > body.num_choices  # ranking needs the logprob of every drawn token
    policy = limits.policies.choose(body, limits.context)
    sampling = []
    for prompt in prompts:
        max_tokens = _max_tokens(len(prompt), limits, policy, asked, default, param)
        _check_min_tokens(body, max_tokens)
        reported = 0 if ranked and logprobs is None else logprobs
        sampling.append(_sampling(body, n, max_tokens, reported))
    return Prepared(
        prompts=prompts,
        sampling=sampling,
        echoes=[""] * len(prompts),
        num_choices=body.num_choices,
        stops=StopPatterns(body.stop),
        min_tokens=body.min_tokens or 0,
        logprobs=logprobs,
        cache_salt=body.cache_salt or "",
        cache_key=body.prompt_cache_key or "",
        pins=[_whole(prompt, body.cache_control) for prompt in prompts],
        kv_policy=policy,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        timing=bool(body.timing),
    )


def _whole(prompt: list[int], ttl_s: int | None) -> list[Pinned]:
    return [] if ttl_s is None else [Pinned(len(prompt), ttl_s)]


def _check_token_ids(param: str, token_ids: Iterable[int], model: TextModel) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise invalid(
                param,
                f"{param} holds token id {token_id}, "
                f"which is not in the vocabulary of {model.vocab_size} tokens.",
                "invalid_value",
            )


def _check_min_tokens(body: GenerationBody, max_tokens: int) -> None:
    if (body.min_tokens or 0) > max_tokens:
        message = f"min_tokens must not be above the {max_tokens} tokens that may be generated."
        raise invalid("min_tokens", message, "invalid_value")


def _max_tokens(
    num_prompt_tokens: int,
    limits: Limits,
    policy: KVPolicy,
    asked: int | None,
    default: int | None,
    param: str,
) -> int:
    room = limits.total - num_prompt_tokens
    if policy.is_endless:
        room = max(room, limits.total)  # of an answer whose length nobody gave
    elif num_prompt_tokens > limits.prompt or room < (asked or 1):
        raise _too_long(num_prompt_tokens, limits, asked, param)
    max_tokens = asked or min(default or room, room)
    if not policy.is_full and not limits.can_hold(
        policy, num_prompt_tokens, num_prompt_tokens + max_tokens
    ):
        message = f"No worker can hold {num_prompt_tokens + max_tokens} tokens under {policy}."
        raise invalid(param, message, "context_length_exceeded")
    return max_tokens


def _too_long(num_prompt_tokens: int, limits: Limits, asked: int | None, param: str) -> ApiError:
    longest = min(limits.prompt, limits.total - 1)
    if num_prompt_tokens > longest:
        told = f"the prompt has {num_prompt_tokens} tokens, at most {longest} fit"
    else:
        told = f"the prompt has {num_prompt_tokens} tokens and {asked} more were asked for"
    message = f"The context holds {limits.total} tokens: {told}."
    return invalid(param, message, "context_length_exceeded")


def _sampling(
    body: GenerationBody, n: int, max_tokens: int, logprobs: int | None
) -> common_pb2.SamplingParams:
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    beam = _beam(body) if body.use_beam_search else None
    default_temperature = 1.0 if beam is None else 0.0
    return common_pb2.SamplingParams(
        temperature=default_temperature if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else max(body.top_p, LEAST_TOP_P),
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        n=n,
        logprobs=logprobs,
        beam=beam,
    )


def _beam(body: GenerationBody) -> common_pb2.BeamParams:
    early = {
        True: common_pb2.EARLY_STOPPING_ALWAYS,
        "never": common_pb2.EARLY_STOPPING_NEVER,
    }
    return common_pb2.BeamParams(
        width=body.beam_width,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=early.get(
            body.early_stopping or False, common_pb2.EARLY_STOPPING_UNSPECIFIED
        ),
    )
