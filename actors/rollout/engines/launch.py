"""Starts a server of SGLang with the run's key, which comes in the environment: every user reads command lines.

    python launch.py sglang.launch_server ARGUMENTS...

Needs nothing but the standard library: it runs in the interpreter that has SGLang.
"""

import os
import runpy
import sys
from pathlib import Path

KEY_VARIABLE = "PHYSARUM_ENGINE_KEY"
KEY_ARGUMENTS = {
    "sglang.launch_server": ("--api-key={key}",),
    "sglang_router.launch_router": ("--api-key={key}", "--control-plane-api-keys=run:run:admin:{key}"),
}


def main() -> None:
    """Become the server."""
    module, *arguments = sys.argv[1:]
    key = os.environ.pop(KEY_VARIABLE, "")
    with_key = [argument.format(key=key) for argument in KEY_ARGUMENTS[module]] if key else []
    sys.argv = [module, *arguments, *with_key]
    here = str(Path(__file__).resolve().parent)  # its files are not what SGLang means by their names
    sys.path[:] = [place for place in sys.path if place != here]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
