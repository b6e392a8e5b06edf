"""Protobuf to engine types and back. Raises ValueError, naming the field, for what no engine
may see; nothing else in a worker knows protobuf.
"""

import math
from collections.abc import Sequence as ListOf
from dataclasses import asdict, fields
from typing import Literal

from baton.engine.kv_layout import KVLayout, converts
from baton.engine.sampling_params import BeamParams, SamplingParams
from baton.engine.sequence import FinishReason, Progress, SampledToken, StepOutput
from baton.engine.transfer.base import FirstToken, HandoffRefused
from baton.step_totals import StepTotals
from baton.v1 import common_pb2 as pb
from baton.v1.decode_pb2 import GenerateRequest
from baton.v1.prefill_pb2 import PrefillRequest

_REASON_TO_PB = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_REASON_FROM_PB = {value: key for key, value in _REASON_TO_PB.items()}


def prompt_from_pb(
    token_ids: ListOf[int], vocab_size: int, name: str = "prompt_token_ids"
) -> list[int]:
    prompt = list(token_ids)
    if not prompt:
        raise ValueError(f"{name} must not be empty")
    if max(prompt) >= vocab_size:
        raise ValueError(f"{name}: {max(prompt)} is outside the vocabulary {vocab_size}")
    return prompt


def sampling_from_pb(message: pb.SamplingParams, vocab_size: int) -> SamplingParams:
    """`vocab_size` bounds every token id."""
    for name, least in (("n", 1), ("max_tokens", 1)):
        if getattr(message, name) < least:
            raise ValueError(f"sampling.{name} must be at least {least}")
    for name in ("temperature", "top_p", "min_p"):
        if not 0 <= getattr(message, name) < float("inf"):
            raise ValueError(f"sampling.{name} must be a number of at least 0")
    if not 0 < message.repetition_penalty < float("inf"):
        raise ValueError("sampling.repetition_penalty must be above 0")
    for name, ids in (
        ("logit_bias", message.logit_bias),
        ("stop_token_ids", message.stop_token_ids),
    ):
        if ids and max(ids) >= vocab_size:
            raise ValueError(f"sampling.{name}: {max(ids)} is outside the vocabulary {vocab_size}")
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        n=message.n,
        logprobs=min(message.logprobs, vocab_size) if message.HasField("logprobs") else None,
        beam=_beam_from_pb(message),
    )


def _beam_from_pb(message: pb.SamplingParams) -> BeamParams | None:
    if not message.HasField("beam"):
        return None
    beam = message.beam
    if beam.width < message.n:
        raise ValueError("sampling.beam.width must be at least n")
    if not -1000 <= beam.length_penalty <= 1000:
        raise ValueError("sampling.beam.length_penalty must be a number from -1000 to 1000")
    early: dict[int, bool | Literal["never"]] = {
        pb.EARLY_STOPPING_ALWAYS: True,
        pb.EARLY_STOPPING_NEVER: "never",
    }
    return BeamParams(beam.width, beam.length_penalty, early.get(beam.early_stopping, False))


def continuation_of(
    request: PrefillRequest | GenerateRequest, sampling: SamplingParams, vocab_size: int
) -> tuple[list[int], int | None]:
    """Output so far and the choice that goes on; nothing and None for a fresh request."""
    if not request.HasField("continuation"):
        return [], None
    message = request.continuation
    output = prompt_from_pb(message.output_token_ids, vocab_size, "continuation.output_token_ids")
    if sampling.n != 1 or len(output) >= sampling.max_tokens:
        raise ValueError("a continuation is one choice with tokens left to generate")
    return output, message.choice


def _token_to_pb(
    choice: int, token: SampledToken, index: int, reason: FinishReason | None
) -> pb.Token:
    message = pb.Token(
        choice=choice, token_id=token.token_id, index=index, finish_reason=_REASON_TO_PB[reason]
    )
    if token.logprob is not None:
        message.logprobs.logprob = token.logprob
        message.logprobs.top_token_ids.extend(token_id for token_id, _ in token.top)
        message.logprobs.top_logprobs.extend(logprob for _, logprob in token.top)
    return message


def output_to_pb(output: StepOutput) -> pb.Token:
    if output.token is None:
        raise ValueError("an output without a token has no message")
    return _token_to_pb(output.choice, output.token, output.index, output.finish_reason)


def step_to_pb(progress: Progress) -> pb.Step:
    step = progress.step
    return pb.Step(
        start=step.start,
        end=step.end,
        batch_size=step.batch_size,
        num_tokens=progress.num_new_tokens,
        context=progress.num_computed_tokens,
        num_drafted_tokens=progress.num_drafted_tokens,
    )


def first_token_to_pb(first: FirstToken) -> pb.Token:
    return _token_to_pb(first.choice, first.token, first.index, first.finish_reason)


def first_token_from_pb(message: pb.Token) -> FirstToken:
    logprob = message.logprobs.logprob if message.HasField("logprobs") else None
    ids, values = message.logprobs.top_token_ids, message.logprobs.top_logprobs
    top = tuple(zip(ids, values, strict=True))
    token = SampledToken(message.token_id, logprob, top)
    return FirstToken(message.choice, token, message.index, _REASON_FROM_PB[message.finish_reason])


# A prompt without a deadline, or whose deadline has passed already, is due after so long: others
# go first for a while, but not for ever.
PATIENCE_S = 10.0


def due_at(request: PrefillRequest | GenerateRequest, now: float) -> float:
    """On the clock of `now`."""
    left_s = request.deadline_s if request.HasField("deadline_s") else 0.0
    return now + (min(left_s, PATIENCE_S) if left_s > 0 else PATIENCE_S)


def totals_to_pb(totals: StepTotals) -> pb.StepTotals:
    return pb.StepTotals(**asdict(totals))


_LAYOUT_FIELDS = [field.name for field in fields(KVLayout) if field.name != "layer_kinds"]


def layout_to_pb(layout: KVLayout) -> pb.KVLayout:
    return pb.KVLayout(**{name: getattr(layout, name) for name in _LAYOUT_FIELDS})


def handoff_block_size(prefill: KVLayout | pb.KVLayout, decode: KVLayout | pb.KVLayout) -> int:
    """Tokens per block of what the two exchange. Raises HandoffRefused with the first field in
    which they do not match and both values. `layer_kinds` follows from the fingerprint."""
    # A block of plain values is slots side by side, and splits; a quantized one is a whole.
    splits = "/" not in prefill.dtype and (
        "/" not in decode.dtype or prefill.block_size % decode.block_size == 0
    )
    bridged = {"block_size": splits, "dtype": converts(prefill.dtype, decode.dtype)}
    for name in _LAYOUT_FIELDS:
        here, there = getattr(prefill, name), getattr(decode, name)
        if here != there and not bridged.get(name, False):
            raise HandoffRefused(
                f"the KV caches do not match: {name} is {here!r} at prefill and {there!r} at decode"
            )
    return math.gcd(prefill.block_size, decode.block_size)
