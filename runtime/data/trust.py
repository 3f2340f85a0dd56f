"""Code named by a dump: another user's topology.json imports nothing unless the user allows it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from runtime.data.dump_files import TOPOLOGY_FILE
from runtime.settings.derived import EVAL_FUNCTIONS, trainer_functions
from runtime.settings.load import LoadedTopology
from runtime.settings.plugins import is_plugin
from runtime.settings.reading.config import Problem
from runtime.settings.reading.toml import SET
from runtime.settings.topology import Topology
from runtime.util.formatting import show

Target = Literal["filter", "batch", "trainer"]
TRUST: Final = "--trust"
WRITABLE_BY_OTHERS: Final = 0o022


def untrusted_code(loaded: LoadedTopology, target: Target) -> list[Problem]:
    """Return problems for functions that a replay would import and the user did not set with --set.

    Args:
        loaded: the topology of another user's dump.
        target: where the replay sends the dump.
    """
    return [
        Problem(
            key=key,
            value=value,
            message=f"only the dump names this code: read it, then allow it with {TRUST}, or replace it with {SET}",
            file=loaded.loaded.origin(key),
        )
        for key, value in _code_of(loaded.topology, target)
        if loaded.loaded.origin(key) != SET
    ]


def is_own_dump(dump: Path, runs: Path) -> bool:
    """Return whether this user wrote a dump below a directory of runs, and no other user can write it.

    Args:
        dump: its directory; symbolic links are resolved.
        runs: the configured run.dir.
    """
    place = Path(os.path.realpath(dump))
    if not place.is_relative_to(os.path.realpath(runs)):
        return False
    try:
        stats = [path.stat() for path in (place, place / TOPOLOGY_FILE)]
    except OSError:
        return False
    return all(found.st_uid == os.geteuid() and not found.st_mode & WRITABLE_BY_OTHERS for found in stats)


def _code_of(topology: Topology, target: Target) -> Iterator[tuple[str, str]]:
    """Yield the keys and values that name code which the target imports."""
    rollout = topology.rollout
    named: dict[str, str | None] = {"rollout.dynamic_filter": rollout.dynamic_filter}
    if target != "filter":
        named["rollout.over_sampling_filter"] = rollout.over_sampling_filter
        named["rollout.buffer_filter"] = rollout.buffer_filter
    if target == "trainer":
        named["rollout.custom_generate"] = rollout.custom_generate
        named["rollout.custom_rollout"] = rollout.custom_rollout
        for index, data in enumerate(topology.data):
            named |= {f"data.{index}.source": data.source, f"data.{index}.rm_type": data.rm_type}
            named[f"data.{index}.source_class"] = data.source_class
        named |= dict(trainer_functions(topology))
        for index, item in enumerate(topology.eval):
            named |= {f"eval.{index}.{name}": getattr(item, name) for name in EVAL_FUNCTIONS}
        named |= {f"reward.graders.{name}": value for name, value in topology.reward.graders.items()}
        named |= {f"reward.judges.{name}.parser": judge.parser for name, judge in topology.reward.judges.items()}
    yield from ((key, show(value)) for key, value in named.items() if value is not None and is_plugin(value))
    if target == "trainer" and topology.model.trust_remote_code:
        yield "model.trust_remote_code", "true"
