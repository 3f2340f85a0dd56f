"""Reports on the run: lines, metrics, samples. An error here affects only the report, never the run."""

import anyio
import anyio.abc
import anyio.to_thread
import structlog

from messages import GroupCompleted, Message, SampleSummary, SegmentsPublished
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.bus.events import Received
from runtime.data.stored_prompts import SHOWN_CHARS, fetch_prompt
from runtime.ledger.archive import ArchiveDamaged, ArchivedBefore, start_state
from runtime.ledger.snapshots import newest_snapshot_seen
from runtime.node.claims.rundir import METRICS_FILE
from runtime.node.display import Display, Show
from runtime.node.node_plan import NodePlan
from runtime.report.report import Line, Notice, Report, RowDone, SampleShown
from runtime.report.rows import MetricsFile
from runtime.util.formatting import shortened

log = structlog.get_logger()

EVENTS_BOUND = 1024  # waiting to be reported; at the bound their reader waits
SAMPLE_TIMEOUT_S = 10.0
FINISH_TIMEOUT_S = 2.0  # for each of the queued events at the end

Event = Received[Message]


async def sample_lines(bus: Bus, shown: SampleShown) -> list[str]:
    """Return the lines of a group's first sample; none if the log was trimmed meanwhile."""
    async with bus.read(GroupCompleted, from_seq=shown.seq) as events:
        received = await events.next()
    if received is None or received.seq != shown.seq:
        return []
    group = received.message
    if not group.samples:
        return [f"{shown.which} sample: group {group.group_id} has none"]
    sample = group.samples[0]
    try:
        published = [await bus.fetch(SegmentsPublished, ref.seq) for ref in sample.segments]
        cited = zip(published, sample.segments, strict=True)
        response = "".join(message.segments[ref.position].text for message, ref in cited)
        first = published[0]
        label = (await fetch_prompt(bus, group.prompt_parts)).label if group.prompt_parts else first.label
    except (BusError, IndexError) as error:
        return [f"the {shown.which} sample cannot be shown: {error}"]
    return [
        *shown.why,
        f"{shown.which} sample: group {group.group_id}, {_headline(sample, graded=shown.graded)}",
        f"  prompt    {first.prompt!r}",
        f"  response  {response!r}",
        f"  label     {shortened(repr(label), SHOWN_CHARS)}",
        *shown.causes,
    ]


def _headline(sample: SampleSummary, *, graded: bool) -> str:
    tokens = f"{sample.prompt_len} + {sample.response_len} tokens"
    if not graded:
        return f"a demonstration, {tokens}"
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    weights = "no weights of the run" if sample.last_version is None else f"weights v{sample.last_version}"
    return f"{sample.status}, reward {reward}, {weights}, {tokens}"


class Reporting:
    """Folds the archived events and those of the log into terminal lines and metrics.

    Args:
        show: prints a line for the user.
        rewrite: replaces the last printed line, on a terminal.
    """

    def __init__(self, plan: NodePlan, *, show: Show, rewrite: Show | None) -> None:
        self.report = self._new_report(plan)
        self.display = Display(show, rewrite, self._progress_line)
        self._plan = plan
        self._metrics = MetricsFile(plan.run_dir / METRICS_FILE) if plan.keeps_metrics else None
        self._failed = False
        self._first_seq = 1
        self._ahead_s = 0.0  # of this machine's clock before the server's, which times events
        send, receive = anyio.create_memory_object_stream[Event](EVENTS_BOUND)
        self._send, self._events = send, receive
        self._ended = anyio.Event()

    def begin_at(self, first_seq: int) -> None:
        """Set the log sequence at which this start begins: lines of earlier events are not shown again."""
        self._first_seq = self.report.first_seq = first_seq

    async def take(self, event: Event) -> None:
        """Queue an event of the log for the report."""
        try:
            await self._send.send(event)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):  # at the very end
            return

    async def run(self, bus: Bus) -> None:
        """Report until finished or cancelled."""
        async with self._events, anyio.create_task_group() as samples:
            try:
                await self._report_all(bus, samples)
            except Exception as error:  # noqa: BLE001 - an error in the report must not end the run
                self._fail("the following events cannot be shown", error)
                async for _ in self._events:
                    continue
            samples.cancel_scope.cancel()
        self._ended.set()

    async def finish(self) -> None:
        """Report the queued events, and accept no more. Ends early if one of them takes too long."""
        self._send.close()
        queued = EVENTS_BOUND + 1
        while not self._ended.is_set() and (left := self._events.statistics().current_buffer_used) < queued:
            queued = left
            with anyio.move_on_after(FINISH_TIMEOUT_S):
                await self._ended.wait()

    def close(self) -> None:
        """Accept no more events, after all tasks ended."""
        self._send.close()
        self._events.close()

    async def _report_all(self, bus: Bus, samples: anyio.abc.TaskGroup) -> None:
        if self._plan.server is None:
            self._ahead_s = await self._clock_ahead_s(bus)
        begins = await start_state(bus, self._plan.run_dir)
        if begins is not None:
            self.report.begin(begins)
        past = ArchivedBefore(self._plan.run_dir)
        async for event in self._events:
            try:
                async for archived in past.events(event.seq):
                    await self._report(bus, archived, samples)
            except ArchiveDamaged as error:
                await self._begin_again(bus, error)
            await self._report(bus, event, samples)

    async def _clock_ahead_s(self, bus: Bus) -> float:
        try:
            return await bus.kv.clock_ahead_s(f"clock.{self._plan.node}")
        except BusError as error:
            log.warning("clock_not_compared", error=str(error))
            return 0.0

    async def _begin_again(self, bus: Bus, error: ArchiveDamaged) -> None:
        log.error("archive_damaged", error=str(error))
        self.display.show(f"{error}: events before the newest snapshot are missing")
        self.report = self._new_report(self._plan)
        self.report.first_seq = self._first_seq
        state = await newest_snapshot_seen(bus)
        if state is not None:
            self.report.begin(state)

    async def _report(self, bus: Bus, event: Event, samples: anyio.abc.TaskGroup) -> None:
        try:
            notices = self.report.apply(event.message, event.seq, event.unix_time + self._ahead_s)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(f"event {event.seq} cannot be shown", error)
            return
        for notice in notices:
            await self._show(bus, notice, samples, live=event.seq >= self._first_seq)

    async def _show(self, bus: Bus, notice: Notice, samples: anyio.abc.TaskGroup, *, live: bool) -> None:
        match notice:
            case SampleShown():
                samples.start_soon(self._show_sample, bus, notice)
            case Line(text) if live:
                self.display.show(text)
            case RowDone(row) if self._metrics is not None:
                try:
                    await anyio.to_thread.run_sync(self._metrics.put, row)
                except OSError as error:
                    self._fail("metrics.jsonl cannot be written; the next start rebuilds it from the log", error)
            case _:
                pass

    async def _show_sample(self, bus: Bus, shown: SampleShown) -> None:
        try:
            with anyio.move_on_after(SAMPLE_TIMEOUT_S):
                for line in await sample_lines(bus, shown):
                    self.display.show(line)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(f"the {shown.which} sample cannot be shown", error)

    def _progress_line(self, now: float) -> str:
        try:
            return self.report.progress_line(now)
        except Exception as error:  # noqa: BLE001 - as above
            return f"the progress line cannot be shown: {error!r}"

    def _fail(self, what: str, error: Exception) -> None:
        """Log every error; show only the first."""
        log.error("reporting_failed", what=what, exc_info=error)
        if not self._failed:
            self._failed = True
            self.display.show(f"{what}: {error!r}; the run goes on (logs/daemon.jsonl has more)")

    @staticmethod
    def _new_report(plan: NodePlan) -> Report:
        return Report(
            plan.run,
            plan.num_steps,
            plan.started,
            step_groups=plan.step_groups,
            graded=plan.graded,
            random_init=plan.random_init,
        )
