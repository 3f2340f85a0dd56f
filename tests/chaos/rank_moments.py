"""Moments of a train step and of a checkpoint at which a rank of the trainer kills or stops itself, once.

`moments/sitecustomize.py` puts them into a rank's process, and those of weight sessions (session_moments.py) into all
that take part in these. Which ones: `planned`, in the environment of the run.
"""

import functools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

VARIABLE: Final = "PHYSARUM_TEST_MOMENTS"
PROCESS: Final = "PHYSARUM_PROCESS"  # whose value is the name of each process of a run
GATE: Final = "closed"  # among the marks, from a moment on until the test opens it
FOLDER: Final = Path(__file__).with_name("moments")


class Moment(msgspec.Struct, frozen=True):
    """Where a process meets its end: in which train step, in the checkpoint of how many, with which weights."""

    what: str  # as `install` has it, or session_moments.py
    step: int
    process: str
    signal: str = "SIGKILL"

    @property
    def name(self) -> str:
        return f"{self.what}-{self.step}-{self.process}-{self.signal}"


class Planned(msgspec.Struct, frozen=True):
    """What is to happen in a run."""

    moments: tuple[Moment, ...]
    marks: str  # directory that gets a file for each moment that has come
    in_turn: bool = False


def planned(moments: Sequence[Moment], marks: Path, *, in_turn: bool = False) -> dict[str, str]:
    """The environment of a run whose processes are to meet these moments.

    Args:
        moments: of any order.
        marks: directory for a file of each that has come.
        in_turn: each comes at the first time that is possible from its step on, after the one before it; and not before
            the test has removed the file GATE, which each puts among the marks.
    """
    plan = msgspec.json.encode(Planned(tuple(moments), str(marks), in_turn)).decode()
    return {VARIABLE: plan, "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))}


class Place(NamedTuple):
    """A method, and whether the moment is before or after it."""

    owner: Any
    method: str
    after: bool


class _Now:
    """Where this rank is."""

    step = -1  # that is trained
    trains = False  # in the pass whose gradients count
    saved = -1  # train steps in the checkpoint that is written


Strike = Callable[[str, int], None]  # what is about to happen, and its step


def striker() -> Strike:
    """What kills this process, or stops it, where that is planned."""
    plan = msgspec.json.decode(os.environ[VARIABLE], type=Planned)
    return functools.partial(_strike, plan, os.environ[PROCESS])


def install(strike: Strike) -> None:
    """Put moments of train steps and checkpoints into the trainer's classes."""
    from torch.optim import AdamW

    from actors.trainer.megatron.rank_model import Replica
    from actors.trainer.megatron.saving import Saving, _WritesLater
    from actors.trainer.step.train_step import TrainStep

    around(TrainStep, "__call__", before=lambda _, batch: setattr(_Now, "step", batch.step))
    around(
        Replica,
        "backward",
        before=lambda *_args, **_options: setattr(_Now, "trains", True),
        after=lambda _: setattr(_Now, "trains", False),
    )
    around(Replica, "_forward_step", after=lambda answer: _passing(answer[0], strike))
    around(AdamW, "step", after=lambda _: strike("optimizer", _Now.step))
    around(Saving, "__init__", before=lambda _self, _state, path, *_, **__: setattr(_Now, "saved", _number(path)))
    for what, place in {
        "copied": Place(Saving, "__init__", after=True),
        "before its files": Place(_WritesLater, "write", after=False),
        "before its report": Place(_WritesLater, "report", after=False),
        "after its report": Place(_WritesLater, "report", after=True),
        "named": Place(Saving, "finish", after=True),
    }.items():

        def come(*_args: Any, what: str = what, **_options: Any) -> None:
            strike(what, _Now.saved)

        around(place.owner, place.method, **{"after" if place.after else "before": come})


def _passing(output: Any, strike: Strike) -> None:
    """After the forward pass of a micro-batch; its gradient comes by in the backward pass."""
    if not _Now.trains:
        return
    strike("forward", _Now.step)
    tensor = output[0] if isinstance(output, tuple) else output
    if tensor.requires_grad:
        tensor.register_hook(lambda _: strike("backward", _Now.step))


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def around(
    owner: Any, method: str, *, before: Callable[..., object] | None = None, after: Callable[..., object] | None = None
) -> None:
    """Call something before a method, with its arguments, or after it, with its answer."""
    right = getattr(owner, method)

    @functools.wraps(right)
    def wrapped(*args: Any, **options: Any) -> Any:
        if before is not None:
            before(*args, **options)
        answer = right(*args, **options)
        if after is not None:
            after(answer)
        return answer

    setattr(owner, method, wrapped)


def _strike(plan: Planned, process: str, what: str, step: int) -> None:
    """Die here, if that is planned and has not happened yet."""
    marks = Path(plan.marks)
    left = [moment for moment in plan.moments if not (marks / moment.name).exists()]
    if plan.in_turn:
        left = [] if (marks / GATE).exists() else left[:1]
    for moment in left:
        due = step >= moment.step if plan.in_turn else step == moment.step
        if due and (moment.what, moment.process) == (what, process):
            if plan.in_turn:
                (marks / GATE).touch()
            (marks / moment.name).touch()
            os.kill(os.getpid(), signal.Signals[moment.signal])
