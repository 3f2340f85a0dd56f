"""Runs benchmarks one after another, each in a fresh process, and prints all their results as one JSON object.

Run: python -m tests.bench [--results DIR] [NAME...]. What each one measures is in docs/reference/benchmarks.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.results import write_results

ROOT = Path(__file__).parents[2]
BENCHES = {file.stem.removeprefix("bench_"): file for file in sorted(Path(__file__).parent.glob("bench_*.py"))}
TIMEOUT_S = 1200


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; default: all")
    parser.add_argument("--results", type=Path, metavar="DIR", help="also write a dated page of the results into DIR")
    args = parser.parse_args(argv)
    names = args.names or list(BENCHES)
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    results: dict[str, Any] = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = run(name)
    print(json.dumps({"machine": machine(), **results}, indent=2))
    if args.results is not None:
        subject = "-".join(["bench", *args.names])
        print(write_results(args.results, subject, machine(), results), file=sys.stderr)
    return 0 if all("error" not in result for result in results.values()) else 1


def run(name: str) -> dict[str, Any]:
    """What one benchmark prints, and the load of the machine around it; its last error lines if it fails."""
    load_before, begin = os.getloadavg()[0], time.monotonic()
    command = [sys.executable, "-m", f"tests.bench.bench_{name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, check=False)
    if done.returncode:
        return {"error": done.stderr.splitlines()[-20:], "exit_code": done.returncode}
    took = {"took_s": round(time.monotonic() - begin, 1), "load_before": round(load_before, 2)}
    return {**json.loads(done.stdout), "measured": took}


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu_model(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
