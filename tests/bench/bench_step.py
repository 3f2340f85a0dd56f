"""Where a step of a real model goes on the CPU, against the machine's matrix products. Prints JSON.

The shapes of SmolLM2-135M, with drawn weights: 16 prompts of 45 tokens with 8 samples of 3 to 8 tokens. For each dtype:

- gemm: GFLOP/s of the model's own matrices, weighted by their share of the operations, at the rows of a micro-batch
  (training: forward and both gradients) and of a decode step (generation). `square` is one of 2048 x 2048 x 2048.
- train: seconds of a train step, its parts, and its useful operations a second as a share of `gemm.train`.
- train_skipped: the same where 13 of 16 prompts have samples of one reward, which get no passes.
- train_all: these prompts with an entropy term so small that it changes nothing, so that all samples get passes.
- publish: seconds of writing a weight version, and its parts.
- generate: seconds of a round of the tiny engine, and its useful operations a second as a share of `gemm.generate`.

Useful are the distinct prompt tokens of a step, once, and response tokens; of skipped samples none. A token costs twice
the parameters of its matrices in a forward pass, three times that with the gradients; the head counts for response
tokens alone. Attention's own products are left out: they are under 2 % here.

Run: python -m tests.bench.bench_step
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from runtime.settings.devices import ON_CPU
from tests.bench.bench_engine import real_rounds
from tests.bench.bench_trainer import REAL, TOPOLOGY, real_batch
from tests.support.tiny_engine import write_config

PROMPTS, GROUP, PROMPT, RESPONSES = 16, 8, 45, (3, 9)  # prompts, samples, tokens, tokens from and below
FLAT = 13  # prompts whose samples have one reward
NO_CHANGE = "algorithm.entropy_coef=1e-30"  # a term for all samples
DECODE_ROWS = 128
PARTS = ("forward_backward", "optimizer", "plan", "metrics")


class Matrix(NamedTuple):
    """A matrix of the model, as often as it has it."""

    rows: int  # output size
    columns: int  # input size
    count: int

    @property
    def weights(self) -> int:
        return self.rows * self.columns * self.count


def matrices() -> dict[str, Matrix]:
    """Return the matrices that every token passes, and the head."""
    hidden, inner, layers = REAL["hidden_size"], REAL["intermediate_size"], REAL["num_hidden_layers"]
    heads = REAL["num_attention_heads"] + 2 * REAL["num_key_value_heads"]
    return {
        "qkv": Matrix(heads * REAL["head_dim"], hidden, layers),
        "output": Matrix(hidden, REAL["num_attention_heads"] * REAL["head_dim"], layers),
        "gate_up": Matrix(2 * inner, hidden, layers),
        "down": Matrix(hidden, inner, layers),
        "head": Matrix(REAL["vocab_size"], hidden, 1),
    }


def useful_flops(prompt_tokens: int, response_tokens: int, *, passes: int) -> float:
    """Operations of the distinct prompt tokens and the response tokens; `passes` is 1 forward, 3 with gradients."""
    body = sum(matrix.weights for name, matrix in matrices().items() if name != "head")
    head = matrices()["head"].weights
    return 2.0 * passes * (body * (prompt_tokens + response_tokens) + head * response_tokens)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--dtype", action="append", choices=("bfloat16", "float32"), help="default: both")
    parser.add_argument("--threads", type=int, default=cores, help="of torch (default: all cores)")
    parser.add_argument("--steps", type=int, default=5, help="train steps that count, after two (default 5)")
    parser.add_argument("--rounds", type=int, default=3, help="of generation (default 3)")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each matrix (default 0.3)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the trainer")
    args = parser.parse_args(argv)
    if not ON_CPU.items() <= os.environ.items():  # as in a run; malloc reads its own before Python begins
        again = [sys.executable, "-m", "tests.bench.bench_step", *(sys.argv[1:] if argv is None else argv)]
        os.execve(sys.executable, again, os.environ | ON_CPU)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # likewise; read when torch is imported
    import torch

    torch.set_num_threads(args.threads)
    results: dict[str, Any] = {"threads": args.threads, "load_before": round(os.getloadavg()[0], 2)}
    for dtype in args.dtype or ("bfloat16", "float32"):
        rates = gemm(dtype, args.seconds)
        found: dict[str, Any] = {"gemm": rates}
        for name, flat, more in (("train", 0, []), ("train_skipped", FLAT, []), ("train_all", FLAT, [NO_CHANGE])):
            with tempfile.TemporaryDirectory() as folder:
                steps = train(Path(folder), dtype, flat, [*args.set, *more], args.steps, publishes=name == "train")
            found |= {name: with_share(steps, rates["train"])}
        found["generate"] = with_share(generate(dtype, args.threads, args.rounds), rates["generate"])
        results[dtype] = found
    print(json.dumps(results, indent=2))
    return 0


def with_share(figures: dict[str, Any], rate: float) -> dict[str, Any]:
    """Add the useful operations a second, and what share of a rate they are."""
    gflops = figures["useful_gflop"] / figures["s"]
    return {**figures, "gflop_per_s": round(gflops), "share_of_gemm": round(gflops / rate, 3)}


def gemm(dtype: str, seconds: float) -> dict[str, float]:
    """GFLOP/s of the model's matrices: each product takes its share of a token's operations."""
    import torch

    kind = getattr(torch, dtype)
    train_rows = PROMPTS * (PROMPT + GROUP * sum(RESPONSES) // 2) // 4

    def rate(rows: int, passes: bool) -> float:
        flops = took = 0.0
        for matrix in matrices().values():
            weight = torch.randn(matrix.rows, matrix.columns).to(kind)
            inputs = torch.randn(rows, matrix.columns).to(kind)
            outputs = torch.randn(rows, matrix.rows).to(kind)
            products = [lambda x=inputs, w=weight: x @ w.T]
            if passes:
                products += [lambda y=outputs, w=weight: y @ w, lambda y=outputs, x=inputs: y.T @ x]
            for product in products:
                flops += 2.0 * matrix.weights * rows
                took += matrix.count * best_s(product, seconds)
        return flops / took / 1e9

    square = torch.randn(2048, 2048).to(kind)
    return {
        "train": round(rate(train_rows, passes=True)),
        "generate": round(rate(DECODE_ROWS, passes=False)),
        "square": round(2.0 * 2048**3 / best_s(lambda: square @ square, seconds) / 1e9),
    }


def best_s(call: Callable[[], object], seconds: float) -> float:
    """Return the shortest time of a call."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def train(
    place: Path, dtype: str, flat: int, settings: list[str], num_steps: int, *, publishes: bool
) -> dict[str, Any]:
    """Medians over train steps, and of the weight versions after them."""
    from actors.trainer.commands import TrainerRank
    from runtime.settings.load import load_topology

    (place / "config.json").write_text(json.dumps(REAL))
    named = {"model.hf_checkpoint": place, "model.random_init": "true", "model.dtype": dtype}
    named["algorithm.num_steps_per_rollout"] = 1  # as smollm2.toml has it; the laptop's recipe takes two
    words = [*(f"{key}={value}" for key, value in named.items()), *settings]
    engine = TrainerRank(load_topology(TOPOLOGY, words).topology, place)
    rows: list[dict[str, float]] = []
    for step in range(num_steps + 2):
        batch = real_batch(step, flat, prompt=PROMPT, responses=RESPONSES)
        begin = time.perf_counter()
        metrics = engine.train(batch).metrics
        row = {"s": time.perf_counter() - begin, **{part: metrics.get(f"perf/{part}_time", 0.0) for part in PARTS}}
        if publishes:
            begin = time.perf_counter()
            engine.publish(step + 1, confirmed=step)
            row["publish"] = time.perf_counter() - begin
        row["useful_gflop"] = useful_of(batch, flat if "entropy" not in " ".join(settings) else 0) / 1e9
        rows.append(row)
    engine.close()
    counted = rows[2:]
    return {key: round(statistics.median(row[key] for row in counted), 3) for key in counted[0]}


def useful_of(batch: Any, skipped: int) -> float:
    """Useful operations of a batch whose first `skipped` prompts get no passes."""
    trains = batch.groups_B >= skipped
    responses = int((batch.lengths_B[trains] - PROMPT).sum())
    return useful_flops((PROMPTS - skipped) * PROMPT, responses, passes=3)


def generate(dtype: str, num_threads: int, num_rounds: int) -> dict[str, Any]:
    """A round of the tiny engine: all samples of all prompts, the prompts once."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        write_config(directory, **REAL, initializer_range=0.02)
        measured = real_rounds(directory, dtype, num_threads, num_rounds, prompt=PROMPT)
    responses = measured.num_tokens / num_rounds
    useful = useful_flops(PROMPTS * PROMPT, round(responses), passes=1)
    return {"s": round(measured.wall_s / num_rounds, 3), "useful_gflop": round(useful / 1e9, 1)}


if __name__ == "__main__":
    sys.exit(main())
