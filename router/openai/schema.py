"""What a request body may say: fields, types and ranges, and nothing that is not understood.

Types are strict ("16" is not a number). A field that we do not offer is refused by name unless
its value asks for nothing; an unknown one is refused too, since ignoring it could change the
answer silently. Checks that need the model are made later, in `prepare`.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from router.openai.cache_control import parse_cache_control
from router.openai.errors import ApiError, invalid
from router.openai.fields import (
    Message,
    Prompt,
    parse_logit_bias,
    parse_messages,
    parse_prompts,
    parse_stop,
)
from router.openai.slo import Slo

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1

# Accepted and without any effect on the answer.
HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_retention",
        "parallel_tool_calls",
    )
)
# Not offered; these values ask for nothing and pass.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "best_of": (1,),
    "echo": (False,),
}

Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(BaseModel):
    """What both endpoints take. None means absent."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    n: Choices | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(parse_stop)] = ()
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=100, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(parse_logit_bias)] = Field(
        default_factory=dict
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    cache_control: Annotated[int | None, BeforeValidator(parse_cache_control)] = None
    kv_policy: Annotated[str, Field(max_length=200)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timing: bool | None = None
    slo: Slo | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def beam_width(self) -> int:
        return self.num_choices

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], BeforeValidator(parse_messages)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class CompletionBody(GenerationBody):
    prompt: Annotated[list[Prompt], BeforeValidator(parse_prompts)]
    best_of: Choices | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def beam_width(self) -> int:
        return max(self.best_of or 1, self.num_choices)


Body = TypeVar("Body", bound=GenerationBody)


def parse(kind: type[Body], payload: Any) -> Body:
    """Raises ApiError that names the field."""
    if not isinstance(payload, dict):
        raise invalid(None, "The body must be a JSON object.")
    try:
        body = kind.model_validate(payload)
    except ValidationError as error:
        raise _explain(error) from error
    for name, value in (body.model_extra or {}).items():
        _check_extra(name, value)
    _check_combinations(body)
    return body


def _explain(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = str(first["loc"][0])
    place = ".".join(str(part) for part in first["loc"] if isinstance(part, str | int))
    if first["type"] == "missing":
        wanted = "must not be empty" if param in ("messages", "prompt") else "is required"
        return invalid(param, f"{param} {wanted}.", "missing_required_parameter")
    if first["type"] == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        joint = "" if message.startswith(("[", ".", " ")) else " "
        return invalid(param, f"{param}{joint}{message}.", "invalid_value")
    return invalid(param, f"Invalid value for {place}: {first['msg']}.", "invalid_value")


def _check_extra(name: str, value: Any) -> None:
    if value is None or name in HARMLESS:
        return
    if name not in NOT_OFFERED:
        raise invalid(name[:64], f"Unknown parameter: {name[:64]!r}.", "unknown_parameter")
    if not any(type(value) is type(ok) and value == ok for ok in NOT_OFFERED[name]):
        raise invalid(name, f"{name} is not supported here.", "unsupported_parameter")


def _check_combinations(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream: true.", "invalid_value")
    _check_beams(body)
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true.", "invalid_value")
    elif isinstance(body, CompletionBody):
        _check_completion(body)


_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "stop": ((),),
    "logprobs": (False,),
}
"""A search over whole answers, most likely first, draws nothing and shows nothing on its way."""


def _check_beams(body: GenerationBody) -> None:
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", (0, 1)), ("early_stopping", (False,))):
            value = getattr(body, name)
            if value is not None and value not in neutral:
                raise invalid(name, f"{name} needs use_beam_search: true.", "invalid_value")
        return
    for name, neutral in _NOT_WITH_BEAMS.items():
        value = getattr(body, name, None)
        # 0 top logprobs are logprobs, though 0 equals False.
        asks = value not in neutral or (name == "logprobs" and value is not False)
        if value is not None and asks:
            raise invalid(
                name, f"{name} cannot be combined with use_beam_search.", "unsupported_parameter"
            )
    if body.beam_width < 2:
        raise invalid(
            "use_beam_search",
            "use_beam_search needs n, or best_of in completions, of at least 2: its width.",
            "invalid_value",
        )


def _check_completion(body: CompletionBody) -> None:
    if body.echo and body.logprobs is not None:
        raise invalid(
            "logprobs", "logprobs together with echo is not supported.", "unsupported_parameter"
        )
    if body.best_of is not None:
        if body.best_of < body.num_choices:
            raise invalid("best_of", "best_of must be at least n.", "invalid_value")
        if body.stream and body.best_of > body.num_choices:
            raise invalid("best_of", "best_of above n cannot be streamed.", "invalid_value")
