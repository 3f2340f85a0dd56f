"""Whether a run directory and the streams on the bus are of one run: an id made once, kept in both and compared."""

import socket
import uuid
from enum import Enum, auto
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from runtime.agent.claims.node_claim import holders, place_of
from runtime.bus.bus import Bus
from runtime.bus.errors import SequenceMismatch
from runtime.files import write_atomically

log = structlog.get_logger()

RUN_ID_FILE: Final = "run-id.json"
KEY: Final = "run"  # in the run's bucket
ATTEMPTS: Final = 5  # of several nodes that start at the same time


class IdInDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """What a run directory says of its run."""

    id: str
    joined: bool  # the id was seen on a bus; until then it is a proposal


class IdOnBus(msgspec.Struct, frozen=True, kw_only=True):
    """What the bus says of the run whose streams it has."""

    id: str
    owned: bool  # the directory of the node that owns the streams has it
    made_in: str  # the first run directory, and its host, to be shown


class Decision(Enum):
    """What becomes of a start."""

    GO_ON = auto()  # directory and streams are of one run
    TAKE = auto()  # the streams are new: they get the directory's id
    ADOPT = auto()  # this node joins the run that the streams are of
    GONE = auto()  # the directory's streams are not on this bus, or a part of them
    FOREIGN = auto()  # the streams are of another directory


class RunMismatch(Exception):
    """A run directory and the streams of its name are not of one run; the text says what to do."""


def decide(
    directory: IdInDirectory | None, bus: IdOnBus | None, *, owns: bool, used: bool = False, whole: bool = True
) -> Decision:
    """Compare both ids.

    Args:
        owns: this is the node whose directory the streams go with. Another one may join with a directory of its own.
        used: something was stored in the streams.
        whole: all streams are there.
    """
    if bus is None:
        if directory is not None and directory.joined:
            return Decision.GONE
        return Decision.FOREIGN if used else Decision.TAKE
    if directory is not None and directory.id == bus.id:
        return Decision.GO_ON if whole else Decision.GONE
    if directory is not None and directory.joined:
        return Decision.FOREIGN
    return Decision.FOREIGN if owns and bus.owned else Decision.ADOPT


async def check_run_id(bus: Bus, run_dir: Path, *, owns: bool) -> None:
    """Compare the ids before anything is made or claimed.

    Raises:
        RunMismatch: they are not of one run.
        BusError: the bus cannot be read.
    """
    held = await bus.holdings()
    entry = await bus.kv.get(KEY, IdOnBus) if held.has_bucket else None
    on_bus = None if entry is None else entry.value
    decision = decide(id_in(run_dir), on_bus, owns=owns, used=held.used, whole=held.whole)
    await _refuse(decision, bus, run_dir, on_bus)


async def settle_run_id(bus: Bus, run_dir: Path, *, owns: bool) -> str:
    """Compare them again, now that the streams are there and the node is claimed, and enter the id in both; return it.

    May be interrupted anywhere: the directory proposes an id before the bus gets it, and says so once it has.

    Raises:
        RunMismatch: somebody else took the streams, or deleted them, in between.
        BusError: the bus cannot be read or written.
    """
    for _ in range(ATTEMPTS):
        ours = id_in(run_dir)
        entry = await bus.kv.get(KEY, IdOnBus)
        on_bus = None if entry is None else entry.value
        decision = decide(ours, on_bus, owns=owns)
        await _refuse(decision, bus, run_dir, on_bus)
        run_id = on_bus.id if on_bus is not None else ours.id if ours is not None else uuid.uuid4().hex
        if ours is None or ours.id != run_id:
            _keep(run_dir, run_id, joined=False)
        try:
            if entry is None or on_bus is None:
                place = f"{await anyio.Path(run_dir).resolve()} on {socket.gethostname()}"
                await bus.kv.create(KEY, IdOnBus(id=run_id, owned=owns, made_in=place))
            elif owns and not on_bus.owned:
                await bus.kv.update(KEY, msgspec.structs.replace(on_bus, owned=True), entry.revision)
        except SequenceMismatch:
            continue  # another node was quicker
        _keep(run_dir, run_id, joined=True)
        log.info("run_id_compared", run_id=run_id, decision=decision.name.lower())
        return run_id
    raise RunMismatch(f"run {bus.run}: others keep entering its id on the bus; start again")


def id_in(run_dir: Path) -> IdInDirectory | None:
    """What the directory says; None if it was never used.

    Raises:
        RunMismatch: the file was edited.
    """
    path = run_dir / RUN_ID_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=IdInDirectory)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:  # a ValidationError is one
        raise RunMismatch(f"{path} cannot be read ({error}): it was edited, or written by another version") from error


def _keep(run_dir: Path, run_id: str, *, joined: bool) -> None:
    content = msgspec.json.encode(IdInDirectory(id=run_id, joined=joined))
    write_atomically(run_dir / RUN_ID_FILE, content + b"\n")


async def _refuse(decision: Decision, bus: Bus, run_dir: Path, on_bus: IdOnBus | None) -> None:
    instead = f"choose another run.name, or start over with --fresh {bus.run}"
    if decision is Decision.GONE:
        raise RunMismatch(
            f"{run_dir} holds a run whose streams are not on this bus, or not all of them: its checkpoints alone do "
            f"not resume it; use the bus that it ran on, {instead}"
        )
    if decision is Decision.FOREIGN:
        whose = "were discarded in part" if on_bus is None else f"belong to {on_bus.made_in}"
        held = [] if on_bus is None else await holders(bus)
        at_work = "".join(f"; node {node} of it is run by {place_of(holder)}" for node, holder in held)
        raise RunMismatch(
            f"the streams of run {bus.run} on this bus {whose}, not to {run_dir}{at_work}; "
            f"resume that run there, {instead}"
        )
