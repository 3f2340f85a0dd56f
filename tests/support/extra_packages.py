"""Packages of extras that the lock leaves out, in a folder of their own that later runs of the tests find again."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "test-packages"


def installed(name: str, *requirements: str, deps: bool = False) -> Path:
    """Install exact requirements into a folder, once; return it.

    Args:
        name: of the folder.
        requirements: as pip takes them, each with its version.
        deps: whether pip adds what they depend on.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted, folder = "\n".join((version, *requirements)), FOLDER / name
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / f"{name}.lock"):
        stamp = folder / "requirements.txt"
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            made = Path(tempfile.mkdtemp(dir=FOLDER))
            command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(made), *requirements]
            subprocess.run([*command, *(() if deps else ("--no-deps",))], check=True, timeout=300, env=os.environ)
            (made / "requirements.txt").write_text(wanted)
            made.rename(folder)
    return folder
