"""What the run's own processes pay for observers: their CPU with all of them, against none. Prints JSON.

The laptop recipe as a person starts it, in pairs: once alone, once with the page, `/metrics` of Prometheus, TensorBoard
and W&B (offline, if its environment was made). nats-server counts as a process of the run: it serves the observers too.
The CPU of the observers themselves is told apart. Which of a pair is first changes; the median of the pairs counts.

Run: python -m tests.bench.bench_observed
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.bench.bench_demo import ROOT, run
from tests.bench.rig import rounded
from tests.support.prometheus_text import free_address

TARGETS: Final = {"cpu_ratio": 1.03}
OBSERVERS: Final = "observers"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="train steps of each run")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per run")
    args = parser.parse_args(argv)
    pairs = list[dict[str, dict[str, float]]]()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.pairs):
            order = ("alone", "observed") if number % 2 else ("observed", "alone")
            pairs.append(
                {
                    kind: run(
                        Path(folder), f"{kind}-{number}", args.steps, args.timeout, on() if kind == "observed" else ()
                    )[1]
                    for kind in order
                }
            )
    print(json.dumps({"targets": TARGETS, **rounded(compared(pairs))}, indent=2))
    return 0


def on() -> tuple[str, ...]:
    """Settings that turn observers on."""
    known = ["observe.page=127.0.0.1:0", f"observe.prometheus={free_address()}"]
    for tracker, more in (("tensorboard", []), ("wandb", ["observe.wandb.mode=offline"])):
        if (ROOT / f".venv-{tracker}" / "bin" / "python").exists():
            known += [f"observe.{tracker}.enabled=true", *more]
    return tuple(known)


def compared(pairs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """The ratio of each pair, and medians of the CPU seconds of each process."""
    ratios = [own(pair["observed"]) / own(pair["alone"]) for pair in pairs]
    names = {name for pair in pairs for kind in pair.values() for name in kind}
    return {
        "cpu_ratio": statistics.median(ratios),
        "cpu_ratios": ratios,
        "cpu_s": {
            kind: {name: statistics.median(pair[kind].get(name, 0.0) for pair in pairs) for name in sorted(names)}
            for kind in ("alone", "observed")
        },
    }


def own(cpu_s: dict[str, float]) -> float:
    """CPU seconds of the processes that are no observers."""
    return sum(seconds for name, seconds in cpu_s.items() if name != OBSERVERS)


if __name__ == "__main__":
    sys.exit(main())
