"""Ends a run whose first calls of a user's function all fail: graders, generate functions, filters."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from runtime.bus.bus import Bus

FIRST_CALLS: Final = 8  # the run ends when at least this many first calls all fail
FIRST_GROUPS: Final = 4  # and they are for at least this many prompt groups: one bad prompt ends no run


def never_worked(failed_calls: Mapping[int, int]) -> bool:
    """Whether the failed calls before the first good one are enough to end the run.

    Args:
        failed_calls: number of failed calls by group.
    """
    return sum(failed_calls.values()) >= FIRST_CALLS and len(failed_calls) >= FIRST_GROUPS


class FirstCalls:
    """Counts failed calls until the run's first good one.

    A key on the bus records that call, so a restarted actor does not count again.
    """

    def __init__(self, bus: Bus, key: str, what: str) -> None:
        """Start without calls.

        Args:
            bus: the bus.
            key: exists in its key-value store once a call of this run succeeded.
            what: the calls, for people: "calls of graders".
        """
        self._bus, self._key, self._what = bus, key, what
        self._failed_calls: Counter[int] = Counter()  # by group
        self.is_over = False

    async def begin(self) -> None:
        """Read whether an earlier process of this run had a good call."""
        self.is_over = await self._bus.kv.get(self._key, bool) is not None

    async def succeeded(self) -> None:
        """Note a good call: nothing is counted any more."""
        if not self.is_over:
            self.is_over = True
            await self._bus.kv.put(self._key, True)

    async def failed(self, group_id: int, number: int = 1) -> str:
        """Count failed calls for a prompt group. Return why the run ends; empty: it does not."""
        if self.is_over:
            return ""
        self._failed_calls[group_id] += number
        if not never_worked(self._failed_calls):
            return ""
        self.is_over = True  # said once, though other calls fail before this process ends
        if await self._bus.kv.get(self._key, bool) is not None:
            return ""
        num_calls, num_groups = self._failed_calls.total(), len(self._failed_calls)
        return f"the first {num_calls} {self._what} in this run, for {num_groups} prompt groups, all failed"
