"""Pre-start checks. `--check` reports the result, and a start obeys it."""

import re
from collections.abc import Iterator
from itertools import chain
from typing import Final

import anyio

import actors.buffer.preflight as buffer
import actors.reward.preflight as reward
import actors.rollout.preflight as rollout
import actors.trainer.preflight as trainer
from actors.reward.grader_check import check_rows, label_problem
from actors.rollout.sglang.model_support import fp8_refusal, parallel_sizes
from actors.trainer.models.config import critic_model, trained_model
from actors.trainer.models.shapes import hf_shapes, num_weights
from runtime.functions.child import UserProcess, UserProcessError
from runtime.functions.load import PluginError, find, is_plugin, located
from runtime.functions.table import UserFunction, at
from runtime.node.checks.check import check_here
from runtime.node.checks.context import ASKING_LIMIT_S, MODEL, CheckContext, Checked, Checks, SourceRows
from runtime.node.checks.hub import hub_models
from runtime.node.checks.machine import free_memory_bytes
from runtime.process.actor import InputError
from runtime.settings.derived import has_critic, limits_of
from runtime.settings.placement import data_parallel_size
from runtime.settings.reading.config import Problem
from runtime.settings.reading.schema import functions_in
from runtime.settings.sizes import show_bytes
from runtime.settings.topology import answers_are_recorded, critic_topology
from runtime.util.formatting import count_of

BYTES_TRAINED: Final = 18  # bytes per weight, trained on the CPU: weight, gradient, Adam's moments, weight export
BYTES_SERVED: Final = 10  # bytes per weight, in a tiny engine during a weight update; both measured with 80 million


def preflight(context: CheckContext) -> Checked:
    """Run all pre-start checks. Return the problems that make a start refuse, and notes."""
    check_here(context)
    context.run(*CHECKS.settings)
    if not context.elsewhere:
        context.run(*CHECKS.machine)
        if _can_be_read(context):
            model = context.topology.model.hf_checkpoint
            context.doing(MODEL, model, "reading it, or asking engines for it", limit_s=ASKING_LIMIT_S)
            context.run(*CHECKS.model)
            if not context.has(MODEL):
                context.run(*CHECKS.contents)
    return context.checked()


def _can_be_read(context: CheckContext) -> bool:
    """Whether this node needs the model and has it. A model that the start brings here is checked after that."""
    is_here = not context.coming and not any(hub_models(context.loaded))
    return context.roles.needs_model and not context.has(MODEL) and is_here


def check_functions(context: CheckContext) -> Iterator[Problem]:
    """Find every function that the topology names and check its parameters. Imports users' modules."""
    for key, value, function in functions_in(context.topology):
        if key in context.coming:
            continue
        context.doing(key, value, f"importing it{function.also}" if is_plugin(value) else "trying it")
        try:
            _try(context, function, key, value)
        except (ValueError, InputError, UserProcessError) as error:
            if context.elsewhere and is_plugin(value):
                continue  # the function may be on the machines of the run alone
            named = rf"^{re.escape(key)} = (['\"]).*?\1: "  # a process and a dry run name them too
            message = error.problem if isinstance(error, PluginError) else re.sub(named, "", str(error))
            yield Problem.of(key, value, message)


def _try(context: CheckContext, function: UserFunction, key: str, value: str) -> None:
    """Find and try what a setting names. Raises ValueError: it cannot be used."""
    topology, base_dirs = context.topology, context.places(key)
    if function.trial:
        at(function.trial)(topology, function, key, value, base_dirs)
    elif function.answering and is_plugin(value):
        anyio.run(_start, UserProcess(function, key, located(key, value, base_dirs), limits_of(topology.reward)))
    else:
        find(function, key, value, base_dirs)


async def _start(process: UserProcess) -> None:
    """Start the process of a function as a run does, with its environment and its limits."""
    try:
        await process.start()
    finally:
        await process.kill()


def check_fp8(context: CheckContext) -> Iterator[Problem]:
    """Check that engines computing in FP8 can read the model's matrices as sharded over their ranks."""
    topology = context.topology
    if topology.run.only == "rollout" or answers_are_recorded(topology):
        return
    shape = trained_model(topology)
    for name, engine in topology.engines.items():
        ranks, experts = parallel_sizes(engine)
        if engine.weight_format == "fp8" and not engine.urls:
            message = fp8_refusal(hf_shapes(shape), shape.attention.head_dim, tp_size=ranks, ep_size=experts)
            if message is not None:
                yield Problem.of(f"engines.{name}.weight_format", "fp8", message)


def check_memory(context: CheckContext) -> Iterator[Problem]:
    """Check that weights trained or served on the CPU fit this machine's memory."""
    topology = context.topology
    critic = critic_model(topology) if has_critic(topology) and not context.has(trainer.CRITIC) else None
    weights, replicas = num_weights(trained_model(topology)), data_parallel_size(topology.trainer)
    trains = topology.run.only != "rollout" and topology.trainer.device == "cpu"
    of_critic = 0 if critic is None else num_weights(critic) * data_parallel_size(critic_topology(topology).trainer)
    of_weight = BYTES_SERVED if topology.trainer.lora.rank else BYTES_TRAINED  # frozen: the weight, and its export
    needed = (weights * replicas + of_critic) * of_weight if trains else 0
    engines = rollout.num_tiny_engines(topology)
    needed += weights * engines * BYTES_SERVED + rollout.memory_of_pools(topology)
    free = free_memory_bytes()
    if needed > free:
        message = (
            f"its {weights:,} weights{' and the critic' if critic else ''} need {show_bytes(needed)} of memory in "
            f"{count_of(replicas, 'replica')} of the trainer and {count_of(engines, 'engine')}, "
            f"but this machine has only {show_bytes(free)} free"
        )
        yield Problem.of(MODEL, topology.model.hf_checkpoint, message)


def check_data(context: CheckContext) -> Iterator[Problem]:
    """Check data and tokenizer, and with the rows the engines' limits and the graders."""
    if not context.roles.is_home:  # only home has the data
        return
    sources: list[SourceRows] = []
    found = list(buffer.check_rows(context, label_problem, sources))
    if not answers_are_recorded(context.topology) and MODEL not in {problem.key for problem in found}:
        yield from rollout.check_requests(context)
    yield from found
    yield from rollout.check_lengths(context, sources)
    yield from check_rows(context, sources)


ACTORS: Final = (
    Checks(settings=(check_functions,)),
    trainer.CHECKS,
    rollout.CHECKS,
    reward.CHECKS,
    Checks(contents=(check_fp8, check_memory, check_data)),  # of several actors
)
CHECKS: Final = Checks(*(tuple(chain(*kind)) for kind in zip(*ACTORS, strict=True)))
