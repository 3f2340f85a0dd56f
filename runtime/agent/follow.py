"""Follows the run's history: shows it, keeps its metrics, and sees its end."""

from collections.abc import Callable
from typing import Any

import anyio
import anyio.abc

from messages import GroupCompleted, RunFailed, RunFinished, SegmentsPublished
from runtime.agent.claims.rundir import METRICS_FILE
from runtime.agent.node_plan import NodePlan, Outcome
from runtime.agent.stalls import StallWatch
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.ledger.archive import history, start_state
from runtime.report.metrics_file import MetricsFile
from runtime.report.report import Line, Report, RowDone, SampleShown

SAMPLE_TIMEOUT_S = 10.0

Show = Callable[[str], None]


class Follower:
    """Folds the history of a run into what is shown of it.

    Args:
        show: prints a line for people.
        progress: told of each trained step.
        end: told when the log says that the run has ended.
    """

    def __init__(
        self, plan: NodePlan, *, show: Show, progress: Callable[[], None], end: Callable[[Outcome], None]
    ) -> None:
        self.report = Report(plan.run, plan.num_steps, plan.started)
        self._plan = plan
        self._show = show
        self._progress = progress
        self._end = end
        self._metrics = MetricsFile(plan.run_dir / METRICS_FILE) if plan.keeps_metrics else None

    def close(self) -> None:
        """No more events will come."""
        for notice in self.report.close():
            self._take(notice)

    async def follow(self, bus: Bus, watch: StallWatch | None, tasks: anyio.abc.TaskGroup) -> None:
        """Fold the run's history; show what happened since the start."""
        begins = await start_state(bus, self._plan.run_dir)
        if begins is not None:
            self.report.begin(begins)
        async with history(bus, self._plan.run_dir, buries=True) as events:
            async for received in events.follow():
                if watch is not None:
                    watch.happened(received.message)
                message, moment, steps = received.message, received.time.timestamp(), self.report.steps
                live = moment >= self._plan.started
                for notice in self.report.apply(message, received.seq, moment):
                    if isinstance(notice, SampleShown):
                        tasks.start_soon(self._show_sample, bus, notice)
                    elif live or isinstance(notice, RowDone):
                        self._take(notice)
                if self.report.steps > steps:
                    self._progress()
                if isinstance(message, RunFinished) and (live or message.steps >= self._plan.num_steps):
                    self._end(Outcome(finished=True))  # an earlier start may have finished with fewer steps to do
                elif isinstance(message, RunFailed) and live:
                    self._end(Outcome(finished=False, error=message.reason))

    def _take(self, notice: Any) -> None:
        match notice:
            case Line(text):
                self._show(text)
            case RowDone(row) if self._metrics is not None:
                self._metrics.put(row)
            case _:
                pass

    async def _show_sample(self, bus: Bus, shown: SampleShown) -> None:
        with anyio.move_on_after(SAMPLE_TIMEOUT_S):
            async with bus.read(GroupCompleted, from_seq=shown.seq) as events:
                received = await events.next()
            if received is None or received.seq != shown.seq:
                return  # trimmed meanwhile
            group, sample = received.message, received.message.samples[0]
            try:
                published = [await bus.fetch(SegmentsPublished, ref.seq) for ref in sample.segments]
                first = published[0]
                cited = zip(published, sample.segments, strict=True)
                response = "".join(message.segments[ref.position].text for message, ref in cited)
            except (BusError, IndexError) as error:
                self._show(f"the {shown.which} sample cannot be shown: {error}")
                return
            reward = "none" if sample.reward is None else f"{sample.reward:g}"
            tokens = f"{sample.prompt_len} + {sample.response_len} tokens"
            told = f"group {group.group_id}, {sample.status}, reward {reward}, weights v{sample.last_version}, {tokens}"
            self._show(f"{shown.which} sample: {told}")
            self._show(f"  prompt    {first.prompt!r}")
            self._show(f"  response  {response!r}")
            self._show(f"  label     {first.label!r}")
