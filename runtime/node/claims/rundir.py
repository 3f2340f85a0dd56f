"""The run directory: create, resume, start over, or refuse; its incarnation counts the starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from runtime.node.claims.claim import Claim, RunClaimed, refuse_claimed
from runtime.report.summary import Result
from runtime.settings.placement import bus_node, home_node
from runtime.settings.topology import Topology, decode_topology, encode_topology
from runtime.util.files import write_atomically

TOPOLOGY_FILE = "topology.json"
TOPOLOGY_VARIABLE = "PHYSARUM_TOPOLOGY"  # name of this file for actors of a node that does not own the directory
NODE_TOPOLOGY_FILE = "topology-{}.json"  # of such a node
RESULT_FILE = "result.json"
METRICS_FILE = "metrics.jsonl"
BUS_FILE = "bus.url"  # URL of the run's bus, for users and tools

FORMAT_FILE = "format"
FORMAT: Final = 2  # of what a run stores; raised when a version cannot continue the runs of earlier ones
LAST_RELEASE: Final = {"1": "0.1.0 (2026-11-23)"}  # that continues a run of an earlier format; 1 had no file

# Settings that a resumed run may change, in addition to those of where it runs.
HARMLESS = frozenset(
    {
        "train.num_steps",
        "train.save_interval",
        "train.keep_checkpoints",
        "train.max_tokens_per_gpu",
        "train.max_skipped",
        "train.skip_window",
        "train.max_skipped_share",
    }
)
PLACES = "rollout.nodes"  # where the run runs
LASTING = (
    "model",
    "data",
    "rollout",
    "algorithm",
    "optimizer",
    "critic",
    "train",
    "eval",
    "run.seed",
    "run.only",
    "run.load",
)
LASTING_OF_REWARD = ("reward.on_failure", "reward.failures", "reward.reward_key", "reward.group_rm")
LASTING_OF_TRAINER = ("trainer.load", "trainer.load_weights_only")


INCARNATION_FILE = "incarnation"


def raise_incarnation(run_dir: Path, node: str | None = None) -> int:
    """Count this start and return its number, from 1. The directory must be claimed.

    Args:
        run_dir: of the run.
        node: of a shared directory, where each node counts its own starts.
    """
    path = run_dir / (INCARNATION_FILE if node is None else f"{INCARNATION_FILE}-{node}")
    incarnation = (int(path.read_text()) if path.exists() else 0) + 1
    write_atomically(path, f"{incarnation}\n".encode())
    return incarnation


class RunRefused(Exception):
    """The run cannot be started. The text says why and what to do."""


class StoredResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the run when its daemon last ended."""

    finished: bool
    result: Result


def check_start(
    topology: Topology, fresh: str | None, node: str, *, join: Path | None = None, take_over: bool = False
) -> None:
    """Check the options and the run directory as a start would, without writing.

    Args:
        topology: topology of the run.
        fresh: name of the run to discard, "" for none; None: resume the run.
        node: the node to start.
        join: join file of the run.
        take_over: become home although another machine holds the lease.

    Raises:
        RunRefused: a start would be refused.
    """
    refuse_unused(topology, node, join=join, take_over=take_over)
    run, run_dir = topology.run.name, Path(topology.run.dir) / topology.run.name
    if fresh and fresh != run:
        raise RunRefused(f"--fresh {fresh}: this topology's run is {run}; nothing was discarded")
    is_home = node == home_node(topology)  # the directory belongs to that node; others may share it
    if fresh == "" and is_home and (run_dir / TOPOLOGY_FILE).exists():
        raise RunRefused(f"{run_dir} exists; to discard that run and start over, name it: --fresh {run}")
    try:
        refuse_claimed(run_dir, claimed_node(topology, node))
    except RunClaimed as error:
        raise RunRefused(str(error)) from error
    if fresh is None and is_home:
        changes_since(run_dir, topology)


def refuse_unused(topology: Topology, node: str, *, join: Path | None, take_over: bool) -> None:
    """Refuse an option that would have no effect on this node.

    Raises:
        RunRefused: names the option and the reason.
    """
    bus = bus_node(topology)
    if join is not None and bus is None:
        raise RunRefused(f"--join {join}: the topology names the bus (bus.url); leave --join out")
    if join is not None and bus == node:
        raise RunRefused(f"--join {join}: node {bus} starts the bus itself; leave --join out")
    if take_over and (bus is None or len(topology.nodes) == 1):
        which = "several nodes, one of which starts the bus (no bus.url)"
        raise RunRefused(f"--take-over: only a topology of {which}, has a lease to take over; leave --take-over out")
    if take_over and bus != node:
        raise RunRefused(f"--take-over: node {node} holds no lease; only node {bus}, which starts the bus, does")


def claimed_node(topology: Topology, node: str) -> str | None:
    """Return the node whose part of the run directory is claimed; None: the whole directory, for a single node."""
    return node if len(topology.nodes) > 1 else None


def prepare(claim: Claim, topology: Topology) -> list[str]:
    """Prepare a claimed directory for a start of this topology; return the changes since the last start.

    Raises:
        RunRefused: the run began with another recipe, or with a version whose runs this one does not continue.
    """
    changes = changes_since(claim.run_dir, topology)
    if topology_in(claim.run_dir) is None:
        write_atomically(claim.run_dir / FORMAT_FILE, f"{FORMAT}\n".encode())
    write_atomically(claim.run_dir / TOPOLOGY_FILE, encode_topology(topology))
    return changes


def changes_since(run_dir: Path, topology: Topology) -> list[str]:
    """Return the settings that differ from those of the last start.

    Raises:
        RunRefused: the run began with another recipe, or with a version whose runs this one does not continue.
    """
    path = run_dir / TOPOLOGY_FILE
    if not path.exists():
        return []
    _refuse_other_format(run_dir)
    return _accepted_changes(run_dir, _stored(path), topology)


def _refuse_other_format(run_dir: Path) -> None:
    path = run_dir / FORMAT_FILE
    found = path.read_text(errors="replace").strip() if path.exists() else "1"
    if found == str(FORMAT):
        return
    release = LAST_RELEASE.get(found)
    able = f"the last release that continues it is {release}" if release else "only the version that began it does"
    raise RunRefused(
        f"{run_dir} holds a run of format {found!r}, and this version continues format {FORMAT}; {able}; "
        f"choose another run.name, or start over with --fresh {run_dir.name}"
    )


def topology_in(run_dir: Path) -> bytes | None:
    """Return the encoded topology of the last start; None if there was none."""
    path = run_dir / TOPOLOGY_FILE
    return path.read_bytes() if path.exists() else None


def put_back(claim: Claim, topology: bytes | None) -> None:
    """Undo `prepare`, after a start was refused."""
    path = claim.run_dir / TOPOLOGY_FILE
    if topology is None:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, topology)


def wants_more_steps(run_dir: Path, topology: Topology) -> bool:
    """Return whether this topology has more train steps than the last start.

    Raises:
        RunRefused: the topology of the last start cannot be read.
    """
    path = run_dir / TOPOLOGY_FILE
    return path.exists() and topology.train.num_steps > _stored(path).train.num_steps


def stored_result(run_dir: Path) -> StoredResult | None:
    """Return the stored result; None if the run never ended."""
    path = run_dir / RESULT_FILE
    return msgspec.json.decode(path.read_bytes(), type=StoredResult) if path.exists() else None


def store_result(run_dir: Path, result: StoredResult) -> None:
    """Store the result of the run."""
    write_atomically(run_dir / RESULT_FILE, msgspec.json.encode(result) + b"\n")


def differences(before: Topology, after: Topology) -> list[tuple[str, Any, Any]]:
    """Return dotted keys whose values differ, with both values."""
    return differing(msgspec.to_builtins(before), msgspec.to_builtins(after))


def differing(before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """Return dotted keys whose values differ, with both values, of nested dicts and lists."""
    return list(_differences("", before, after))


def _stored(path: Path) -> Topology:
    try:
        return decode_topology(path.read_bytes())
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise RunRefused(f"{path} cannot be read ({error}): it was edited, or written by another version") from error


def _accepted_changes(run_dir: Path, before: Topology, after: Topology) -> list[str]:
    changed = differences(before, after)
    lines = {key: f"{key}: {_shown(old)} → {_shown(new)}" for key, old, new in changed if not key.startswith("run.dir")}
    refused = [line for key, line in lines.items() if _lasts(key)]
    if refused:
        listed = "\n".join(f"  {line}" for line in refused)
        raise RunRefused(
            f"{run_dir} holds a run with another recipe:\n{listed}\n"
            "to resume it, write the values before the arrows, defaults of an earlier version too; otherwise choose "
            f"another run.name, or start over with --fresh {run_dir.name}"
        )
    return list(lines.values())


def _lasts(key: str) -> bool:
    if key in HARMLESS or key.startswith(PLACES):
        return False
    return key.startswith((*LASTING_OF_REWARD, *LASTING_OF_TRAINER)) or any(
        key == table or key.startswith(f"{table}.") for table in LASTING
    )


def _differences(key: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        names: list[str] = list(dict.fromkeys([*before, *after]))  # pyright: ignore[reportUnknownArgumentType]
        for name in names:
            yield from _differences(f"{key}.{name}" if key else name, before.get(name), after.get(name))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple) and len(before) == len(after):  # pyright: ignore[reportUnknownArgumentType]
        for index, (old, new) in enumerate(zip(before, after, strict=True)):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            yield from _differences(f"{key}.{index}", old, new)
    elif before != after:
        yield key, before, after


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()
