"""Pre-start checks of engine pools whose model does not change, and of judges."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from actors.reward.judging.keys import KeyProblem, api_key, remote_key
from actors.rollout.sglang.facts import KEPT_OF_INPUT
from actors.rollout.sglang.served_model import TOKENIZER, ServedModel
from runtime.models.config import ModelError, read_dense_model
from runtime.settings.derived import asks_topk
from runtime.settings.placement import home_node
from runtime.settings.reading.config import Problem
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.topology import (
    Topology,
    answers_are_recorded,
    frozen_pools,
    judge_pools,
    model_of,
    other_pools,
    sglang_arguments,
)

CHAT_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")
BYTES_LOADED: Final = 2  # memory of a tiny engine per byte of its weight files


class _Template(msgspec.Struct, frozen=True):
    chat_template: str | list[dict[str, str]] | None = None


class _Config(msgspec.Struct, frozen=True):
    max_position_embeddings: int | None = None


def pool_problems(topology: Topology, context: int, broken: set[str]) -> Iterator[Problem]:
    """Check that the models of these pools read the samples of the trained model.

    Args:
        topology: the topology.
        context: most tokens of a prompt and its response in the trained model.
        broken: keys that already have a problem.
    """
    for name in frozen_pools(topology) if not answers_are_recorded(topology) else ():
        engine, key = topology.engines[name], f"engines.{name}.hf_checkpoint"
        if engine.hf_checkpoint is None or key in broken:
            continue
        directory, topk = Path(engine.hf_checkpoint), topology.algorithm.distillation_topk
        try:
            served = ServedModel.read(directory)
            if engine.kind == "tiny" and not engine.urls:
                read_dense_model(directory)
            config = msgspec.json.decode((directory / "config.json").read_bytes(), type=_Config)
            trained = ServedModel.read(Path(topology.model.hf_checkpoint))
            problem = tokenizer_problem(trained, served)
        except (OSError, ValueError, ModelError) as error:
            yield Problem.of(key, engine.hf_checkpoint, str(error))
            continue
        if problem is not None:
            yield Problem.of(key, engine.hf_checkpoint, problem)
        smallest = min(trained.vocab_size, served.vocab_size)
        if asks_topk(topology.algorithm) and topk > smallest:
            message = f"the vocabulary of the trained model or of engines.{name} has {smallest} tokens"
            yield Problem.of("algorithm.distillation_topk", topk, message)
        longest, room = _longest(topology, context), config.max_position_embeddings
        if room is not None and room <= longest + KEPT_OF_INPUT:
            message = f"its context has {room} tokens; samples of {longest} tokens need {longest + KEPT_OF_INPUT + 1}"
            yield Problem.of(key, engine.hf_checkpoint, message)


def answering_problems(topology: Topology, broken: set[str]) -> Iterator[Problem]:
    """Check that the models of pools that generate functions may choose can be read, and their tokens or texts."""
    if answers_are_recorded(topology):
        return
    for name in topology.rollout.pools:
        engine, key = topology.engines[name], f"engines.{name}.hf_checkpoint"
        if engine.hf_checkpoint is None or key in broken:
            continue
        try:
            served = ServedModel.read(Path(engine.hf_checkpoint))
            if engine.kind == "tiny" and not engine.urls:
                read_dense_model(Path(engine.hf_checkpoint))
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


def judge_problems(topology: Topology, node: str, broken: set[str]) -> Iterator[Problem]:
    """Check that a node's reward actor can read its API keys, and that the models of judges know a chat format.

    Args:
        topology: the topology.
        node: this machine.
        broken: keys that already have a problem.
    """
    if answers_are_recorded(topology):
        return
    if node in (topology.reward.nodes or (home_node(topology),)):
        try:
            remote_key(topology.reward)
        except KeyProblem as error:
            yield Problem.of(f"reward.{error.setting}", error.value, str(error))
    for name, judge in topology.reward.judges.items():
        if node in (topology.reward.nodes or (home_node(topology),)):
            try:
                api_key(judge)
            except KeyProblem as error:
                yield Problem.of(f"reward.judges.{name}.{error.setting}", error.value, str(error))
    for pool in dict.fromkeys(judge_pools(topology).values()):
        engine, key = topology.engines[pool], f"engines.{pool}.hf_checkpoint"
        given = any(argument.name == "chat_template" for argument in sglang_arguments(engine))
        directory = Path(engine.hf_checkpoint or "")
        if engine.hf_checkpoint is None or key in broken or engine.urls or given or not directory.is_dir():
            continue
        try:
            if engine.kind == "tiny":
                read_dense_model(directory)
            has_template = _has_chat_template(directory)
        except (OSError, ValueError, ModelError) as error:
            yield Problem.of(key, engine.hf_checkpoint, str(error))
            continue
        if not has_template:
            message = f"has no chat template, which a judge needs: choose a chat model, or set engines.{pool}.sglang"
            yield Problem.of(key, engine.hf_checkpoint, f"{message}.chat_template")


def _has_chat_template(directory: Path) -> bool:
    if any((directory / name).is_file() for name in CHAT_TEMPLATES):
        return True
    file = directory / "tokenizer_config.json"
    return file.is_file() and msgspec.json.decode(file.read_bytes(), type=_Template).chat_template is not None


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


def memory_of_pools(topology: Topology) -> int:
    """Return the bytes that the weights of tiny engines need, of pools whose model does not change."""
    named = dict.fromkeys((*frozen_pools(topology), *other_pools(topology)))
    pools = [topology.engines[name] for name in named if name in topology.engines]
    return sum(_memory(topology, engine) for engine in pools if engine.kind == "tiny" and not engine.urls)


def _memory(topology: Topology, engine: EngineConfig) -> int:
    files = Path(model_of(topology, engine)).glob("*.safetensors")
    return engine.num_engines * BYTES_LOADED * sum(file.stat().st_size for file in files)


def _longest(topology: Topology, context: int) -> int:
    """Return the most tokens that a sample may have."""
    rollout = topology.rollout
    limits = [context if rollout.max_context_len is None else rollout.max_context_len, context]
    if rollout.max_prompt_len is not None:
        limits.append(rollout.max_prompt_len + rollout.max_response_len)
    return min(limits)
