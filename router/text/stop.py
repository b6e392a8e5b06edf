"""Stop strings over a growing text, none of which may leak.

Characters are fed one by one through a Knuth-Morris-Pratt automaton per stop string, so the
result does not depend on where token borders lie. The match that completes first wins; of
those that complete on the same character the longest does. Text that could still turn into
a stop is held back: exactly the longest suffix that begins one.
"""

from collections.abc import Sequence


def _failure(pattern: str) -> list[int]:
    """`failure[k]`: length of the longest proper border of `pattern[:k]`."""
    failure = [0] * (len(pattern) + 1)
    k = 0
    for i in range(1, len(pattern)):
        while k and pattern[i] != pattern[k]:
            k = failure[k]
        if pattern[i] == pattern[k]:
            k += 1
        failure[i + 1] = k
    return failure


class StopPatterns:
    """The compiled stop strings of a request, shared by its choices."""

    __slots__ = ("patterns",)

    def __init__(self, stops: Sequence[str]) -> None:
        self.patterns = [(stop, _failure(stop)) for stop in stops]


class StopMatcher:
    """The automaton state of one choice."""

    __slots__ = ("_held", "_patterns", "_states")

    def __init__(self, stops: StopPatterns) -> None:
        self._patterns = stops.patterns
        self._states = [0] * len(self._patterns)
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, bool]:
        """The text now safe to show, and whether a stop ended the choice.

        While not `armed`, completed stops are let through as ordinary text.
        """
        if not self._patterns:
            return text, False
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            matched = self._advance(buffer[position])
            if matched and armed:
                self._held = ""
                return buffer[: position + 1 - matched], True
        keep = max(self._states)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """The held text, when the choice ended without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Feeds one character; the length of the longest stop completed by it, or 0."""
        longest = 0
        for i, (pattern, failure) in enumerate(self._patterns):
            k = self._states[i]
            while k and pattern[k] != char:
                k = failure[k]
            if pattern[k] == char:
                k += 1
            if k == len(pattern):
                longest = max(longest, k)
                k = failure[k]
            self._states[i] = k
        return longest
