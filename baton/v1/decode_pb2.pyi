from baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "cache_salt", "prefill_here", "continuation", "deadline_s", "pins", "kv_policy", "max_uncached_tokens", "reply_to")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HERE_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    KV_POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    cache_salt: str
    prefill_here: bool
    continuation: _common_pb2.Continuation
    deadline_s: float
    pins: _containers.RepeatedCompositeFieldContainer[_common_pb2.CachePin]
    kv_policy: str
    max_uncached_tokens: int
    reply_to: _common_pb2.ReplyTo
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., prefill_here: _Optional[bool] = ..., continuation: _Optional[_Union[_common_pb2.Continuation, _Mapping]] = ..., deadline_s: _Optional[float] = ..., pins: _Optional[_Iterable[_Union[_common_pb2.CachePin, _Mapping]]] = ..., kv_policy: _Optional[str] = ..., max_uncached_tokens: _Optional[int] = ..., reply_to: _Optional[_Union[_common_pb2.ReplyTo, _Mapping]] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("reserved", "tokens", "done")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    tokens: Tokens
    done: GenerateDone
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., done: _Optional[_Union[GenerateDone, _Mapping]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("reservation", "received_at", "sent_at")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_AT_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    reservation: _common_pb2.Reservation
    received_at: float
    sent_at: float
    def __init__(self, reservation: _Optional[_Union[_common_pb2.Reservation, _Mapping]] = ..., received_at: _Optional[float] = ..., sent_at: _Optional[float] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens", "step", "ready_at")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    READY_AT_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.Token]
    step: _common_pb2.Step
    ready_at: float
    def __init__(self, tokens: _Optional[_Iterable[_Union[_common_pb2.Token, _Mapping]]] = ..., step: _Optional[_Union[_common_pb2.Step, _Mapping]] = ..., ready_at: _Optional[float] = ...) -> None: ...

class GenerateDone(_message.Message):
    __slots__ = ("num_cached_tokens", "num_recomputed_tokens", "num_preemptions", "handoff_s", "decode_s", "prefill_steps", "decode_steps", "queue_s")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    handoff_s: float
    decode_s: float
    prefill_steps: _common_pb2.StepTotals
    decode_steps: _common_pb2.StepTotals
    queue_s: float
    def __init__(self, num_cached_tokens: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., handoff_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., prefill_steps: _Optional[_Union[_common_pb2.StepTotals, _Mapping]] = ..., decode_steps: _Optional[_Union[_common_pb2.StepTotals, _Mapping]] = ..., queue_s: _Optional[float] = ...) -> None: ...

class StopChoiceRequest(_message.Message):
    __slots__ = ("reservation_id", "choice", "secret")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    choice: int
    secret: bytes
    def __init__(self, reservation_id: _Optional[str] = ..., choice: _Optional[int] = ..., secret: _Optional[bytes] = ...) -> None: ...

class StopChoiceResponse(_message.Message):
    __slots__ = ("stopped",)
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    stopped: bool
    def __init__(self, stopped: _Optional[bool] = ...) -> None: ...
