"""From a topology file to a checked Topology with its paths found."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from runtime.settings.halves import half_of
from runtime.settings.reading.config import TopologyError
from runtime.settings.reading.toml import SET, Loaded, convert, load_tables
from runtime.settings.rules.validate import validate
from runtime.settings.slices import split_slice
from runtime.settings.topology import Topology


class LoadedTopology(msgspec.Struct, frozen=True, kw_only=True):
    """A valid topology and where its keys came from. Paths that exist here are absolute."""

    topology: Topology
    loaded: Loaded


def load_topology(path: Path, overrides: Sequence[str] = ()) -> LoadedTopology:
    """Read, merge, type and cross-check a topology file; opens no data file and asks for no GPU.

    A relative path in a file is looked up beside that file, then beside `path`, then in the current directory; one
    from an override in the current directory, then beside `path`. The first place that has it wins and the path
    becomes absolute; a path found nowhere stays as it is, since it may be a hub name or exist on another node.
    `run.dir` and `run.dump_details` belong to the current directory.

    Raises:
        TopologyError: every problem found, each with file, key, value and what is allowed.
    """
    loaded = load_tables(path, overrides, Topology)
    topology = half_of(convert(loaded, Topology))
    problems = [msgspec.structs.replace(problem, file=loaded.origin(problem.key)) for problem in validate(topology)]
    if problems:
        raise TopologyError(problems)
    return LoadedTopology(topology=_find_paths(topology, loaded), loaded=loaded)


def places(loaded: Loaded, key: str) -> tuple[Path, ...]:
    """Directories in which the relative path under a key is looked up, in order."""
    origin = loaded.origin(key)
    beside = loaded.files[-1].parent.resolve()
    found = (Path.cwd(), beside) if origin == SET else (Path(origin).parent.resolve(), beside, Path.cwd())
    return tuple(dict.fromkeys(found))


def _find_paths(topology: Topology, loaded: Loaded) -> Topology:
    def find(key: str, value: str) -> str:
        candidates = (place / value for place in places(loaded, key))
        return next((str(candidate.resolve()) for candidate in candidates if candidate.exists()), value)

    def optional(key: str, value: str | None) -> str | None:
        return None if value is None else find(key, value)

    def data_file(key: str, value: str) -> str:
        found = find(key, value)
        file, rows = split_slice(found)
        return f"{find(key, file)}{rows}" if rows else found

    def plug_in(key: str, value: str | None) -> str | None:
        file, colon, function = (value or "").rpartition(":")
        return f"{find(key, file)}:{function}" if colon and file.endswith(".py") else value

    model, rollout, run = topology.model, topology.rollout, topology.run
    return msgspec.structs.replace(
        topology,
        model=msgspec.structs.replace(
            model,
            hf_checkpoint=find("model.hf_checkpoint", model.hf_checkpoint),
            ref_load=optional("model.ref_load", model.ref_load),
        ),
        data=tuple(
            msgspec.structs.replace(
                item,
                path=None if item.path is None else data_file(f"data.{index}.path", item.path),
                source=plug_in(f"data.{index}.source", item.source),
                rm_type=plug_in(f"data.{index}.rm_type", item.rm_type),
            )
            for index, item in enumerate(topology.data)
        ),
        eval=tuple(
            msgspec.structs.replace(
                item,
                path=data_file(f"eval.{index}.path", item.path),
                rm_type=plug_in(f"eval.{index}.rm_type", item.rm_type),
            )
            for index, item in enumerate(topology.eval)
        ),
        rollout=msgspec.structs.replace(
            rollout,
            dynamic_filter=plug_in("rollout.dynamic_filter", rollout.dynamic_filter),
            custom_generate=plug_in("rollout.custom_generate", rollout.custom_generate),
            over_sampling_filter=plug_in("rollout.over_sampling_filter", rollout.over_sampling_filter),
            buffer_filter=plug_in("rollout.buffer_filter", rollout.buffer_filter) or "fifo",
        ),
        run=msgspec.structs.replace(
            run,
            dir=str(Path(run.dir).resolve()),
            dump_details=None if run.dump_details is None else str(Path(run.dump_details).resolve()),
            load=optional("run.load", run.load),
        ),
    )
