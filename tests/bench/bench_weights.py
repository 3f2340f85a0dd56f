"""Weights to files: gathered, written, hashed and synced, against a copy of the same bytes and their sha256. JSON.

Run: python -m tests.bench.bench_weights. One rank, in turns; seconds on the clock, medians, smallest and largest.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 7, "vocab_size": 16384}
SHAPE |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="times that each is measured")
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that it runs")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), SMALL if args.small else SHAPE, args.runs), indent=2))
    return 0


def measure(place: Path, shape: dict[str, Any], num_runs: int) -> dict[str, Any]:
    import torch

    from actors.trainer.megatron import groups
    from actors.trainer.megatron.build import build_chunks
    from actors.trainer.megatron.config import transformer_config
    from actors.trainer.megatron.imports import quiet
    from actors.trainer.models.config import read_hf_config
    from actors.trainer.models.files import random_source
    from actors.trainer.models.sharding import load_weights
    from actors.trainer.weights.export import weight_thread
    from actors.trainer.weights.files import export_to_files
    from actors.trainer.weights.gathering import own_parts
    from runtime.settings.tables.trainer import MegatronConfig, TrainerConfig
    from tests.actors.trainer.tiny import TINY

    torch.set_num_threads(1)
    (place / "config.json").write_text(json.dumps(TINY | shape))
    hf, device = read_hf_config(place), torch.device("cpu")
    with quiet():
        groups.join(groups.Ranks(), MegatronConfig(), device, seed=1)
        chunks = build_chunks(hf, transformer_config(hf, MegatronConfig(), dtype=torch.float32))
        for chunk in chunks:
            load_weights(chunk, hf, random_source(hf, 1))

        def export() -> None:
            shutil.rmtree(place / "out", ignore_errors=True)
            (place / "out").mkdir()
            bucket_bytes = TrainerConfig().export_bucket_bytes
            with weight_thread() as thread:
                parts, out = own_parts(chunks, hf), place / "out"
                export_to_files(parts, hf, out, thread, device=device, bucket_bytes=bucket_bytes).finish()

        export()
        (file,) = (place / "out").glob("*.safetensors")
        source = file.rename(place / "source")
        seconds = in_turns({"export": export, "copy_and_sha256": lambda: copy_and_hash(source)}, num_runs)
        groups.leave()
    ratio = seconds["export"]["median"] / seconds["copy_and_sha256"]["median"]
    return {"megabytes": round(source.stat().st_size / 1e6), "seconds": seconds, "ratio": round(ratio, 2)}


def copy_and_hash(source: Path) -> None:
    """What is least: the file once more, on the disk, and its checksum."""
    copy = source.with_name("copy")
    copy.unlink(missing_ok=True)
    shutil.copyfile(source, copy)
    with copy.open("rb") as file:
        os.fsync(file.fileno())
        hashlib.file_digest(file, "sha256")


def in_turns(calls: dict[str, Callable[[], None]], num_runs: int) -> dict[str, dict[str, float]]:
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_runs):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            took[name].append(time.perf_counter() - begin)
    return {
        name: {"median": round(statistics.median(times), 3), "min": round(min(times), 3), "max": round(max(times), 3)}
        for name, times in took.items()
    }


if __name__ == "__main__":
    sys.exit(main())
