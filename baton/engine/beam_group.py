"""The sequences of one beam search: they take a step together, whenever each was computed.

A part of the decode scheduler's policy in a file of its own; under its caller's lock like it.
"""

from bisect import insort
from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING

from baton.engine.beam_search import Beam, BeamSearch
from baton.engine.finish import stop_ids
from baton.engine.sequence import SampledToken, Sequence, SequenceStatus, StepOutput

if TYPE_CHECKING:
    from baton.engine.decode_scheduler import DecodeScheduler


class BeamGroup:
    """`members[i]` holds running beam i of `search`."""

    def __init__(self, search: BeamSearch, first: Sequence) -> None:
        self.search = search
        self.members = [first]
        self._candidates: dict[int, ListOf[tuple[int, float]]] = {}

    def note(self, seq: Sequence, token: SampledToken) -> bool:
        """Keeps what may follow a member; True when every member has been heard."""
        self._candidates[seq.seq_id] = token.top
        return len(self._candidates) == len(self.members)

    def advance(self) -> list[tuple[Sequence, list[Beam]]]:
        """Members with the beams that live on from each, perhaps none."""
        heard = [self._candidates[seq.seq_id] for seq in self.members]
        self._candidates = {}
        beams = self.search.advance(heard)
        return [
            (seq, [beam for beam in beams if beam.parent == place])
            for place, seq in enumerate(self.members)
        ]

    def results(self, seq: Sequence) -> list[StepOutput]:
        """The best finished beams, token by token, as the choices of the request."""
        outputs = []
        for choice, beam in enumerate(self.search.finished[: seq.sampling.n]):
            last = len(beam.tokens) - 1
            for index, token in enumerate(beam.tokens):
                reason = beam.finish_reason if index == last else None
                outputs.append(StepOutput(seq, token, choice, index, reason))
        return outputs


def accept_beam(
    scheduler: "DecodeScheduler", seq: Sequence, token: SampledToken
) -> list[StepOutput]:
    """Notes what may follow a beam (`token.top`). The last of a group to be heard moves the
    whole group on; the outputs are the search's results once it is over."""
    group = seq.beams
    if group is None:
        assert seq.sampling.beam is not None
        stops = stop_ids(seq.sampling, scheduler.config.eos_token_ids)
        search = BeamSearch(seq.sampling.beam, seq.sampling.max_tokens, stops)
        group = seq.beams = BeamGroup(search, seq)
    if not group.note(seq, token):
        return []
    grown = group.advance()
    if group.search.over:
        results = group.results(seq)
        for member in group.members:
            scheduler.end(member)
        return results
    _grow(scheduler, group, grown)
    return []


def _grow(
    scheduler: "DecodeScheduler",
    group: BeamGroup,
    grown: ListOf[tuple[Sequence, list[Beam]]],
) -> None:
    """Forks members with several beams on their blocks; ends those with none. Members are
    running, or parked without blocks: then what grows from them waits to be computed again."""
    successors: dict[int, Sequence] = {}
    for seq, beams in grown:
        if not beams:
            scheduler.end(seq)
            continue
        if seq.status is SequenceStatus.HELD:
            scheduler.held.remove(seq)
            seq.status = SequenceStatus.WAITING
            insort(scheduler.waiting, seq, key=lambda s: s.arrival)
        waits = seq.status is SequenceStatus.WAITING
        queue = scheduler.waiting if waits else scheduler.running
        forks = [seq, *(seq.fork(0) for _ in beams[1:])]
        for fork, beam in zip(forks, beams, strict=True):
            if fork is not seq:
                scheduler.blocks.acquire(fork.held_blocks)
                insort(queue, fork, key=lambda s: s.arrival)
            fork.token_ids.append(beam.tokens[-1].token_id)
            successors[id(beam)] = fork
    group.members = [successors[id(beam)] for beam in group.search.running]
    for place, member in enumerate(group.members):
        member.choices = (place,)
