"""Faults of a simulated run: drawn by a seed before it begins, so that any of them can be left out."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

import msgspec

from tests.simulate.loop import Process
from tests.simulate.server import Link

SERVER: Final = "nats-server"
AT_CALLS: Final = (
    "dies before",
    "dies after",
    "loses the answer",
    "freezes",
    "is replaced",
    "clock jumps",
)  # of the bus
AT_TIMES: Final = ("dies", "freezes")
OF_ACTORS: Final = (*AT_TIMES, "is replaced")  # stands still, while another machine starts a successor
LOSES_PAYLOADS: Final = "loses payloads"
OF_SERVER: Final = ("dies", "freezes", "is full", LOSES_PAYLOADS)
CALLS: Final = 150  # of an actor, up to which faults are drawn
TIME_S: Final = 12.0  # up to which faults are drawn
DOWN_S: Final = (0.1, 45.0)  # beyond the time limit of a publish
FROZEN_S: Final = (0.2, 60.0)
JUMP_S: Final = 1000.0
LONGEST: Final = 8  # faults of a run


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happens once."""

    target: str  # name of a process
    kind: str
    call: int = 0  # number of the target's call of the bus at which it happens, over all its processes; 0: at a time
    at_s: float = 0.0  # since the start of the run
    seconds: float = 0.0  # how long it lasts, or how far a clock jumps

    def __str__(self) -> str:
        when = f"at its call {self.call} of the bus" if self.call else f"after {self.at_s:.3f} s"
        lasts = f" ({self.seconds:.1f} s)" if self.seconds else ""
        return f"{self.target} {self.kind} {when}{lasts}"


def drawn(random: Random, actors: list[str], engines: list[str]) -> list[Fault]:
    """Draw the faults of a run."""
    return [_draw(random, actors, engines) for _ in range(random.randint(0, LONGEST))]


def _draw(random: Random, actors: list[str], engines: list[str]) -> Fault:
    kind_of_target = random.random()
    at_s = random.uniform(0, TIME_S)
    if kind_of_target < 0.15:
        kind = random.choice(OF_SERVER)
        return Fault(target=SERVER, kind=kind, at_s=at_s, seconds=_between(random, *DOWN_S))
    if kind_of_target < 0.3:
        return Fault(target=random.choice(engines), kind=random.choice(AT_TIMES), at_s=at_s, seconds=_frozen_s(random))
    target = random.choice(actors)
    if kind_of_target < 0.45:
        return Fault(target=target, kind=random.choice(OF_ACTORS), at_s=at_s, seconds=_frozen_s(random))
    kind = random.choice(AT_CALLS)
    seconds = random.uniform(-JUMP_S, JUMP_S) if kind == "clock jumps" else _frozen_s(random)
    return Fault(target=target, kind=kind, call=random.randint(1, CALLS), seconds=seconds)


def _frozen_s(random: Random) -> float:
    return _between(random, *FROZEN_S)


def _between(random: Random, low: float, high: float) -> float:
    return low * (high / low) ** random.random()  # short ones as often as long ones


class CallFaults:
    """Carries out the faults at calls of the bus."""

    def __init__(self, faults: list[Fault], note: Callable[[str], None]) -> None:
        self.num_calls: Counter[str] = Counter()
        self.is_over = False
        self.points: set[str] = set()  # what was struck where
        self._note = note
        self._due = {(fault.target, fault.call): fault for fault in faults if fault.call}
        self._after: Fault | None = None

    def before(self, process: Process, subject: str) -> None:
        """A process is about to send."""
        if self.is_over:
            return
        self.num_calls[process.name] += 1
        fault = self._due.get((process.name, self.num_calls[process.name]))
        if fault is None:
            return
        self._note(f"{fault}: {subject}")
        self.points.add(f"{process.name} {fault.kind} {_kind_of(subject)}")
        match fault.kind:
            case "dies before":
                process.kill()
            case "freezes":
                process.freeze(fault.seconds)
            case "is replaced":
                process.replace(fault.seconds)
            case "clock jumps":
                process.clock_ahead_s += fault.seconds
            case _:
                self._after = fault

    def after(self, process: Process, subject: str, link: Link | None) -> None:
        """A process has sent."""
        fault, self._after = self._after, None
        if fault is None:
            return
        if fault.kind == "dies after":
            process.kill()
        elif link is not None:
            link.send(lambda link: link.break_off("connection reset"))


def _kind_of(subject: str) -> str:
    """A subject without numbers and ids."""
    if "_INBOX" in subject:
        return "answer"
    return ".".join(token for token in subject.split(".")[:6] if not token.isdigit() and len(token) < 20)
