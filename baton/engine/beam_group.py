"""The sequences of one beam search: they take a step together, whenever each was computed."""

from collections.abc import Sequence as ListOf

from baton.engine.beam_search import Beam, BeamSearch
from baton.engine.sequence import SampledToken, Sequence, StepOutput


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
