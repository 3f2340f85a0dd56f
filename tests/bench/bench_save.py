"""Train steps beside which a checkpoint is written, against steps by themselves. Prints JSON.

Run: python -m tests.bench.bench_save. One rank, in turns; seconds on the clock. Steps beside a save are those that
begin while its files are written, so the last of each may end after them. `pause_s`: training waits for the copy.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.bench.bench_transformers import MODEL, TABLES, ragged_batch
from tests.bench.rig import rounded

VOCABULARY: Final = 8192
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 20}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="saves to measure")
    parser.add_argument("--pairs", type=int, default=1, help="half the samples of a step")
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that it runs")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(rounded(measure(Path(folder), args)), indent=2))
    return 0


def measure(place: Path, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from actors.trainer.commands import TrainerRank
    from runtime.settings.topology import Topology

    torch.set_num_threads(1)
    config = MODEL | {"vocab_size": VOCABULARY} | (SMALL if args.small else SHAPE)
    (place / "config.json").write_text(json.dumps(config))
    tables = TABLES | {
        "model": {"hf_checkpoint": str(place), "random_init": True},
        "train": {"num_steps": 2, "keep_checkpoints": 1},
    }
    alone: list[float] = []
    beside: list[float] = []
    pauses: list[float] = []
    written: list[float] = []
    batch = ragged_batch(0, VOCABULARY, 0.5, pairs=args.pairs)
    engine = TrainerRank(msgspec.convert(tables, Topology), place)
    engine.train(batch)
    for run in range(args.runs):
        alone.append(_seconds(lambda: engine.train(batch)))
        begin = time.perf_counter()
        saving = engine.begin_save(step=run + 1, incarnation=1)
        pauses.append(time.perf_counter() - begin)
        while not saving.done():
            beside.append(_seconds(lambda: engine.train(batch)))
        saved, _ = engine.finish_save()
        written.append(time.perf_counter() - begin)
        size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    engine.close()
    return {
        "megabytes": size / 1e6,
        "step_alone_s": _spread(alone),
        "step_beside_a_save_s": _spread(beside) if beside else None,
        "ratio": statistics.median(beside) / statistics.median(alone) if beside else None,
        "pause_s": _spread(pauses),
        "save_s": _spread(written),
    }


def _seconds(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "number": float(len(values))}


if __name__ == "__main__":
    sys.exit(main())
