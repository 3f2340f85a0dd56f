"""A disk of a few bytes: a tmpfs of its own. Mounting needs root, which CI and development machines here have."""

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(place: Path, size_bytes: int) -> Generator[Path]:
    """A directory on a disk of its own, gone when the block ends."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place)], check=True, timeout=10)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=10)


def fill(place: Path, leave_bytes: int = 0) -> Path:
    """Write a file that leaves so much room; returns it."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * (64 << 10))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - leave_bytes))
    return filler
