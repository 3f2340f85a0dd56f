"""The demo of a real model: topologies/smollm2.toml with several seeds, one after another. Writes its curve.

Run: python -m tests.learning.demo [--seeds 3] [--minutes 12] [--kill] [--resume DIR] [--results DIR] [--readme FILE].
A run's clock starts with its command and ends with --minutes. Its score is the best of the evaluations until then; what
counts is whether each seed reaches the goal. --kill ends engine and trainer of the last seed's run with -9, at the same
time, and its clock goes on. Runs that DIR has already are not repeated.

The model comes from the package of `bin/setup --with smollm2`, unless --set model.hf_checkpoint=DIR names another.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import psutil

from runtime.util.exit_codes import EXIT_INTERRUPTED, EXIT_OK
from tests.bench.__main__ import machine
from tests.support.smollm2 import imported
from tests.support.verified import note, ran

ROOT: Final = Path(__file__).parents[2]
START: Final = [sys.executable, "-P", str(ROOT / "bin/physarum.py"), "start-topology"]
TOPOLOGY: Final = ROOT / "topologies" / "smollm2.toml"
SEEDS: Final = (1234, 7, 42, 99, 5)
GOAL: Final = 0.5
KILL_AT: Final = 45  # train steps
LOOK_S: Final = 0.5  # between two looks at a run
END_S: Final = 60.0  # that a run may take to stop
STEP: Final = re.compile(r"step +(?P<step>\d+)/\d+ \|")
EVALUATION: Final = re.compile(r"evaluation after step (?P<step>\d+) .*: sums-held-out (?P<score>[\d.]+)$")
BEGIN, END = "<!-- written by just demo-smollm2 -->\n", "<!-- end of the curve -->\n"
BAR: Final = 20  # characters of a score of 1


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation."""

    step: int  # train steps in the weights
    minutes: float  # from the command to the end of the evaluation
    held_out: float  # share of the held-out prompts that were answered right


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run of one seed, until its time was over."""

    seed: int
    points: tuple[Point, ...]
    killed_at: int | None = None  # train step after which engine and trainer were killed
    load: float = 0.0  # of the machine before

    @property
    def best(self) -> Point:
        """Return the first of its best evaluations."""
        return max(self.points, key=lambda point: (point.held_out, -point.step))

    @property
    def reached(self) -> Point | None:
        """Return the first evaluation at the goal."""
        return next((point for point in self.points if point.held_out >= GOAL), None)


class Demo(msgspec.Struct, frozen=True, kw_only=True):
    """What the command measured, and where."""

    date: str
    cpu: str
    cores: int
    dtype: str
    minutes: float  # limit of a run
    runs: tuple[Run, ...]
    settings: tuple[str, ...] = ()  # other than those of the topology


class Seen:
    """Follows what a run prints, and notes when an evaluation came."""

    def __init__(self, log: Path, start: float) -> None:
        """Begin before the first line. `start` is the time of the command, by time.monotonic()."""
        self._log = log
        self._start = start
        self._read = 0  # characters
        self.step = 0  # newest train step
        self.points: dict[int, Point] = {}  # by step; the first of a step that is evaluated again counts

    def look(self) -> None:
        """Read the lines that are new."""
        text = self._log.read_text(encoding="utf-8")
        whole = text.rfind("\n") + 1
        minutes = (time.monotonic() - self._start) / 60
        for line in text[self._read : whole].splitlines():
            if found := STEP.match(line):
                self.step = int(found["step"])
            elif found := EVALUATION.match(line):
                step = int(found["step"])
                point = Point(step=step, minutes=round(minutes, 1), held_out=float(found["score"]))
                self.points.setdefault(step, point)
        self._read = whole


def block_of(demo: Demo) -> str:
    """Draw the curves as README shows them: a row per evaluation, the bar for the mean over the seeds."""
    seeds = "".join(f"{f'seed {run.seed}':>11}" for run in demo.runs)
    lines = [
        f"SmolLM2-135M-Instruct, {demo.dtype}, {demo.cpu}, {demo.cores} cores, {demo.date}",
        f"step  minutes{seeds}   share of 100 held-out sums answered right",
    ]
    by_step: dict[int, list[Point | None]] = {}
    for number, run in enumerate(demo.runs):
        for point in run.points:
            by_step.setdefault(point.step, [None] * len(demo.runs))[number] = point
    for step, points in sorted(by_step.items()):
        known = [point for point in points if point is not None]
        values = "".join(f"{'-' if point is None else f'{point.held_out:.2f}':>11}" for point in points)
        mean = sum(point.held_out for point in known) / len(known)
        bar = "█" * round(BAR * mean)
        lines.append(f"{step:4}  {max(point.minutes for point in known):7.1f}{values}   {bar}".rstrip())
    lines += [
        f"engine and trainer of seed {run.seed} were killed with -9 after step {run.killed_at}"
        for run in demo.runs
        if run.killed_at is not None
    ]
    return "```\n" + "\n".join(lines) + "\n```\n"


def with_block(text: str, block: str) -> str:
    """Put the curves between the marks of a page.

    Raises:
        ValueError: the page has no marks.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"the page has no lines {BEGIN.strip()} and {END.strip()}")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + block + END + rest.partition(END)[2]


def page_of(demo: Demo) -> str:
    """Write the page of results: when each seed reached the goal, and every evaluation."""
    rows = [
        f"| {run.seed} | {_at(run.reached)} | {_at(run.best)} | {_at(run.points[-1])} "
        f"| {'-' if run.killed_at is None else f'after step {run.killed_at}'} | {run.load:.2f} |"
        for run in demo.runs
    ]
    settings = ", ".join(f"`{each}`" for each in demo.settings) or "none"
    return "\n".join(
        [
            f"# The demo of a real model, {demo.date}",
            "",
            f"`just demo-smollm2`: `topologies/smollm2.toml`, at most {demo.minutes:g} minutes for each seed, counted "
            f"from the command. Other settings: {settings}.",
            f"Goal: {GOAL:.2f} of the held-out prompts, which are not trained. Score, step and minutes in each cell.",
            "",
            f"| seed | goal reached | best | last | killed | load before |\n{'|---' * 6}|",
            *rows,
            "",
            block_of(demo),
        ]
    )


def _at(point: Point | None) -> str:
    return "no" if point is None else f"{point.held_out:.2f}, step {point.step}, {point.minutes:.1f} min"


def run_of(seed: int, settings: Sequence[str], place: Path, *, minutes: float, kill_at: int | None) -> Run:
    """Train one seed until it ends or its time is over.

    Args:
        seed: of the run.
        settings: as for --set.
        place: directory of the run directories.
        minutes: limit.
        kill_at: train step after which engine and trainer are killed; None: they are not.
    """
    name = f"seed-{seed}"
    words = [f"run.name={name}", f"run.dir={place}", f"run.seed={seed}", f"rollout.seed={seed}", *settings]
    command = [*START, str(TOPOLOGY), "--fresh", name, *(part for word in words for part in ("--set", word))]
    load, log = os.getloadavg()[0], place / f"{name}.log"
    log.unlink(missing_ok=True)
    seen, killed_at, deadline = Seen(log, time.monotonic()), None, time.monotonic() + 60 * minutes
    with log.open("w") as output:
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT)
    try:
        while process.poll() is None and time.monotonic() < deadline:
            psutil.wait_procs([process], timeout=LOOK_S)
            seen.look()
            if kill_at is not None and killed_at is None and seen.step >= kill_at:
                killed_at = seen.step
                _kill(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        code = process.wait(END_S)
    if code not in (EXIT_OK, EXIT_INTERRUPTED):
        raise RuntimeError(f"{log}: exit code {code}")
    if not seen.points:
        raise RuntimeError(f"{log}: no evaluation ended within {minutes:g} minutes")
    return Run(seed=seed, points=tuple(seen.points.values()), killed_at=killed_at, load=round(load, 2))


def _kill(command: psutil.Process) -> None:
    """Kill the engine and the trainer at the same time."""
    for process in command.children(recursive=True):
        words = process.cmdline()
        if "actors.tiny_engine" in words or words[-1:] == ["trainer"]:
            process.kill()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help=f"at most {len(SEEDS)} (default 3)")
    parser.add_argument("--minutes", type=float, default=12.0, help="limit of a run (default 12)")
    parser.add_argument("--kill", action="store_true", help=f"kill -9 in the last seed's run, after step {KILL_AT}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, as for a run")
    parser.add_argument("--resume", type=Path, default=ROOT / ".demo-smollm2", metavar="DIR", help="keep runs here")
    parser.add_argument("--results", type=Path, metavar="DIR", help="also write a dated page into DIR")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="also write the curve between the marks of FILE")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a run ends with this command
    args.resume.mkdir(parents=True, exist_ok=True)
    settings = list(args.set)
    if not any(word.startswith("model.hf_checkpoint=") for word in settings):
        if not (args.resume / "model").exists():
            imported(args.resume / "model")
        settings.append(f"model.hf_checkpoint={args.resume / 'model'}")
    seeds = SEEDS[: args.seeds]
    runs: list[Run] = []
    for seed in seeds:
        kept = args.resume / f"seed-{seed}.json"
        if not kept.exists():
            kill_at = KILL_AT if args.kill and seed == seeds[-1] else None
            run = run_of(seed, settings, args.resume.resolve(), minutes=args.minutes, kill_at=kill_at)
            kept.write_bytes(msgspec.json.encode(run))
        runs.append(msgspec.json.decode(kept.read_bytes(), type=Run))
        print(f"seed {seed}: best {_at(runs[-1].best)}; goal reached: {_at(runs[-1].reached)}", flush=True)
    return _report(args, tuple(runs), settings)


def _report(args: argparse.Namespace, runs: tuple[Run, ...], settings: Sequence[str]) -> int:
    """Write what was asked for. Returns 1 if a seed did not reach the goal."""
    here = machine()
    demo = Demo(
        date=datetime.now(UTC).date().isoformat(),
        cpu=str(here["cpu"]),
        cores=int(here["cores"]),
        dtype=_dtype(args.resume / f"seed-{runs[0].seed}"),
        minutes=args.minutes,
        runs=runs,
        settings=tuple(word for word in settings if not word.startswith("model.hf_checkpoint=")),
    )
    print(block_of(demo))
    failed = [run.seed for run in runs if run.reached is None]
    if args.results is not None:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / f"{demo.date}-demo-smollm2.md").write_text(page_of(demo), encoding="utf-8")
        result = f"{len(runs) - len(failed)} of {len(runs)} seeds reached {GOAL:.2f} in {args.minutes:g} minutes"
        note([ran("just demo-smollm2", f"{demo.cores} cores", result)], args.results)
    if args.readme is not None:
        args.readme.write_text(with_block(args.readme.read_text(encoding="utf-8"), block_of(demo)), encoding="utf-8")
    return 1 if failed else 0


def _dtype(run_dir: Path) -> str:
    """Return the dtype that a run trained in."""
    return str(json.loads((run_dir / "topology.json").read_text())["model"]["dtype"])


if __name__ == "__main__":
    sys.exit(main())
