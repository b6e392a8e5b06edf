"""When a hand-off is worth encoding, and what its transfer teaches."""

import pytest

from baton.engine.kv.quantized_sizes import QuantizedSizes
from baton.engine.kv_cache import KVCache
from baton.engine.kv_layout import KVLayout
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import Sequence
from baton.engine.transfer.payload import SequenceReader
from baton.engine.transfer.plan import RAW
from baton.step_totals import StepTotals
from baton.v1 import common_pb2
from prefill_service.encoding import Encoding
from prefill_service.wire_policy import (
    RATE_LIFE_S,
    Busy,
    Forecast,
    Rates,
    frame_bytes,
    worth_encoding,
)

MB = 1_000_000


@pytest.mark.parametrize(
    ("raw_rate", "encoded_rate", "hidden_s", "worth"),
    [
        (None, None, 0.0, False),  # nothing is known of the link
        (10 * MB, None, 9.9, True),  # 10 s on the link, computed in less
        (10 * MB, None, 10.1, False),  # computing hides it
        (10 * MB, 6 * MB, 0.0, True),  # 54 MB in 9 s
        (10 * MB, 5 * MB, 0.0, False),  # encoding takes longer than it saves
        (10_000 * MB, 100 * MB, 0.0, False),
    ],
)
def test_only_what_the_link_holds_up_is_encoded(
    raw_rate: float | None, encoded_rate: float | None, hidden_s: float, worth: bool
) -> None:
    forecast = Forecast(100 * MB, 54 * MB, hidden_s, raw_rate, encoded_rate)
    assert worth_encoding(forecast) is worth


def test_rates_are_smoothed_and_forgotten() -> None:
    rates = Rates()
    assert rates.get("x", 0.0) is None
    rates.saw("x", 100, 1.0, 0.0)
    rates.saw("x", 200, 1.0, 1.0)
    rates.saw("x", 200, 0.0, 2.0)  # tells nothing
    assert rates.get("x", 2.0) == pytest.approx(130) and rates.get("y", 2.0) is None
    assert rates.get("x", 1.0 + RATE_LIFE_S) and rates.get("x", 1.1 + RATE_LIFE_S) is None


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (None, 1 << 20),  # not measured: as if slow
        (MB, 1 << 20),  # a second, in which no deadline passes
        (10 * MB, 2_500_000),  # a quarter of a second
        (1000 * MB, 32 << 20),  # what the transport allows
    ],
)
def test_frames_are_as_long_as_their_link_is_fast(rate: float | None, expected: int) -> None:
    assert frame_bytes(32 << 20, rate) == expected
    assert frame_bytes(4096, rate) == 4096


def test_what_a_link_carried_before_it_failed_counts_no_more() -> None:
    rates = Rates()
    rates.saw("x", 100, 1.0, 0.0)
    rates.forget("x")
    rates.forget("y")
    assert rates.get("x", 0.0) is None


def test_a_link_is_busy_while_anything_is_on_its_way() -> None:
    busy = Busy()
    for begin, end in ((1.0, 3.0), (10.0, 11.0)):
        busy.begin(begin)
        busy.begin(begin + 0.5)
        busy.add(5)
        busy.end(end)
        busy.end(end + 1)
    assert (busy.num_bytes, busy.seconds) == (10, 3.0)


class Link:
    name = "grpc"
    owns_payloads = True


def encoding(
    choice: str = "auto", dtype: str = "bfloat16", codecs: tuple[str, ...] = ("fp8", "int8", "int4")
) -> Encoding:
    """Of 8 MiB, of a prompt that takes 16 s to compute at 64 tokens a second; 4 MiB leave at its
    end, so that 8 s are hidden."""
    layout = KVLayout("f", 8, 4, 64, 16, "bfloat16", ("full",) * 8)
    seq = Sequence([1] * 1024, SamplingParams())
    seq.block_table = list(range(64))
    seq.prefill_steps = StepTotals(1, 64, 0, 0, 0, 1.0)
    offer = common_pb2.TransferOffer(codecs=codecs)
    offer.layout.dtype = dtype
    reader = SequenceReader(KVCache(layout, 64), seq)
    return Encoding(choice, offer, reader, seq, Rates(), Rates(), {})


def test_auto_encodes_on_a_slow_link_and_not_on_a_fast_or_an_unknown_one() -> None:
    for rate, codec in ((None, RAW), (MB, "int8"), (2 * MB, RAW), (1000 * MB, RAW)):
        auto = encoding()
        if rate is not None:
            auto.moved(Link(), RAW, 4 * MB, 4 * MB / rate)
        assert auto.codec_on(Link(), ()) == codec
    learned = encoding()
    learned.moved(Link(), RAW, 4 * MB, 0.004)
    learned.moved(Link(), "int8", 2 * MB, 0.1)  # encoding was the slower way
    assert learned.codec_on(Link(), ()) == RAW
    small = encoding()
    small.moved(Link(), RAW, 1000, 1.0)  # latency, no rate
    assert small.codec_on(Link(), ()) == RAW


def test_a_hand_off_tells_how_many_bytes_it_shipped_per_token() -> None:
    auto = encoding()
    auto.moved(Link(), RAW, 4 * MB, 0.004)
    assert auto.token_bytes == {"grpc": 8 * 2 * 4 * 64 * 2}
    auto.moved(Link(), "int4", MB, 0.001)
    assert auto.token_bytes == {"grpc": 8 * QuantizedSizes("int4", 16, 4, 64).row_bytes // 16}


def test_auto_takes_the_codec_of_a_quantized_cache_and_encodes_nothing_that_is_held() -> None:
    for dtype, codec in (("int4/bfloat16", "int4"), ("float32", "int8")):
        auto = encoding(dtype=dtype)
        auto.moved(Link(), RAW, 4 * MB, 4.0)
        assert auto.codec_on(Link(), ()) == codec
        assert auto.codec_on(Link(), range(64)) == RAW


@pytest.mark.parametrize("choice", ["int4", "auto"])
def test_nothing_is_encoded_that_decode_does_not_offer_or_reads_in_place(choice: str) -> None:
    class InPlace(Link):
        owns_payloads = False

    known, old = encoding(choice), encoding(choice, codecs=())
    for one in (known, old):
        one.moved(Link(), RAW, 4 * MB, 4.0)
    assert known.codec_on(Link(), ()) != RAW
    assert known.codec_on(InPlace(), ()) == RAW and old.codec_on(Link(), ()) == RAW
