"""Whether a start would go on this machine: the one decision that --check tells and a start obeys."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from actors.buffer.prompts.prompts import PromptReader, Reader
from actors.buffer.prompts.source import training_reader
from actors.buffer.prompts.tokenizing import Tokenizing, load_tokenizing
from actors.hooks import check_hooks
from actors.reward.graders.builtin import find_grader
from actors.rollout.engines.external import Wanted
from actors.rollout.engines.launching.server_arguments import engine_problems
from actors.rollout.requests.served_model import ServedModel
from actors.rollout.sglang.limits import KEPT_OF_INPUT
from actors.trainer.checkpoints import beginning_of, newest_of_run
from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.models.layout import check_layout
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.models.weight_files import check_weights
from messages import Prompt
from runtime.agent.preflight.check import check_here
from runtime.agent.preflight.findings import Checked
from runtime.agent.preflight.hub import hub_models
from runtime.hf_config import ModelError, read_dense_model
from runtime.hf_experts import Qwen3MoeKeys
from runtime.samples.data_files import DataError
from runtime.samples.dump_files import RUN_FILE, DumpedRun
from runtime.samples.rows import read_rows
from runtime.settings.load import LoadedTopology
from runtime.settings.plugins import is_plugin
from runtime.settings.reading.config import Problem
from runtime.settings.recipe import (
    DataConfig,
    eval_data,
    eval_sampling,
    max_prompt_len,
    rollout_sampling,
    trains_demonstrations,
)
from runtime.settings.topology import Topology, answers_are_recorded, sglang_arguments
from runtime.weights.fp8 import sglang_refuses

READ_ROWS: Final = 1000  # of each data file, rendered and tokenised as the buffer will
MODEL: Final = "model.hf_checkpoint"


def preflight(
    loaded: LoadedTopology, node: str | None = None, *, fresh: bool = False, elsewhere: bool = False
) -> Checked:
    """Everything that a start would be refused for.

    Args:
        loaded: the topology.
        node: which of its nodes this machine is; none: the one with the bus.
        fresh: the run that is there is to be discarded.
        elsewhere: leave out what only the machine can show where the run is to be.
    """
    checked = check_here(loaded, node, fresh=fresh, elsewhere=elsewhere)
    hooks = check_hooks(loaded.topology, loaded.loaded)
    found = [problem for problem in hooks if not (elsewhere and _is_of_a_machine(problem))]
    if not elsewhere:
        broken = {problem.key for problem in checked.problems}
        found += _with_origin(loaded, _of_dumps(loaded.topology))
        found += _with_origin(loaded, _of_engines(loaded.topology, broken))
        if _can_be_read(loaded, broken):
            found += _with_origin(loaded, _of_urls(loaded.topology, broken))
            found += _with_origin(loaded, _of_model(loaded.topology, broken, fresh=fresh))
    return msgspec.structs.replace(checked, problems=(*checked.problems, *found))


def _can_be_read(loaded: LoadedTopology, broken: set[str]) -> bool:
    """Whether the model is here; one that a start is to download is checked then."""
    return MODEL not in broken and not any(hub_models(loaded))


def _is_of_a_machine(problem: Problem) -> bool:
    """Whether another machine may be without it: users' files, and what a kernel refuses."""
    return is_plugin(problem.value or "") or problem.key == "reward.sandbox"


def _with_origin(loaded: LoadedTopology, problems: Iterator[Problem]) -> Iterator[Problem]:
    for problem in problems:
        yield msgspec.structs.replace(problem, file=loaded.loaded.origin(problem.key))


def _of_dumps(topology: Topology) -> Iterator[Problem]:
    key, value = "run.dump_details", topology.run.dump_details
    file = Path(value or "") / RUN_FILE
    if value is None or not file.is_file():
        return
    try:
        owner = msgspec.json.decode(file.read_bytes(), type=DumpedRun).run
    except (OSError, msgspec.MsgspecError) as error:
        yield Problem.of(key, value, f"{file} cannot be read: {error}")
        return
    if owner != topology.run.name:
        message = f"holds the dumps of another run, {owner}: move them away, or name another directory"
        yield Problem.of(key, value, message)


def _of_engines(topology: Topology, broken: set[str]) -> Iterator[Problem]:
    for name, engine in topology.engines.items() if not answers_are_recorded(topology) else ():
        key = f"engines.{name}"
        if engine.kind == "sglang" and not engine.urls and not broken & {f"{key}.python", f"{key}.kind"}:
            yield from engine_problems(key, engine)


def _of_urls(topology: Topology, broken: set[str]) -> Iterator[Problem]:
    """Engines that run already, and serve something else."""
    for name, engine in topology.engines.items() if not answers_are_recorded(topology) else ():
        key = f"engines.{name}.urls"
        if not engine.urls or key in broken:
            continue
        try:
            wanted = Wanted.by(topology, engine)
        except (OSError, ValueError):  # said of the model
            return
        from actors.rollout.engines.asking import url_problems  # and an HTTP client, which most runs do without

        yield from url_problems(key, engine.urls, wanted)


def _of_model(topology: Topology, broken: set[str], *, fresh: bool) -> Iterator[Problem]:
    """What the model's directory and the prompts for it are refused for; `broken` keys are known to be unusable."""
    model = topology.model
    try:
        shape = read_hf_config(Path(model.hf_checkpoint), topology.trainer.megatron.mtp_num_layers)
        if topology.run.only != "rollout":
            yield from _layout(topology, shape)
            yield from _replay(topology, shape)
            yield from block_problems(topology, shape)
        _ = [read_dense_model(Path(model.hf_checkpoint)) for _ in _embedded(topology)]
        yield from _of_sglang(topology, shape)
    except (OSError, ValueError, ModelError) as error:
        yield Problem.of(MODEL, model.hf_checkpoint, str(error))
        return
    if not model.random_init:
        yield from _weights(MODEL, model.hf_checkpoint, shape)
    if model.ref_load is not None and "model.ref_load" not in broken:
        yield from _weights("model.ref_load", model.ref_load, shape)
    if topology.run.only != "rollout":
        yield from _load(topology, shape)
        yield from _resumed(topology, shape) if not fresh else ()
    yield from _limits(topology, shape)
    yield from _prompts(topology, shape, broken)


def _embedded(topology: Topology) -> Iterator[str]:
    if not answers_are_recorded(topology):
        yield from (name for name, pool in topology.engines.items() if pool.kind == "embedded" and not pool.urls)


def _of_sglang(topology: Topology, shape: HfConfig) -> Iterator[Problem]:
    """A Qwen3-MoE with layers without experts, in which SGLang 0.5.23 builds experts: it serves another model."""
    pools = () if answers_are_recorded(topology) else topology.engines.values()
    if shape.model_type != "qwen3_moe" or shape.experts is None or all(shape.experts.layers):
        return
    if not any(pool.kind == "sglang" for pool in pools):
        return
    directory = topology.model.hf_checkpoint
    config = Path(directory) / "config.json"
    keys = msgspec.json.decode(config.read_bytes(), type=Qwen3MoeKeys)
    if keys.mlp_only_layers:
        said, allowed = f"mlp_only_layers = {list(keys.mlp_only_layers)}", "[]"
    else:
        said, allowed = f"decoder_sparse_step = {keys.decoder_sparse_step}", "1"
    message = f"{config}: {said}, and SGLang builds experts in those layers all the same; allowed for it: {allowed}"
    yield Problem.of(MODEL, directory, message)


def _weights(key: str, directory: str, shape: HfConfig) -> Iterator[Problem]:
    """Whether the files hold the tensors of the model and no others."""
    try:
        check_weights(Path(directory), shape)
    except (OSError, ValueError) as error:
        yield Problem.of(key, directory, str(error))


def _replay(topology: Topology, shape: HfConfig) -> Iterator[Problem]:
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if getattr(topology.algorithm, name) and shape.experts is None:
            yield Problem.of(f"algorithm.{name}", True, "the model has no experts, and so no router")


def _layout(topology: Topology, shape: HfConfig) -> Iterator[Problem]:
    try:
        check_layout(shape, topology.trainer.megatron)
    except ValueError as error:
        yield Problem(key="trainer.megatron", message=str(error))


def block_problems(topology: Topology, shape: HfConfig) -> Iterator[Problem]:
    """Whether engines that compute in FP8 can read the model's matrices, cut among their ranks."""
    for name, engine in topology.engines.items() if not answers_are_recorded(topology) else ():
        arguments = {argument.name: argument.value for argument in sglang_arguments(engine)}
        ranks = arguments.get("tp_size") or arguments.get("tensor_parallel_size") or engine.num_gpus_per_engine
        experts = arguments.get("ep_size") or arguments.get("expert_parallel_size") or 1
        if engine.weight_format == "fp8" and not engine.urls:
            message = sglang_refuses(hf_shapes(shape), shape.head_dim, tp_size=ranks, ep_size=experts)
            if message is not None:
                yield Problem.of(f"engines.{name}.weight_format", "fp8", message)


def _load(topology: Topology, shape: HfConfig) -> Iterator[Problem]:
    """Whether the run can begin from the checkpoint that it names."""
    try:
        beginning_of(topology, shape)
    except ValueError as error:
        yield Problem.of("trainer.load", topology.trainer.load, str(error))


def _resumed(topology: Topology, shape: HfConfig) -> Iterator[Problem]:
    """Whether the run's own newest checkpoint is of its model; one that cannot be read is set aside by the start."""
    try:
        newest = newest_of_run(Path(topology.run.dir) / topology.run.name)
    except ValueError:
        return
    try:
        if newest is not None:
            path, saved = newest
            saved.check(path, shape, dtype=topology.model.dtype, resumes=True)
    except ValueError as error:
        yield Problem.of(MODEL, topology.model.hf_checkpoint, str(error))


def _limits(topology: Topology, shape: HfConfig) -> Iterator[Problem]:
    rollout = topology.rollout
    if rollout.max_context_len is not None and rollout.max_context_len > _context(shape):
        message = f"at most {_context(shape)}: {_ends(shape)}"
        yield Problem.of("rollout.max_context_len", rollout.max_context_len, message)
    if beyond := [token for token in rollout.stop_token_ids if token >= shape.vocab_size]:
        message = f"{beyond[0]} is no token of the model, which has {shape.vocab_size}"
        yield Problem.of("rollout.stop_token_ids", list(rollout.stop_token_ids), message)


def _context(shape: HfConfig) -> int:
    """Tokens of a prompt and its response at most."""
    return shape.max_position_embeddings - KEPT_OF_INPUT


def _ends(shape: HfConfig) -> str:
    return f"the model ends at {shape.max_position_embeddings} tokens, of which engines keep {KEPT_OF_INPUT} free"


def _served(topology: Topology) -> Iterator[Problem]:
    """What would be refused of each request: stop texts; and a tokenizer that makes tokens which the model has not."""
    model, stop = topology.model.hf_checkpoint, topology.rollout.stop
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


def _prompts(topology: Topology, shape: HfConfig, broken: set[str]) -> Iterator[Problem]:
    try:
        tokenizing = load_tokenizing(topology.model.hf_checkpoint, trust_remote_code=topology.model.trust_remote_code)
    except DataError as error:
        yield Problem.of(MODEL, topology.model.hf_checkpoint, str(error))
        return
    if not answers_are_recorded(topology):
        yield from _served(topology)
    own_graders = topology.reward.graders
    for key, data, reader, response in _sources(topology, tokenizing):
        if data.path is None or key in broken:
            continue
        try:
            rows = list(islice(read_rows(data), READ_ROWS + 1))
            prompts = reader.read(rows[:READ_ROWS], data)
        except DataError as error:
            yield Problem.of(key, data.path, str(error))
            continue
        usable = [prompt for prompt in prompts if reader.too_long(prompt) is None]
        if not usable and len(rows) <= READ_ROWS:
            shortest = min(prompts, key=lambda prompt: len(prompt.prompt_ids))
            message = f"every row is over a limit; of the shortest {reader.too_long(shortest)}"
            yield Problem.of(key, data.path, message)
        if not trains_demonstrations(topology):
            yield from _ungraded(key, data, [prompt for prompt in usable if prompt.rm_type not in own_graders])
        yield from _too_large(topology, shape, key, data.path, usable, response)


def _ungraded(key: str, data: DataConfig, prompts: list[Prompt]) -> Iterator[Problem]:
    """Built-in graders that do not exist, or that have no label to compare with."""
    built_in = [(prompt.rm_type, prompt) for prompt in prompts if prompt.rm_type and not is_plugin(prompt.rm_type)]
    for name, prompt in dict(reversed(built_in)).items():
        try:
            find_grader(name)
        except ValueError as error:
            yield Problem.of(key, data.path, f"row {prompt.row}: {error}")
    for name, prompt in built_in:
        if prompt.label is None:
            message = f"row {prompt.row} of {data.path} has no label, which the grader {name} compares with"
            yield Problem(key=key.replace("path", "label_key"), message=message)
            return


def _sources(topology: Topology, tokenizing: Tokenizing) -> Iterator[tuple[str, DataConfig, Reader, int]]:
    """Key of the path, data, what reads it, and how many tokens a response may have."""
    for index, data in enumerate(topology.data):
        response = rollout_sampling(topology).max_response_len
        yield f"data.{index}.path", data, training_reader(topology, tokenizing), response
    reader = PromptReader(tokenizing, max_prompt_len(topology.rollout))
    for index, item in enumerate(topology.eval):
        response = eval_sampling(topology, item).max_response_len
        yield f"eval.{index}.path", eval_data(topology, item), reader, response


def _too_large(
    topology: Topology, shape: HfConfig, key: str, path: str, prompts: list[Prompt], response: int
) -> Iterator[Problem]:
    """Token ids that the model has not, and prompts after which it has no room for a response."""
    highest = max((int(prompt.prompt_ids.max()) for prompt in prompts), default=0)
    if highest >= shape.vocab_size:
        message = f"its tokenizer gives token {highest} for {path}, and the model has {shape.vocab_size}"
        yield Problem.of(MODEL, topology.model.hf_checkpoint, message)
    longest = max((len(prompt.prompt_ids) for prompt in prompts), default=0)
    needed = min(longest + response, topology.rollout.max_context_len or longest + response)
    why = f"a prompt of {longest} tokens in {path} and a response of {response} need {needed}"
    for name, engine in topology.engines.items() if not answers_are_recorded(topology) else ():
        room = engine.max_total_tokens
        if room is not None and room < needed + KEPT_OF_INPUT:
            message = f"is too small: {why}, and engines keep {KEPT_OF_INPUT} free"
            yield Problem.of(f"engines.{name}.max_total_tokens", room, message)
    if not answers_are_recorded(topology) and needed > _context(shape):
        length = "rollout.max_response_len" if key.startswith("data") else key.replace("path", "max_response_len")
        remedy = "rollout.max_context_len cuts responses, rollout.max_prompt_len leaves long prompts out"
        yield Problem.of(length, response, f"{why}, and {_ends(shape)}; {remedy}")
