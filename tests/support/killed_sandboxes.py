"""Kills a tenth of the sandboxes of the grader `code`, and compares the lengths of samples."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio

from runtime.util.descendants import children_of

SHARE = 0.1  # of the sandboxes that are killed
LOOK_S = 0.01  # between two looks at the living ones
MOST_DEEP = 4  # processes of a sandbox: the launcher, one for the run, the first of the namespace, the program


def distance(ours: list[int], theirs: list[int]) -> float:
    """The Kolmogorov-Smirnov distance of two samples of lengths."""
    shares = [[sum(one <= at for one in some) / len(some) for at in {*ours, *theirs}] for some in (ours, theirs)]
    return max(abs(one - other) for one, other in zip(*shares, strict=True))


def launchers_below(pid: int) -> Iterator[int]:
    """Processes that run a sandbox each, among the descendants of a process."""
    for child in children_of(pid):
        command = b""
        with suppress(OSError):  # it has ended
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"/code/launcher.py" in command:
            yield child
        else:
            yield from launchers_below(child)


def sandbox_of(launcher: int) -> list[int]:
    """Processes of a sandbox without the program: a program may also kill itself, which is a wrong answer."""
    found = [launcher]
    while len(found) < MOST_DEEP - 1 and (children := children_of(found[-1])):
        found.append(children[0])
    return found


class Killer:
    """Kills a tenth of the sandboxes that it sees. The longer one lives, the more often it may be chosen."""

    def __init__(self, above: int) -> None:
        """Start without a kill.

        Args:
            above: process whose descendants run the sandboxes.
        """
        self.seen = set[int]()
        self.killed = set[int]()
        self._above = above
        self._moments = random.Random(7)

    async def run(self) -> None:
        """Look at the sandboxes until cancelled."""
        while True:
            living = [pid for pid in launchers_below(self._above) if pid not in self.killed]
            self.seen.update(living)
            if living and len(self.killed) < SHARE * len(self.seen):
                launcher = self._moments.choice(living)
                with suppress(ProcessLookupError):
                    os.kill(self._moments.choice(sandbox_of(launcher)), signal.SIGKILL)
                    self.killed.add(launcher)
            await anyio.sleep(LOOK_S)
