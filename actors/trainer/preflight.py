"""Pre-start checks of the trainer: the models that it reads, their files and its checkpoints."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from actors.trainer.checkpoints import beginning_of, newest_of_run
from actors.trainer.lora.peft_files import adapter_problems
from actors.trainer.lora.saved import SavedLora
from actors.trainer.lora.targets import NoTarget, targeted
from actors.trainer.models.config import HfConfig, critic_model, trained_model
from actors.trainer.models.layout import check_layout
from actors.trainer.models.shapes import check_weights
from runtime.models.config import IGNORE
from runtime.models.directory import CONFIG, ModelError, has_file, read_json
from runtime.node.checks.context import MODEL, CheckContext, Checks
from runtime.settings.derived import has_critic, policy_model, quantization
from runtime.settings.reading.config import Problem
from runtime.settings.topology import (
    POLICY,
    Topology,
    answers_are_recorded,
    critic_has_ranks,
    critic_topology,
    named_models,
)

CRITIC: Final = "critic.hf_checkpoint"
WIDEST: Final = 1 << 17  # largest hidden_size; at 2^19, engine and trainer log-probs differed by 0.011 (measured)


def check_model(context: CheckContext) -> Iterator[Problem]:
    """Check that the trainer can build the model in its parallel layout."""
    topology = context.topology
    try:
        shape = trained_model(topology)
    except (OSError, ValueError) as error:
        for problem in error.problems if isinstance(error, ModelError) else (str(error),):
            yield Problem.of(MODEL, topology.model.hf_checkpoint, problem)
        return
    yield from _ignored(context)
    context.notes.extend(_unread(topology))
    context.notes.extend(_dequantized(topology))
    if topology.run.only == "rollout":
        return
    try:
        check_layout(shape, topology.trainer.megatron)
    except ValueError as error:
        yield Problem(key="trainer.megatron", message=str(error))
    yield from _lora(topology, shape)
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if getattr(topology.algorithm, name) and shape.experts is None:
            yield Problem.of(f"algorithm.{name}", True, "the model has no experts, and so no router")


def _lora(topology: Topology, shape: HfConfig) -> Iterator[Problem]:
    """Check that the targets of LoRA are layers of the model, and that the adapter to start from fits them."""
    config = topology.trainer.lora
    if not config.rank:
        return
    try:
        targeted(shape, config)
    except NoTarget as error:
        yield Problem(key="trainer.lora", message=str(error))
        return
    if config.load is not None:
        for message in adapter_problems(Path(config.load), shape, config):
            yield Problem.of("trainer.lora.load", config.load, message)


def _ignored(context: CheckContext) -> Iterator[Problem]:
    """Check the keys of config.json that the topology ignores, and name them with their values."""
    topology = context.topology
    named = topology.model.ignore_config_keys
    directories = dict.fromkeys((topology.model.hf_checkpoint, critic_topology(topology).model.hf_checkpoint))
    keys: dict[str, Any] = {}
    for directory in directories:
        if has_file(Path(directory), CONFIG):
            keys = read_json(Path(directory), CONFIG, dict[str, Any]) | keys
    for key in named:
        if key not in keys:
            yield Problem.of(IGNORE, key, f"{CONFIG} of {MODEL} has no such key: leave it out")
    if ignored := [f"{key} = {json.dumps(keys[key]):.60}" for key in named if key in keys]:
        context.notes.append(f"{IGNORE}: the run trains a model without {', '.join(ignored)} of {CONFIG}")


def _unread(topology: Topology) -> Iterator[str]:
    """Name the keys of config.json that have no effect."""
    model = policy_model(topology)
    if model.unread_keys:
        why = f"transformers' {model.shape.architecture} does not read them"
        yield f"{CONFIG} of {MODEL} has keys that are ignored, as {why}: {', '.join(model.unread_keys)}"


def _dequantized(topology: Topology) -> Iterator[str]:
    """Say what becomes of quantized weights, and what the engines of such a directory do."""
    found = quantization(topology)
    if found is None or topology.run.only == "rollout":
        return
    yield (
        f"{MODEL} is quantized ({found.method}): the trainer dequantizes its weights; published weights and exports "
        f"are not quantized"
    )
    pool = topology.engines.get(POLICY)
    if pool is None or answers_are_recorded(topology):
        return
    form = "in FP8" if pool.weight_format == "fp8" else "without quantization"
    if pool.urls:
        yield (
            f"engines.{POLICY}.urls: an engine that was started on that directory would serve its quantized weights "
            f"and read updates wrongly; start it {form} (--json-model-override-args)"
        )
    else:
        yield f"engines.{POLICY} start {form} and without that directory's weights, and serve after the first update"


def check_files(context: CheckContext) -> Iterator[Problem]:
    """Check the files of all models that the trainer reads, and that it can start from its checkpoint."""
    topology, model = context.topology, context.topology.model
    shape = trained_model(topology)
    if not model.random_init:
        yield from weight_problems(MODEL, model.hf_checkpoint, shape)
    if shape.hidden_size > WIDEST:
        message = f"hidden_size = {shape.hidden_size}: at most {WIDEST}; wider models round too much to verify weights"
        yield Problem.of(MODEL, model.hf_checkpoint, message)
    critic = None
    if has_critic(topology) and not context.has(CRITIC):
        try:
            critic = critic_model(topology)
            yield from _critic(context, shape, critic)
        except (OSError, ValueError) as error:
            yield Problem.of(CRITIC, topology.critic.hf_checkpoint, str(error))
    if context.roles.trains or context.roles.is_home:
        for other in named_models(topology):  # the reference and the teacher
            if other.pool is None and other.key not in (MODEL, CRITIC) and not context.has(other.key):
                yield from weight_problems(other.key, other.name, shape)
    if context.roles.trains:
        yield from _load(topology, shape, critic)
        yield from _resumed(topology, shape, critic) if not context.fresh else ()


def _critic(context: CheckContext, actor: HfConfig, shape: HfConfig) -> Iterator[Problem]:
    """Check the critic's vocabulary, which is the actor's, its parallel layout, and its files."""
    topology, directory = context.topology, context.topology.critic.hf_checkpoint
    if shape.vocab_size != actor.vocab_size:
        message = f"reads a vocabulary of {shape.vocab_size} tokens, and the actor's has {actor.vocab_size}"
        yield Problem.of(CRITIC, directory, message)
    try:
        check_layout(shape, critic_topology(topology).trainer.megatron)
    except ValueError as error:
        if critic_has_ranks(topology):
            yield Problem(key="trainer.critic.megatron", message=str(error))
        else:
            message = f"the critic has the layout of trainer.megatron: {error}"
            yield Problem.of(CRITIC, directory, message)
    if directory is not None and (context.roles.trains or context.roles.is_home):
        yield from weight_problems(CRITIC, directory, shape)


def weight_problems(key: str, directory: str, shape: HfConfig) -> Iterator[Problem]:
    """Check that the files hold exactly the model's tensors."""
    try:
        check_weights(Path(directory), shape)
    except (OSError, ValueError) as error:
        yield Problem.of(key, directory, str(error))


def _load(topology: Topology, shape: HfConfig, critic: HfConfig | None) -> Iterator[Problem]:
    """Check that the run can start from the checkpoint in trainer.load."""
    try:
        beginning_of(topology, shape, critic)
    except ValueError as error:
        yield Problem.of("trainer.load", topology.trainer.load, str(error))


def _resumed(topology: Topology, shape: HfConfig, critic: HfConfig | None) -> Iterator[Problem]:
    """Check that the run's newest checkpoint fits its model. The start sets an unreadable checkpoint aside."""
    try:
        newest = newest_of_run(Path(topology.run.dir) / topology.run.name)
    except ValueError:
        return
    try:
        if newest is not None:
            path, saved = newest
            lora = SavedLora.of(topology, shape)
            saved.check(path, shape, lora=lora, dtype=topology.model.dtype, resumes=True, critic=critic)
    except ValueError as error:
        yield Problem.of(MODEL, topology.model.hf_checkpoint, str(error))


CHECKS: Final = Checks(model=(check_model,), contents=(check_files,))
