"""Entry points of the commands of an installed package, as [project.scripts] in pyproject.toml names them.

They use the environment that they are installed in. The scripts of a checkout, such as bin/ledger, set up .venv first.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from bin.interrupt import handle_ctrl_c

OF_A_RUN: Final = ("aiohttp", "cryptography", "jinja2", "psutil", "tokenizers", "transformers", "uvloop")
RUN_COMMANDS: Final = (
    "credentials",
    "export_hf",
    "halt",
    "ledger",
    "replay",
    "report",
    "start_topology",
    "try_function",
    "watch",
)  # need the extra `run`


def start_topology() -> None:
    """Start a run, or resume it."""
    _run("start_topology")


def ledger() -> None:
    """Print a run's ledger."""
    _run("ledger")


def halt() -> None:
    """Halt the round that a run generates now."""
    _run("halt")


def watch() -> None:
    """Show a run."""
    _run("watch")


def report() -> None:
    """Write one HTML file about a run."""
    _run("report")


def credentials() -> None:
    """Give, list and revoke the credentials of external clients."""
    _run("credentials")


def reward_worker() -> None:
    """Grade the samples of a run on another machine."""
    _run("reward_worker")


def export_hf() -> None:
    """Export a run's trained model."""
    _run("export_hf")


def replay() -> None:
    """Replay the samples of a dump."""
    _run("replay")


def from_slime() -> None:
    """Turn a start script of slime into a recipe and a topology."""
    _run("from_slime")


def try_function() -> None:
    """Call a user's function as a run does."""
    _run("try_function")


def describe_settings() -> None:
    """Write the reference pages of the settings."""
    _run("describe_settings")


def describe_algorithms() -> None:
    """Write the reference pages of losses and advantages."""
    _run("describe_algorithms")


def describe_messages() -> None:
    """Write the message catalogue."""
    _run("describe_messages")


def _run(module: str) -> None:
    handle_ctrl_c()
    from runtime.util.import_path import refuse_shadows

    refuse_shadows()
    from bin.entry import run  # after the check, since it imports modules that may be shadowed

    missing = [name for name in OF_A_RUN if module in RUN_COMMANDS and find_spec(name) is None]
    if missing:
        sys.stderr.write(f'needs {", ".join(missing)}, not installed here: pip install "physarum[run]"\n')
        sys.exit(2)  # wrong input
    run(import_module(f"bin.{module}").main)
