"""A filter asked again about groups that were completed long ago."""

import inspect

import anyio

from actors.filter.filters import Filter, Verdict, find_filter, summary_of, verdict_of
from messages import GroupCompleted, Outcome


class ReplayedFilter:
    """The filter of a name, one group after another and without a time limit."""

    def __init__(self, name: str | None) -> None:
        """Raises ValueError when there is no such filter, PluginError when a user's cannot be used."""
        self.name = name or "none"
        self._filter: Filter = find_filter(name)

    def judge(self, group: GroupCompleted) -> Verdict:
        """What it says now; a filter that raises gives a failed verdict."""
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
