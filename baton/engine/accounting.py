"""Books each computed step on the sequences that took part in it.

A sequence so knows what the engine did while it was served, batch-mates included, and not
what it did while the sequence waited.
"""

from baton.engine.sequence import ScheduledBatch
from baton.step_totals import StepTotals, chunk_attention


def book_step(batch: ScheduledBatch, seconds: float) -> None:
    """Before the batch is postprocessed: what was computed is not counted yet."""
    prefill_tokens = attended_tokens = decode_tokens = context_tokens = 0
    for item in batch.items:
        start, count = item.seq.num_computed_tokens, item.num_new_tokens
        kept = item.seq.num_kept_tokens
        if start >= item.seq.num_initial_tokens:
            decode_tokens += count
            context_tokens += chunk_attention(kept, count)
        else:
            prefill_tokens += count
            attended_tokens += chunk_attention(kept, count)
    step = StepTotals(1, prefill_tokens, attended_tokens, decode_tokens, context_tokens, seconds)
    for item in batch.items:
        if prefill_tokens:
            item.seq.prefill_steps += step
        else:
            item.seq.decode_steps += step
