"""Which KV policy a request gets: its own wish where that harms nobody, else the workers'.

A request may choose freely only where the operator has chosen nothing: under any other policy
of the workers, a request that keeps more would take the room of others.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster.workers import Role, WorkerRecord
from baton.kv_policy import FULL, KVPolicy, parse_policy
from router.openai.errors import invalid
from router.openai.schema import GenerationBody


@dataclass(frozen=True)
class PolicyOptions:
    """`usual` is that of most decode workers; `possible` names what all workers can do."""

    usual: KVPolicy = FULL
    possible: frozenset[str] = frozenset({"full"})

    @staticmethod
    def of(workers: Sequence[WorkerRecord]) -> "PolicyOptions":
        decode = sorted(w.kv_policy for w in workers if w.role is Role.DECODE)
        if not decode:
            return PolicyOptions()
        (usual, _), *_ = Counter(decode).most_common(1)
        return PolicyOptions(
            parse_policy(usual),
            frozenset.intersection(*(frozenset(w.kv_policies) for w in workers)),
        )

    def choose(self, body: GenerationBody, context: int) -> KVPolicy:
        """Raises ApiError that names the field. `context`: the model's, in tokens."""
        policy = self.usual if body.kv_policy is None else self._asked(body.kv_policy, context)
        if body.use_beam_search and (policy.is_endless or policy.keeps_state):
            message = f"use_beam_search cannot be had with kv_policy {policy.name}."
            raise invalid(_blamed(body), message, "invalid_value")
        return policy

    def _asked(self, text: str, context: int) -> KVPolicy:
        try:
            policy = parse_policy(text)
        except ValueError as error:
            raise invalid("kv_policy", f"kv_policy: {error}.", "invalid_value") from error
        if policy != self.usual and not self.usual.is_full:
            message = f"kv_policy: these workers keep {self.usual}, a request cannot change that."
            raise invalid("kv_policy", message, "invalid_value")
        if policy.name not in self.possible:
            message = f"kv_policy: {policy.name} cannot be had with this model and its cache."
            raise invalid("kv_policy", message, "invalid_value")
        if policy.span > context:
            message = f"kv_policy: sinks and window are more than the context of {context} tokens."
            raise invalid("kv_policy", message, "invalid_value")
        return policy


def _blamed(body: GenerationBody) -> str:
    return "use_beam_search" if body.kv_policy is None else "kv_policy"
