"""Grading throughput against the number of grader processes, for a dear and a cheap grader. Prints ratios as JSON.

Run: python -m tests.bench.bench_reward
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import anyio

from actors.reward.graders.calling import resolve_grader
from actors.reward.grades import GraderSpec, Hello
from actors.reward.pool import PoolSettings, open_pool
from actors.reward.samples import GradedSample
from runtime.process.logs import configure_logging

USER_CODE = Path(__file__).resolve().parents[1] / "actors" / "reward" / "user_graders.py"
DEAR = GraderSpec(name=f"{USER_CODE}:burn")  # some 3 ms of arithmetic
CHEAP = GraderSpec(name="positional_match")


async def samples_per_s(grader: GraderSpec, samples: list[GradedSample], num_processes: int, num_repeats: int) -> float:
    """Median over repeats, processes warm."""
    hello = Hello(graders=(grader,))
    async with open_pool(PoolSettings(hello=hello, num_processes=num_processes, timeout_s=60)) as pool:
        with anyio.fail_after(200):
            while pool.stats()["num_starts"] < num_processes:
                await pool.grade(grader, samples[: 4 * num_processes])
        rates: list[float] = []
        for _ in range(num_repeats):
            start = time.perf_counter()
            await pool.grade(grader, samples)
            rates.append(len(samples) / (time.perf_counter() - start))
    return statistics.median(rates)


def direct_samples_per_s(grader: GraderSpec, samples: list[GradedSample], num_repeats: int) -> float:
    """The same function called in this process: what grading itself costs."""
    grade = resolve_grader(grader)
    rates: list[float] = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        for sample in samples:
            grade(sample)
        rates.append(len(samples) / (time.perf_counter() - start))
    return statistics.median(rates)


async def measure(num_dear: int, num_cheap: int, num_repeats: int) -> dict[str, float]:
    dear = [GradedSample(response="30000") for _ in range(num_dear)]
    cheap = [GradedSample(response=f"{number % 100:02}", label="47") for number in range(num_cheap)]
    direct = direct_samples_per_s(DEAR, dear, num_repeats)
    one, two = [await samples_per_s(DEAR, dear, num_processes, num_repeats) for num_processes in (1, 2)]
    cheap_one = await samples_per_s(CHEAP, cheap, 1, num_repeats)
    return {
        "dear_direct_per_s": direct,
        "dear_1_process_per_s": one,
        "dear_2_processes_per_s": two,
        "dear_2_to_1": two / one,
        "dear_1_to_direct": one / direct,
        "cheap_1_process_us_per_sample": 1e6 / cheap_one,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dear", type=int, default=200, help="samples of some 3 ms of arithmetic each")
    parser.add_argument("--cheap", type=int, default=4000, help="samples of two digits")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    configure_logging("bench", "bench")
    numbers = anyio.run(measure, args.dear, args.cheap, args.repeats)
    print(json.dumps({name: float(f"{value:.3g}") for name, value in numbers.items()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
