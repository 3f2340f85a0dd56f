"""Checks the paths of a topology: models, data, dumps, and the run directory."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from runtime.data.data_files import DataError
from runtime.data.rows import read_rows
from runtime.node.checks.findings import Findings
from runtime.node.checks.hub import HubModel, NotOnHub, offer
from runtime.settings.derived import eval_data
from runtime.settings.placement import roles_of
from runtime.settings.sizes import min_free_bytes, show_bytes, stream_sizes
from runtime.settings.slices import split_slice
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.topology import EXPORT_DIRECTORY, Topology
from runtime.util.disk import free_bytes
from runtime.util.formatting import show
from runtime.util.secrets import read_login

CHECKED_ROWS: Final = 10_000  # per data file; the buffer reads all rows
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")


def check_paths(findings: Findings, node: str) -> None:
    """Check every path of the topology that processes of a node read or write."""
    topology, roles = findings.topology, roles_of(findings.topology, node)
    if roles.needs_model:
        _model(findings, "model.hf_checkpoint", topology.model.hf_checkpoint, weights=not topology.model.random_init)
    if topology.model.ref_load is not None and (roles.trains or roles.is_home):
        _model(findings, "model.ref_load", topology.model.ref_load, weights=True)
    if topology.model.opd_teacher_load is not None and (roles.trains or roles.is_home):
        _model(findings, "model.opd_teacher_load", topology.model.opd_teacher_load, weights=True)
    for name, engine in topology.engines.items():
        if engine.hf_checkpoint is not None and (name in roles.pools or roles.is_home):
            weights = not engine.urls
            _model(findings, f"engines.{name}.hf_checkpoint", engine.hf_checkpoint, weights=weights)
    if topology.critic.hf_checkpoint is not None and (roles.trains or roles.is_home):
        _model(findings, "critic.hf_checkpoint", topology.critic.hf_checkpoint, weights=True)
    if roles.is_home or topology.train.num_epoch is not None:  # epochs are counted on every node
        for index, data in enumerate(topology.data):
            _data(findings, f"data.{index}", data)
        for index, item in enumerate(topology.eval):
            _data(findings, f"eval.{index}", eval_data(topology, item))
    if roles.is_home:
        _dumps(findings)
    _credentials(findings)
    _run_dir(findings)


def paths_of(topology: Topology) -> Iterator[str]:
    """Yield the keys of the paths that must exist."""
    model = topology.model
    named = {"model.hf_checkpoint": model.hf_checkpoint, "model.ref_load": model.ref_load}
    named |= {"model.opd_teacher_load": model.opd_teacher_load}
    named["critic.hf_checkpoint"] = topology.critic.hf_checkpoint
    named |= {f"engines.{name}.hf_checkpoint": engine.hf_checkpoint for name, engine in topology.engines.items()}
    named |= {f"data.{index}.path": item.path for index, item in enumerate(topology.data)}
    named |= {f"eval.{index}.path": item.path for index, item in enumerate(topology.eval)}
    named |= {"run.load": topology.run.load, "run.dir": topology.run.dir, "bus.credentials": topology.bus.credentials}
    return (key for key, value in named.items() if value is not None)


def _model(findings: Findings, key: str, value: str, *, weights: bool) -> None:
    directory = Path(value)
    wanted = [model for model in findings.hub_models() if model.key == key]
    if wanted:
        _on_hub(findings, wanted[0])
        return
    if not directory.is_dir():
        _no_directory(findings, key, value)
        return
    if not (directory / "config.json").is_file():
        findings.problem(key, value, "no config.json in this directory")
    if key == "model.hf_checkpoint" and not any((directory / name).is_file() for name in TOKENIZERS):
        findings.problem(key, value, f"no tokenizer in this directory: {', '.join(TOKENIZERS[:-1])} or vocab.json")
    if weights and not any((directory / name).is_file() for name in WEIGHTS):
        message = f"no weights in this directory: {' or '.join(WEIGHTS)}"
        findings.problem(key, value, f"{message}; model.random_init = true draws them from run.seed")


def _on_hub(findings: Findings, model: HubModel) -> None:
    """Add a note on the download of a hub model that is not in the cache, or a problem."""
    try:
        findings.notes.append(f"{model.key} = {show(model.name)}: {offer(model)}; a check does not download it")
    except NotOnHub as error:
        findings.problem(model.key, model.name, str(error))


def _no_directory(findings: Findings, key: str, value: str) -> None:
    path = Path(value)
    message = "no such directory"
    if path.name == EXPORT_DIRECTORY:
        run = path.parent.name
        message = (
            f"no such directory yet: run {run} writes it at its end, with train.save_hf = true; start that run first"
        )
    findings.missing(key, value, message)


def _data(findings: Findings, key: str, data: DataConfig) -> None:
    for name, path in data.files.items():
        if not Path(split_slice(path)[0]).is_file():
            findings.missing(f"{key}.files.{name}", path, "no such file")
    if data.path is None:
        return  # a function or a class, checked with the plug-ins
    file = Path(split_slice(data.path)[0])
    if not file.exists():
        findings.missing(f"{key}.path", data.path, "no such file")
        return
    if not file.is_file():
        findings.problem(f"{key}.path", data.path, "is not a regular file: a run reads its data again at each start")
        return
    findings.doing(f"{key}.path", data.path, f"reading the first {CHECKED_ROWS:,} rows")
    try:
        for _ in read_rows(data, CHECKED_ROWS):
            pass
    except DataError as error:
        findings.problem(f"{key}.path", data.path, str(error))


def _credentials(findings: Findings) -> None:
    """Check the file with the login of an external bus."""
    key, value = "bus.credentials", findings.topology.bus.credentials
    if value is None:
        return
    if not Path(value).is_file():
        findings.missing(key, value, "no such file")
        return
    try:
        read_login(Path(value))
    except (OSError, ValueError) as error:
        findings.problem(key, value, str(error))


def _dumps(findings: Findings) -> None:
    """Check the directories of dumps to write and to read."""
    run = findings.topology.run
    if run.load is not None and not Path(run.load).is_dir():
        findings.missing("run.load", run.load, "no such directory")
    if run.dump_details is not None:
        _writable(findings, "run.dump_details", Path(run.dump_details))


def _run_dir(findings: Findings) -> None:
    run, sizes = findings.topology.run, stream_sizes(findings.topology)
    place = _writable(findings, "run.dir", Path(run.dir) / run.name)
    total, free = sizes.event_bytes + sizes.work_bytes + sizes.data_bytes, free_bytes(place)
    if free < (least := min_free_bytes(findings.topology)):
        findings.problem("run.dir", run.dir, f"{place}: a run needs at least {least:,} bytes; {free:,} are free")
    elif total > free:
        findings.notes.append(f"the streams may grow to {show_bytes(total)}; {place} has {show_bytes(free)} free")


def _writable(findings: Findings, key: str, path: Path) -> Path:
    """Check that a directory can be created or written; return its nearest existing parent."""
    place = next(path for path in (path, *path.parents) if path.exists())
    if (
        link := next((each for each in (path, *path.parents) if each.is_symlink() and not each.exists()), None)
    ) is not None:
        findings.problem(key, str(path), f"{link} is a symbolic link that leads nowhere, or in a circle")
    elif not place.is_dir():
        findings.problem(key, str(path), f"{place} is a file, not a directory")
    elif not os.access(place, os.W_OK | os.X_OK):
        findings.problem(key, str(path), f"{place} cannot be written")
    return place
