"""Grading throughput against the number of grader processes, for a dear and a cheap grader. Prints ratios as JSON.

Run: .venv/bin/python -m tests.bench.bench_reward
"""

import json
import os
import statistics
import time
from pathlib import Path

import anyio
import pytest

from actors.reward.frames import GraderSpec, Hello
from actors.reward.grading import resolve_grader
from actors.reward.pool import PoolSettings, open_pool
from actors.reward.samples import GradedSample

USER_CODE = Path(__file__).resolve().parents[1] / "actors" / "reward" / "user_graders.py"
DEAR = GraderSpec(name=f"{USER_CODE}:burn")  # some 3 ms of arithmetic
CHEAP = GraderSpec(name="positional_match")
NUM_REPEATS = 5


async def samples_per_s(grader: GraderSpec, samples: list[GradedSample], num_processes: int) -> float:
    """Median over repeats, processes warm."""
    hello = Hello(graders=(grader,))
    async with open_pool(PoolSettings(hello=hello, num_processes=num_processes, timeout_s=60)) as pool:
        with anyio.fail_after(30):
            while pool.stats()["num_starts"] < num_processes:
                await pool.grade(grader, samples[: 4 * num_processes])
        rates: list[float] = []
        for _ in range(NUM_REPEATS):
            start = time.perf_counter()
            await pool.grade(grader, samples)
            rates.append(len(samples) / (time.perf_counter() - start))
    return statistics.median(rates)


def direct_samples_per_s(grader: GraderSpec, samples: list[GradedSample]) -> float:
    """The same function called in this process: what grading itself costs."""
    grade = resolve_grader(grader)
    rates: list[float] = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        for sample in samples:
            grade(sample)
        rates.append(len(samples) / (time.perf_counter() - start))
    return statistics.median(rates)


async def measure() -> dict[str, float]:
    dear = [GradedSample(response="30000") for _ in range(200)]
    cheap = [GradedSample(response=f"{number:02}", label="47") for number in range(4000)]
    direct = direct_samples_per_s(DEAR, dear)
    one, two = [await samples_per_s(DEAR, dear, num_processes) for num_processes in (1, 2)]
    cheap_one = await samples_per_s(CHEAP, cheap, 1)
    return {
        "dear_direct_per_s": direct,
        "dear_1_process_per_s": one,
        "dear_2_processes_per_s": two,
        "dear_2_to_1": two / one,
        "dear_1_to_direct": one / direct,
        "cheap_1_process_us_per_sample": 1e6 / cheap_one,
    }


@pytest.mark.bench
def test_grading_scales_with_processes() -> None:
    """Up to the cores; a dear grader loses little to being in another process."""
    numbers = anyio.run(measure)
    print_json(numbers)
    assert numbers["dear_2_to_1"] > 0.75 * min(2, len(os.sched_getaffinity(0)))


def print_json(numbers: dict[str, float]) -> None:
    print(json.dumps({name: float(f"{value:.3g}") for name, value in numbers.items()}, indent=1))


if __name__ == "__main__":
    print_json(anyio.run(measure))
