"""Program for a test: make machines with running programs, print what belongs to them as JSON, and wait."""

import json
import os
import sys
import time
from pathlib import Path

from tests.support.machines.lan import machines

PRINT_SHM = ["sh", "-c", "echo ready; exec sleep 600"]


def main() -> None:
    with machines("n0", "n1", shared=Path(sys.argv[1])) as lan:
        stopped = lan["n1"].start(PRINT_SHM)
        running = lan["n0"].start(PRINT_SHM)
        for process in (stopped, running):
            process.wait_for("ready", 60)
        stopped.pause()
        both = (lan["n0"], lan["n1"])
        pids = [lan.pid, *(machine.pid for machine in both), stopped.pid, running.pid]
        networks = [os.readlink(f"/proc/{machine.pid}/ns/net") for machine in both]
        print(json.dumps([pids, networks, str(lan["n0"].directory)]), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
