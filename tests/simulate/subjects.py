"""Subject filters of a simulated server."""

from collections.abc import Sequence


class Filter:
    """A subject filter with the wildcards `*` and `>`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._tokens = pattern.split(".")
        self._is_open = self._tokens[-1] == ">"
        self._num_dots = len(self._tokens) - 1
        star = pattern.find("*")
        self._has_star = star >= 0
        self._prefix = pattern[:star] if self._has_star else pattern[:-1] if self._is_open else pattern

    def matches(self, subject: str) -> bool:
        """Whether a subject passes."""
        if not subject.startswith(self._prefix):
            return False
        if not self._has_star:
            return len(subject) > len(self._prefix) if self._is_open else len(subject) == len(self._prefix)
        num_dots = subject.count(".")
        if num_dots < self._num_dots or (num_dots > self._num_dots and not self._is_open):
            return False
        tokens = subject.split(".")
        return all(mine in ("*", ">", theirs) for mine, theirs in zip(self._tokens, tokens, strict=False))


class Filters:
    """Several filters, of which one has to match; none: every subject passes."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._exact = frozenset(pattern for pattern in patterns if "*" not in pattern and not pattern.endswith(">"))
        self._wild = [Filter(pattern) for pattern in patterns if pattern not in self._exact]

    def matches(self, subject: str) -> bool:
        """Whether a subject passes."""
        if subject in self._exact:
            return True
        if not self._wild:
            return not self._exact
        return any(each.matches(subject) for each in self._wild)
