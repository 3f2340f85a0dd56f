"""bin/start-topology with the small processes of tests/runtime/node/player.py in place of a run's actors.

Their arguments come in the variable PLAYERS: a JSON list of lists. KILL_AT=MODULE:FUNCTION:N ends it by kill -9 when
a function is called for the Nth time. With STOP_S a stop may take so many seconds before processes are killed.
"""

import importlib
import json
import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

from bin.start_topology import main
from runtime.node import daemon
from runtime.node.supervisor import supervision
from runtime.settings.processes import ProcessSpec
from runtime.settings.topology import Topology

ROOT = Path(__file__).parents[2]
PLAYER = ROOT / "tests" / "runtime" / "node" / "player.py"


def players(topology: Topology, node: str, run_dir: Path) -> list[ProcessSpec]:
    del topology, node, run_dir
    env = {"PYTHONPATH": str(ROOT)}
    return [
        ProcessSpec(name=f"player.{index}", command=(sys.executable, str(PLAYER), *arguments), env=env, max_restarts=1)
        for index, arguments in enumerate(json.loads(os.environ["PLAYERS"]))
    ]


def kill_at(module: str, function: str, number: str) -> None:
    home = importlib.import_module(module)
    original, calls = getattr(home, function), count(1)

    def killed(*arguments: Any, **options: Any) -> Any:
        if next(calls) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(home, function, killed)


if __name__ == "__main__":
    if moment := os.environ.get("KILL_AT"):
        kill_at(*moment.split(":"))
    if stop_s := os.environ.get("STOP_S"):
        supervision.STOP_WITHIN_S = daemon.STOP_DEADLINE_S = float(stop_s)
    sys.exit(main(specs_of=players))
