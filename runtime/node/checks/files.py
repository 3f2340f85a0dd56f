"""Checks the paths of a topology: models, data, dumps, and the run directory."""

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import msgspec

from runtime.data.data_files import DataError
from runtime.data.dump_files import RUN_FILE, DumpedRun
from runtime.data.rows import read_rows
from runtime.models.directory import CONFIG, VOCABULARIES, ModelError, check_links, has_file
from runtime.models.safetensors import INDEX_FILE, SINGLE_FILE
from runtime.node.checks.context import MODEL, CheckContext
from runtime.node.checks.hub import NotOnHub, hub_models, offer
from runtime.settings.derived import eval_data
from runtime.settings.load import default_dtype
from runtime.settings.reading.config import Problem
from runtime.settings.sizes import min_free_bytes, show_bytes, stream_sizes
from runtime.settings.slices import split_slice
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.topology import EXPORT_DIRECTORY, NamedModel, Topology, named_models
from runtime.util.disk import free_bytes
from runtime.util.formatting import show
from runtime.util.import_path import command_name
from runtime.util.secrets import read_login

CHECKED_ROWS: Final = 10_000  # per data file; the buffer reads all rows
WEIGHTS: Final = (SINGLE_FILE, INDEX_FILE)


def check_paths(context: CheckContext) -> Iterator[Problem]:
    """Check every path of the topology that processes of this node read or write."""
    topology, roles = context.topology, context.roles
    if roles.is_home:
        found = default_dtype(context.loaded.loaded, topology.model)
        if found is not None and found.note:
            context.notes.append(f"model.dtype is unset: {found.dtype}, {found.note}")
    for model in named_models(topology):
        opens = roles.trains if model.pool is None else model.pool in roles.pools
        if roles.needs_model if model.key == MODEL else opens or roles.is_home:
            yield from _model(context, model)
    if roles.is_home or topology.train.num_epoch is not None:  # epochs are counted on every node
        for index, data in enumerate(topology.data):
            yield from _data(context, f"data.{index}", data)
        for index, item in enumerate(topology.eval):
            yield from _data(context, f"eval.{index}", eval_data(topology, item))
    if roles.is_home:
        yield from _dumps(context)
    yield from _credentials(context)
    yield from _run_dir(context)


def paths_of(topology: Topology) -> Iterator[str]:
    """Yield the keys of the paths that must exist."""
    yield from (model.key for model in named_models(topology))
    named = {f"data.{index}.path": item.path for index, item in enumerate(topology.data)}
    named |= {f"eval.{index}.path": item.path for index, item in enumerate(topology.eval)}
    named |= {"run.load": topology.run.load, "run.dir": topology.run.dir, "bus.credentials": topology.bus.credentials}
    yield from (key for key, value in named.items() if value is not None)


def _model(context: CheckContext, model: NamedModel) -> Iterator[Problem]:
    key, value, directory = model.key, model.name, Path(model.name)
    if key in context.coming:
        return
    if model in hub_models(context.loaded):
        yield from _on_hub(context, model)
        return
    if not directory.is_dir():
        yield from _no_directory(context, key, value)
        return
    try:
        check_links(directory)
        for problem in _absent_files(directory, tokenizer=key == MODEL, weights=model.weights):
            yield Problem.of(key, value, problem)
    except ModelError as error:
        yield Problem.of(key, value, str(error))


def _absent_files(directory: Path, *, tokenizer: bool, weights: bool) -> Iterator[str]:
    """Yield what a model directory lacks. Raises ModelError as `has_file` does."""
    if not has_file(directory, CONFIG):
        yield f"no {CONFIG} in this directory"
    if tokenizer and not any(has_file(directory, name) for name in VOCABULARIES):
        yield f"no tokenizer in this directory: {', '.join(VOCABULARIES[:-1])} or {VOCABULARIES[-1]}"
    if weights and not any(has_file(directory, name) for name in WEIGHTS):
        message = f"no weights in this directory: {' or '.join(WEIGHTS)}"
        yield f"{message}; model.random_init = true draws them from run.seed"


def _on_hub(context: CheckContext, model: NamedModel) -> Iterator[Problem]:
    """Add a note on the download of a hub model that is not in the cache, or a problem."""
    try:
        context.notes.append(f"{model.key} = {show(model.name)}: {offer(model)}; a check does not download it")
    except NotOnHub as error:
        other = f"a directory works too, and {command_name('import-gguf')} writes one from a GGUF file"
        yield Problem.of(model.key, model.name, f"{error}; {other}")


def _no_directory(context: CheckContext, key: str, value: str) -> Iterator[Problem]:
    path = Path(value)
    message = "no such directory"
    if path.name == EXPORT_DIRECTORY:
        run = path.parent.name
        message = (
            f"no such directory yet: run {run} writes it at its end, with train.save_hf = true; start that run first"
        )
    yield context.missing(key, value, message)


def _data(context: CheckContext, key: str, data: DataConfig) -> Iterator[Problem]:
    for name, path in data.files.items():
        if not Path(split_slice(path)[0]).is_file() and f"{key}.files.{name}" not in context.coming:
            yield context.missing(f"{key}.files.{name}", path, "no such file")
    if data.path is None or f"{key}.path" in context.coming:
        return  # a function or a class is checked with the plug-ins
    file = Path(split_slice(data.path)[0])
    if not file.exists():
        yield context.missing(f"{key}.path", data.path, "no such file")
        return
    if not file.is_file():
        yield Problem.of(f"{key}.path", data.path, "is not a regular file: a run reads its data again at each start")
        return
    context.doing(f"{key}.path", data.path, f"reading the first {CHECKED_ROWS:,} rows")
    try:
        for _ in read_rows(data, CHECKED_ROWS):
            pass
    except DataError as error:
        yield Problem.of(f"{key}.path", data.path, str(error))


def _credentials(context: CheckContext) -> Iterator[Problem]:
    """Check the file with the login of an external bus."""
    key, value = "bus.credentials", context.topology.bus.credentials
    if value is None:
        return
    if not Path(value).is_file():
        yield context.missing(key, value, "no such file")
        return
    try:
        read_login(Path(value))
    except (OSError, ValueError) as error:
        yield Problem.of(key, value, str(error))


def _dumps(context: CheckContext) -> Iterator[Problem]:
    """Check the directories of dumps to write and to read."""
    run = context.topology.run
    if run.load is not None and not Path(run.load).is_dir():
        yield context.missing("run.load", run.load, "no such directory")
    if run.dump_details is not None:
        yield from _writable(context, "run.dump_details", Path(run.dump_details))
        yield from _dumps_of_others("run.dump_details", run.dump_details, run.name)


def _dumps_of_others(key: str, directory: str, name: str) -> Iterator[Problem]:
    """Refuse a directory with the dumps of another run."""
    file = Path(directory) / RUN_FILE
    if not file.is_file():
        return
    try:
        owner = msgspec.json.decode(file.read_bytes(), type=DumpedRun).run
    except (OSError, msgspec.MsgspecError) as error:
        yield Problem.of(key, directory, f"{file} cannot be read: {error}")
        return
    if owner != name:
        message = f"holds the dumps of another run, {owner}: move them away, or name another directory"
        yield Problem.of(key, directory, message)


def _run_dir(context: CheckContext) -> Iterator[Problem]:
    run, sizes = context.topology.run, stream_sizes(context.topology)
    place = yield from _writable(context, "run.dir", Path(run.dir) / run.name)
    total, free = sizes.event_bytes + sizes.work_bytes + sizes.data_bytes, free_bytes(place)
    if free < (least := min_free_bytes(context.topology)):
        yield Problem.of("run.dir", run.dir, f"{place}: a run needs at least {least:,} bytes; {free:,} are free")
    elif total > free:
        context.notes.append(f"the streams may grow to {show_bytes(total)}; {place} has {show_bytes(free)} free")


def _writable(context: CheckContext, key: str, path: Path) -> Generator[Problem, None, Path]:
    """Check that a directory can be created or written; return its nearest existing parent."""
    place = next(path for path in (path, *path.parents) if path.exists())
    if (
        link := next((each for each in (path, *path.parents) if each.is_symlink() and not each.exists()), None)
    ) is not None:
        yield Problem.of(key, str(path), f"{link} is a symbolic link that leads nowhere, or in a circle")
    elif not place.is_dir():
        yield Problem.of(key, str(path), f"{place} is a file, not a directory")
    elif not os.access(place, os.W_OK | os.X_OK):
        yield Problem.of(key, str(path), f"{place} cannot be written")
    return place
