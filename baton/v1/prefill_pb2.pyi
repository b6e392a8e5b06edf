from baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "destination", "cache_salt", "continuation", "deadline_s", "pins", "kv_policy", "reply_to")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    KV_POLICY_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    destination: _common_pb2.Reservation
    cache_salt: str
    continuation: _common_pb2.Continuation
    deadline_s: float
    pins: _containers.RepeatedCompositeFieldContainer[_common_pb2.CachePin]
    kv_policy: str
    reply_to: _common_pb2.ReplyTo
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., destination: _Optional[_Union[_common_pb2.Reservation, _Mapping]] = ..., cache_salt: _Optional[str] = ..., continuation: _Optional[_Union[_common_pb2.Continuation, _Mapping]] = ..., deadline_s: _Optional[float] = ..., pins: _Optional[_Iterable[_Union[_common_pb2.CachePin, _Mapping]]] = ..., kv_policy: _Optional[str] = ..., reply_to: _Optional[_Union[_common_pb2.ReplyTo, _Mapping]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("started", "first_tokens", "done")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    started: PrefillStarted
    first_tokens: FirstTokens
    done: PrefillDone
    def __init__(self, started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("num_cached_tokens", "queue_s", "received_at", "started_at", "sent_at")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    queue_s: float
    received_at: float
    started_at: float
    sent_at: float
    def __init__(self, num_cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., received_at: _Optional[float] = ..., started_at: _Optional[float] = ..., sent_at: _Optional[float] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("tokens", "steps")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.Token]
    steps: _containers.RepeatedCompositeFieldContainer[_common_pb2.Step]
    def __init__(self, tokens: _Optional[_Iterable[_Union[_common_pb2.Token, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[_common_pb2.Step, _Mapping]]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("num_computed_tokens", "compute_s", "transfer_s", "bytes_sent", "blocks_sent", "finished", "transport", "transfers", "totals", "exposed_bytes")
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SENT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_computed_tokens: int
    compute_s: float
    transfer_s: float
    bytes_sent: int
    blocks_sent: int
    finished: bool
    transport: str
    transfers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    totals: _common_pb2.StepTotals
    exposed_bytes: int
    def __init__(self, num_computed_tokens: _Optional[int] = ..., compute_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., blocks_sent: _Optional[int] = ..., finished: _Optional[bool] = ..., transport: _Optional[str] = ..., transfers: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ..., totals: _Optional[_Union[_common_pb2.StepTotals, _Mapping]] = ..., exposed_bytes: _Optional[int] = ...) -> None: ...
