"""Calls a user's selection function. A failure falls back to first come, first served; no group is lost or doubled."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, get_args

import anyio
import structlog

from actors.buffer.deciding.selection import Chosen, Kind, Selection, chosen_of, find_selection, first_come
from messages import SelectionFailed
from messages.plain import clipped
from runtime.settings.topology import Topology
from runtime.util.threads import BoundedThreads

log = structlog.get_logger()

SELECTION_TIMEOUT_S: Final = 10.0
MAX_REASON_CHARS: Final = 500
THREADS: Final = 2  # a function that hangs occupies a thread


class Selector:
    """Runs the selection functions of a recipe in threads, with a timeout.

    Args:
        topology: the topology, with its recipe.
        report: called with each failure.
        timeout_s: maximum seconds for one call of a user's function.

    Raises:
        ValueError: no function has the given name; PluginError if a user's function cannot be used.
    """

    def __init__(
        self,
        topology: Topology,
        report: Callable[[SelectionFailed], Awaitable[object]] | None = None,
        *,
        timeout_s: float = SELECTION_TIMEOUT_S,
    ) -> None:
        names = {"over_sampling_filter": topology.rollout.over_sampling_filter}
        names["buffer_filter"] = topology.rollout.buffer_filter
        self._functions: dict[Kind, Callable[..., Any]] = {}
        for kind in get_args(Kind):
            name = names[kind]
            function = None if name is None else find_selection(kind, name)
            if function is not None:
                self._functions[kind] = function
        self._threads = BoundedThreads(THREADS)
        self._report = report
        self._timeout_s = timeout_s

    async def choose(self, selection: Selection) -> Chosen:
        """The function's choice, or the first groups if it raises, hangs or gives an invalid answer."""
        try:
            return await self._call(selection)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the run continues without it
            reason = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else repr(error)
            log.warning("selection_failed", kind=selection.kind, reason=reason, instead="first come first")
            if self._report is not None:
                failed = SelectionFailed(
                    kind=selection.kind, reason=clipped(reason, MAX_REASON_CHARS), num_groups=len(selection.groups)
                )
                await self._report(failed)
            return first_come(selection)

    async def _call(self, selection: Selection) -> Chosen:
        arguments: list[Any] = [list(selection.groups)]
        if selection.kind == "buffer_filter":
            arguments.append(selection.count)
        function = self._functions[selection.kind]

        def call() -> Chosen:
            return chosen_of(selection, function(*arguments))  # reads a generator here, in the thread

        if self._threads.is_full:
            raise RuntimeError(f"{THREADS} earlier calls of the function have not returned")
        with anyio.fail_after(self._timeout_s):
            return await self._threads.run(call)
