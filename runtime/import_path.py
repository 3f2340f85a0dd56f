"""Where modules are found: ours first, those of the user's folder last."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("actors", "bin", "messages", "runtime")  # packages; no module of a user's has one of these names


def user_folder_last() -> None:
    """Have modules of the current folder found after all others: `module:function` may name one, nothing else does.

    Our processes are started with `-P`, which keeps Python from putting that folder first, where a messages.py in it
    would take the place of our messages.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
