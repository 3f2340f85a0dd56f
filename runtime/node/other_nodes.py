"""The other nodes of a run: which ones take part, which ones are away, and what the run does without them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import anyio
import structlog

from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.node.acceptance import Acceptance, NodeStatement, Statement
from runtime.node.checks.comparison import Refusal
from runtime.node.claims.node_claim import NodeHolder, claims, place_of
from runtime.node.display import Show
from runtime.node.missing import Missing
from runtime.node.node_plan import NodePlan, RunEnd
from runtime.node.supervisor.state_changes import GivenUp

log = structlog.get_logger()

LOOK_EVERY_S: Final = 1.0
SILENT_AFTER_S: Final = 8.0  # without a renewal of a claim, which comes every 5 s
LEAVE_WITHIN_S: Final = 5.0  # at the end of the run


class _Seen:
    """A node whose claim was seen."""

    def __init__(self, holder: NodeHolder, revision: int, now: float) -> None:
        self.holder = holder
        self.revision = revision
        self.renewed_at = now  # on this machine's clock
        self.silent = False
        self.away = False  # its claim expired


class NodesSeen:
    """Tracks which nodes joined, left, are silent or came back. Pure."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._nodes: dict[str, _Seen] = {}

    def look(self, now: float, found: Mapping[str, tuple[NodeHolder, int]]) -> list[str]:
        """Compare the claims with those seen before, and return the lines to show.

        Args:
            now: on this machine's monotonic clock, in seconds.
            found: claims by node, with their revisions.
        """
        lines: list[str] = []
        for node, (holder, revision) in found.items():
            seen = self._nodes.get(node)
            if node == self._own:
                continue
            if seen is None or seen.holder != holder:
                lines.append(f"node {node} joined: {place_of(holder)}")
                self._nodes[node] = _Seen(holder, revision, now)
            elif seen.revision != revision:
                if seen.silent:
                    lines.append(f"node {node} is back")
                seen.revision, seen.renewed_at, seen.silent, seen.away = revision, now, False, False
            elif now - seen.renewed_at > SILENT_AFTER_S and not seen.silent:
                seen.silent = True
                lines.append(f"node {node} has been silent for {now - seen.renewed_at:.0f} s")
        for node, seen in [each for each in self._nodes.items() if each[0] not in found]:
            if not seen.silent:
                del self._nodes[node]
                lines.append(f"node {node} left")
            elif not seen.away:
                seen.away = True  # the same daemon may come back
                lines.append(f"node {node} is away")
        return lines


class OtherNodes:
    """Decides which nodes take part, which ones the run waits for, and whether it goes on without a process.

    Home decides for the run. Another node reports to home what it gave up, and ends if home refuses it.

    Args:
        plan: of this node.
        comparison: at home, accepts and refuses nodes; elsewhere, states this node's facts.
        show: prints a line for the user.
        end: ends this daemon.
        has_trained: returns whether the run has trained a step.
    """

    def __init__(
        self,
        plan: NodePlan,
        comparison: Acceptance | NodeStatement | None,
        *,
        show: Show,
        end: Callable[[RunEnd], None],
        has_trained: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._comparison = comparison
        self._show = show
        self._end = end
        self._has_trained = has_trained
        self._missing = Missing(plan.needs, plan.waits)
        self._waits = plan.owns_streams and len(plan.nodes) > 1

    async def open(self, bus: Bus) -> None:
        """At home, announce this start, to which other nodes state their facts.

        Raises:
            BusError: the bucket cannot be written.
            OSError: the run directory cannot be written.
        """
        if isinstance(self._comparison, Acceptance):
            await self._comparison.open(bus)

    @property
    def are_refused(self) -> bool:
        """Whether home cannot start, and refuses every other node."""
        return isinstance(self._comparison, Acceptance) and bool(self._comparison.problems)

    async def refuse_all(self, bus: Bus) -> None:
        """Report the problems of home to the other nodes, those that wait and those that run, and end this daemon."""
        assert isinstance(self._comparison, Acceptance)
        await self._comparison.refuse_all(bus)
        await self.wait_until_left(bus)
        refused = "\n".join(map(str, self._comparison.problems))
        self._end(RunEnd(finished=False, refused=refused, is_announced=True))

    async def run(self, bus: Bus) -> None:
        """Accept, refuse and watch the other nodes, or state this node's facts to home, until cancelled."""
        async with anyio.create_task_group() as tasks:
            match self._comparison:
                case Acceptance() as acceptance:
                    tasks.start_soon(acceptance.run, bus, self._ends_run, self._report_refusals, self.lost)
                case NodeStatement() as statement:
                    tasks.start_soon(statement.run, bus, self._end_refused)
                case None:
                    pass
            if self._waits:
                tasks.start_soon(self._watch, bus)

    async def wait_until_left(self, bus: Bus) -> None:
        """At home, wait until the other nodes released their claims: they need the bus to see the end of the run."""
        if not self._waits:
            return
        with anyio.move_on_after(LEAVE_WITHIN_S):
            try:
                while set(await claims(bus)) - {self._plan.node}:  # noqa: ASYNC110 - other machines release them
                    await anyio.sleep(0.1)
            except BusError as error:
                log.warning("nodes_not_seen", error=str(error))

    def started(self, process: str) -> None:
        """Note that a process was started, perhaps by a new daemon of its node."""
        self._missing.started(process)

    def goes_on_without(self, given_up: GivenUp) -> bool:
        """Return whether the run goes on without a process of this node."""
        name = given_up.spec.name
        if not self._missing.may_lose(given_up.spec, given_up.exit_code):
            return False
        if self._plan.owns_streams and self._missing.give_up(name, given_up.reason) is not None:
            return False
        if isinstance(self._comparison, NodeStatement):
            self._comparison.give_up(name, given_up.reason)
        self._show_given_up(name, given_up.reason)
        return True

    def lost(self, process: str, reason: str) -> None:
        """Note at home that a process of any node is not restarted, by the log or by the node's statement."""
        if not self._plan.owns_streams or self._missing.is_given_up(process):
            return
        failure = self._missing.give_up(process, reason)
        if failure is not None:
            self._end(RunEnd(finished=False, error=failure))
        elif self._missing.is_given_up(process):
            self._show_given_up(process, reason)

    async def _watch(self, bus: Bus) -> None:
        """Show when other nodes join, leave, fall silent and come back. End a run that lacks one for too long."""
        own, seen = self._plan.node, NodesSeen(self._plan.node)
        while True:
            try:
                found = await claims(bus)
            except BusError as error:
                log.warning("nodes_not_seen", error=str(error))
            else:
                looked = self._missing.look(anyio.current_time(), {*found, own})
                for line in (*seen.look(anyio.current_time(), found), *looked.lines):
                    self._show(line)
                if looked.failure is not None:
                    self._end(RunEnd(finished=False, error=looked.failure))
                    return
            await anyio.sleep(LOOK_EVERY_S)

    def _ends_run(self, statement: Statement) -> bool:
        """Whether the refusal of a node ends the run: before the first train step, when nothing is lost."""
        return not statement.only_checks and not self._has_trained()

    def _report_refusals(self, refusals: Sequence[Refusal], ends: bool) -> None:
        """Show why a node cannot take part, and end the run if the refusal ends it."""
        for refusal in refusals:
            self._show(f"refused {refusal}")
        if ends:
            self._end(RunEnd(finished=False, refused="\n".join(map(str, refusals))))

    def _end_refused(self, reasons: Sequence[str]) -> None:
        """End this node: home has started again, and refuses it now."""
        self._end(RunEnd(finished=False, refused="\n".join(reasons)))

    def _show_given_up(self, process: str, reason: str) -> None:
        self._show(f"{process} is given up, the run goes on without it: {reason}")
