"""Whole runs whose trainer waits for its weights, or goes on beside a copy of them (trainer.weight_export). JSON.

The disaggregated layout of laptop-split.toml with a larger model: a trainer of two ranks, two engines, one train step
apart. By files and by broadcast, each with live and async weight export, in turns. Medians of train
steps, the first ones left out:

- step_s: from one train step's end to the next one's.
- training_stands_still_s: for a version: its export, or its copy; and its weight session, where none is sent beside.
- engines_stand_still_s: in which they begin no request.
- applied_s: from a version's announcement until engines have proven it.

Run: python -m tests.bench.bench_weight_export
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
START: Final = (sys.executable, str(ROOT / "bin" / "physarum.py"), "start-topology")
TOPOLOGY: Final = str(ROOT / "topologies" / "laptop-split.toml")
MODEL: Final = ROOT / "topologies" / "demo" / "models" / "reverse-digits"
LARGE: Final = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
LARGE_HEADS: Final = {"num_key_value_heads": 4, "head_dim": 64}  # 76 MB with the other sizes
WARM_UP: Final = 2  # train steps
TRANSPORTS: Final = ("disk", "collective")
EXPORTS: Final = ("live", "async")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each way, in turns")
    parser.add_argument("--steps", type=int, default=10, help="train steps of a run")
    parser.add_argument("--groups", type=int, default=16, help="of a train step, with 4 samples each")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: both")
    parser.add_argument("--small", action="store_true", help="the laptop's model: shows that it runs")
    args = parser.parse_args(argv)
    rows: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, small=args.small)
        for number in range(args.runs):
            for transport in args.transport or TRANSPORTS:
                for export in EXPORTS:
                    found = run(Path(folder), f"{transport}-{export}-{number}", model, transport, export, args)
                    rows.setdefault(f"{transport}, {export}", []).extend(found)
    report = {way: {name: median(steps, name) for name in steps[0]} for way, steps in rows.items()}
    print(json.dumps(report, indent=2))
    return 0


def write_model(directory: Path, *, small: bool) -> None:
    """The laptop recipe's model directory, with other sizes."""
    shutil.copytree(MODEL, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config if small else config | LARGE | LARGE_HEADS))


def run(
    folder: Path, name: str, model: Path, transport: str, export: str, args: argparse.Namespace
) -> list[dict[str, float]]:
    """What each train step of a run took."""
    settings = {
        "run.name": name,
        "run.dir": folder,
        "model.hf_checkpoint": model,
        "train.num_steps": args.steps,
        "rollout.rollout_batch_size": args.groups,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_staleness": 1,
        "trainer.weight_export": export,
        "engines.policy.weight_transport": transport,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run([*START, TOPOLOGY, "--json", *words], capture_output=True, text=True, timeout=900, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{name}: exit code {done.returncode}: {done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "perf/train_time" in row]
    shutil.rmtree(folder / name)
    return [taken(before, after, transport, export) for before, after in pairwise(steps[WARM_UP - 1 :])]


def taken(before: dict[str, Any], after: dict[str, Any], transport: str, export: str) -> dict[str, float]:
    """Seconds of the step that a row of metrics tells of, after the row before it."""
    is_sent_beside = transport == "disk" or export == "async"
    session_s = 0.0 if is_sent_beside else after["perf/update_weights_session_time"]
    return {
        "step_s": after["time"] - before["time"],
        "train_s": after["perf/train_time"],
        "training_stands_still_s": after["perf/update_weights_time"] + session_s,
        "engines_stand_still_s": after["perf/update_weights_pause_time"],
        "applied_s": after["perf/update_weights_applied_time"],
    }


def median(steps: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(step[name] for step in steps), 3)


if __name__ == "__main__":
    sys.exit(main())
