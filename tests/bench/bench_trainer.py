"""The trainer on the laptop recipe: start, one train step with its publish, a checkpoint. Prints JSON.

Run: python -m tests.bench.bench_trainer. The samples are random: the recipe's sizes, not its task. With --real: CPU
seconds and memory of train steps of the shapes of SmolLM2-135M, 16 prompts of 29 tokens with 8 samples of 3 to 8 each.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.settings.devices import ON_CPU
from tests.support.tiny_engine import SMOLLM2

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGY = ROOT / "topologies" / "laptop.toml"
PROMPT = 4  # tokens of a prompt of the recipe
REAL = {
    **SMOLLM2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}
REAL_PROMPT = 29
IMPORT = "import time; begin = time.perf_counter(); import actors.trainer.commands; print(time.perf_counter() - begin)"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="train steps to measure")
    parser.add_argument("--imports", type=int, default=3, help="fresh processes to measure the import in")
    parser.add_argument("--profile", action="store_true", help="say where a train step's time goes")
    parser.add_argument("--real", choices=("float32", "bfloat16"), help="the shapes of SmolLM2-135M in this dtype")
    parser.add_argument("--layers", type=int, default=30, help="with --real: fewer layers, for a smaller model")
    parser.add_argument("--flat", type=int, default=0, help="with --real: prompts of 16 whose samples have one reward")
    parser.add_argument("--save", action="store_true", help="with --real: a checkpoint after every third step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with --real: a setting")
    args = parser.parse_args(argv)
    if args.real:
        if not ON_CPU.items() <= os.environ.items():  # as in a run; malloc reads its own before Python begins
            again = [sys.executable, "-m", "tests.bench.bench_trainer", *(sys.argv[1:] if argv is None else argv)]
            os.execve(sys.executable, again, os.environ | ON_CPU)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(real(Path(folder), args), indent=2))
        return 0
    results: dict[str, Any] = {"import_s": [round(import_s(), 2) for _ in range(args.imports)]}
    with tempfile.TemporaryDirectory() as folder:
        results |= measure(Path(folder), args.steps, profile=args.profile)
    print(json.dumps(results, indent=2))
    return 0


def import_s() -> float:
    """Seconds to import torch, Megatron-core and the trainer in a fresh process."""
    command = [sys.executable, "-c", IMPORT]
    return float(subprocess.run(command, capture_output=True, check=True, timeout=120, cwd=ROOT).stdout)


def measure(run_dir: Path, num_steps: int, *, profile: bool) -> dict[str, Any]:
    import torch

    from actors.trainer.commands import TrainerRank
    from runtime.settings.load import load_topology
    from tests.support.checkpoints import save

    torch.set_num_threads(1)
    topology = load_topology(TOPOLOGY).topology
    batches = [random_batch(step, topology.rollout.rollout_batch_size) for step in range(num_steps)]
    begin = time.perf_counter()
    engine = TrainerRank(topology, run_dir)
    built_s = time.perf_counter() - begin
    metrics: list[dict[str, float]] = []
    train_ms = milliseconds(num_steps, lambda step: metrics.append(engine.train(batches[step]).metrics))
    publish_ms = milliseconds(num_steps, lambda step: engine.publish(step + 1, confirmed=step))
    save_ms = milliseconds(5, lambda step: save(engine, step=step + 1))
    if profile:
        print_profile(lambda: [engine.train(batch) for batch in batches])
    engine.close()
    forward_ms = [1e3 * one["perf/log_probs_time"] for one in metrics]
    return {
        "build_s": round(built_s, 3),
        "samples": len(batches[0].lengths_B),
        "tokens": round(statistics.mean(len(batch.tokens_N) for batch in batches)),
        "train_ms": summary(train_ms),
        "of_which_log_probs_ms": summary(forward_ms),
        "publish_ms": summary(publish_ms),
        "save_ms": summary(save_ms),
    }


def real(place: Path, args: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of each train step, and memory after it, in MB."""
    import torch

    from actors.trainer.commands import TrainerRank
    from runtime.settings.load import load_topology
    from tests.support.checkpoints import save

    torch.set_num_threads(1)
    (place / "config.json").write_text(json.dumps({**REAL, "num_hidden_layers": args.layers}))
    named = {"model.hf_checkpoint": place, "model.random_init": "true", "model.dtype": args.real}
    settings = [*(f"{key}={value}" for key, value in named.items()), *args.set]
    engine = TrainerRank(load_topology(TOPOLOGY, settings).topology, place)
    cpu_s: list[float] = []
    after: list[int] = []
    loss = 0.0
    for step in range(args.steps):
        begin = time.process_time()
        loss = engine.train(real_batch(step, args.flat)).metrics["train/grad_norm"]
        cpu_s.append(round(time.process_time() - begin, 2))
        after.append(round(resident_mb()))
        if args.save and step % 3 == 2:
            save(engine, step=step + 1)
    engine.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {
        "tokens": len(real_batch(0, 0).tokens_N),
        "cpu_s": {**summary(cpu_s[1:] or cpu_s), "first": cpu_s[0]},
        "rss_mb": {"peak": round(peak), "after": after},
        "grad_norm": loss,
    }


def resident_mb() -> float:
    """Memory of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024 / 1e6


def real_batch(step: int, flat: int, *, prompt: int = REAL_PROMPT, responses: tuple[int, int] = (3, 9)) -> Any:
    """Each prompt's samples begin with the same tokens. The first `flat` prompts have samples of one reward."""
    import numpy as np

    batch = random_batch(step, 16, prompt=prompt, responses=responses)
    draw = np.random.default_rng(step)
    tokens_N = draw.integers(0, REAL["vocab_size"], len(batch.tokens_N)).astype(np.int32)
    prompts = draw.integers(0, REAL["vocab_size"], (16, prompt))
    for group, start in zip(batch.groups_B.tolist(), batch.starts_B.tolist(), strict=True):
        tokens_N[start : start + prompt] = prompts[group]
    rewards_B = np.where(batch.groups_B < flat, 0.3, batch.rewards_B)
    log_probs_N = np.where(batch.loss_mask_N, -10.8, 0.0).astype(np.float32)
    return replace(batch, tokens_N=tokens_N, rewards_B=rewards_B, rollout_log_probs_N=log_probs_N)


def milliseconds(count: int, call: Callable[[int], object]) -> list[float]:
    times: list[float] = []
    for number in range(count):
        begin = time.perf_counter()
        call(number)
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def summary(values: list[float]) -> dict[str, float]:
    return {"first": round(values[0], 1), "median": round(statistics.median(values), 1), "max": round(max(values), 1)}


def random_batch(
    step: int, num_groups: int, group_size: int = 8, *, prompt: int = PROMPT, responses: tuple[int, int] = (1, 5)
) -> Any:
    import numpy as np

    from actors.trainer.data.batch import TrainBatch

    generator = np.random.default_rng(step)
    count = num_groups * group_size
    lengths = prompt + generator.integers(*responses, count)
    mask = np.concatenate([np.arange(length) >= prompt for length in lengths])
    return TrainBatch(
        step=step,
        groups_B=np.repeat(np.arange(num_groups), group_size),
        rollouts_B=np.arange(count),
        indices_B=np.tile(np.arange(group_size), num_groups),
        parts_B=np.zeros(count, dtype=np.int64),
        rewards_B=(rewards := generator.random(count)),
        raw_rewards_B=rewards,
        truncated_B=np.zeros(count, dtype=np.uint8),
        left_out_B=np.zeros(count, dtype=np.uint8),
        lengths_B=lengths,
        tokens_N=generator.integers(0, 16, len(mask)).astype(np.int32),
        loss_mask_N=mask.astype(np.uint8),
        rollout_log_probs_N=np.where(mask, -2.77, 0.0).astype(np.float32),
        staleness_N=np.where(mask, 0, -1).astype(np.int32),
    )


def print_profile(call: Callable[[], object]) -> None:
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.runcall(call)
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumtime").print_stats(40)


if __name__ == "__main__":
    sys.exit(main())
