"""Loads a topology file: reads and checks it, and resolves its paths."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from runtime.settings.derived import EVAL_FUNCTIONS, TRAINER_FUNCTIONS, trainer_functions
from runtime.settings.halves import half_of
from runtime.settings.plugins import PluginError, file_of, find_file
from runtime.settings.reading.config import Problem, TopologyError
from runtime.settings.reading.toml import SET, Loaded, convert, load_tables
from runtime.settings.rules.validate import validate
from runtime.settings.slices import split_slice
from runtime.settings.slime.functions import PREFIX
from runtime.settings.tables.observe import ObserveConfig
from runtime.settings.tables.reward import RewardConfig
from runtime.settings.tables.rollout import RolloutConfig
from runtime.settings.tables.trainer import TrainerConfig
from runtime.settings.tables.training import ModelConfig
from runtime.settings.topology import Topology
from runtime.util.secrets import Login, split_login

T = TypeVar("T", bound=msgspec.Struct)
IMPORT_PATH: Final = "PYTHONPATH"


OF_STORED: Final[dict[str | None, Literal["float32", "bfloat16"]]] = {  # a model in float16 trains in bfloat16
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "bfloat16",
}


class _Stored(msgspec.Struct, frozen=True):
    """The dtype in config.json; transformers 4 uses the longer name."""

    dtype: str | None = None
    torch_dtype: str | None = None


def with_default_dtype(topology: Topology, device: str) -> Topology:
    """Fill in model.dtype from the model directory, for a recipe without it.

    A config.json that is missing or unreadable changes nothing here: reading the model reports it later.

    Args:
        topology: the whole topology, or the half that runs.
        device: the trainer's device in the whole topology: a run without a trainer generates samples for that device.
    """
    if device != "cuda":
        return topology
    try:
        stored = msgspec.json.decode((Path(topology.model.hf_checkpoint) / "config.json").read_bytes(), type=_Stored)
    except (OSError, msgspec.MsgspecError):
        return topology
    dtype = OF_STORED.get(stored.dtype or stored.torch_dtype, topology.model.dtype)
    return msgspec.structs.replace(topology, model=msgspec.structs.replace(topology.model, dtype=dtype))


class LoadedTopology(msgspec.Struct, frozen=True, kw_only=True):
    """A valid topology and the origin of its keys. Paths that exist on this machine are absolute."""

    topology: Topology  # without any secret
    loaded: Loaded
    bus_login: Login | None = None  # taken from bus.url


def load_topology(path: Path, overrides: Sequence[str] = ()) -> LoadedTopology:
    """Read, merge, decode and check a topology file. Open no data file and require no GPU.

    A relative path in a file is looked up next to that file, then next to `path`, then in the current directory. A path
    from an override is looked up in the current directory, then next to `path`. The first match wins, and the path
    becomes absolute. A path without a match stays as it is: it may be a hub name or exist on another node. `run.dir`
    and `run.dump_details` are relative to the current directory.

    Raises:
        TopologyError: lists every problem, each with file, key, value and allowed values.
    """
    loaded = load_tables(path, overrides, Topology)
    bus_login = _take_login(loaded)
    topology = half_of(convert(loaded, Topology))
    problems = [*validate(topology), *_two_logins(topology, bus_login)]
    if problems:
        problems = [*_missing_files(topology, loaded), *problems]
        raise TopologyError([msgspec.structs.replace(item, file=loaded.origin(item.key)) for item in problems])
    found = LoadedTopology(topology=_find_paths(topology, loaded), loaded=loaded, bus_login=bus_login)
    return with_topology(found, found.topology)


def with_topology(loaded: LoadedTopology, topology: Topology) -> LoadedTopology:
    """Replace the topology by one with more resolved paths, and derive defaults that depend on them."""
    tables = loaded.loaded.tables
    if "dtype" not in tables.get("model", {}):
        topology = with_default_dtype(topology, tables.get("trainer", {}).get("device", TrainerConfig().device))
    return msgspec.structs.replace(loaded, topology=topology)


def _take_login(loaded: Loaded) -> Login | None:
    """Remove the login from bus.url before any table is shown or stored, and return it."""
    bus: dict[str, Any] | Any = loaded.tables.get("bus")
    url = bus.get("url") if isinstance(bus, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(url, str):
        return None
    try:
        bus["url"], login = split_login(url)
    except ValueError as error:
        raise TopologyError([Problem(key="bus.url", message=str(error), file=loaded.origin("bus.url"))]) from error
    return login


def _two_logins(topology: Topology, login: Login | None) -> Iterator[Problem]:
    if login is not None and topology.bus.credentials is not None:
        yield Problem.of(
            "bus.credentials", topology.bus.credentials, "bus.url contains a login too; give only one of them"
        )


def _missing_files(topology: Topology, loaded: Loaded) -> Iterator[Problem]:
    """Yield the user functions whose files do not exist, to be named before other problems of the settings.

    Without other problems a start checks every function itself, on the node that calls it.
    """
    rollout, reward = topology.rollout, topology.reward
    named: dict[str, str | None] = dict(trainer_functions(topology))
    for name in ("dynamic_filter", "custom_generate", "custom_rollout", "over_sampling_filter", "buffer_filter"):
        named[f"rollout.{name}"] = getattr(rollout, name)
    for index, data in enumerate(topology.data):
        named |= {f"data.{index}.source": data.source, f"data.{index}.rm_type": data.rm_type}
        named[f"data.{index}.source_class"] = data.source_class
    for index, item in enumerate(topology.eval):
        named |= {f"eval.{index}.{name}": getattr(item, name) for name in EVAL_FUNCTIONS}
    named |= {f"reward.graders.{name}": value for name, value in reward.graders.items()}
    named |= {f"reward.judges.{name}.parser": judge.parser for name, judge in reward.judges.items()}
    for key, value in named.items():
        file = Path(file_of(value or ""))
        if value is None or file.suffix != ".py":
            continue
        try:
            find_file(key, value, file, places(loaded, key))
        except PluginError as error:
            yield Problem.of(key, value, error.problem)


def places(loaded: Loaded, key: str) -> tuple[Path, ...]:
    """Return the directories to look up the relative path of a key in, in order."""
    origin = loaded.origin(key)
    beside = Path(os.path.realpath(loaded.files[-1].parent))
    found = (Path.cwd(), beside) if origin == SET else (Path(os.path.realpath(Path(origin).parent)), beside, Path.cwd())
    return tuple(dict.fromkeys(found))


def _find_paths(topology: Topology, loaded: Loaded) -> Topology:
    finder, run = _Finder(loaded), topology.run
    return msgspec.structs.replace(
        topology,
        bus=msgspec.structs.replace(
            topology.bus, credentials=finder.optional("bus.credentials", topology.bus.credentials)
        ),
        model=_model_found(topology.model, finder),
        critic=msgspec.structs.replace(
            topology.critic, hf_checkpoint=finder.optional("critic.hf_checkpoint", topology.critic.hf_checkpoint)
        ),
        data=tuple(
            msgspec.structs.replace(
                item,
                path=None if item.path is None else finder.data_file(f"data.{index}.path", item.path),
                source=finder.plug_in(f"data.{index}.source", item.source),
                source_class=finder.plug_in(f"data.{index}.source_class", item.source_class),
                files={name: finder.data_file(f"data.{index}.files.{name}", path) for name, path in item.files.items()},
                rm_type=finder.plug_in(f"data.{index}.rm_type", item.rm_type),
            )
            for index, item in enumerate(topology.data)
        ),
        eval=tuple(
            msgspec.structs.replace(
                item,
                path=finder.data_file(f"eval.{index}.path", item.path),
                custom_generate=finder.plug_in(f"eval.{index}.custom_generate", item.custom_generate),
                custom_evaluation=finder.plug_in(f"eval.{index}.custom_evaluation", item.custom_evaluation),
                custom_metrics=finder.plug_in(f"eval.{index}.custom_metrics", item.custom_metrics),
                rm_type=finder.plug_in(f"eval.{index}.rm_type", item.rm_type),
            )
            for index, item in enumerate(topology.eval)
        ),
        rollout=_functions_found(topology.rollout, finder),
        algorithm=_trainer_functions_found("algorithm", topology.algorithm, finder),
        train=_trainer_functions_found("train", topology.train, finder),
        trainer=msgspec.structs.replace(topology.trainer, load=finder.optional("trainer.load", topology.trainer.load)),
        reward=_graders_found(topology.reward, finder),
        observe=_trackers_found(topology.observe, finder),
        run=msgspec.structs.replace(
            run,
            dir=os.path.realpath(run.dir),
            dump_details=None if run.dump_details is None else os.path.realpath(run.dump_details),
            load=finder.optional("run.load", run.load),
        ),
        engines={
            name: msgspec.structs.replace(
                engine,
                hf_checkpoint=finder.optional(f"engines.{name}.hf_checkpoint", engine.hf_checkpoint),
                python=finder.interpreter(f"engines.{name}.python", engine.python),
                env=finder.import_path(f"engines.{name}.env", engine.env),
            )
            for name, engine in topology.engines.items()
        },
    )


def _model_found(model: ModelConfig, finder: "_Finder") -> ModelConfig:
    return msgspec.structs.replace(
        model,
        hf_checkpoint=finder.path("model.hf_checkpoint", model.hf_checkpoint),
        ref_load=finder.optional("model.ref_load", model.ref_load),
        opd_teacher_load=finder.optional("model.opd_teacher_load", model.opd_teacher_load),
    )


def _graders_found(reward: RewardConfig, finder: "_Finder") -> RewardConfig:
    found = {name: finder.plug_in(f"reward.graders.{name}", value) or value for name, value in reward.graders.items()}
    judges = {
        name: msgspec.structs.replace(
            judge,
            parser=finder.plug_in(f"reward.judges.{name}.parser", judge.parser) or judge.parser,
            api_key_file=finder.optional(f"reward.judges.{name}.api_key_file", judge.api_key_file),
        )
        for name, judge in reward.judges.items()
    }
    key_file = finder.optional("reward.rm_api_key_file", reward.rm_api_key_file)
    nltk_data = finder.optional("reward.nltk_data", reward.nltk_data)
    return msgspec.structs.replace(reward, graders=found, judges=judges, rm_api_key_file=key_file, nltk_data=nltk_data)


def _trackers_found(observe: ObserveConfig, finder: "_Finder") -> ObserveConfig:
    wandb, tensorboard = observe.wandb, observe.tensorboard
    return msgspec.structs.replace(
        observe,
        otlp=msgspec.structs.replace(
            observe.otlp, python=finder.interpreter("observe.otlp.python", observe.otlp.python)
        ),
        wandb=msgspec.structs.replace(
            wandb,
            python=finder.interpreter("observe.wandb.python", wandb.python),
            key_file=finder.optional("observe.wandb.key_file", wandb.key_file),
            dir=None if wandb.dir is None else os.path.realpath(wandb.dir),
        ),
        tensorboard=msgspec.structs.replace(
            tensorboard,
            python=finder.interpreter("observe.tensorboard.python", tensorboard.python),
            dir=None if tensorboard.dir is None else os.path.realpath(tensorboard.dir),
        ),
        swanlab=msgspec.structs.replace(
            observe.swanlab,
            python=finder.interpreter("observe.swanlab.python", observe.swanlab.python),
            key_file=finder.optional("observe.swanlab.key_file", observe.swanlab.key_file),
            dir=None if observe.swanlab.dir is None else os.path.realpath(observe.swanlab.dir),
        ),
        mlflow=msgspec.structs.replace(
            observe.mlflow, python=finder.interpreter("observe.mlflow.python", observe.mlflow.python)
        ),
    )


def _functions_found(rollout: RolloutConfig, finder: "_Finder") -> RolloutConfig:
    return msgspec.structs.replace(
        rollout,
        dynamic_filter=finder.plug_in("rollout.dynamic_filter", rollout.dynamic_filter),
        custom_generate=finder.plug_in("rollout.custom_generate", rollout.custom_generate),
        custom_rollout=finder.plug_in("rollout.custom_rollout", rollout.custom_rollout),
        over_sampling_filter=finder.plug_in("rollout.over_sampling_filter", rollout.over_sampling_filter),
        buffer_filter=finder.plug_in("rollout.buffer_filter", rollout.buffer_filter) or "fifo",
    )


def _trainer_functions_found(table: str, config: T, finder: "_Finder") -> T:
    names = TRAINER_FUNCTIONS[table]
    return msgspec.structs.replace(
        config, **{name: finder.plug_in(f"{table}.{name}", getattr(config, name)) for name in names}
    )


class _Finder:
    """Makes the paths of a topology absolute where they exist."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def path(self, key: str, value: str) -> str:
        candidates = (place / value for place in places(self._loaded, key))
        return next((os.path.realpath(candidate) for candidate in candidates if candidate.exists()), value)

    def optional(self, key: str, value: str | None) -> str | None:
        return None if value is None else self.path(key, value)

    def data_file(self, key: str, value: str) -> str:
        found = self.path(key, value)
        file, rows = split_slice(found)
        return f"{self.path(key, file)}{rows}" if rows else found

    def plug_in(self, key: str, value: str | None) -> str | None:
        prefix = PREFIX if (value or "").startswith(PREFIX) else ""
        file, colon, function = (value or "").removeprefix(prefix).rpartition(":")
        return f"{prefix}{self.path(key, file)}:{function}" if colon and file.endswith(".py") else value

    def import_path(self, key: str, env: dict[str, str]) -> dict[str, str]:
        """Return a process's variables, with the directories in PYTHONPATH resolved like other paths."""
        if (value := env.get(IMPORT_PATH)) is None:
            return env
        places = (self.path(f"{key}.{IMPORT_PATH}", place) if place else "" for place in value.split(os.pathsep))
        return {**env, IMPORT_PATH: os.pathsep.join(places)}

    def interpreter(self, key: str, value: str | None) -> str | None:
        """Return an absolute interpreter path, without resolving links: a virtual environment's link leads out of it.

        A bare name stays as it is; it is looked up on PATH later.
        """
        if value is None or "/" not in value:
            return value
        candidates = (place / Path(value).expanduser() for place in places(self._loaded, key))
        return next((str(candidate.absolute()) for candidate in candidates if candidate.exists()), value)
