"""What a valid topology still needs from this machine: data files, model directories, GPUs, disk."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from runtime.samples.data_files import DataError
from runtime.samples.rows import read_rows
from runtime.secrets import read_login
from runtime.settings.gpus import gpus_here
from runtime.settings.load import LoadedTopology, places
from runtime.settings.placement import bus_node
from runtime.settings.reading.config import Problem
from runtime.settings.recipe import DataConfig, eval_data
from runtime.settings.sizes import show_bytes, stream_sizes
from runtime.settings.slices import split_slice
from runtime.settings.topology import EXPORT_DIRECTORY, Topology
from runtime.wording import show

CHECKED_ROWS: Final = 10_000  # of each data file; the buffer reads them all
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHTS: Final = ("*.safetensors", "pytorch_model*.bin")
HUB_NAME: Final = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out on this machine."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]  # what could not be checked here, and what is worth knowing


def check_files(loaded: LoadedTopology, node: str | None = None) -> Checked:
    """Look at the files and GPUs that a topology names.

    Args:
        loaded: the topology.
        node: the node that this machine is about to be; its GPUs and files must then be here. None: this machine is
            only asked; what it lacks is a note if the node has GPUs that this machine does not have.
    """
    topology = loaded.topology
    home = node or bus_node(topology) or next(iter(topology.nodes))
    is_home = node is not None or topology.nodes[home].gpus <= gpus_here()
    checker = _Checker(loaded, home, is_home=is_home, starting=node is not None)
    if node is not None:
        checker.gpus(node)
    elif not is_home:
        checker.notes.append(f"the GPUs of {', '.join(_gpu_nodes(topology))}: this machine has {gpus_here()}")
    checker.model("model.hf_checkpoint", topology.model.hf_checkpoint, weights=not topology.model.random_init)
    if topology.model.ref_load is not None:
        checker.model("model.ref_load", topology.model.ref_load, weights=True)
    for index, data in enumerate(topology.data):
        checker.data(f"data.{index}", data)
    for index, item in enumerate(topology.eval):
        checker.data(f"eval.{index}", eval_data(topology, item))
    checker.credentials()
    checker.dumps()
    checker.not_built()
    checker.disk()
    return Checked(problems=tuple(checker.problems), notes=tuple(checker.notes))


def _not_built(topology: Topology) -> Iterator[tuple[str, str, str]]:
    """What the schema knows and a run would not do yet: a start refuses it rather than doing something else."""
    for name, engine in topology.engines.items():
        if engine.weight_transport != "disk":
            yield f"engines.{name}.weight_transport", engine.weight_transport, 'not built yet; "disk" is'
        if engine.colocate is not None:
            yield f"engines.{name}.colocate", engine.colocate, "taking turns on GPUs is not built yet"


def _gpu_nodes(topology: Topology) -> Iterator[str]:
    return (f"{name} ({node.gpus})" for name, node in topology.nodes.items() if node.gpus)


class _Checker:
    def __init__(self, loaded: LoadedTopology, home: str, *, is_home: bool, starting: bool) -> None:
        self._loaded = loaded
        self._home = home
        self._is_home = is_home
        self._starting = starting  # or somebody only asks
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def gpus(self, node: str) -> None:
        asked, found = self._loaded.topology.nodes[node].gpus, gpus_here()
        if asked > found:
            self._problem(f"nodes.{node}.gpus", asked, f"this machine has {found} GPUs")

    def model(self, key: str, value: str, *, weights: bool) -> None:
        directory = Path(value)
        if not directory.is_dir():
            self._no_directory(key, value)
            return
        if not (directory / "config.json").is_file():
            self._problem(key, value, "no config.json in this directory")
        if key == "model.hf_checkpoint" and not any((directory / name).is_file() for name in TOKENIZERS):
            self._problem(key, value, f"no tokenizer in this directory: {', '.join(TOKENIZERS[:-1])} or vocab.json")
        if weights and not any(True for pattern in WEIGHTS for _ in directory.glob(pattern)):
            message = "no weights (*.safetensors) in this directory; model.random_init = true draws them from run.seed"
            self._problem(key, value, message)

    def data(self, key: str, data: DataConfig) -> None:
        if data.path is None:
            return  # a function, which is looked for where plug-ins are
        if not Path(split_slice(data.path)[0]).exists():
            self._missing(f"{key}.path", data.path, "no such file")
            return
        try:
            for _ in read_rows(data, CHECKED_ROWS):
                pass
        except DataError as error:
            self._problem(f"{key}.path", data.path, str(error))

    def credentials(self) -> None:
        """The file with the login of a bus that is not ours."""
        key, value = "bus.credentials", self._loaded.topology.bus.credentials
        if value is None:
            return
        if not Path(value).exists():
            self._missing(key, value, "no such file")
            return
        try:
            read_login(Path(value))
        except (OSError, ValueError) as error:
            self._problem(key, value, str(error))

    def dumps(self) -> None:
        """Where samples are dumped and where a dump is read."""
        run = self._loaded.topology.run
        if run.load is not None and not Path(run.load).is_dir():
            self._missing("run.load", run.load, "no such directory")
        if run.dump_details is None or not self._is_home:
            return
        place = next(path for path in (Path(run.dump_details), *Path(run.dump_details).parents) if path.exists())
        if not place.is_dir():
            self._problem("run.dump_details", run.dump_details, f"{place} is a file, not a directory")
        elif not os.access(place, os.W_OK | os.X_OK):
            self._problem("run.dump_details", run.dump_details, f"{place} cannot be written")

    def not_built(self) -> None:
        """A start refuses what it would not do; who only asks is told."""
        for key, value, message in _not_built(self._loaded.topology):
            if self._starting:
                self._problem(key, value, message)
            else:
                self.notes.append(f"{key} = {show(value)}: {message}")

    def disk(self) -> None:
        topology = self._loaded.topology
        place = next(path for path in (Path(topology.run.dir), *Path(topology.run.dir).parents) if path.is_dir())
        sizes, free = stream_sizes(topology), shutil.disk_usage(place).free
        total = sizes.event_bytes + sizes.work_bytes + sizes.data_bytes
        if self._is_home and total > free:
            self.notes.append(f"the streams may grow to {show_bytes(total)}; {place} has {show_bytes(free)} free")

    def _no_directory(self, key: str, value: str) -> None:
        beside = [place / Path(value).parent for place in places(self._loaded.loaded, key)]
        is_hub_name = HUB_NAME.match(value) and not ("/" in value and any(path.is_dir() for path in beside))
        if is_hub_name:
            self.notes.append(f"{key} = {show(value)}: no directory here, taken as a Hugging Face name")
        elif Path(value).name == EXPORT_DIRECTORY:
            self._no_export(key, value)
        else:
            self._missing(key, value, "no such directory")

    def _no_export(self, key: str, value: str) -> None:
        run = Path(value).parent.name
        message = f"not there yet: start run {run} first, here, which writes it at its end with train.save_hf = true"
        if self._starting:
            looked = ", ".join(map(str, places(self._loaded.loaded, key)))
            self._problem(key, value, f"{message} (looked in {looked})")
        else:
            self.notes.append(f"{key} = {show(value)}: {message}")

    def _missing(self, key: str, value: str, message: str) -> None:
        looked = ", ".join(map(str, places(self._loaded.loaded, key)))
        if self._is_home:
            self._problem(key, value, f"{message} (looked in {looked})")
        else:
            self.notes.append(f"{key} = {show(value)}: {message} here, {self._home} must have it")

    def _problem(self, key: str, value: object, message: str) -> None:
        origin = self._loaded.loaded.origin(key)
        self.problems.append(Problem(key=key, value=show(value), message=message, file=origin))
