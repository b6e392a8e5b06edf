"""KV frames on the wire are ordinary protobuf, whoever writes and whoever reads them."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.transfer.base import ShmBlocks, TorchMessage
from baton.engine.transfer.plan import FramePlan
from baton.v1 import kv_pb2
from baton.worker.kv_wire import PayloadFrame, message_of, parse, serialize

plans = st.builds(
    FramePlan,
    st.integers(0, 99),
    st.integers(1, 99),
    st.lists(st.integers(0, 2**20), max_size=9, unique=True).map(lambda x: tuple(sorted(x))),
)
checksums = st.none() | st.integers(0, 2**64 - 1)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), plans, st.binary(max_size=400), checksums)
def test_protobuf_reads_what_the_writer_joined_and_the_reader_what_protobuf_wrote(
    sequence: int, plan: FramePlan, payload: bytes, checksum: int | None
) -> None:
    frame = PayloadFrame(sequence, plan, len(payload), checksum is not None)
    frame.payload[:] = payload
    wire = frame.message(checksum)
    message = kv_pb2.KVFrame.FromString(wire)
    data = message.data
    assert (data.sequence, data.layer_start, data.layer_count) == (sequence, *_layers(plan))
    assert tuple(data.blocks) == plan.positions and data.payload == payload
    assert (data.checksum if data.HasField("checksum") else None) == checksum
    for written in (wire, message.SerializeToString()):
        read, view = parse(written)
        assert view is not None and bytes(view) == payload
        read.data.payload = payload
        assert read == message


def _layers(plan: FramePlan) -> tuple[int, int]:
    return plan.layer_start, plan.layer_count


@pytest.mark.parametrize(
    "carrier", [ShmBlocks(1, 2, b"t", 3, (2, 0)), TorchMessage("g", 5, 6, True)]
)
def test_a_payload_elsewhere_is_only_named(carrier: ShmBlocks | TorchMessage) -> None:
    frame = message_of(3, FramePlan(0, 1, (0,)), carrier, 9)
    message, payload = parse(serialize(frame))
    assert payload is None and message == frame


@given(st.binary(max_size=60))
def test_noise_is_refused_or_read_as_protobuf_reads_it(wire: bytes) -> None:
    try:
        expected = kv_pb2.KVFrame.FromString(wire)
    except DecodeError:
        with pytest.raises(DecodeError):
            parse(wire)
        return
    message, payload = parse(wire)
    if payload is not None:
        message.data.payload = bytes(payload)
    assert message == expected
