"""bin/start-topology with the small processes of tests/runtime/agent/player.py in place of a run's actors.

Their arguments come in the variable PLAYERS: a JSON list of lists.
"""

import json
import os
import sys
from pathlib import Path

from bin.start_topology import main
from runtime.settings.processes import ProcessSpec
from runtime.settings.topology import Topology

ROOT = Path(__file__).parents[2]
PLAYER = ROOT / "tests" / "runtime" / "agent" / "player.py"


def players(topology: Topology, node: str, run_dir: Path) -> list[ProcessSpec]:
    del topology, node, run_dir
    env = {"PYTHONPATH": str(ROOT)}
    return [
        ProcessSpec(name=f"player.{index}", command=(sys.executable, str(PLAYER), *arguments), env=env, max_restarts=1)
        for index, arguments in enumerate(json.loads(os.environ["PLAYERS"]))
    ]


if __name__ == "__main__":
    sys.exit(main(specs_of=players))
