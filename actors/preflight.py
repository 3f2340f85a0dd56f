"""Pre-start checks. `--check` reports the result, and a start obeys it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from actors.hooks import check_hooks
from actors.preflight_pools import answering_problems, judge_problems, memory_of_pools, pool_problems
from actors.preflight_prompts import MODEL, CheckOutput, context_of, end_of, prompt_problems
from actors.rollout.engines.checks import ServerRequirements
from actors.rollout.sglang.model_support import dense_layers_refusal, fp8_refusal, parallel_sizes
from actors.rollout.sglang.served_model import ServedModel
from actors.rollout.sglang.server_arguments import engine_problems
from actors.trainer.checkpoints import beginning_of, newest_of_run
from actors.trainer.models.config import HfConfig, critic_model, trained_model
from actors.trainer.models.layout import check_layout
from actors.trainer.models.shapes import check_weights, hf_shapes, num_weights
from runtime.data.dump_files import RUN_FILE, DumpedRun
from runtime.models.config import ModelError, read_dense_model
from runtime.node.checks.apart import Doing, unlimited
from runtime.node.checks.check import ASK_TIMEOUT_S, check_here
from runtime.node.checks.findings import Checked
from runtime.node.checks.hub import hub_models
from runtime.node.checks.machine import free_memory_bytes
from runtime.settings.derived import has_critic
from runtime.settings.load import LoadedTopology
from runtime.settings.placement import NodeRoles, data_parallel_size, home_node, roles_of
from runtime.settings.plugins import is_plugin
from runtime.settings.reading.config import Problem
from runtime.settings.sizes import show_bytes
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.topology import POLICY, Topology, answers_are_recorded, critic_has_ranks, critic_topology
from runtime.util.formatting import count_of

WIDEST: Final = 1 << 17  # largest hidden_size; at 2^19, engine and trainer log-probs differed by 0.011 (measured)
BYTES_TRAINED: Final = 18  # bytes per weight, trained on the CPU: weight, gradient, Adam's moments, weight export
BYTES_SERVED: Final = 10  # bytes per weight, in a tiny engine during a weight update; both measured with 80 million


def preflight(
    loaded: LoadedTopology,
    node: str | None = None,
    *,
    fresh: bool = False,
    elsewhere: bool = False,
    doing: Doing = unlimited,
) -> Checked:
    """Run all pre-start checks.

    Args:
        loaded: the topology.
        node: the topology's name for this machine; None means the node with the bus.
        fresh: the start discards an existing run of this name.
        elsewhere: skip the checks that only the machines of the run can answer.
        doing: called before each check with the key, the value and a description.

    Returns:
        The problems that make a start refuse, and notes.
    """
    checked = check_here(loaded, node, fresh=fresh, elsewhere=elsewhere, doing=doing)
    hooks, notes = check_hooks(loaded.topology, loaded.loaded, doing), list(checked.notes)
    found = [problem for problem in hooks if not (elsewhere and _is_of_a_machine(problem))]
    if not elsewhere:
        here = node or home_node(loaded.topology)
        roles = roles_of(loaded.topology, here)
        broken = {problem.key for problem in checked.problems}
        if roles.is_home:
            found += _with_origin(loaded, _of_dumps(loaded.topology))
        found += _with_origin(loaded, _of_engines(loaded.topology, broken, roles))
        found += _with_origin(loaded, judge_problems(loaded.topology, here, broken))
        if roles.needs_model and _can_be_read(loaded, broken):
            broken |= {problem.key for problem in found}
            doing(
                MODEL,
                loaded.topology.model.hf_checkpoint,
                "reading it, or asking engines for it",
                limit_s=ASK_TIMEOUT_S,
            )
            if roles.is_home:
                found += _with_origin(loaded, _of_urls(loaded.topology, broken))
            output = CheckOutput(doing, notes)
            found += _with_origin(loaded, _of_model(loaded.topology, broken, output, roles, fresh=fresh))
    return msgspec.structs.replace(checked, problems=(*checked.problems, *found), notes=tuple(notes))


def _can_be_read(loaded: LoadedTopology, broken: set[str]) -> bool:
    """Whether the model is on this machine. A model that the start downloads is checked after the download."""
    return MODEL not in broken and not any(hub_models(loaded))


def _is_of_a_machine(problem: Problem) -> bool:
    """Whether a problem may be specific to this machine: a user's file, or a kernel that refuses the sandbox."""
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


def _of_engines(topology: Topology, broken: set[str], roles: NodeRoles) -> Iterator[Problem]:
    for name in roles.pools:
        key, engine = f"engines.{name}", topology.engines[name]
        if engine.kind == "sglang" and not broken & {f"{key}.python", f"{key}.kind"}:
            yield from engine_problems(key, engine)


def _of_urls(topology: Topology, broken: set[str]) -> Iterator[Problem]:
    """Check that external engines serve the topology's model."""
    for name, engine in topology.engines.items() if not answers_are_recorded(topology) else ():
        key = f"engines.{name}.urls"
        if not engine.urls or key in broken:
            continue
        try:
            wanted = ServerRequirements.by(topology, engine)
        except (OSError, ValueError):  # the model's own check reports it
            continue
        from actors.rollout.engines.checks import url_problems  # imports an HTTP client, which most runs do not need

        yield from url_problems(key, engine.urls, wanted)


def _of_model(
    topology: Topology, broken: set[str], output: CheckOutput, roles: NodeRoles, *, fresh: bool
) -> Iterator[Problem]:
    """Check the model's directory and its prompts. Keys in `broken` already have a problem."""
    model = topology.model
    try:
        shape = trained_model(topology)
        if topology.run.only != "rollout":
            yield from _layout(topology, shape)
            yield from _replay(topology, shape)
            yield from block_problems(topology, shape)
        _ = [read_dense_model(Path(model.hf_checkpoint)) for _ in _tiny_engines(topology)]
        yield from _of_sglang(topology, shape)
    except (OSError, ValueError, ModelError) as error:
        yield Problem.of(MODEL, model.hf_checkpoint, str(error))
        return
    if not model.random_init:
        yield from _weights(MODEL, model.hf_checkpoint, shape)
    if shape.hidden_size > WIDEST:
        message = f"hidden_size = {shape.hidden_size}: at most {WIDEST}; wider models round too much to verify weights"
        yield Problem.of(MODEL, model.hf_checkpoint, message)
    critic = None
    if has_critic(topology) and "critic.hf_checkpoint" not in broken:
        try:
            critic = critic_model(topology)
            yield from _critic(topology, shape, critic, roles)
        except (OSError, ValueError) as error:
            yield Problem.of("critic.hf_checkpoint", topology.critic.hf_checkpoint, str(error))
    yield from _memory(topology, shape, critic)
    if model.ref_load is not None and "model.ref_load" not in broken and (roles.trains or roles.is_home):
        yield from _weights("model.ref_load", model.ref_load, shape)
    if (
        model.opd_teacher_load is not None
        and "model.opd_teacher_load" not in broken
        and (roles.trains or roles.is_home)
    ):
        yield from _weights("model.opd_teacher_load", model.opd_teacher_load, shape)
    if roles.trains:
        yield from _load(topology, shape, critic)
        yield from _resumed(topology, shape, critic) if not fresh else ()
    if not roles.is_home:  # only home has the data
        return
    yield from _limits(topology, shape)
    yield from pool_problems(topology, context_of(shape), broken)
    yield from answering_problems(topology, broken)
    found = list(prompt_problems(topology, shape, broken, output))
    if not answers_are_recorded(topology) and MODEL not in {problem.key for problem in found}:
        yield from _served(topology)
    yield from found


def _critic(topology: Topology, actor: HfConfig, shape: HfConfig, roles: NodeRoles) -> Iterator[Problem]:
    """Check the critic's vocabulary, which is the actor's, its parallel layout, and its files."""
    directory = topology.critic.hf_checkpoint
    if shape.vocab_size != actor.vocab_size:
        message = f"reads a vocabulary of {shape.vocab_size} tokens, and the actor's has {actor.vocab_size}"
        yield Problem.of("critic.hf_checkpoint", directory, message)
    try:
        check_layout(shape, critic_topology(topology).trainer.megatron)
    except ValueError as error:
        if critic_has_ranks(topology):
            yield Problem(key="trainer.critic.megatron", message=str(error))
        else:
            message = f"the critic has the layout of trainer.megatron: {error}"
            yield Problem.of("critic.hf_checkpoint", directory, message)
    if directory is not None and (roles.trains or roles.is_home):
        yield from _weights("critic.hf_checkpoint", directory, shape)


def _memory(topology: Topology, shape: HfConfig, critic: HfConfig | None) -> Iterator[Problem]:
    """Check that weights trained or served on the CPU fit this machine's memory."""
    weights, replicas = num_weights(shape), data_parallel_size(topology.trainer)
    trains = topology.run.only != "rollout" and topology.trainer.device == "cpu"
    of_critic = 0 if critic is None else num_weights(critic) * data_parallel_size(critic_topology(topology).trainer)
    needed = (weights * replicas + of_critic) * BYTES_TRAINED if trains else 0
    engines = sum(pool.num_engines for pool in _tiny_engines(topology))
    needed += weights * engines * BYTES_SERVED + memory_of_pools(topology)
    free = free_memory_bytes()
    if needed > free:
        message = (
            f"its {weights:,} weights{' and the critic' if critic else ''} need {show_bytes(needed)} of memory in "
            f"{count_of(replicas, 'replica')} of the trainer and {count_of(engines, 'engine')}, "
            f"but this machine has only {show_bytes(free)} free"
        )
        yield Problem.of(MODEL, topology.model.hf_checkpoint, message)


def _tiny_engines(topology: Topology) -> Iterator[EngineConfig]:
    """Yield the pool of tiny engines that serve the trained model, if there is one."""
    pool = None if answers_are_recorded(topology) else topology.engines.get(POLICY)
    if pool is not None and pool.kind == "tiny" and not pool.urls:
        yield pool


def _of_sglang(topology: Topology, shape: HfConfig) -> Iterator[Problem]:
    """Refuse a Qwen3-MoE with dense layers if SGLang serves it."""
    pool = None if answers_are_recorded(topology) else topology.engines.get(POLICY)
    if shape.model_type != "qwen3_moe" or shape.experts is None or all(shape.experts.layers):
        return
    if pool is not None and pool.kind == "sglang":
        directory = topology.model.hf_checkpoint
        yield Problem.of(MODEL, directory, dense_layers_refusal(Path(directory)))


def _weights(key: str, directory: str, shape: HfConfig) -> Iterator[Problem]:
    """Check that the files hold exactly the model's tensors."""
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
    """Check that engines computing in FP8 can read the model's matrices as sharded over their ranks."""
    for name, engine in topology.engines.items() if not answers_are_recorded(topology) else ():
        ranks, experts = parallel_sizes(engine)
        if engine.weight_format == "fp8" and not engine.urls:
            message = fp8_refusal(hf_shapes(shape), shape.head_dim, tp_size=ranks, ep_size=experts)
            if message is not None:
                yield Problem.of(f"engines.{name}.weight_format", "fp8", message)


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
            saved.check(path, shape, dtype=topology.model.dtype, resumes=True, critic=critic)
    except ValueError as error:
        yield Problem.of(MODEL, topology.model.hf_checkpoint, str(error))


def _limits(topology: Topology, shape: HfConfig) -> Iterator[Problem]:
    rollout = topology.rollout
    if rollout.max_context_len is not None and rollout.max_context_len > context_of(shape):
        message = f"at most {context_of(shape)}: {end_of(shape)}"
        yield Problem.of("rollout.max_context_len", rollout.max_context_len, message)
    if beyond := [token for token in rollout.stop_token_ids if token >= shape.vocab_size]:
        message = f"{beyond[0]} is not a token of the model, whose vocabulary has {shape.vocab_size}"
        yield Problem.of("rollout.stop_token_ids", list(rollout.stop_token_ids), message)


def _served(topology: Topology) -> Iterator[Problem]:
    """Check what engines would refuse in every request: stop texts, and token ids beyond the model's vocabulary."""
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
