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
    __slots__ = ("reservation_id", "generation", "incarnation", "layout")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    generation: int
    incarnation: str
    layout: _common_pb2.KVLayout
    def __init__(self, reservation_id: _Optional[str] = ..., generation: _Optional[int] = ..., incarnation: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ...) -> None: ...

class KVData(_message.Message):
    __slots__ = ("sequence", "layer_start", "layer_count", "blocks", "payload", "checksum")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    layer_start: int
    layer_count: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    payload: bytes
    checksum: int
    def __init__(self, sequence: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_count: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., payload: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class KVCommit(_message.Message):
    __slots__ = ("num_frames", "first_tokens")
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_frames: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.Token]
    def __init__(self, num_frames: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[_common_pb2.Token, _Mapping]]] = ...) -> None: ...

class KVPushResponse(_message.Message):
    __slots__ = ("blocks_received", "bytes_received")
    BLOCKS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    blocks_received: int
    bytes_received: int
    def __init__(self, blocks_received: _Optional[int] = ..., bytes_received: _Optional[int] = ...) -> None: ...
