"""A sequence knows the steps that it took part in, with everything that was computed in them."""

from baton.engine.accounting import book_step
from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import ScheduledBatch, ScheduledSequence, Sequence
from baton.step_totals import StepTotals, chunk_attention


def sequence(prompt: int, computed: int, output: int = 0) -> Sequence:
    seq = Sequence([1] * prompt, SamplingParams())
    seq.token_ids += [1] * output
    seq.num_computed_tokens = computed
    return seq


def test_attention_is_the_sum_of_what_each_token_sees() -> None:
    assert chunk_attention(0, 4) == 1 + 2 + 3 + 4
    assert chunk_attention(10, 3) == 11 + 12 + 13


def test_a_mixed_step_is_booked_on_all_as_one_that_computed_prompts() -> None:
    prompt, decoding = sequence(100, computed=20), sequence(10, computed=12, output=3)
    batch = ScheduledBatch(items=[ScheduledSequence(decoding, 1), ScheduledSequence(prompt, 30)])
    book_step(batch, 0.5)
    expected = StepTotals(1, 30, chunk_attention(20, 30), 1, 13, 0.5)
    assert prompt.prefill_steps == decoding.prefill_steps == expected
    assert prompt.decode_steps == decoding.decode_steps == StepTotals()


def test_steps_add_up_and_choices_start_their_own_account() -> None:
    seq = sequence(10, computed=11, output=2)
    for _ in range(2):
        book_step(ScheduledBatch(items=[ScheduledSequence(seq, 1)]), 0.25)
    assert seq.decode_steps == StepTotals(2, 0, 0, 2, 24, 0.5)
    assert seq.fork(1).decode_steps == StepTotals()
