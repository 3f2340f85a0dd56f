"""Applies a filter to dumped groups."""

import inspect

import anyio

from actors.filter.filters import Filter, Verdict, find_filter, summary_of, verdict_of
from messages import GroupCompleted, Outcome


class ReplayedFilter:
    """A filter by name, applied to one group at a time, without a timeout."""

    def __init__(self, name: str | None) -> None:
        """Raises ValueError for an unknown filter, PluginError if a user's filter cannot be used."""
        self.name = name or "none"
        self._filter: Filter = find_filter(name)

    def judge(self, group: GroupCompleted) -> Verdict:
        """Judge a group; a filter that raises gives a failed verdict."""
        try:
            answer = self._filter(summary_of(group))
            if inspect.isawaitable(answer):
                answer = anyio.run(_awaited, answer)
            return verdict_of(answer, self.name)
        except Exception as error:  # noqa: BLE001 - a user's filter may raise anything
            return Verdict(outcome=Outcome.FAILED, reason=repr(error)[:500])


async def _awaited(answer: object) -> object:
    assert inspect.isawaitable(answer)
    return await answer
