"""Calls a user's selection function. A failure falls back to first come, first served; no group is lost or doubled."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import structlog

from actors.buffer.deciding.selection import FUNCTIONS, Chosen, Kind, Selection, chosen_of, first_come, key_of
from messages import SelectionFailed
from messages.plain import clipped
from runtime.functions.child import UserFunctionError, UserProcess
from runtime.functions.load import find, is_plugin, load
from runtime.functions.table import OVER_SAMPLING_FILTER
from runtime.settings.derived import limits_of
from runtime.settings.topology import Topology

log = structlog.get_logger()

MAX_REASON_CHARS: Final = 500


class Selector:
    """Calls the selection functions of a recipe, each in a process of its own that a call without an end costs.

    Args:
        topology: the topology, with its recipe.
        report: called with each failure.
        show: called with the setting and the traceback when a user's function raises.
        timeout_s: maximum seconds for one call of a user's function.

    Raises:
        ValueError: no built-in selection has the given name.
    """

    def __init__(
        self,
        topology: Topology,
        report: Callable[[SelectionFailed], Awaitable[object]] | None = None,
        show: Callable[[str, str], Awaitable[object]] | None = None,
        *,
        timeout_s: float = OVER_SAMPLING_FILTER.timeout_s,
    ) -> None:
        names = {"over_sampling_filter": topology.rollout.over_sampling_filter}
        names["buffer_filter"] = topology.rollout.buffer_filter
        self._processes: dict[Kind, UserProcess] = {}
        for kind, function in FUNCTIONS.items():
            name = names[kind]
            if name is not None and is_plugin(name):
                self._processes[kind] = UserProcess(function, key_of(kind), name, limits_of(topology.reward))
            elif name is not None:
                find(function, key_of(kind), name)
        self._report, self._show = report, show
        self._timeout_s = timeout_s

    async def start(self) -> None:
        """Start the processes.

        Raises:
            ValueError: a user's function cannot be used.
        """
        for process in self._processes.values():
            await process.start()

    async def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            await process.kill()

    async def choose(self, selection: Selection) -> Chosen:
        """The function's choice, or the first groups if it raises, hangs or gives an invalid answer."""
        try:
            return await self._call(selection)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the run continues without it
            reason = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else repr(error)
            if isinstance(error, UserFunctionError):
                reason = str(error)
                if self._show is not None:
                    await self._show(key_of(selection.kind), error.traceback)
            log.warning("selection_failed", kind=selection.kind, reason=reason, instead="first come first")
            if self._report is not None:
                failed = SelectionFailed(
                    kind=selection.kind, reason=clipped(reason, MAX_REASON_CHARS), num_groups=len(selection.groups)
                )
                await self._report(failed)
            return first_come(selection)

    async def _call(self, selection: Selection) -> Chosen:
        process, payload = self._processes[selection.kind], msgspec.msgpack.encode(selection)
        return msgspec.msgpack.decode(await process.call(payload, timeout_s=self._timeout_s), type=Chosen)


def answering(key: str, name: str) -> Callable[[bytes], bytes]:
    """Return a user's selection as its process calls it: from a packed Selection to a packed Chosen.

    Raises:
        ValueError: the function cannot be used.
    """
    (kind,) = (function for kind, function in FUNCTIONS.items() if key_of(kind) == key)
    function, decoder = load(kind, key, name).function, msgspec.msgpack.Decoder(Selection)
    return lambda payload: msgspec.msgpack.encode(called(function, decoder.decode(payload)))


def called(function: Callable[..., Any], selection: Selection) -> Chosen:
    """Call a user's function.

    Raises:
        SelectionError: its answer is invalid. The function may raise anything.
    """
    arguments: list[Any] = [list(selection.groups)]
    if selection.kind == "buffer_filter":
        arguments.append(selection.count)
    return chosen_of(selection, function(*arguments))
