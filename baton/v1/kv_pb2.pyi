from baton.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVFrame(_message.Message):
    __slots__ = ("open", "data", "commit")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    open: KVOpen
    data: KVData
    commit: KVCommit
    def __init__(self, open: _Optional[_Union[KVOpen, _Mapping]] = ..., data: _Optional[_Union[KVData, _Mapping]] = ..., commit: _Optional[_Union[KVCommit, _Mapping]] = ...) -> None: ...

class KVOpen(_message.Message):
    __slots__ = ("reservation_id", "generation", "incarnation", "layout", "secret")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    generation: int
    incarnation: str
    layout: _common_pb2.KVLayout
    secret: bytes
    def __init__(self, reservation_id: _Optional[str] = ..., generation: _Optional[int] = ..., incarnation: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., secret: _Optional[bytes] = ...) -> None: ...

class KVData(_message.Message):
    __slots__ = ("sequence", "layer_start", "layer_count", "blocks", "checksum", "codec", "payload", "shm", "torch")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    layer_start: int
    layer_count: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    checksum: int
    codec: str
    payload: bytes
    shm: ShmBlocks
    torch: TorchMessage
    def __init__(self, sequence: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_count: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., checksum: _Optional[int] = ..., codec: _Optional[str] = ..., payload: _Optional[bytes] = ..., shm: _Optional[_Union[ShmBlocks, _Mapping]] = ..., torch: _Optional[_Union[TorchMessage, _Mapping]] = ...) -> None: ...

class KVCommit(_message.Message):
    __slots__ = ("num_frames", "first_tokens")
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_frames: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.Token]
    def __init__(self, num_frames: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[_common_pb2.Token, _Mapping]]] = ...) -> None: ...

class ShmBlocks(_message.Message):
    __slots__ = ("pid", "fd", "token", "num_blocks", "blocks")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    token: bytes
    num_blocks: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., token: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class TorchMessage(_message.Message):
    __slots__ = ("group", "tag", "size", "has_checksum")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    group: str
    tag: int
    size: int
    has_checksum: bool
    def __init__(self, group: _Optional[str] = ..., tag: _Optional[int] = ..., size: _Optional[int] = ..., has_checksum: _Optional[bool] = ...) -> None: ...

class KVAck(_message.Message):
    __slots__ = ("frames", "unreadable", "committed", "blocks", "bytes", "refused")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    frames: int
    unreadable: str
    committed: bool
    blocks: int
    bytes: int
    refused: bool
    def __init__(self, frames: _Optional[int] = ..., unreadable: _Optional[str] = ..., committed: _Optional[bool] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., refused: _Optional[bool] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("backend", "max_bytes", "reservation_id", "secret", "key")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    backend: str
    max_bytes: int
    reservation_id: str
    secret: bytes
    key: RendezvousKey
    def __init__(self, backend: _Optional[str] = ..., max_bytes: _Optional[int] = ..., reservation_id: _Optional[str] = ..., secret: _Optional[bytes] = ..., key: _Optional[_Union[RendezvousKey, _Mapping]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("group", "key")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    group: str
    key: RendezvousKey
    def __init__(self, group: _Optional[str] = ..., key: _Optional[_Union[RendezvousKey, _Mapping]] = ...) -> None: ...

class RendezvousKey(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
