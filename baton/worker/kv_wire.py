"""KVFrame messages with large payloads, written and read without protobuf copying the bytes.

What goes over the wire is ordinary protobuf: any client may speak to it. The writer puts the
payload last and has it written into the message itself; the reader leaves it where gRPC put it.
"""

import ctypes
from typing import NamedTuple

from baton.engine.transfer.base import ShmBlocks, TorchMessage
from baton.engine.transfer.plan import RAW, FramePlan
from baton.v1 import kv_pb2

_FRAME_DATA = kv_pb2.KVFrame.DESCRIPTOR.fields_by_name["data"].number
_DATA_PAYLOAD = kv_pb2.KVData.DESCRIPTOR.fields_by_name["payload"].number
_LENGTH_DELIMITED = 2


class WireFrame(NamedTuple):
    """`message` lacks its payload bytes, which `payload` holds."""

    message: kv_pb2.KVFrame
    payload: memoryview | None = None


def message_of(
    sequence: int,
    plan: FramePlan,
    carrier: ShmBlocks | TorchMessage | bytes,
    checksum: int | None,
) -> kv_pb2.KVFrame | bytes:
    """The message of a frame; a carrier of bytes is one already."""
    if isinstance(carrier, bytes):
        return carrier
    data = _data(sequence, plan, checksum)
    if isinstance(carrier, ShmBlocks):
        data.shm.MergeFrom(kv_pb2.ShmBlocks(**vars(carrier)))
    else:
        data.torch.MergeFrom(kv_pb2.TorchMessage(**vars(carrier)))
    return kv_pb2.KVFrame(data=data)


class PayloadFrame:
    """The message of a frame, whose `payload` of `size` bytes is to be written in place."""

    def __init__(self, sequence: int, plan: FramePlan, size: int, with_checksum: bool) -> None:
        self._sequence, self._plan = sequence, plan
        head = len(_head(sequence, plan, size, 0 if with_checksum else None))
        self._message = _new_bytes(head + size)
        room = _writable(self._message)
        self._head, self.payload = room[:head], room[head:]

    def message(self, checksum: int | None) -> bytes:
        """Once the payload is written, of which this is the checksum."""
        size = len(self.payload)
        self._head[:] = _head(self._sequence, self._plan, size, checksum)
        return self._message


def _head(sequence: int, plan: FramePlan, size: int, checksum: int | None) -> bytes:
    """What goes before the payload. A checksum of any value takes as much room."""
    inner = _data(sequence, plan, checksum).SerializeToString() + _header(_DATA_PAYLOAD, size)
    return _header(_FRAME_DATA, len(inner) + size) + inner


def _data(sequence: int, plan: FramePlan, checksum: int | None) -> kv_pb2.KVData:
    return kv_pb2.KVData(
        sequence=sequence,
        layer_start=plan.layer_start,
        layer_count=plan.layer_count,
        blocks=plan.positions,
        checksum=checksum,
        codec="" if plan.codec == RAW else plan.codec,
    )


_new = ctypes.pythonapi.PyBytes_FromStringAndSize
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)
_address = ctypes.pythonapi.PyBytes_AsString
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object,)


def _new_bytes(size: int) -> bytes:
    """Not yet written: the C API lets its maker fill a bytes object that nobody else has seen.
    https://docs.python.org/3/c-api/bytes.html#c.PyBytes_FromStringAndSize"""
    return _new(None, size)


def _writable(message: bytes) -> memoryview:
    """Over the bytes object's own memory; only while the object is kept."""
    room = (ctypes.c_uint8 * len(message)).from_address(_address(message))
    return memoryview(room).cast("B")


def serialize(frame: kv_pb2.KVFrame | bytes) -> bytes:
    return frame if isinstance(frame, bytes) else frame.SerializeToString()


def parse(wire: bytes) -> WireFrame:
    """Raises DecodeError, as protobuf does."""
    try:
        payload = _find_payload(memoryview(wire))
    except IndexError:
        payload = None  # cut short: protobuf says so below
    if payload is None:
        return WireFrame(kv_pb2.KVFrame.FromString(wire))
    start, end, head = payload
    rest = wire[head : start - _header_size(end - start)] + wire[end:]
    message = kv_pb2.KVFrame(data=kv_pb2.KVData.FromString(rest))
    if message.data.WhichOneof("carrier") is not None:  # two carriers: protobuf knows which counts
        return WireFrame(kv_pb2.KVFrame.FromString(wire))
    return WireFrame(message, memoryview(wire)[start:end])


def _find_payload(wire: memoryview) -> tuple[int, int, int] | None:
    """Start and end of the payload and where KVData begins; None when there is no payload or
    the message is not one KVData."""
    tag, at = _varint(wire, 0)
    if tag != _FRAME_DATA << 3 | _LENGTH_DELIMITED:
        return None
    size, head = _varint(wire, at)
    at = head
    if head + size != len(wire):
        return None
    while at < len(wire):
        tag, at = _varint(wire, at)
        length, start = _field(wire, at, tag & 7)
        if length < 0 or start + length > len(wire):
            return None
        if tag == _DATA_PAYLOAD << 3 | _LENGTH_DELIMITED:
            minimal = start - at == len(_encode_varint(length))
            return (start, start + length, head) if minimal else None
        at = start + length
    return None


def _field(wire: memoryview, at: int, kind: int) -> tuple[int, int]:
    """Length and start of a field's contents; -1 for a kind that we do not use."""
    if kind == 0:
        return 0, _varint(wire, at)[1]
    if kind == _LENGTH_DELIMITED:
        return _varint(wire, at)
    return {1: 8, 5: 4}.get(kind, -1), at


def _varint(wire: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = wire[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _header(field: int, size: int) -> bytes:
    return _encode_varint(field << 3 | _LENGTH_DELIMITED) + _encode_varint(size)


def _header_size(size: int) -> int:
    return len(_header(_DATA_PAYLOAD, size))
