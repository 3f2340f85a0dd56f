"""Kill points in a train step or checkpoint, at which a trainer rank kills or stops itself once.

`moments/sitecustomize.py` installs them in a rank's process. It also installs those of weight syncs
(weight_moments.py) in all processes that take part in one. `planned` sets them in the environment of the run.
"""

import functools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

VARIABLE: Final = "PHYSARUM_TEST_MOMENTS"
PROCESS: Final = "PHYSARUM_PROCESS"  # environment variable with the name of each process of a run
GATE: Final = "closed"  # file among the marks: exists from a kill point on until the test removes it
FOLDER: Final = Path(__file__).with_name("moments")


class Moment(msgspec.Struct, frozen=True):
    """A kill point of one process. `step` is a train step, the step of a checkpoint, or a weight version."""

    what: str  # name of the kill point in `install` or weight_moments.py
    step: int
    process: str
    signal: str = "SIGKILL"

    @property
    def name(self) -> str:
        return f"{self.what}-{self.step}-{self.process}-{self.signal}"


class Planned(msgspec.Struct, frozen=True):
    """Kill points of a run."""

    moments: tuple[Moment, ...]
    marks: str  # directory that gets a file for each kill point reached
    in_turn: bool = False


def planned(moments: Sequence[Moment], marks: Path, *, in_turn: bool = False) -> dict[str, str]:
    """Build the environment of a run with kill points.

    Args:
        moments: Kill points, in any order unless in_turn.
        marks: Directory for a file of each kill point reached.
        in_turn: Take the kill points one after another. Each strikes at its first opportunity from its step on, and
            creates the file GATE among the marks. The next one waits until the test has removed that file.
    """
    plan = msgspec.json.encode(Planned(tuple(moments), str(marks), in_turn)).decode()
    return {VARIABLE: plan, **with_moments()}


def with_moments() -> dict[str, str]:
    """Environment in which `moments/sitecustomize.py` is imported."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))}


class Place(NamedTuple):
    """A method, and whether the kill point is before or after it."""

    owner: Any
    method: str
    after: bool


class _Now:
    """Current position of this rank."""

    step = -1  # train step
    trains = False  # True in the pass that computes the gradients
    saved = -1  # train steps in the checkpoint being written


def train_step() -> int:
    """Return the train step that this rank is at."""
    return _Now.step


Strike = Callable[[str, int], None]  # takes the name of the kill point and its step


def striker() -> Strike:
    """Return the function that kills or stops this process at its planned kill points."""
    return functools.partial(_strike, msgspec.json.decode(os.environ[VARIABLE], type=Planned))


def install(strike: Strike) -> None:
    """Install kill points of train steps and checkpoints in the trainer's classes."""
    from torch.optim import AdamW

    from actors.trainer.megatron.rank_model import Replica
    from actors.trainer.megatron.saving import Saving, _DeferredWriter
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
        "before its files": Place(_DeferredWriter, "write", after=False),
        "before its report": Place(_DeferredWriter, "report", after=False),
        "after its report": Place(_DeferredWriter, "report", after=True),
        "named": Place(Saving, "finish", after=True),
    }.items():

        def come(*_args: Any, what: str = what, **_options: Any) -> None:
            strike(what, _Now.saved)

        around(place.owner, place.method, **{"after" if place.after else "before": come})


def _passing(output: Any, strike: Strike) -> None:
    """Strike after the forward pass of a micro-batch, and when its gradient passes in the backward pass."""
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
    """Wrap a method: call `before` with its arguments, and `after` with its result."""
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


def _strike(plan: Planned, what: str, step: int) -> None:
    """Signal this process if the kill point is planned and has not been reached before."""
    process = os.environ.get(PROCESS)  # a forked process has its name only now
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
