"""What a hand-off is encoded with on a link, and what its transfer teaches for the next ones."""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from baton.engine.sequence import Sequence
from baton.engine.transfer.base import BlockReader, PayloadLink
from baton.engine.transfer.plan import RAW, FramePlan
from baton.engine.transfer.wire import bytes_per_token, codecs_of
from baton.v1 import common_pb2
from prefill_service.wire_policy import LEAST_BYTES, Forecast, Rates, worth_encoding

AUTO = "auto"
_COMPUTE = "compute"
_LEAVES_AT_BYTES = 4 << 20
"""Complete layers leave when they are so much."""


@dataclass(frozen=True)
class Encoding:
    """Of one hand-off of `seq`. `links` are the rates of its pair of workers, by link and way;
    `computing` knows how many prompt tokens this worker computes per second. `token_bytes` learns,
    by link, what the hand-off shipped per token."""

    choice: str
    offer: common_pb2.TransferOffer
    reader: BlockReader
    seq: Sequence
    links: Rates
    computing: Rates
    token_bytes: dict[str, int]

    def codec_on(self, link: PayloadLink, held: Collection[int]) -> str:
        """Asked before the first frame on the link; `held` need not be shipped."""
        layout = self.reader.layout
        able = set(codecs_of(layout)) & set(self.offer.codecs)
        # Where decode reads blocks in the cache itself, nothing can be encoded.
        if layout.quantized is not None or not link.owns_payloads:
            return RAW
        if self.choice != AUTO:
            return self.choice if self.choice in able else RAW
        # A quantized cache rounds what comes anyway: its own codec loses nothing more.
        kind = self.offer.layout.dtype.rpartition("/")[0] or "int8"
        if kind not in able:
            return RAW
        forecast = self._forecast(link, kind, held, time.monotonic())
        return kind if forecast is not None and worth_encoding(forecast) else RAW

    def moved(self, link: PayloadLink, codec: str, num_bytes: int, seconds: float) -> None:
        """A hand-off has ended well; `seconds`: while any of its payloads was on its way."""
        now, steps = time.monotonic(), self.seq.prefill_steps
        self.token_bytes[link.name] = bytes_per_token(self.reader.layout, codec)
        if num_bytes >= LEAST_BYTES:
            self.links.saw(f"{link.name} {codec}", num_bytes, seconds, now)
        if steps.prefill_tokens:
            self.computing.saw(_COMPUTE, steps.prefill_tokens, steps.seconds, now)

    def _forecast(
        self, link: PayloadLink, codec: str, held: Collection[int], now: float
    ) -> Forecast | None:
        """None when nothing is shipped."""
        layout, seq = self.reader.layout, self.seq
        wanted = [p for p in seq.handoff_positions(layout.block_size) if p not in held]
        if not wanted:
            return None
        plan = FramePlan(0, layout.num_layers, tuple(wanted))
        raw_bytes = self.reader.num_bytes(plan)
        return Forecast(
            raw_bytes,
            self.reader.num_bytes(replace(plan, codec=codec)),
            self._hidden_s(raw_bytes, now),
            self.links.get(f"{link.name} {RAW}", now),
            self.links.get(f"{link.name} {codec}", now),
        )

    def _hidden_s(self, raw_bytes: int, now: float) -> float:
        """The first bytes leave when enough of them are complete; none do before the end under a
        policy that then drops tokens."""
        seq, rate = self.seq, self.computing.get(_COMPUTE, now)
        if rate is None or seq.dropped_of(seq.num_initial_tokens, self.reader.layout.block_size):
            return 0.0
        computed_s = (seq.num_initial_tokens - seq.num_cached_tokens) / rate
        return computed_s * max(0.0, 1 - _LEAVES_AT_BYTES / raw_bytes)
