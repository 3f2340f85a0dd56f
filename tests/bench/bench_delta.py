"""Changes of weights against whole files: bytes, seconds to write and to apply, whether all bits come back. JSON.

Run: python -m tests.bench.bench_delta. bfloat16, of which 2 % of the numbers change, evenly spread; in turns; seconds
on the clock, medians, smallest and largest. All files lie on one disk: what crosses a network is not measured.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.bench_weights import in_turns

ROWS, COLUMNS, NUM = 2500, 2500, 40  # 500 MB
SMALL = (100, 50, 4)
CHANGED = 0.02


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="times that each is measured")
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that it runs")
    args = parser.parse_args(argv)
    shape = SMALL if args.small else (ROWS, COLUMNS, NUM)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), *shape, num_runs=args.runs), indent=2))
    return 0


def measure(place: Path, rows: int, columns: int, num: int, *, num_runs: int) -> dict[str, Any]:
    import torch

    from actors.trainer.models.shards import write_weights
    from actors.trainer.weights.publish import Versions
    from runtime.models.checksums import checksums_of
    from runtime.models.copies import make_copy
    from runtime.models.delta import Version, apply_deltas
    from tests.support.published import publish

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    old = {f"w{i}": (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16() for i in range(num)}
    new = {name: with_changes(tensor, generator) for name, tensor in old.items()}
    (model := place / "model").mkdir()
    (model / "config.json").write_text("{}")
    versions = Versions(place / "weights", model, every=2)
    first, second = publish(versions, 1, old), publish(versions, 2, new)
    assert first.path is not None
    assert second.path is not None
    base, changes, checksums = first.path, second.path, checksums_of(first.path).tensors

    def write_whole() -> None:
        write_weights(new, fresh(place / "out"))

    def write_whole_and_changes() -> None:
        write_both(new, fresh(place / "out"), base, checksums)

    def copy_whole() -> None:
        shutil.rmtree(place / "copies", ignore_errors=True)
        make_copy(Version(1, first.checksum), base, place / "copies")

    def apply_changes() -> None:
        shutil.rmtree(place / "copy", ignore_errors=True)
        apply_deltas(base, [changes], place / "copy")

    calls = (write_whole, write_whole_and_changes, copy_whole, apply_changes)
    for call in calls:
        call()
    seconds = in_turns({call.__name__: call for call in calls}, num_runs)
    medians = {name: taken["median"] for name, taken in seconds.items()}
    write_whole()
    return {
        "megabytes": round(second.size_bytes / 1e6, 1),
        "changes_megabytes": round(second.delta_bytes / 1e6, 2),
        "share_of_bytes": round(second.delta_bytes / second.size_bytes, 4),
        "bit_exact": same(place / "copy" / "model.safetensors", place / "out" / "model.safetensors"),
        "seconds": seconds,
        "write_ratio": round(medians["write_whole_and_changes"] / max(medians["write_whole"], 1e-3), 2),
        "apply_ratio": round(medians["apply_changes"] / max(medians["copy_whole"], 1e-3), 2),
    }


def with_changes(tensor: Any, generator: Any) -> Any:
    """The same with the lowest bit of some numbers flipped, as a small train step changes them."""
    import torch

    flips = (torch.rand(tensor.shape, generator=generator) < CHANGED).to(torch.int16)
    return (tensor.view(torch.int16) ^ flips).view(torch.bfloat16)


def write_both(weights: Any, directory: Path, base: Path, checksums: Any) -> None:
    """As the trainer's writer does: each tensor whole, and what changed of it."""
    from actors.trainer.models.shards import ShardWriter, bytes_of, cut_into_shards, entry_of, named
    from actors.trainer.weights.delta import DeltaWriter

    files = ShardWriter(directory, named(cut_into_shards([entry_of(*item) for item in weights.items()])))
    changes = DeltaWriter(directory, base, checksums)
    for name, tensor in weights.items():
        data = bytes_of(tensor)
        changes.write(files.write(name, data), data, files.checksums[name])
    files.close()
    changes.close()


def fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory


def same(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
