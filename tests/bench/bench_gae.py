"""GAE by chunks against a loop over tokens that computes all samples at once. Prints seconds and ratios as JSON.

Run: python -m tests.bench.bench_gae
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.trainer.algorithms.advantage_inputs import Advantages
from actors.trainer.algorithms.returns import gae
from tests.bench.rig import rounded

GAMMA, LAMBD = 0.999, 0.95
Array = NDArray[Any]


def looped(rewards: Array, values: Array) -> tuple[Array, Array]:
    """One step per token, from the last one, over all samples."""
    num_samples, num_tokens = rewards.shape
    advantages, following = np.empty_like(rewards), np.zeros(num_samples, rewards.dtype)
    next_values = np.zeros(num_samples, rewards.dtype)
    for token in range(num_tokens - 1, -1, -1):
        deltas = rewards[:, token] + GAMMA * next_values - values[:, token]
        following = deltas + GAMMA * LAMBD * following
        advantages[:, token], next_values = following, values[:, token]
    return advantages, advantages + values


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    found = function()
    return time.perf_counter() - begin, found


def measure(num_samples: int, num_tokens: int, num_repeats: int) -> dict[str, Any]:
    """Medians of runs that take turns."""
    draw = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for dtype in (np.float32, np.float64):
        rewards, values = (draw.normal(size=(num_samples, num_tokens)).astype(dtype) for _ in range(2))
        times: dict[str, list[float]] = {"chunks": [], "chunks_own_lambda": [], "loop": []}
        difference = 0.0
        for _ in range(num_repeats):
            took, ours = timed(lambda given=(rewards, values): gae(*given, gamma=GAMMA, lambd=LAMBD))
            times["chunks"].append(took)
            took, plain = timed(lambda given=(rewards, values): looped(*given))
            times["loop"].append(took)
            difference = max(difference, apart(ours, plain))
            del ours, plain
            took, _ = timed(lambda given=(rewards, values): gae(*given, gamma=GAMMA, lambd=LAMBD, critic_lambd=1.0))
            times["chunks_own_lambda"].append(took)
        medians = {name: statistics.median(each) for name, each in times.items()}
        found[np.dtype(dtype).name] = {
            **{f"{name}_s": median for name, median in medians.items()},
            "chunks_to_loop": medians["chunks"] / medians["loop"],
            "chunks_own_lambda_to_loop": medians["chunks_own_lambda"] / medians["loop"],
            "largest_difference": difference,
        }
    return {"samples": num_samples, "tokens": num_tokens, **found}


def apart(ours: Advantages, plain: tuple[Array, Array]) -> float:
    """Largest difference of advantages and returns."""
    assert ours.returns is not None
    return max(
        float(np.abs(one - other).max()) for one, other in zip((ours.advantages, ours.returns), plain, strict=True)
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=131072, help="of each sample")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    print(json.dumps(rounded(measure(args.samples, args.tokens, args.repeats)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
