"""Pre-start checks of this machine that do not depend on actors."""

from collections.abc import Iterator

from runtime.node.checks.buses import check_bus
from runtime.node.checks.context import CheckContext
from runtime.node.checks.files import check_paths, paths_of
from runtime.node.checks.machine import check_machine
from runtime.settings.derived import max_prompt_len, trains_demonstrations, truncates
from runtime.settings.placement import engine_places, nodes_of_engine, rank_places, sample_limit
from runtime.settings.reading.config import Problem
from runtime.settings.rules.recipe import MAX_KEPT
from runtime.settings.rules.weights import STAGES
from runtime.settings.topology import (
    Topology,
    answers_are_recorded,
    critic_has_ranks,
    critic_topology,
    sglang_arguments,
)


def not_built(topology: Topology) -> Iterator[Problem]:
    """Yield every setting that is not implemented yet."""
    yield from _over_nodes(topology)
    if topology.algorithm.use_rollout_routing_replay and not answers_are_recorded(topology):
        message = 'not implemented yet with engines. Allowed on a dump with routed experts, with run.only = "trainer"'
        yield Problem.of("algorithm.use_rollout_routing_replay", True, message)


def _over_nodes(topology: Topology) -> Iterator[Problem]:
    """Yield what engines over several nodes cannot do."""
    if answers_are_recorded(topology):
        return
    for name, engine in topology.engines.items():
        key, where = f"engines.{name}", "for an engine over several nodes"
        if all(len(nodes_of_engine(places)) == 1 for places in engine_places(topology, engine)):
            continue
        if engine.local_copy:
            yield Problem.of(f"{key}.local_copy", True, f"not implemented yet {where}; allowed: false")
        if (interval := topology.trainer.full_export_interval) > 1:
            yield Problem.of("trainer.full_export_interval", interval, f"not implemented yet {where}; allowed: 1")
        for argument, spelled, value in sglang_arguments(engine):
            if argument in STAGES and value != 1:
                message = f"not implemented yet: pipeline stages {where}; allowed: 1"
                yield Problem.of(f"{key}.sglang.{spelled}", value, message)


def check_here(context: CheckContext) -> None:
    """Check what a topology needs on this machine, and what is not implemented yet."""
    context.run(_check_settings)
    if context.elsewhere:
        context.left_out = tuple(_left_out(context.topology))
    else:
        context.run(check_machine, check_paths, check_bus)


def _check_settings(context: CheckContext) -> Iterator[Problem]:
    topology = context.topology
    context.notes += [*_long_samples(topology), *_split_tensor_groups(topology), *_truncated_sampling(topology)]
    return not_built(topology)


def _long_samples(topology: Topology) -> Iterator[str]:
    """Yield a note if samples may be longer than the trainer's ranks accept."""
    rollout, limit = topology.rollout, sample_limit(topology)
    longest = (max_prompt_len(rollout) or 0) + rollout.max_response_len
    longest = min(longest, rollout.max_context_len or longest)
    if topology.run.only == "rollout" or longest <= limit:
        return
    becomes = "trains nothing" if topology.train.on_too_long == "mask" else "ends the run"
    yield (
        f"samples may have {longest} tokens (rollout.max_prompt_len, max_response_len, max_context_len), but {limit} "
        "fit on the trainer's ranks (train.max_tokens_per_gpu x trainer.megatron.context_parallel_size): "
        f'a longer sample {becomes} (train.on_too_long = "{topology.train.on_too_long}")'
    )


def _split_tensor_groups(topology: Topology) -> Iterator[str]:
    """Yield a note if ranks of one tensor-parallel group are on several nodes: they exchange data in every layer."""
    if topology.run.only == "rollout":
        return
    models = {"trainer.megatron": topology}
    models |= {"trainer.critic.megatron": critic_topology(topology)} if critic_has_ranks(topology) else {}
    for key, model in models.items():
        size, places = model.trainer.megatron.tensor_model_parallel_size, rank_places(model)
        for first in range(0, len(places), size):
            nodes = list(dict.fromkeys(place.node for place in places[first : first + size]))
            if len(nodes) > 1:
                yield (
                    f"{key}.tensor_model_parallel_size = {size}: ranks {first} to {first + size - 1} share each layer "
                    f"and are on the nodes {', '.join(nodes)}: the network between them limits the speed"
                )
                break


def _truncated_sampling(topology: Topology) -> Iterator[str]:
    """Yield a note if log-probs are those of another distribution than the sampled one."""
    rollout = topology.rollout
    if rollout.return_sampling_mask or not truncates(rollout) or trains_demonstrations(topology):
        return
    key = "top_p" if rollout.top_p < 1 else "top_k"
    needs = "" if 2 <= rollout.top_k <= MAX_KEPT else f"; it needs rollout.top_k of 2 to {MAX_KEPT}"
    yield (
        f"rollout.{key} = {getattr(rollout, key):g}: log-probs of engine and trainer are over the whole vocabulary and "
        "differ from those of the truncated distribution that samples come from; rollout.return_sampling_mask = true "
        f"takes both over the kept tokens{needs}"
    )


def _left_out(topology: Topology) -> Iterator[str]:
    gpus = [f"{name}: {node.gpus}" for name, node in topology.nodes.items() if node.gpus]
    yield f"GPUs ({', '.join(gpus) or 'none requested'})"
    yield "interpreters and their packages"
    yield f"paths ({', '.join(paths_of(topology))})"
    yield "addresses and ports"
    urls = [url for engine in topology.engines.values() for url in engine.urls]
    if urls:
        yield f"models of external engines ({', '.join(urls)})"
