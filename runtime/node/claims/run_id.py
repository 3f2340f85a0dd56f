"""The run id: stored in the run directory and on the bus, to check that both belong to the same run."""

import socket
import uuid
from enum import Enum, auto
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from runtime.bus.bus import Bus
from runtime.bus.errors import SequenceMismatch
from runtime.node.claims.node_claim import holders, place_of
from runtime.util.files import write_atomically

log = structlog.get_logger()

RUN_ID_FILE: Final = "run-id.json"
KEY: Final = "run"  # in the run's bucket
ATTEMPTS: Final = 5  # when several nodes start at the same time


class IdInDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """The run id in a run directory."""

    id: str
    joined: bool  # the id was stored on a bus; before that it is a proposal


class IdOnBus(msgspec.Struct, frozen=True, kw_only=True):
    """The run id on the bus, next to the run's streams."""

    id: str
    owned: bool  # the directory of the node that owns the streams has this id
    made_in: str  # first run directory and its host, for messages


class Decision(Enum):
    """Result of the comparison of both ids at a start."""

    GO_ON = auto()  # directory and streams belong to one run
    TAKE = auto()  # the streams are new and get the directory's id
    ADOPT = auto()  # this node joins the run of the streams
    GONE = auto()  # some or all of the directory's streams are not on this bus
    FOREIGN = auto()  # the streams belong to another directory


class RunMismatch(Exception):
    """A run directory and the streams of its name belong to different runs. The text says what to do."""


def decide(
    directory: IdInDirectory | None, bus: IdOnBus | None, *, owns: bool, used: bool = False, whole: bool = True
) -> Decision:
    """Decide what a start does, from the run ids in the directory and on the bus.


    Args:
        owns: this node's directory belongs with the streams. Other nodes may join with their own directories.
        used: the streams contain messages.
        whole: all streams exist.
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
    """Compare the run ids of the directory and the bus, before anything is created or claimed.

    Raises:
        RunMismatch: the directory and the bus belong to different runs.
        BusError: the bus cannot be read.
    """
    held = await bus.holdings()
    entry = await bus.kv.get(KEY, IdOnBus) if held.has_bucket else None
    on_bus = None if entry is None else entry.value
    decision = decide(id_in(run_dir), on_bus, owns=owns, used=held.used, whole=held.whole)
    await _refuse(decision, bus, run_dir, on_bus)


async def settle_run_id(bus: Bus, run_dir: Path, *, owns: bool) -> str:
    """Compare the ids again, after the streams exist and the node is claimed; store the id in both and return it.

    It may be interrupted at any point: the directory stores a proposal before the bus gets the id, and confirms it
    afterwards.

    Raises:
        RunMismatch: another daemon took or deleted the streams in between.
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
            continue  # another node was faster
        _keep(run_dir, run_id, joined=True)
        log.info("run_id_compared", run_id=run_id, decision=decision.name.lower())
        return run_id
    raise RunMismatch(f"run {bus.run}: other starts keep changing its id on the bus; start again")


def id_in(run_dir: Path) -> IdInDirectory | None:
    """Return the id in a directory; None if it was never used.

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
            f"{run_dir} holds a run whose streams are not on this bus, or not all of them, and checkpoints alone do "
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
