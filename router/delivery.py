"""Tokens from a worker to the client: taken in, made into text, sent, noted in the ledger."""

import time
from collections.abc import Sequence

from baton.v1 import common_pb2
from router.calls import WorkerCall
from router.generation import BrokenSequence
from router.job import Leg, Output, Served


async def deliver(
    leg: Leg,
    tokens: Sequence[common_pb2.Token],
    call: WorkerCall,
    output: Output,
    served: Served,
    again: bool = False,
) -> None:
    """Raises WorkerContradiction. `again`: an earlier attempt may have given some of the tokens."""
    if not tokens:
        return  # a chunk of a prompt: nothing was drawn
    served.last_token_at = time.monotonic()
    served.first_token_at = served.first_token_at or served.last_token_at
    try:
        fresh = output.generation.unknown(tokens) if again else tokens
        deltas = output.generation.push(fresh)
    except BrokenSequence as error:
        raise call.contradiction(str(error)) from error
    decoded = time.monotonic()
    rendered = output.render(deltas)
    rendered_at = sent_at = time.monotonic()
    if rendered:
        await output.send(rendered)
        sent_at = time.monotonic()
    longest = output.generation.longest
    leg.job.trail.delivered(
        len(deltas), served.last_token_at, decoded, rendered_at, sent_at, longest
    )
