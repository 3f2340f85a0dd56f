"""A tmpfs of limited size. Mounting needs root, as in CI and on development machines."""

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(place: Path, size_bytes: int) -> Generator[Path]:
    """Mount a disk of limited size at a directory; unmount it after the block."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place)], check=True, timeout=10)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=10)


def fill(place: Path, leave_bytes: int = 0) -> Path:
    """Fill the disk up to `leave_bytes` of free space. Return the file."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * (64 << 10))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - leave_bytes))
    return filler
