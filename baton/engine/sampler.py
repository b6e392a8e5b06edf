"""Draws tokens from logits, the same way whatever else is in the batch.

The uniform number behind a draw is a hash of (seed, choice, position), and the draw walks
the cumulative distribution in order of token id, so rounding in the logits moves a token
only when the number falls within that rounding of a boundary. Log probabilities are of
the raw distribution: temperature 1, before bias and penalties.
"""

import hashlib
import struct
from collections.abc import Sequence as ListOf
from itertools import islice
from typing import NamedTuple

import torch

from baton.engine.beam_search import BeamSearch
from baton.engine.finish import finish_reason, stop_ids
from baton.engine.sequence import SampledToken, ScheduledBatch, ScheduledSequence, Sequence


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits (BLAKE2b as a counter-based generator)."""
    key = struct.pack("<QIQ", seed & (2**64 - 1), choice, position)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


class _Draw(NamedTuple):
    """One token of one choice, from one row of the logits; `ahead`: drafted tokens before it."""

    row: int
    seq: Sequence
    choice: int
    ahead: list[int]

    @property
    def num_output_tokens(self) -> int:
        return self.seq.num_output_tokens + len(self.ahead)

    @property
    def number(self) -> float:
        seq = self.seq
        return uniform(seq.sampling.seed, self.choice, len(seq.token_ids) + len(self.ahead))


class Sampler:
    """Stateless but for the model's end-of-sequence ids."""

    def __init__(self, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._eos = eos_token_ids

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: ScheduledBatch) -> list[list[SampledToken]]:
        """`logits`: fp32 [rows, vocab], one row per sampling item of the batch and one per token
        of its draft, in order. Returns, per item, one token per choice of its sequence (none when
        it does not sample); of one with a draft, the drafted tokens that are drawn and one more.
        """
        draws: list[_Draw] = []
        counts, row = [], 0
        for item in batch.items:
            mine = _draws(item, row) if item.samples else []
            row += 1 + len(item.draft) if item.samples else 0
            draws += mine
            counts.append(len(mine))
        tokens = iter(self._draw(logits, draws) if draws else ())
        drawn = [list(islice(tokens, count)) for count in counts]
        pairs = zip(batch.items, drawn, strict=True)
        return [self._verified(item, run) if item.draft else run for item, run in pairs]

    def _verified(self, item: ScheduledSequence, tokens: list[SampledToken]) -> list[SampledToken]:
        """Up to the first that was not drafted, or that ends the choice."""
        sampling, index = item.seq.sampling, item.seq.num_output_tokens
        for count, (token, guessed) in enumerate(zip(tokens, item.draft, strict=False), start=1):
            ends = finish_reason(token.token_id, index + count, sampling, self._eos)
            if token.token_id != guessed or ends:
                return tokens[:count]
        return tokens

    def _num_top(self, seq: Sequence) -> int | None:
        """Likeliest tokens to report with each; None when not even its own log probability."""
        sampling = seq.sampling
        if sampling.beam is None:
            return sampling.logprobs
        return BeamSearch.num_candidates(sampling.beam.width, len(stop_ids(sampling, self._eos)))

    def _draw(self, logits: torch.Tensor, draws: ListOf[_Draw]) -> list[SampledToken]:
        adjusted = logits if len(draws) == len(logits) else logits[[draw.row for draw in draws]]
        touched = [i for i, draw in enumerate(draws) if _is_adjusted(draw)]
        if touched and adjusted is logits:
            adjusted = logits.clone()  # log probabilities are of the raw rows
        for i in touched:
            self._adjust(adjusted[i], draws[i])
        ids = adjusted.max(dim=-1).indices  # three times as fast as argmax here
        random = [i for i, draw in enumerate(draws) if not draw.seq.sampling.greedy]
        if random:
            ids[random] = _draw_random(adjusted[random], [draws[i] for i in random])
        num_top = [self._num_top(draw.seq) for draw in draws]
        return [
            SampledToken(token_id)
            if top is None
            else _token_with_logprobs(logits[draw.row], token_id, top)
            for draw, token_id, top in zip(draws, ids.tolist(), num_top, strict=True)
        ]

    def _adjust(self, row: torch.Tensor, draw: _Draw) -> None:
        """Bias, penalties and the minimum length, in place. `row`: fp32 [vocab]."""
        seq, sampling = draw.seq, draw.seq.sampling
        token_ids = seq.token_ids + draw.ahead
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias))
            row[ids] += torch.tensor(list(sampling.logit_bias.values()))
        if sampling.repetition_penalty != 1.0:
            _penalise_repetition(row, token_ids, sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            output = torch.tensor(token_ids[seq.num_prompt_tokens :], dtype=torch.long)
            counts = torch.bincount(output, minlength=len(row))
            row -= sampling.frequency_penalty * counts
            row -= sampling.presence_penalty * (counts > 0)
        if draw.num_output_tokens < sampling.min_tokens:
            row[list(stop_ids(sampling, self._eos))] = -torch.inf


def _draws(item: ScheduledSequence, row: int) -> list[_Draw]:
    """`row`: the first of the item's in the logits."""
    if item.draft:
        ahead = (item.draft[:count] for count in range(len(item.draft) + 1))
        return [_Draw(row + i, item.seq, item.seq.choice, before) for i, before in enumerate(ahead)]
    return [_Draw(row, item.seq, choice, []) for choice in item.seq.choices]


def _is_adjusted(draw: _Draw) -> bool:
    sampling = draw.seq.sampling
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or draw.num_output_tokens < sampling.min_tokens
    )


def _penalise_repetition(row: torch.Tensor, token_ids: list[int], penalty: float) -> None:
    """Keskar et al. 2019 (CTRL), section 4.1, with the sign rule everybody uses."""
    seen = torch.tensor(sorted(set(token_ids)), dtype=torch.long)
    values = row[seen]
    row[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _draw_random(logits: torch.Tensor, draws: ListOf[_Draw]) -> torch.Tensor:
    """One id per row of `logits` [rows, vocab], by inversion in order of token id."""
    sampling = [draw.seq.sampling for draw in draws]
    temperature = torch.tensor([s.temperature for s in sampling])[:, None]
    # Subtracting the maximum first keeps tiny temperatures finite.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if any(s.top_k or s.top_p < 1.0 or s.min_p for s in sampling):
        scaled = _truncate(scaled, draws)
    cumulative = scaled.double().softmax(dim=-1).cumsum(dim=-1)
    numbers = torch.tensor([draw.number for draw in draws], dtype=torch.float64)
    targets = (numbers * cumulative[:, -1])[:, None]
    # right=True: the first id whose cumulative sum exceeds the target, never one of weight 0.
    return (
        torch.searchsorted(cumulative, targets, right=True)
        .squeeze(1)
        .clamp_(max=logits.shape[-1] - 1)
    )


def _truncate(scaled: torch.Tensor, draws: ListOf[_Draw]) -> torch.Tensor:
    """top-k, then top-p (Holtzman et al. 2020), then min-p (Nguyen et al. 2024), each on the
    distribution that the one before leaves."""
    vocab = scaled.shape[-1]
    sampling = [draw.seq.sampling for draw in draws]
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab)
    top_k = torch.tensor([s.top_k or vocab for s in sampling])[:, None]
    values = values.masked_fill(rank >= top_k, -torch.inf)
    probs = values.softmax(dim=-1)
    top_p = torch.tensor([s.top_p for s in sampling])[:, None]
    # The most likely token always stays, also at top_p = 0.
    drop = (probs.cumsum(dim=-1) - probs >= top_p) & (rank > 0) & (top_p < 1.0)
    min_p = torch.tensor([s.min_p for s in sampling])[:, None]
    drop |= probs < min_p * probs[:, :1]
    return torch.full_like(scaled, -torch.inf).scatter_(
        1, order, values.masked_fill(drop, -torch.inf)
    )


def _token_with_logprobs(row: torch.Tensor, token_id: int, num_top: int) -> SampledToken:
    logprobs = row.log_softmax(dim=-1)
    num_top = min(num_top, len(row))
    values, ids = logprobs.topk(num_top) if num_top else (row[:0], row[:0].long())
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token_id, float(logprobs[token_id]), top)
