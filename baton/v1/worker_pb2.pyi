from baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class RepliesRequest(_message.Message):
    __slots__ = ("stream",)
    STREAM_FIELD_NUMBER: _ClassVar[int]
    stream: bytes
    def __init__(self, stream: _Optional[bytes] = ...) -> None: ...

class ReplyBatch(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[Reply]
    def __init__(self, replies: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("call", "event")
    CALL_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    call: int
    event: bytes
    def __init__(self, call: _Optional[int] = ..., event: _Optional[bytes] = ...) -> None: ...

class GetCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheInfo(_message.Message):
    __slots__ = ("known_blocks", "idle_blocks", "pinned_blocks", "block_size", "tenant_quota_blocks", "pins")
    KNOWN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IDLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENANT_QUOTA_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    known_blocks: int
    idle_blocks: int
    pinned_blocks: int
    block_size: int
    tenant_quota_blocks: int
    pins: _containers.RepeatedCompositeFieldContainer[PinInfo]
    def __init__(self, known_blocks: _Optional[int] = ..., idle_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., tenant_quota_blocks: _Optional[int] = ..., pins: _Optional[_Iterable[_Union[PinInfo, _Mapping]]] = ...) -> None: ...

class PinInfo(_message.Message):
    __slots__ = ("id", "tenant", "blocks", "cached_blocks", "expires_in_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant: str
    blocks: int
    cached_blocks: int
    expires_in_s: float
    def __init__(self, id: _Optional[str] = ..., tenant: _Optional[str] = ..., blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: bool
    def __init__(self, unpinned: _Optional[bool] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "model", "layout", "max_model_len", "max_num_seqs", "num_blocks", "load", "counters", "links", "transfer")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: Role
    model: str
    layout: _common_pb2.KVLayout
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    load: WorkerLoad
    counters: WorkerCounters
    links: _containers.RepeatedCompositeFieldContainer[TransferLink]
    transfer: TransferResources
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., model: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_blocks: _Optional[int] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., counters: _Optional[_Union[WorkerCounters, _Mapping]] = ..., links: _Optional[_Iterable[_Union[TransferLink, _Mapping]]] = ..., transfer: _Optional[_Union[TransferResources, _Mapping]] = ...) -> None: ...

class TransferLink(_message.Message):
    __slots__ = ("peer", "transport", "degraded", "in_flight_bytes", "token_bytes")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    transport: str
    degraded: _containers.RepeatedScalarFieldContainer[str]
    in_flight_bytes: int
    token_bytes: int
    def __init__(self, peer: _Optional[str] = ..., transport: _Optional[str] = ..., degraded: _Optional[_Iterable[str]] = ..., in_flight_bytes: _Optional[int] = ..., token_bytes: _Optional[int] = ...) -> None: ...

class TransferResources(_message.Message):
    __slots__ = ("torch_groups", "shm_bytes", "staging_bytes", "in_flight_bytes")
    TORCH_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SHM_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    torch_groups: int
    shm_bytes: int
    staging_bytes: int
    in_flight_bytes: int
    def __init__(self, torch_groups: _Optional[int] = ..., shm_bytes: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., in_flight_bytes: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("waiting", "running", "free_blocks", "cached_blocks", "handoffs_in_flight", "draining", "promised_blocks")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    free_blocks: int
    cached_blocks: int
    handoffs_in_flight: int
    draining: bool
    promised_blocks: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., handoffs_in_flight: _Optional[int] = ..., draining: _Optional[bool] = ..., promised_blocks: _Optional[int] = ...) -> None: ...

class WorkerCounters(_message.Message):
    __slots__ = ("handoffs", "handoffs_failed", "prefill_tokens_computed", "prefill_tokens_cached", "tokens_generated", "preemptions", "tokens_recomputed", "blocks_transferred", "bytes_transferred", "tokens_drafted", "tokens_accepted", "blocks_reused", "blocks_evicted", "pins_broken")
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FAILED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TRANSFERRED_FIELD_NUMBER: _ClassVar[int]
    BYTES_TRANSFERRED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REUSED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    PINS_BROKEN_FIELD_NUMBER: _ClassVar[int]
    handoffs: int
    handoffs_failed: int
    prefill_tokens_computed: int
    prefill_tokens_cached: int
    tokens_generated: int
    preemptions: int
    tokens_recomputed: int
    blocks_transferred: int
    bytes_transferred: int
    tokens_drafted: int
    tokens_accepted: int
    blocks_reused: int
    blocks_evicted: int
    pins_broken: int
    def __init__(self, handoffs: _Optional[int] = ..., handoffs_failed: _Optional[int] = ..., prefill_tokens_computed: _Optional[int] = ..., prefill_tokens_cached: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., preemptions: _Optional[int] = ..., tokens_recomputed: _Optional[int] = ..., blocks_transferred: _Optional[int] = ..., bytes_transferred: _Optional[int] = ..., tokens_drafted: _Optional[int] = ..., tokens_accepted: _Optional[int] = ..., blocks_reused: _Optional[int] = ..., blocks_evicted: _Optional[int] = ..., pins_broken: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s", "undo")
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    undo: bool
    def __init__(self, timeout_s: _Optional[float] = ..., undo: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("drained",)
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    def __init__(self, drained: _Optional[bool] = ...) -> None: ...

class ChangeRoleRequest(_message.Message):
    __slots__ = ("role", "timeout_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    role: Role
    timeout_s: float
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ChangeRoleResponse(_message.Message):
    __slots__ = ("drained",)
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    def __init__(self, drained: _Optional[bool] = ...) -> None: ...
