"""Who sees what: the additive masks of a step, for attention that torch computes.

Places and queries count slots of the compact cache. A row is one sequence of a decode step, or one
query of a prefill chunk. The sinks of a `Streaming` sequence have masks of their own, because
attention reads them with another query; see `ops.sinks`.
"""

from collections.abc import Sequence as ListOf
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.ops.attention import Window
from baton.engine.ops.cpu import kernels
from baton.engine.ops.sinks import Anchors
from baton.engine.sequence import ScheduledSequence
from baton.kv_policy import Streaming

_NEVER = 2**31 - 1


class Streams(NamedTuple):
    """Of each row, (row, 1): its sinks, and how many of the last tokens it sees beside them."""

    sinks: Tensor
    windows: Tensor

    @staticmethod
    def of(items: ListOf[ScheduledSequence]) -> "Streams | None":
        """None when no item has outgrown a window yet: then all is seen, wherever it is."""
        found = [stream_of(item) for item in items]
        if not any(found):
            return None
        sinks = [stream.sinks if stream else 0 for stream in found]
        windows = [stream.window if stream else _NEVER for stream in found]
        return Streams(torch.tensor(sinks).unsqueeze(1), torch.tensor(windows).unsqueeze(1))

    def apply_to(self, window: Window) -> Tensor:
        """(row, 1): a layer whose own window is not wider stays as the model declares it."""
        return self.windows < (_NEVER if window is None else window)


def stream_of(item: ScheduledSequence) -> Streaming | None:
    policy = item.seq.kv_policy
    if not isinstance(policy, Streaming):
        return None
    end = item.seq.num_kept_tokens + item.num_new_tokens
    return policy if end > policy.window else None


def anchors_of(items: ListOf[ScheduledSequence]) -> Anchors | None:
    """Where the queries of a step stand as sinks see them; None when there are no sinks."""
    if not any(stream and stream.sinks for stream in map(stream_of, items)):
        return None
    positions: list[int] = []
    for item in items:
        stream, start = stream_of(item), item.seq.num_computed_tokens
        last = stream.span - 1 if stream else _NEVER
        positions += [min(p, last) for p in range(start, start + item.num_new_tokens)]
    return Anchors(torch.tensor(positions))


def kernel_streams(
    items: ListOf[ScheduledSequence], windows: ListOf[Window]
) -> dict[Window, kernels.Streams]:
    """What each sequence sees in the layers of each window; empty when nothing but that counts."""
    found = [stream_of(item) for item in items]
    return {w: _kernel_streams(found, w) for w in windows} if any(found) else {}


def _kernel_streams(found: ListOf[Streaming | None], window: Window) -> kernels.Streams:
    most = _NEVER if window is None else window
    counts = [
        (stream.window, stream.sinks) if stream and stream.window < most else (window or 0, 0)
        for stream in found
    ]
    return kernels.Streams(*torch.tensor(counts, dtype=torch.int32).T.contiguous())


def decode_mask(
    lengths: ListOf[int], window: Window, streams: Streams | None, dtype: torch.dtype
) -> Tensor | None:
    """(sequence, 1, 1, longest), None when every sequence sees all of it."""
    longest = max(lengths)
    if streams is None and min(lengths) == longest and (window is None or window >= longest):
        return None
    queries = torch.tensor(lengths).unsqueeze(1) - 1
    return additive(visible(torch.arange(longest), queries, window, streams), dtype)[:, None, None]


def prefill_mask(
    computed: int, length: int, window: Window, streams: Streams | None, dtype: torch.dtype
) -> Tensor | None:
    """(length - computed, length), None when it is plainly causal."""
    if streams is None and computed == 0 and (window is None or window >= length):
        return None
    queries = torch.arange(computed, length).unsqueeze(1)
    return additive(visible(torch.arange(length), queries, window, streams), dtype)


def visible(places: Tensor, queries: Tensor, window: Window, streams: Streams | None) -> Tensor:
    """(row, place), without the sinks."""
    seen = places <= queries
    if window is not None:
        seen &= places > queries - window
    if streams is not None:
        beside = (places >= streams.sinks) & (places > queries - streams.windows)
        seen &= beside | ~streams.apply_to(window)
    return seen


def sink_mask(
    queries: Tensor, window: Window, streams: Streams | None, dtype: torch.dtype
) -> Tensor | None:
    """(row, most sinks of any), None when there are none. `queries` is (row, 1)."""
    if streams is None or not int(streams.sinks.max()):
        return None
    places = torch.arange(min(int(streams.sinks.max()), int(queries.max()) + 1))
    seen = (places < streams.sinks) & (places <= queries) & streams.apply_to(window)
    return additive(seen, dtype)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
