"""The timeline of the page: the newest spans of a run as bars, by steps. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from runtime.report.fold.spans import Span, StepTime

KEPT_SPANS: Final = 20_000  # of the timeline; the newest ones
SHOWN_STEPS: Final = 5  # if a page does not say how many
MAX_BARS: Final = 3_000  # of a window
SHOWN: Final = frozenset(  # kinds of spans with a lane of the page
    ("queue", "rollout", "halted", "scores", "filter", "part", "update", "evaluation", "checkpoint", "down")
)


class Bar(msgspec.Struct, frozen=True, array_like=True):
    """A span as the page gets it."""

    kind: str  # a lane of the page has one or several
    row: str
    name: str
    begin: float
    end: float
    group: int  # -1: none
    step: int  # whose batch has the group, or that it is part of; 0: none
    versions: tuple[int, int]  # oldest and newest weights of a group, or the version that was brought to an engine


class Window(msgspec.Struct, frozen=True):
    """The bars of some steps."""

    first: int  # steps, from 1; 0: none was trained yet
    last: int
    oldest: int  # step from which on bars are kept
    newest: int
    begin: float  # Unix times
    end: float
    steps: list[tuple[int, float, float]]  # number, begin and end
    bars: list[Bar]
    left_out: int  # shortest bars of groups, beyond MAX_BARS


class Timeline(msgspec.Struct):
    """Keeps the newest spans of a run, and returns those of some steps."""

    bars: list[Bar] = []
    steps: dict[int, tuple[float, float]] = {}  # begin and end of the kept steps
    groups: dict[int, int] = {}  # kept groups in a batch, with its step from 1

    def take(self, spans: Sequence[Span], step: StepTime | None) -> None:
        """Keep the spans that an event ended, and the step."""
        if step is not None and step.what in ("step", "replay"):
            self.steps[step.step] = step.begin, step.end
        for span in spans:
            if span.kind in SHOWN:
                self.bars.append(
                    Bar(span.kind, span.row, span.name, span.begin, span.end, span.group, span.step, span.versions)
                )
            elif span.kind == "wait for the batch":
                self.groups[span.group] = span.step
        if len(self.bars) >= 2 * KEPT_SPANS:
            self._forget()

    def _forget(self) -> None:
        self.bars = self.bars[-KEPT_SPANS:]
        known = {bar.group for bar in self.bars}
        self.groups = {group: step for group, step in self.groups.items() if group in known}
        oldest = min(bar.end for bar in self.bars)
        self.steps = {step: span for step, span in self.steps.items() if span[1] > oldest}

    def window(self, last: int = 0, num_steps: int = SHOWN_STEPS) -> Window:
        """Return the bars of some steps.

        Args:
            last: step, from 1; 0: the newest one, and what goes on after it.
            num_steps: number of steps up to that one.
        """
        if not self.steps:
            return Window(0, 0, 0, 0, 0.0, 0.0, [], [], 0)
        oldest, newest = min(self.steps), max(self.steps)
        to = newest if last <= 0 else min(max(last, oldest), newest)
        since = max(oldest, to - max(1, num_steps) + 1)
        kept = [(step, *span) for step, span in self.steps.items() if since <= step <= to]
        begin, end = min(span[1] for span in kept), max(span[2] for span in kept)
        if last <= 0:
            end = max([end, *(bar.end for bar in self.bars[-MAX_BARS:])])
        found = [bar for bar in self.bars if bar.end >= begin and bar.begin <= end]
        left_out = max(0, len(found) - MAX_BARS)
        if left_out:
            found.sort(key=lambda bar: (bar.group < 0, bar.end - bar.begin))
            found = found[left_out:]
        bars = [
            msgspec.structs.replace(bar, step=self.groups[bar.group]) if bar.group in self.groups else bar
            for bar in found
        ]
        return Window(since, to, oldest, newest, begin, end, kept, bars, left_out)
