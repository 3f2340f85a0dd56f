"""Pre-start checks of engines: their arguments, and the models that they serve."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from actors.rollout.sglang.facts import KEPT_OF_INPUT
from actors.rollout.sglang.model_support import ignored_keys_refusal
from actors.rollout.sglang.served_model import ServedModel
from actors.rollout.sglang.server_arguments import engine_problems
from runtime.functions import isolation
from runtime.models.config import ModelDescription, read_tiny_engine_model
from runtime.models.directory import (
    CHAT_TEMPLATE,
    CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelError,
    has_file,
    read_json,
)
from runtime.models.family import families
from runtime.models.quantization import quantization_of
from runtime.models.safetensors import safetensors_files
from runtime.node.checks.context import MODEL, CheckContext, Checks, SourceRows
from runtime.settings.derived import policy_model, quantization, topk_divergence
from runtime.settings.owners import rollout_places
from runtime.settings.reading.config import Problem
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.topology import (
    POLICY,
    Topology,
    answers_are_recorded,
    frozen_pools,
    judge_pools,
    model_of,
    other_pools,
    sglang_arguments,
)

CHAT_TEMPLATES: Final = (CHAT_TEMPLATE, "chat_template.json")
NEEDS_TRAINER: Final = 'a trainer dequantizes; allowed with run.only = "rollout": an unquantized copy of the model'
BYTES_LOADED: Final = 2  # memory of a tiny engine per byte of its weight files


class _Template(msgspec.Struct, frozen=True):
    chat_template: str | list[dict[str, str]] | None = None


class _Config(msgspec.Struct, frozen=True):
    max_position_embeddings: int | None = None


def context_of(model: ModelDescription) -> int:
    """Maximum number of tokens of a prompt and its response together."""
    return model.max_context - KEPT_OF_INPUT


def end_of(model: ModelDescription) -> str:
    """Describe the model's context limit, as the end of an error message."""
    return f"the model's context has {model.max_context} tokens, of which engines reserve {KEPT_OF_INPUT}"


def check_arguments(context: CheckContext) -> Iterator[Problem]:
    """Ask the SGLang of each pool on this node whether it accepts its arguments."""
    for name in context.roles.pools:
        key, engine = f"engines.{name}", context.topology.engines[name]
        if engine.kind == "sglang" and not (context.has(f"{key}.python") or context.has(f"{key}.kind")):
            yield from engine_problems(key, engine)


def check_urls(context: CheckContext) -> Iterator[Problem]:
    """Check that external engines serve the topology's model."""
    topology = context.topology
    asks = context.roles.is_home and not answers_are_recorded(topology)
    for name, engine in topology.engines.items() if asks else ():
        key = f"engines.{name}.urls"
        if not engine.urls or context.has(key):
            continue
        from actors.rollout.engines.checks import ServerRequirements, url_problems  # imports aiohttp: 0.1 s of a core

        try:
            wanted = ServerRequirements.by(topology, engine)
        except (OSError, ValueError):  # the model's own check reports it
            continue
        yield from url_problems(key, engine.urls, wanted)


def check_model(context: CheckContext) -> Iterator[Problem]:
    """Check that the engines of this run can serve the trained model."""
    topology, directory = context.topology, context.topology.model.hf_checkpoint
    if context.has(MODEL) or answers_are_recorded(topology):
        return
    try:
        if topology.run.only == "rollout" and (found := quantization(topology)) is not None:
            message = f"is quantized ({found.method}), which {NEEDS_TRAINER}"
            yield Problem.of(MODEL, directory, message)
        if num_tiny_engines(topology):
            read_tiny_engine_model(Path(directory), topology.model.ignore_config_keys)
        family = families()[policy_model(topology).shape.model_type]
        refusal = ignored_keys_refusal(Path(directory), family)
        if refusal is not None and POLICY in topology.engines and topology.engines[POLICY].kind == "sglang":
            yield Problem.of(MODEL, directory, refusal)
    except (OSError, ValueError, ModelError) as error:
        yield Problem.of(MODEL, directory, str(error))


def check_limits(context: CheckContext) -> Iterator[Problem]:
    """Check the longest sample and the stop tokens against the trained model."""
    rollout, model = context.topology.rollout, policy_model(context.topology)
    if not context.roles.is_home:
        return
    if rollout.max_context_len is not None and rollout.max_context_len > context_of(model):
        message = f"at most {context_of(model)}: {end_of(model)}"
        yield Problem.of("rollout.max_context_len", rollout.max_context_len, message)
    if beyond := [token for token in rollout.stop_token_ids if token >= model.shape.vocab_size]:
        message = f"{beyond[0]} is not a token of the model, whose vocabulary has {model.shape.vocab_size}"
        yield Problem.of("rollout.stop_token_ids", list(rollout.stop_token_ids), message)


def check_requests(context: CheckContext) -> Iterator[Problem]:
    """Check what engines would refuse in every request: stop texts, and token ids beyond the model's vocabulary."""
    model, stop = context.topology.model.hf_checkpoint, context.topology.rollout.stop
    try:
        served = ServedModel.read(Path(model))
        served.check_tokenizer()
    except (OSError, ValueError) as error:
        yield Problem.of(MODEL, model, str(error))
        return
    try:
        served.check_stop(stop)
    except ValueError as error:
        yield Problem.of("rollout.stop", list(stop), str(error))


def check_lengths(context: CheckContext, sources: Iterable[SourceRows]) -> Iterator[Problem]:
    """Check the longest prompt of each source plus its response against context limits."""
    topology = context.topology
    model = policy_model(topology)
    for source in sources if not answers_are_recorded(topology) else ():
        length = source.longest + source.max_response_len
        needed = min(length, topology.rollout.max_context_len or length)
        why = (
            f"a prompt of {source.longest} tokens in {source.place} and a response of {source.max_response_len} tokens "
            f"need {needed}"
        )
        for name, engine in topology.engines.items():
            room = engine.max_total_tokens
            if room is not None and room < needed + KEPT_OF_INPUT:
                message = f"is too small: {why}, and engines reserve {KEPT_OF_INPUT}"
                yield Problem.of(f"engines.{name}.max_total_tokens", room, message)
        if needed > context_of(model):
            table = "rollout" if source.key.startswith("data") else source.key
            remedy = "set rollout.max_context_len to cut responses, or rollout.max_prompt_len to leave long prompts out"
            message = f"{why}, and {end_of(model)}; {remedy}"
            yield Problem.of(f"{table}.max_response_len", source.max_response_len, message)


def _read_as_stored(directory: Path) -> None:
    """Check that a tiny engine can serve the weights of a directory.

    Raises:
        ModelError: as `read_tiny_engine_model`, or the weights are quantized.
    """
    read_tiny_engine_model(directory)
    if (found := quantization_of(directory)) is not None:
        raise ModelError(
            f"{directory / CONFIG}: the tiny engine does not read quantized weights ({found.method}); use an "
            f'unquantized copy, or kind = "sglang"'
        )


def check_frozen_pools(context: CheckContext) -> Iterator[Problem]:
    """Check that the models of these pools read the samples of the trained model."""
    topology = context.topology
    for name in frozen_pools(topology) if context.roles.is_home and not answers_are_recorded(topology) else ():
        engine, key = topology.engines[name], f"engines.{name}.hf_checkpoint"
        if engine.hf_checkpoint is None or context.has(key):
            continue
        directory, divergence = Path(engine.hf_checkpoint), topk_divergence(topology.algorithm)
        try:
            served = ServedModel.read(directory)
            if engine.kind == "tiny" and not engine.urls:
                _read_as_stored(directory)
            config = read_json(directory, CONFIG, _Config)
            trained = ServedModel.read(Path(topology.model.hf_checkpoint))
            problem = tokenizer_problem(trained, served)
        except (OSError, ValueError, ModelError) as error:
            yield Problem.of(key, engine.hf_checkpoint, str(error))
            continue
        if problem is not None:
            yield Problem.of(key, engine.hf_checkpoint, problem)
        smallest = min(trained.vocab_size, served.vocab_size)
        if divergence is not None and divergence.topk > smallest:
            message = f"the vocabulary of the trained model or of engines.{name} has {smallest} tokens"
            yield Problem.of("algorithm.opd.distillation.topk", divergence.topk, message)
        longest, room = _longest(topology), config.max_position_embeddings
        if room is not None and room <= longest + KEPT_OF_INPUT:
            message = f"its context has {room} tokens; samples of {longest} tokens need {longest + KEPT_OF_INPUT + 1}"
            yield Problem.of(key, engine.hf_checkpoint, message)


def check_chosen_pools(context: CheckContext) -> Iterator[Problem]:
    """Check that the models of pools that generate functions may choose can be read, and their tokens or texts."""
    topology = context.topology
    for name in topology.rollout.pools if context.roles.is_home and not answers_are_recorded(topology) else ():
        engine, key = topology.engines[name], f"engines.{name}.hf_checkpoint"
        if engine.hf_checkpoint is None or context.has(key):
            continue
        try:
            served = ServedModel.read(Path(engine.hf_checkpoint))
            if engine.kind == "tiny" and not engine.urls:
                _read_as_stored(Path(engine.hf_checkpoint))
            trained = ServedModel.read(Path(topology.model.hf_checkpoint))
            if (message := _exchange_problem(trained, served)) is not None:
                yield Problem.of(key, engine.hf_checkpoint, message)
        except (OSError, ValueError, ModelError) as error:
            yield Problem.of(key, engine.hf_checkpoint, str(error))


def _exchange_problem(trained: ServedModel, served: ServedModel) -> str | None:
    """Describe why two models exchange neither tokens nor texts; None if they do."""
    if served.has_tokens_of(trained) or (served.tokens() and trained.tokens()):
        return None
    where = "it" if trained.tokens() else "model.hf_checkpoint"
    return f"{where} has no {TOKENIZER}: models with other tokens exchange texts, which need one"


def check_judges(context: CheckContext) -> Iterator[Problem]:
    """Check that the models of judges know a chat format."""
    topology = context.topology
    if answers_are_recorded(topology):
        return
    for pool in dict.fromkeys(judge_pools(topology).values()):
        engine, key = topology.engines[pool], f"engines.{pool}.hf_checkpoint"
        given = any(argument.name == "chat_template" for argument in sglang_arguments(engine))
        directory = Path(engine.hf_checkpoint or "")
        if engine.hf_checkpoint is None or context.has(key) or engine.urls or given or not directory.is_dir():
            continue
        try:
            if engine.kind == "tiny":
                read_tiny_engine_model(directory)
            has_template = _has_chat_template(directory)
        except (OSError, ValueError, ModelError) as error:
            yield Problem.of(key, engine.hf_checkpoint, str(error))
            continue
        if not has_template:
            message = f"has no chat template, which a judge needs: choose a chat model, or set engines.{pool}.sglang"
            yield Problem.of(key, engine.hf_checkpoint, f"{message}.chat_template")


def check_agent(context: CheckContext) -> Iterator[Problem]:
    """Check that the program of `rollout.agent` is on this node, if it has a rollout actor."""
    agent, topology = context.topology.rollout.agent, context.topology
    here = {place.node for place in rollout_places(topology)}
    if not agent.command or context.node not in here:
        return
    key = "rollout.agent.command"
    if shutil.which(agent.command[0]) is None:
        message = (
            "its first word is no program on this machine: a path with a / that can be executed, or a name on PATH"
        )
        yield Problem.of(key, list(agent.command), message)
    if agent.sandbox == "isolated":
        context.doing("rollout.agent.sandbox", "isolated", "trying it")
        if (reason := isolation.refusal()) is not None:
            message = f'this machine cannot isolate programs: {reason}; "process" and "none" leave them what they reach'
            yield Problem.of("rollout.agent.sandbox", "isolated", message)
    directory = Path(topology.model.hf_checkpoint)
    if directory.is_dir() and not _has_chat_template(directory):
        yield Problem(key="rollout.agent", message="needs a model with a chat template: programs send messages")


def _has_chat_template(directory: Path) -> bool:
    if any(has_file(directory, name) for name in CHAT_TEMPLATES):
        return True
    return (
        has_file(directory, TOKENIZER_CONFIG)
        and read_json(directory, TOKENIZER_CONFIG, _Template).chat_template is not None
    )


def tokenizer_problem(trained: ServedModel, served: ServedModel) -> str | None:
    """Describe why a model cannot read the tokens of the trained model; None if it can.

    A directory without `tokenizer.json` is compared by its vocabulary size.

    Raises:
        ValueError: a tokenizer cannot be read.
    """
    own = trained.tokens()
    highest = max(own.values(), default=trained.vocab_size - 1)
    if highest >= served.vocab_size:
        return f"its vocabulary has {served.vocab_size} tokens, and the tokenizer of the trained model has id {highest}"
    found = served.tokens()
    other = next((text for text, token in own.items() if found.get(text) != token), None) if found else None
    if other is None:
        return None
    return f"its {TOKENIZER} is another one: {other!r} is token {own[other]} of the trained model, and here " + (
        f"token {found[other]}" if other in found else "no token"
    )


def num_tiny_engines(topology: Topology) -> int:
    """Return the number of tiny engines that serve the trained model."""
    pool = None if answers_are_recorded(topology) else topology.engines.get(POLICY)
    return pool.num_engines if pool is not None and pool.kind == "tiny" and not pool.urls else 0


def memory_of_pools(topology: Topology) -> int:
    """Return the bytes that the weights of tiny engines need, of pools whose model does not change."""
    named = dict.fromkeys((*frozen_pools(topology), *other_pools(topology)))
    pools = [topology.engines[name] for name in named if name in topology.engines]
    return sum(_memory(topology, engine) for engine in pools if engine.kind == "tiny" and not engine.urls)


def _memory(topology: Topology, engine: EngineConfig) -> int:
    try:
        files = safetensors_files(Path(model_of(topology, engine)))
    except (OSError, ValueError):  # the check of its directory reports it
        return 0
    return engine.num_engines * BYTES_LOADED * sum(file.stat().st_size for file in files)


def _longest(topology: Topology) -> int:
    """Return the most tokens that a sample may have."""
    rollout, context = topology.rollout, context_of(policy_model(topology))
    limits = [context if rollout.max_context_len is None else rollout.max_context_len, context]
    if rollout.max_prompt_len is not None:
        limits.append(rollout.max_prompt_len + rollout.max_response_len)
    return min(limits)


CHECKS: Final = Checks(
    machine=(check_arguments, check_judges, check_agent),
    model=(check_urls, check_model),
    contents=(check_limits, check_frozen_pools, check_chosen_pools),
)
