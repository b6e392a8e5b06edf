"""Draws: greedy, seeded, truncated, penalised, with true log probabilities."""

import math

import pytest
import torch

from baton.engine.sampler import Sampler, uniform
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import SampledToken, ScheduledBatch, ScheduledSequence, Sequence

VOCAB = 50


def draw(
    logits: torch.Tensor,
    *params: SamplingParams,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
) -> list[list[SampledToken]]:
    """One sequence per row of `logits`."""
    items = []
    for sampling in params:
        seq = Sequence(prompt, sampling)
        seq.token_ids += output
        if output:
            seq.choices = (0,)
        seq.num_computed_tokens = len(seq.token_ids) - 1
        items.append(ScheduledSequence(seq, 1))
    return Sampler(eos_token_ids=(0,)).sample(logits, ScheduledBatch(items))


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_the_uniform_number_depends_on_seed_choice_and_position_only() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    numbers = {uniform(s, c, p) for s in range(5) for c in range(5) for p in range(40)}
    assert len(numbers) == 1000 and all(0 <= x < 1 for x in numbers)
    assert abs(sum(numbers) / 1000 - 0.5) < 0.03


@pytest.mark.parametrize("temperature", [0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_greedy_and_finite(temperature: float) -> None:
    """Scaled logits once overflowed between 1e-5 and 1e-4 and gave blank text."""
    logits = rows(8) * 10
    params = SamplingParams(temperature=temperature, seed=1, logprobs=3)
    for row, (token,) in zip(logits, draw(logits, *[params] * 8), strict=True):
        assert token.token_id == int(row.argmax())
        assert token.logprob is not None and math.isfinite(token.logprob) and token.logprob <= 0


def test_a_draw_does_not_depend_on_batch_mates() -> None:
    logits = rows(6)
    params = [
        SamplingParams(temperature=0.9, seed=s, top_p=0.8 if s % 2 else 1.0) for s in range(6)
    ]
    together = [t.token_id for (t,) in draw(logits, *params)]
    alone = [draw(logits[i : i + 1], params[i])[0][0].token_id for i in range(6)]
    assert together == alone


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]])
    counts = [0] * 4
    for seed in range(4000):
        counts[draw(logits, SamplingParams(seed=seed))[0][0].token_id] += 1
    expected = [2000, 1000, 500, 500]
    chi2 = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert chi2 < 16.3, counts  # 3 degrees of freedom: passed by chance 1 time in 1000


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"min_p": 0.4}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
    ],
)
def test_truncation_keeps_exactly_the_tokens_it_should(
    values: dict[str, float], allowed: set[int]
) -> None:
    logits = torch.tensor([[math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]])
    seen = {
        draw(logits, SamplingParams(seed=s, temperature=1.0, **values))[0][0].token_id  # type: ignore[arg-type]
        for s in range(300)
    }
    assert seen == allowed


def test_choices_of_one_prompt_draw_differently_from_the_same_logits() -> None:
    (tokens,) = draw(rows(1) / 3, SamplingParams(n=8, seed=3))
    assert len(tokens) == 8 and len({t.token_id for t in tokens}) > 3


def test_logit_bias_forces_and_bans_tokens() -> None:
    logits = rows(1)
    best = int(logits.argmax())
    banned = draw(logits, SamplingParams(temperature=0, logit_bias={best: -100.0}))[0][0]
    assert banned.token_id != best
    assert draw(logits, SamplingParams(temperature=0, logit_bias={7: 100.0}))[0][0].token_id == 7


def test_penalties_apply_to_the_tokens_they_name() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 1], logits[0, 9] = 2.0, 1.9, 1.5
    greedy = {"temperature": 0.0}
    assert draw(logits, SamplingParams(**greedy), output=(4,))[0][0].token_id == 4
    repetition = SamplingParams(**greedy, repetition_penalty=1.5)
    assert draw(logits, repetition, output=(4,))[0][0].token_id == 9, "prompt and output count"
    presence = SamplingParams(**greedy, presence_penalty=0.2)
    assert draw(logits, presence, output=(4,))[0][0].token_id == 1, "only the output counts"
    frequency = SamplingParams(**greedy, frequency_penalty=0.04)
    assert draw(logits, frequency, output=(4, 4))[0][0].token_id == 4
    assert draw(logits, frequency, output=(4, 4, 4))[0][0].token_id == 1


def test_end_tokens_are_masked_until_min_tokens_and_stay_masked_for_seeded_draws() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 0], logits[0, 5] = 20.0, 10.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(5,))
    assert draw(logits, params, output=(8,))[0][0].token_id not in (0, 5)
    assert draw(logits, params, output=(8, 8))[0][0].token_id == 0


def test_logprobs_are_the_raw_distribution_whatever_the_temperature_and_bias() -> None:
    logits = rows(1)
    truth = logits[0].log_softmax(-1)
    params = SamplingParams(
        temperature=0.3, seed=2, logprobs=5, logit_bias={7: 100.0}, repetition_penalty=1.3
    )
    token = draw(logits, params)[0][0]
    assert token.token_id == 7
    assert token.logprob == pytest.approx(float(truth[7]), abs=1e-6)
    ids, values = zip(*token.top, strict=True)
    assert list(ids) == truth.topk(5).indices.tolist() and list(values) == sorted(values)[::-1]
    assert sum(map(math.exp, values)) <= 1


def test_no_logprobs_are_computed_unless_asked_for() -> None:
    token = draw(rows(1), SamplingParams(temperature=0))[0][0]
    assert token.logprob is None and token.top == ()
    zero = draw(rows(1), SamplingParams(temperature=0, logprobs=0))[0][0]
    assert zero.logprob is not None and zero.top == ()
