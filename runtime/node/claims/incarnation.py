"""The incarnation: counts the starts of a run's node daemon in its run directory."""

from pathlib import Path

from runtime.util.files import write_atomically

INCARNATION_FILE = "incarnation"


def raise_incarnation(run_dir: Path) -> int:
    """Count this start and return its number, from 1. The directory must be claimed."""
    path = run_dir / INCARNATION_FILE
    incarnation = (int(path.read_text()) if path.exists() else 0) + 1
    write_atomically(path, f"{incarnation}\n".encode())
    return incarnation
