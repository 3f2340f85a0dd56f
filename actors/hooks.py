"""Pre-start checks of the graders, filters, data sources and other functions that a recipe names."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec

from actors.buffer.deciding.measuring import metrics_process
from actors.buffer.deciding.selecting import selection_process
from actors.buffer.deciding.selection import Kind, find_selection
from actors.buffer.prompts.generated import find_source
from actors.buffer.prompts.source_worker import METHODS, OPTIONAL
from actors.filter.filters import FILTER_KEY, filter_process, find_filter
from actors.reward import isolation
from actors.reward.frames import GraderSpec
from actors.reward.graders.boxed import BOXED_PREFIX
from actors.reward.graders.builtin import BUILT_IN_GRADERS
from actors.reward.graders.calling import resolve_grader
from actors.rollout.samples.evaluation_function import find_evaluation_function
from actors.rollout.samples.generate_function import find_generate_function
from actors.rollout.samples.rollout_function import find_rollout_function
from runtime.node.checks.apart import Doing, unlimited
from runtime.process.actor import InputError
from runtime.process.user_process import UserProcess, UserProcessError
from runtime.settings.derived import trainer_functions
from runtime.settings.load import places
from runtime.settings.plugins import PluginError, is_plugin, load_class, located
from runtime.settings.reading.config import Problem
from runtime.settings.reading.toml import Loaded
from runtime.settings.rules.graders import unmet_need
from runtime.settings.tables.reward import RewardConfig
from runtime.settings.topology import Topology, takes_list
from runtime.util.formatting import show

Find = Callable[[Sequence[Path]], object]  # takes the directories that relative paths are resolved against


def check_hooks(topology: Topology, loaded: Loaded | None = None, doing: Doing = unlimited) -> list[Problem]:
    """Find every function that the topology names and check its parameters. Imports users' modules.

    Args:
        topology: the topology.
        loaded: the origin of each key. Problems name the file; relative paths are resolved against its directory.
            Without it, relative paths are resolved against the current directory.
        doing: called before each check with the key, the value and a description.
    """
    problems: list[Problem] = []
    tried = {key for key, _ in trainer_functions(topology) if key.startswith("algorithm.")}
    for key, value, find in _hooks(topology):
        importing = "importing it and trying it on two samples" if key in tried else "importing it"
        doing(key, value, importing if is_plugin(value) else "trying it")
        problem = _problem(key, value, partial(find, places(loaded, key) if loaded else (Path.cwd(),)))
        if problem is not None:
            problems.append(msgspec.structs.replace(problem, file=loaded.origin(key)) if loaded else problem)
    return problems


def _hooks(topology: Topology) -> Iterator[tuple[str, str, Find]]:
    yield from _graders(topology)
    for index, item in enumerate(topology.data):
        if item.source is not None:
            key = f"data.{index}.source"
            yield key, item.source, partial(find_source, key, item.source)
        if item.source_class is not None:
            key = f"data.{index}.source_class"
            yield key, item.source_class, partial(_find_class, key, item.source_class)
    name = topology.rollout.dynamic_filter
    if name is not None:
        started = partial(_start, FILTER_KEY, name, partial(filter_process, topology))
        yield FILTER_KEY, name, started if is_plugin(name) else partial(find_filter, name)
    custom = topology.rollout.custom_generate
    if custom is not None:
        yield "rollout.custom_generate", custom, partial(find_generate_function, custom)
    if (name := topology.rollout.custom_rollout) is not None:
        yield (
            "rollout.custom_rollout",
            name,
            partial(find_rollout_function, name, num_prompts=topology.rollout.custom_rollout_prompts),
        )
    for index, item in enumerate(topology.eval):
        if item.custom_generate is not None:
            key = f"eval.{index}.custom_generate"
            yield key, item.custom_generate, partial(find_generate_function, item.custom_generate, key=key)
        if item.custom_evaluation is not None:
            key = f"eval.{index}.custom_evaluation"
            yield key, item.custom_evaluation, partial(find_evaluation_function, key, item.custom_evaluation)
        if item.custom_metrics is not None:
            key = f"eval.{index}.custom_metrics"
            started = partial(_start, key, item.custom_metrics, partial(metrics_process, topology.reward, key))
            yield key, item.custom_metrics, started
    for key, value in trainer_functions(topology):
        yield key, value, partial(_try_in_trainer, topology, key, value)
    selections: dict[Kind, str | None] = {"over_sampling_filter": topology.rollout.over_sampling_filter}
    selections["buffer_filter"] = topology.rollout.buffer_filter
    for kind, selection in selections.items():
        if selection is not None:
            key = f"rollout.{kind}"
            started = partial(_start, key, selection, partial(selection_process, topology, kind))
            yield key, selection, started if is_plugin(selection) else partial(find_selection, kind, selection)


def _start(key: str, value: str, process_of: Callable[[str], UserProcess], base_dirs: Sequence[Path]) -> None:
    """Start the process of a filter or a selection as a run does, with its environment and its limits."""
    name = located(key, value, base_dirs)

    async def start() -> None:
        process = process_of(name)
        try:
            await process.start()
        finally:
            await process.kill()

    try:
        anyio.run(start)
    except UserProcessError as error:
        raise ValueError(str(error)) from error
    except ValueError as error:
        raise ValueError(str(error).removeprefix(f"{key} = {name!r}: ")) from error


def _find_class(key: str, value: str, base_dirs: Sequence[Path]) -> object:
    return load_class(key, value, methods=METHODS, optional=OPTIONAL, base_dirs=base_dirs)


def _try_in_trainer(topology: Topology, key: str, value: str, base_dirs: Sequence[Path]) -> None:
    from actors.trainer.plugins.dry_run import try_plugin  # imports torch, which most checks do not need

    try:
        try_plugin(topology, key, value, base_dirs=tuple(base_dirs))
    except InputError as error:
        raise ValueError(str(error).removeprefix(f"{key} = {value!r}: ")) from error


def _graders(topology: Topology) -> Iterator[tuple[str, str, Find]]:
    reward = topology.reward
    own, elsewhere, group = reward.graders, {*reward.external, *reward.judges, *reward.sums}, reward.group_rm
    named = [(f"data.{index}.rm_type", item.rm_type, group) for index, item in enumerate(topology.data)]
    named += [(f"eval.{index}.rm_type", item.rm_type, False) for index, item in enumerate(topology.eval)]
    for key, name, group in named:
        if name is not None and name not in own and name not in elsewhere:
            yield key, name, partial(resolve_grader, GraderSpec(name=name, group=group))
    for name, judge in reward.judges.items():
        key, spec = f"reward.judges.{name}", GraderSpec(name=judge.parser, parses=True)
        if _is_built_in(name):
            yield key, name, partial(_refuse, f"{name} is a built-in grader: use another name")
        yield f"{key}.parser", judge.parser, partial(resolve_grader, spec)
    for name in reward.external:
        if _is_built_in(name):
            yield "reward.external", name, partial(_refuse, f"{name} is a built-in grader: use another name")
    for name, value in own.items():
        if _is_built_in(name):
            yield f"reward.graders.{name}", value, partial(_refuse, f"{name} is a built-in grader: use another name")
        else:
            spec = GraderSpec(name=value, group=takes_list(reward, name))
            yield f"reward.graders.{name}", value, partial(resolve_grader, spec)
    for name in reward.limits:
        if name not in own and not _is_built_in(name):
            known = "names in reward.graders, and built-in graders"
            yield "reward.limits", name, partial(_refuse, f"no such grader; allowed: {known}")
    yield from _sums(reward)
    if topology.reward.sandbox == "isolated":
        yield "reward.sandbox", "isolated", _isolate


def _sums(reward: RewardConfig) -> Iterator[tuple[str, str, Find]]:
    tables = {"graders": reward.graders, "judges": reward.judges, "external": reward.external}
    for name, weights in reward.sums.items():
        key = f"reward.sums.{name}"
        if _is_built_in(name):
            yield key, name, partial(_refuse, f"{name} is a built-in grader: use another name")
        for table in (table for table, names in tables.items() if name in names):
            yield key, name, partial(_refuse, f"reward.{table} has a grader of this name too: use another name")
        if not weights:
            yield key, name, partial(_refuse, "has no parts")
        for part, weight in weights.items():
            if not math.isfinite(weight):
                yield f"{key}.{part}", str(weight), partial(_refuse, "a weight must be a finite number")
            yield f"{key}.{part}", part, partial(_find_part, reward, part)


def _find_part(reward: RewardConfig, part: str, base_dirs: Sequence[Path]) -> None:
    """Refuse a part of a sum that is none, or that cannot be used."""
    if part in reward.judges:
        if reward.judges[part].template is None:
            raise ValueError(f"this judge scores no samples: set reward.judges.{part}.template")
    elif (need := unmet_need(part, reward)) is not None:
        raise ValueError(need)
    elif _is_built_in(part):
        resolve_grader(GraderSpec(name=part, group=reward.group_rm), base_dirs)
    elif part not in reward.graders:
        known = "built-in graders, and names in reward.graders and reward.judges"
        raise ValueError(f"no such grader; allowed: {known}")


def _is_built_in(name: str) -> bool:
    return name.removeprefix(BOXED_PREFIX) in BUILT_IN_GRADERS


def _refuse(reason: str, _base_dirs: Sequence[Path]) -> None:
    raise ValueError(reason)


def _isolate(_base_dirs: Sequence[Path]) -> None:
    if (reason := isolation.refusal()) is not None:
        raise ValueError(f'this machine cannot isolate graders: {reason}; "process" works without isolation')


def _problem(key: str, value: str, find: Callable[[], object]) -> Problem | None:
    try:
        find()
    except PluginError as error:
        return Problem(key=key, value=show(value), message=error.problem)
    except ValueError as error:
        return Problem(key=key, value=show(value), message=str(error))
    return None
