"""What a terminal shows of a run, as plain lines of a given width: states, groups, curves, a bar per step. Pure.

Nothing depends on colour: states of groups and parts of a step have characters of their own.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final

from actors.observer.observed import Observed
from messages import EngineState
from runtime.report.fold.spans import PARTS, StepTime
from runtime.report.rows import MetricRow, is_mean
from runtime.util.formatting import count_of, duration, number, sparkline

GROUP_STATES: Final = {  # character in the bar of groups, by field of the books
    "in_flight": "~",
    "pooled": "o",
    "ready": "+",
    "trained": "#",
    "skipped": "=",
    "dropped": "x",
    "failed": "!",
}
PART_LETTERS: Final = {  # character in the bar of a step
    "start": "^",
    "rollout": "R",
    "long tail": "L",
    "queue": "Q",
    "scores": "S",
    "filter": "F",
    "wait": ".",
    "fetch": "f",
    "train": "T",
    "weights": "W",
    "blocked": "B",
    "memory": "M",
    "evaluation": "E",
    "checkpoint": "C",
    "faults": "!",
    "end": "$",
    "unexplained": "?",
}
CURVES: Final = {  # label, by metric; sets of evaluations follow
    "rollout/raw_reward": "reward",
    "train/loss": "loss",
    "train/kl_loss": "KL",
    "train/entropy_loss": "entropy",
    "train/grad_norm": "gradient norm",
    "rollout/response_len/mean": "length",
    "rollout/truncated_ratio": "truncated",
    "rollout/failed_group_ratio": "failed groups",
    "perf/tokens_per_sec": "tokens/s",
    "perf/step_time": "step time",
}
LABEL: Final = 18  # columns
VALUES: Final = 21  # columns of the first and the newest value
STEP: Final = 18  # columns before the bar of a step
LEAST_BAR: Final = 10  # columns


def reading_line(share: float) -> str:
    """Say how much of the log is read, before an observer has caught up with the run."""
    return f"reading the log, {int(100 * share)} %"


def head_line(now: Mapping[str, Any], *, live: bool, problem: str = "", share_read: float | None = None) -> str:
    """Name the run, whether it is live, its step and its weights; until its log is read, how much of it is."""
    if share_read is not None and not problem:
        return f"{now['run']}: {reading_line(share_read)}"
    steps = f"step {now['step']}" + (f" of {now['num_steps']}" if now["num_steps"] else "")
    weights = now["weights"]
    held = f"weights v{weights['held']}" + (
        f" (v{weights['announced']} announced)" if weights["announced"] > weights["held"] else ""
    )
    state = problem or ("live" if live else now["ended"] or "not live")
    return f"{now['run']}: {steps}; {held}; {state}"


def wait_lines(now: Mapping[str, Any], *, live: bool) -> list[str]:
    """Say what goes on now, what runs, and what each process waited for when nothing happened."""
    if not live:
        return list(now["problems"])
    evaluation = now["evaluation"]
    return [
        now["progress"] or "between steps",
        *([] if evaluation is None else [f"the evaluation after step {evaluation[0]} runs"]),
        *(f"nothing happens: {name} waits for {what}" for name, what in now["waiting"].items()),
        *now["problems"],
    ]


def group_lines(books: Mapping[str, int], width: int) -> list[str]:
    """Draw the groups by state as one bar, with a legend."""
    counts = {state: books[state] for state in GROUP_STATES}
    bar = _bar({mark: counts[state] for state, mark in GROUP_STATES.items()}, width)
    shown = [f"{mark} {counts[state]:,} {state.replace('_', ' ')}" for state, mark in GROUP_STATES.items()]
    return [bar or "no group yet", *_wrapped([f"{books['issued']:,} issued:", *shown], width)]


def step_lines(steps: Sequence[StepTime], width: int) -> list[str]:
    """Draw a bar per step, the newest first; all have one scale."""
    full_s = scale_of([step.seconds for step in steps if step.what == "step"])
    return [step_line(step, width, full_s) for step in reversed(steps)]


def scale_of(seconds: Sequence[float]) -> float:
    """Return the seconds of a bar that fills the line: twice the median, so that slow steps do not hide the rest."""
    return 2 * median(seconds) if seconds else 0.0


def step_line(step: StepTime, width: int, full_s: float = 0.0) -> str:
    """Draw the time of a step as a bar of letters. A longer one than fits ends with ">".

    Args:
        step: the step.
        width: columns of the line.
        full_s: seconds of a bar that fills the line; 0: this one does.
    """
    took = step.seconds
    room = max(LEAST_BAR, width - STEP)
    share = took / full_s if full_s > 0 else 1.0
    columns = max(1, round(room * share)) if share <= 1 else room + 1
    parts = {letter: step.parts.get(part, 0.0) for part, letter in PART_LETTERS.items()}
    bar = _bar(parts, min(columns, room))
    return f"{step.label:<10} {duration(took):>6} {bar if columns <= room else bar[:-1] + '>'}".rstrip()


def worst_line(step: StepTime) -> str:
    """Name the longest part of a step, with its worst group, engine or grader."""
    part = max(step.parts, key=lambda name: step.parts[name], default="")
    if not part:
        return ""
    worst = f": {step.worst[part]}" if step.worst.get(part) else ""
    return f"longest in {step.label}: {part} {duration(step.parts[part])}{worst}"


def legend(width: int) -> list[str]:
    """Explain the letters of the bars of steps."""
    return _wrapped([f"{PART_LETTERS[part]} {part}" for part in PARTS], width)


def curve_lines(rows: Sequence[MetricRow], width: int) -> list[str]:
    """Draw a curve per metric, with its first and its newest value."""
    names = {**CURVES, **{name: name for row in rows for name in row if is_mean(name)}}
    lines: list[str] = []
    room = max(LABEL, min(max(map(len, names.values())) + 2, width // 3))
    for name, label in names.items():
        values = [float(value) for row in rows if isinstance(value := row.get(name), int | float)]
        if values:
            ends = f"{_short(values[0])} -> {_short(values[-1])}"
            curve = sparkline(values, max(LEAST_BAR, width - room - VALUES - 2))
            lines.append(f"{_cut(label, room - 1):<{room}}{ends:<{VALUES}}  {curve}")
    return lines or ["no step is trained yet"]


def process_rows(
    now: Mapping[str, Any], width: int, at: float, *, live: bool = True
) -> list[tuple[str, tuple[str, ...]]]:
    """Return a row per engine and process: its name, and its cells.

    Args:
        now: the states.
        width: columns of a row.
        at: Unix time until which a state lasts.
        live: whether the run goes on; the end of the last processes is in no event.
    """
    engines = {engine["name"]: engine for engine in now["engines"]}
    processes = {process["name"]: process for process in now["processes"]}
    room = max(LEAST_BAR, width - 56)
    rows = ((name, _cells(engines.get(name), processes.get(name), at, live=live)) for name in {*engines, *processes})
    return sorted((name, (name, *cells[:-1], _cut(cells[-1], room))) for name, cells in rows)


def _cells(engine: Any, process: Any, at: float, *, live: bool) -> tuple[str, ...]:
    """Return state, duration, weights, restarts and reason of a process, of which one of the two may be unknown."""
    is_up = process is None or process["is_up"]
    state = "down" if not is_up else "ended" if not live else engine["state"] if engine is not None else "up"
    since = max(one["since"] for one in (engine, process) if one is not None)
    weights = f"v{engine['version']}" if engine is not None and engine["version"] else ""
    restarts = str(process["restarts"]) if process is not None and process["restarts"] else ""
    why = process["reason"] if process is not None and not is_up else engine["reason"] if engine is not None else ""
    if live and is_up and engine is not None and engine["load_at"] and engine["state"] == EngineState.CURRENT:
        why = load_text(engine)
    return state, duration(max(0.0, at - since)), weights, restarts, why


PROCESS_COLUMNS: Final = ("process", "state", "since", "weights", "restarts", "load, or why")


def load_text(engine: Mapping[str, Any]) -> str:
    """Describe the load of an engine."""
    if not engine["running"] and not engine["waiting"]:
        return count_of(engine["samples"], "sample")
    return f"{engine['running']} running, {engine['waiting']} waiting, KV cache {engine['cache_usage']:.0%}"


def detail_lines(now: Mapping[str, Any], name: str, at: float) -> list[str]:
    """Return all that is known of an engine or a process at a Unix time."""
    kinds = {"process": now["processes"], "engine": now["engines"]}
    return [
        f"{kind}: {key.replace('_', ' ')} {_detail(key, value, at)}"
        for kind, known in kinds.items()
        for one in known
        if one["name"] == name
        for key, value in one.items()
        if key != "name" and value not in ("", 0.0)
    ]


def group_rows(ledger: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Return a row per live group, then per group that was dropped or failed, the newest first."""
    rows = [
        (str(group), (str(group), name.replace("_", " "), ""))
        for name, stage in ledger["stages"].items()
        for group in stage["groups"]
    ]
    seen = {key for key, _ in rows}
    for ending in ledger["endings"]:
        for group in ending["group_ids"]:
            if str(group) not in seen:
                seen.add(str(group))
                rows.append((str(group), (str(group), ending["outcome"], ending["reason"])))
    return rows


GROUP_COLUMNS: Final = ("group", "state", "why")


def progress_bar(observed: Observed, width: int) -> str:
    """Draw the trained steps of the planned ones; empty if the plan is unknown."""
    if not observed.num_steps:
        return ""
    room = max(LEAST_BAR, width - 2)
    done = min(room, room * observed.steps // observed.num_steps)
    return f"[{'#' * done}{'.' * (room - done)}]"


def clock(time: float) -> str:
    """Format a Unix time as the local time of day."""
    return datetime.fromtimestamp(time, UTC).astimezone().strftime("%H:%M:%S")


def _detail(key: str, value: Any, at: float) -> str:
    if key == "since":
        return f"{duration(max(0.0, at - value))} ago"
    return number(value) if isinstance(value, float) else str(value)


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 1]}…"


def _short(value: float) -> str:
    return number(value) if abs(value) < 1000 else f"{value:,.0f}"


def _bar(amounts: Mapping[str, float], width: int) -> str:
    """Draw amounts as runs of their characters, whose lengths add up to the width."""
    whole = sum(amounts.values())
    if whole <= 0:
        return ""
    bar, seen = "", 0.0
    for mark, amount in amounts.items():
        seen += amount
        bar += mark * (round(width * seen / whole) - len(bar))
    return bar


def _wrapped(items: Sequence[str], width: int) -> list[str]:
    """Join items to lines."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= width:
            lines[-1] += f"  {item}"
        else:
            lines.append(item)
    return lines
