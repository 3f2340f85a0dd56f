"""Scores per second of an async grader that calls an HTTP judge in its own process. Prints numbers as JSON.

Run: python -m tests.bench.bench_judged
"""

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

import anyio

from actors.reward.grades import GraderSpec, Hello
from actors.reward.pool import GraderPool, PoolSettings, open_pool
from actors.reward.samples import GradedSample
from runtime.functions.sandbox import Sandbox
from runtime.process.logs import configure_logging
from runtime.util.descendants import children_of
from tests.support import http_judged

JUDGED = GraderSpec(name=f"{Path(http_judged.__file__)}:judged")


def megabytes(pid: int) -> float:
    """Resident memory of a process and its descendants, of the largest of them."""
    status = Path(f"/proc/{pid}/status").read_text()
    own = float(status.partition("VmRSS:")[2].split()[0]) / 1024 if "VmRSS:" in status else 0.0
    return max([own, *map(megabytes, children_of(pid))])


async def until_warm(pool: GraderPool, num_processes: int) -> None:
    """Wait for the processes for async functions, and the one for plain functions."""
    with anyio.fail_after(200):
        while pool.stats()["num_starts"] < num_processes + 1:
            await pool.grade(JUDGED, [GradedSample(response="fine")] * 8)


def cpu_s(who: int) -> float:
    """CPU seconds of this process, or of its ended children."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


async def measure(delay_s: float, num_processes: int, at_once: int, number: int) -> dict[str, float]:
    command = [sys.executable, http_judged.__file__, str(delay_s)]
    async with await anyio.open_process(command, stderr=None) as judge:
        assert judge.stdout is not None
        url = f"http://127.0.0.1:{int(await judge.stdout.receive())}/"
        settings = PoolSettings(
            hello=Hello(graders=(JUDGED,)),
            sandbox=Sandbox(also={http_judged.URL: url}),
            num_processes=num_processes,
            at_once=at_once,
            timeout_s=60,
        )
        async with open_pool(settings) as pool:
            await until_warm(pool, num_processes)
            start, most, before = time.perf_counter(), [0.0], cpu_s(resource.RUSAGE_SELF)

            async def watch() -> None:
                while True:
                    most.append(max(map(megabytes, children_of(os.getpid()))))
                    await anyio.sleep(1.0)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                grades = await pool.grade(
                    JUDGED, [GradedSample(response="fine", index=index) for index in range(number)]
                )
                took_s, of_pool = time.perf_counter() - start, cpu_s(resource.RUSAGE_SELF) - before
                tasks.cancel_scope.cancel()
        of_graders = cpu_s(resource.RUSAGE_CHILDREN)
        judge.kill()
    failed = sum(graded.error is not None for graded in grades)
    return {
        "scores_per_s": number / took_s,
        "failed": failed,
        "largest_process_mb": max(most),
        "pool_cpu_ms_per_score": 1e3 * of_pool / number,
        "graders_cpu_ms_per_score": 1e3 * of_graders / number,  # their start is included
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.1, help="seconds that the judge takes for an answer")
    parser.add_argument("--processes", type=int, default=2, help="grader processes")
    parser.add_argument("--concurrency", type=int, default=64, help="calls that run together in a process")
    parser.add_argument("--number", type=int, default=10_000, help="samples that are queued at once")
    args = parser.parse_args(argv)
    configure_logging("bench", "bench")
    numbers = anyio.run(measure, args.delay, args.processes, args.concurrency, args.number)
    print(json.dumps({name: float(f"{value:.3g}") for name, value in numbers.items()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
