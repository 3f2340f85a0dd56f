"""Learning runs: train a small recipe with every estimator, loss and correction, and draw the reward curves.

Run: python -m tests.learning [--cases NAME] [--seeds 3] [--resume DIR] [--results DIR] [CASE...]. The cases are in
NAME.toml: algorithms (default) or staleness. A case passes if every seed reaches its goal within its train steps. Runs
that DIR has already are not repeated, unless their case has changed. DIR does not know the code: delete it after a
change there.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from runtime.settings.load import load_topology
from tests.bench.__main__ import machine
from tests.learning.curves import Curve, picture
from tests.support.verified import note, ran

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
START: Final = [sys.executable, "-P", str(ROOT / "bin/physarum.py"), "start-topology"]
SEEDS: Final = (1234, 7, 42, 99, 5)
FIRST_S: Final = 600  # limit of the run that a case starts from


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A learning run of cases.toml."""

    set: tuple[str, ...]  # settings as for --set
    unset: tuple[str, ...] = ()  # keys of [algorithm], or with their table, that the method does not read
    topology: str = "topologies/laptop.toml"
    steps: int = 120
    goal: float = 0.85
    metric: str = "rollout/raw_reward"
    means: tuple[str, ...] = ()  # further metrics whose mean over all steps is reported
    first: str = ""  # topology to train before, whose exported model the case uses
    first_set: tuple[str, ...] = ()  # settings of that run
    first_key: str = "model.hf_checkpoint"  # setting of the case that gets the exported model
    timeout_s: int = 1200
    why_not: str = ""  # why the method cannot reach the goal; then it need not


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run."""

    case: Case  # as it was run
    seed: int
    curve: Curve  # the metric by train step
    held_out: float | None  # last evaluation
    means: dict[str, float] = {}
    error: str = ""

    def reached(self, goal: float) -> int | None:
        """Return the first train step at the goal."""
        return next((step for step, value in self.curve if value >= goal), None)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE", help="default: all cases")
    parser.add_argument("--cases", default="algorithms", choices=sorted(file.stem for file in HERE.glob("*.toml")))
    parser.add_argument("--seeds", type=int, default=3, help=f"seeds of a case, at most {len(SEEDS)} (default 3)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="keep outcomes here, and do not repeat them")
    parser.add_argument("--results", type=Path, metavar="DIR", help="also write a dated page with pictures into DIR")
    args = parser.parse_args(argv)
    cases = msgspec.convert(tomllib.loads((HERE / f"{args.cases}.toml").read_text()), dict[str, Case])
    if unknown := sorted(set(args.names) - set(cases)):
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(cases)}")
    chosen = {name: cases[name] for name in args.names or cases}
    with tempfile.TemporaryDirectory(prefix="learning-") as temporary:
        kept = args.resume or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        outcomes: dict[str, list[Outcome]] = {}
        for name, case in chosen.items():
            outcomes[name] = [_outcome(name, case, seed, kept, Path(temporary)) for seed in SEEDS[: args.seeds]]
            print(_row(name, case, outcomes[name]), flush=True)
    failed = [name for name, case in chosen.items() if not passes(case, outcomes[name])]
    if args.results is not None:
        print(_write(args.results, args.cases, chosen, outcomes), file=sys.stderr)
        result = f"{len(chosen) - len(failed)} cases passed, {len(failed)} failed"
        note([ran(f"python -m tests.learning --cases {args.cases}", f"{args.seeds} seeds", result)], args.results)
    return 1 if failed else 0


def _outcome(name: str, case: Case, seed: int, kept: Path, temporary: Path) -> Outcome:
    file = kept / f"{name}-{seed}.json"
    if file.exists():
        known = msgspec.json.decode(file.read_bytes(), type=Outcome)
        if known.case == case:
            return known
    outcome = _run(name, case, seed, temporary)
    file.write_bytes(msgspec.json.encode(outcome))
    return outcome


def _run(name: str, case: Case, seed: int, temporary: Path) -> Outcome:
    """Train one case with one seed."""
    topology = temporary / f"{name}-{seed}.json"
    topology.write_text(json.dumps(tables_of(case)))
    run = {"run.name": topology.stem, "run.dir": temporary, "run.seed": seed, "train.num_steps": case.steps}
    settings = [*(f"{key}={value}" for key, value in run.items()), *case.set]
    if case.first:
        settings.append(f"{case.first_key}={_exported(ROOT / case.first, case.first_set, temporary)}")
    done = _start(topology, settings, case.timeout_s)
    error = "" if done.returncode == 0 else "\n".join(done.stderr.splitlines()[-5:])
    metrics = temporary / topology.stem / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    curve = [(row["step"], row[case.metric]) for row in rows if case.metric in row]
    means = {
        metric: statistics.fmean(row[metric] for row in rows if metric in row)
        for metric in case.means
        if any(metric in row for row in rows)
    }
    held_out = [row[key] for row in rows for key in row if key.startswith("eval/") and key.endswith("-held-out")]
    last = held_out[-1] if held_out else None
    return Outcome(case=case, seed=seed, curve=curve, held_out=last, means=means, error=error)


def _start(topology: Path, settings: Sequence[object], timeout_s: int) -> subprocess.CompletedProcess[str]:
    command = [*START, str(topology), "--json", *(word for each in settings for word in ("--set", str(each)))]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)


def _exported(topology: Path, settings: Sequence[str], temporary: Path) -> Path:
    """Train a topology once, and return the model directory that it writes."""
    name = f"first-{topology.stem}"
    exported = temporary / name / "hf"
    if not exported.exists():
        done = _start(topology, [f"run.dir={temporary}", f"run.name={name}", *settings], FIRST_S)
        if done.returncode:
            raise RuntimeError(f"{topology}: {done.stderr[-1000:]}")
    return exported


def tables_of(case: Case) -> dict[str, Any]:
    """Return the tables of a case's topology, without the keys that its method does not read."""
    tables = msgspec.to_builtins(load_topology(ROOT / case.topology).topology)
    for key in case.unset:
        *path, name = (key if "." in key else f"algorithm.{key}").split(".")
        table = tables
        for part in path:
            table = table[int(part) if part.isdigit() else part]
        del table[name]
    return tables


def passes(case: Case, outcomes: Sequence[Outcome]) -> bool:
    ended = not any(outcome.error for outcome in outcomes)
    return ended and (bool(case.why_not) or all(outcome.reached(case.goal) is not None for outcome in outcomes))


def _row(name: str, case: Case, outcomes: Sequence[Outcome]) -> str:
    """Return a row of the table: when each seed reached the goal, its last values, and the settings."""
    reached = ", ".join(str(outcome.reached(case.goal) or "-") for outcome in outcomes)
    last = ", ".join(f"{outcome.curve[-1][1]:.2f}" if outcome.curve else "-" for outcome in outcomes)
    held_out = ", ".join("-" if outcome.held_out is None else f"{outcome.held_out:.2f}" for outcome in outcomes)
    said = "".join(f"; {outcome.error}" for outcome in outcomes if outcome.error).replace("\n", " ")
    verdict = "passed" if passes(case, outcomes) else "failed"
    means = {
        key.partition("/")[2]: statistics.fmean(outcome.means[key] for outcome in outcomes if key in outcome.means)
        for key in case.means
        if any(key in outcome.means for outcome in outcomes)
    }
    said = "; ".join([*(f"{key} {value:.3g}" for key, value in means.items()), case.why_not]).strip("; ") + said
    settings = "<br>".join([*(f"`{each}`" for each in case.set), *(f"`{key}` unset" for key in case.unset)])
    return f"| {name} | {verdict} | {reached} | {last} | {held_out} | {settings or 'none'} | {said} |"


def _write(folder: Path, subject: str, cases: dict[str, Case], outcomes: dict[str, list[Outcome]]) -> Path:
    """Write a page with a table and a picture per case."""
    today = datetime.now(UTC).date()
    page, pictures = folder / f"{today}-{subject}.md", folder / f"{today}-{subject}"
    pictures.mkdir(parents=True, exist_ok=True)
    head = "; ".join(f"{key} {value}" for key, value in machine().items())
    rows = [_row(name, case, outcomes[name]) for name, case in cases.items()]
    table = [
        "| case | result | step that reached the goal | last value | held-out | settings | notes |",
        "|---" * 7 + "|",
    ]
    images: list[str] = []
    for name, case in cases.items():
        (pictures / f"{name}.svg").write_text(picture(name, [one.curve for one in outcomes[name]], case.goal))
        images.append(f"![{name}]({pictures.name}/{name}.svg)")
    seeds = len(next(iter(outcomes.values())))
    page.write_text(
        f"# Learning runs: {subject}, {today}\n\n`just {subject}`: {seeds} seeds of each. Numbers of one "
        f"cell are those of the seeds. Machine: {head}.\n\n" + "\n".join([*table, *rows, "", *images]) + "\n"
    )
    return page


if __name__ == "__main__":
    sys.exit(main())
