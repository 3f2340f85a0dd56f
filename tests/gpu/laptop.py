"""The laptop run, whole, with the trainer on the GPU and the engine on the CPU."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.gpu.measured import Measured

ROOT: Final = Path(__file__).parents[2]
TIMEOUT_S: Final = 200.0
LEARNT: Final = {"reward_last": 0.95, "eval_last": 0.85}  # at least, as on the CPU
APART: Final = 1e-2  # log-probs of engine and trainer in float32, the largest difference of a step
ON_GPU: Final = ("nodes.local.gpus=1", "trainer.device=cuda", "trainer.gpus=local:0", "model.dtype=float32")


def laptop(device: str, *, tiny: bool = False) -> Measured:
    """Whether it learns, how long it takes, and how far engine and trainer are apart."""
    settings = ["run.name=gpu", *(ON_GPU if device == "cuda" else ()), *(["train.num_steps=2"] if tiny else [])]
    words = [word for setting in settings for word in ("--set", setting)]
    topology = ROOT / "topologies" / "laptop.toml"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "bin" / "physarum.py"), "start-topology", str(topology), "--json", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            return Measured({}, [f"exit code {done.returncode}: {done.stderr[-3000:]}"])
        result = json.loads(done.stdout)
        lines = (Path(folder) / "runs" / "gpu" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["step"] > 0]
    numbers = {name: result[name] for name in ("steps", "reward_first", "reward_last", "eval_last")}
    numbers["apart"] = max(row["train/train_rollout_logprob_abs_diff_max"] for row in steps)
    numbers["train_s"] = sum(row["perf/train_time"] for row in steps) / len(steps)
    problems = [f"{name} = {numbers[name]}" for name, least in LEARNT.items() if not tiny and numbers[name] < least]
    return Measured(numbers, [*problems, *([f"apart = {numbers['apart']}"] if numbers["apart"] > APART else [])])
