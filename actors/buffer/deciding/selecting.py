"""Calls a user's selection function. A failure falls back to first come, first served; no group is lost or doubled."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, get_args

import anyio
import msgspec
import structlog

from actors.buffer.deciding.selection import Chosen, Kind, Selection, chosen_of, find_selection, first_come
from messages import SelectionFailed
from messages.plain import clipped
from runtime.process.user_process import UserFunctionError, UserLimits, UserProcess
from runtime.settings.plugins import is_plugin
from runtime.settings.topology import Topology

log = structlog.get_logger()

SELECTION_TIMEOUT_S: Final = 10.0
MAX_REASON_CHARS: Final = 500
SEPARATOR: Final = "="  # between kind and name, for the process


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
        timeout_s: float = SELECTION_TIMEOUT_S,
    ) -> None:
        names = {"over_sampling_filter": topology.rollout.over_sampling_filter}
        names["buffer_filter"] = topology.rollout.buffer_filter
        self._processes: dict[Kind, UserProcess] = {}
        for kind in get_args(Kind):
            name = names[kind]
            if name is not None and is_plugin(name):
                self._processes[kind] = selection_process(topology, kind, name)
            elif name is not None:
                find_selection(kind, name)
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
                    await self._show(f"rollout.{selection.kind}", error.traceback)
            log.warning("selection_failed", kind=selection.kind, reason=reason, instead="first come first")
            if self._report is not None:
                failed = SelectionFailed(
                    kind=selection.kind, reason=clipped(reason, MAX_REASON_CHARS), num_groups=len(selection.groups)
                )
                await self._report(failed)
            return first_come(selection)

    async def _call(self, selection: Selection) -> Chosen:
        process = self._processes[selection.kind]
        await process.start()  # again, if an earlier call has cost it
        with anyio.fail_after(self._timeout_s):
            return msgspec.msgpack.decode(await process.call(msgspec.msgpack.encode(selection)), type=Chosen)


def selection_process(topology: Topology, kind: Kind, name: str) -> UserProcess:
    """The process of a user's selection."""
    limits = UserLimits(memory_bytes=topology.reward.memory_bytes, env=topology.reward.env)
    return UserProcess(f"{answering.__module__}:{answering.__name__}", f"{kind}{SEPARATOR}{name}", limits)


def answering(named: str) -> Callable[[bytes], bytes]:
    """Return a user's selection as its process calls it: from a packed Selection to a packed Chosen.

    Raises:
        ValueError: the function cannot be used.
    """
    kinds: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
    kind, _, name = named.partition(SEPARATOR)
    function, decoder = find_selection(kinds[kind], name, (Path.cwd(),)), msgspec.msgpack.Decoder(Selection)
    assert function is not None

    def answer(payload: bytes) -> bytes:
        return msgspec.msgpack.encode(called(function, decoder.decode(payload)))

    return answer


def called(function: Callable[..., Any], selection: Selection) -> Chosen:
    """Call a user's function.

    Raises:
        SelectionError: its answer is invalid. The function may raise anything.
    """
    arguments: list[Any] = [list(selection.groups)]
    if selection.kind == "buffer_filter":
        arguments.append(selection.count)
    return chosen_of(selection, function(*arguments))
