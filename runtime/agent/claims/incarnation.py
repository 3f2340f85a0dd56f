"""A number that counts the starts of a run's agent in its run directory."""

from pathlib import Path

from runtime.files import write_atomically

INCARNATION_FILE = "incarnation"


def raise_incarnation(run_dir: Path) -> int:
    """Count this start, from 1, and return the number; the directory is claimed."""
    path = run_dir / INCARNATION_FILE
    incarnation = (int(path.read_text()) if path.exists() else 0) + 1
    write_atomically(path, f"{incarnation}\n".encode())
    return incarnation
