"""When a choice ends, by its tokens alone. Stop strings are the gateway's business."""

from baton.engine.sampling_params import SamplingParams
from baton.engine.sequence import FinishReason


def stop_ids(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> set[int]:
    """Token ids that end a choice."""
    eos = () if sampling.ignore_eos else eos_token_ids
    return {*eos, *sampling.stop_token_ids}


def finish_reason(
    token_id: int,
    num_output_tokens: int,
    sampling: SamplingParams,
    eos_token_ids: tuple[int, ...],
) -> FinishReason | None:
    """Reason after `token_id` became output token number `num_output_tokens` (from 1)."""
    stops = token_id in stop_ids(sampling, eos_token_ids)
    if stops and num_output_tokens > sampling.min_tokens:
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None
