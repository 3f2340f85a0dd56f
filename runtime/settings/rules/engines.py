"""Rules of engine pools; those of weight transports are in weights.py, those of GPUs in gpus.py."""

from collections.abc import Iterator

import msgspec

from runtime.settings.derived import (
    asks_teachers,
    reads_reference,
    trains_demonstrations,
)
from runtime.settings.owners import fewest_engines
from runtime.settings.placement import num_engines
from runtime.settings.reading.config import Problem
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.topology import (
    POLICY,
    REFERENCE,
    Topology,
    answers_are_recorded,
    frozen_pools,
    other_pools,
    reference_in_pool,
    sglang_arguments,
)

SET_ELSEWHERE = {  # SGLang arguments that the run sets itself, and their source
    "api_key": "the run generates the key of its engines and router",
    "admin_api_key": "the run generates the key of its engines and router",
    "model": "set model.hf_checkpoint instead",
    "model_path": "set model.hf_checkpoint instead",
    "trust_remote_code": "set model.trust_remote_code instead",
    "host": "the node daemon assigns the addresses of engines",
    "port": "the node daemon assigns the addresses of engines",
    "nnodes": "set num_processes of the pool instead",
    "node_rank": "it follows from the number of the process",
    "dist_init_addr": "the node daemon assigns the rendezvous address of an engine's processes",
    "config": "set its keys in this table instead",
    "random_seed": "it is run.seed plus the number of the engine",
    "context_length": "set rollout.max_context_len instead",
    "max_total_tokens": "set max_total_tokens of the pool instead",
}
DETERMINISTIC = ("enable_deterministic_inference", "rl_on_policy_target")  # arguments that make SGLang follow seeds
SET_BY_US = ("CUDA_VISIBLE_DEVICES", "PHYSARUM_")  # variables or their prefixes
FOR_UPDATES = (  # settings of pools whose weights change
    *("colocate", "update_stall_s", "min_load_mb_per_s", "weight_transport", "weight_format", "start_weights"),
    *("local_copy", "update_groups", "verify", "batch_requests", "next_token_after_s", "min_concurrency"),
    *("router", "router_policy", "router_url"),
)
TINY_ENGINE_CONCURRENCY = 4096  # the maximum that the tiny engine accepts


def engine_problems(topology: Topology) -> Iterator[Problem]:
    """Yield problems of engine pools."""
    for rule in (
        _engines,
        _frozen,
        _function_pools,
        _slots_of_calls,
        _reference_pool,
        _sampling_masks,
    ):
        yield from rule(topology)


def _engines(topology: Topology) -> Iterator[Problem]:
    if POLICY not in topology.engines and not answers_are_recorded(topology):
        message = (
            "missing: the pool that generates the samples to train on; "
            'only demonstrations (algorithm.loss.type = "sft") need none'
        )
        yield Problem(key=f"engines.{POLICY}", message=message)
    used = tuple(dict.fromkeys((POLICY, *frozen_pools(topology), *_may_have(topology), *other_pools(topology))))
    for name, engine in topology.engines.items():
        if name not in used:
            allowed = f"{', '.join(used)}, a pool of a judge (reward.judges.NAME.pool), and pools in rollout.pools"
            yield Problem(key=f"engines.{name}", message=f"no actor uses this pool; allowed: {allowed}")
        if trains_demonstrations(topology):
            message = f'no actor uses this pool with algorithm.loss.type = "{topology.algorithm.loss.type}": remove it'
            yield Problem(key=f"engines.{name}", message=message)
        yield from _engine(engine, f"engines.{name}")
        if name == POLICY:
            yield from _router(engine, f"engines.{name}")
        yield from _processes(engine, f"engines.{name}")
        yield from _least(topology, engine, f"engines.{name}")
        yield from _seeds(engine, f"engines.{name}")
        yield from _environment(engine, f"engines.{name}")


def _slots_of_calls(topology: Topology) -> Iterator[Problem]:
    """Refuse calls of a rollout function whose prompt groups could never all have their slots."""
    rollout, policy = topology.rollout, topology.engines.get(POLICY)
    if policy is None or rollout.custom_rollout_prompts == 1:
        return
    slots = policy.concurrency * fewest_engines(topology)
    if rollout.custom_rollout_prompts * rollout.n_samples_per_prompt > slots:
        message = f"needs a slot for each of {rollout.n_samples_per_prompt} samples of a prompt, and there are {slots}"
        message += f" (engines.{POLICY}.concurrency)"
        yield Problem.of("rollout.custom_rollout_prompts", rollout.custom_rollout_prompts, message)


def _function_pools(topology: Topology) -> Iterator[Problem]:
    """Yield problems of pools that generate functions may choose."""
    rollout, key = topology.rollout, "rollout.pools"
    of_sets = [name for item in topology.eval for name in (item.custom_generate, item.custom_evaluation)]
    functions = (rollout.custom_generate, rollout.custom_rollout, *of_sets)
    if rollout.pools and not any(functions):
        yield Problem.of(
            key, list(rollout.pools), "has no effect without rollout.custom_generate or another function that generates"
        )
        return
    for name in rollout.pools:
        if name == POLICY:
            yield Problem.of(key, name, "is the pool of the model that is trained, which generates without a name")
        elif name not in topology.engines and not answers_are_recorded(topology):
            yield Problem.of(key, name, f"missing: the engines of this pool, engines.{name}")


def _may_have(topology: Topology) -> tuple[str, ...]:
    """Return the pools that a run may have and does not need."""
    needs_reference = reads_reference(topology.algorithm) and not trains_demonstrations(topology)
    return (REFERENCE,) if needs_reference else ()


def _reference_pool(topology: Topology) -> Iterator[Problem]:
    """Yield what a reference in engines cannot do."""
    if not reference_in_pool(topology):
        return
    model, interval = topology.model, topology.algorithm.ref_update_interval
    if model.ref_load is not None:
        message = f"contradicts engines.{REFERENCE}, which serves the reference; set one of them"
        yield Problem.of("model.ref_load", model.ref_load, message)
    if interval is not None:
        message = f"the model of engines.{REFERENCE} does not change; remove one of them"
        yield Problem.of("algorithm.ref_update_interval", interval, message)
    if (temperature := topology.rollout.temperature) != 1:
        message = (
            f"must be 1 with engines.{REFERENCE}: engines compute log-probs of given tokens at temperature 1; a "
            "reference in the trainer (model.ref_load) computes them at any"
        )
        yield Problem.of("rollout.temperature", temperature, message)


def _frozen(topology: Topology) -> Iterator[Problem]:
    """Yield problems of pools that serve a model of their own, which does not change."""
    policy = topology.engines.get(POLICY)
    if policy is not None and policy.hf_checkpoint is not None:
        message = "has no effect: these engines serve the model that is trained, model.hf_checkpoint"
        yield Problem.of(f"engines.{POLICY}.hf_checkpoint", policy.hf_checkpoint, message)
    for index, data in enumerate(topology.data):
        if data.teacher is not None and not asks_teachers(topology.algorithm):
            message = 'has no effect without algorithm.opd.type = "sglang"'
            yield Problem.of(f"data.{index}.teacher", data.teacher, message)
        elif data.teacher == POLICY:
            message = "is the pool of the model that is trained; a teacher has a pool of its own"
            yield Problem.of(f"data.{index}.teacher", data.teacher, message)
    if answers_are_recorded(topology):
        return
    frozen = frozen_pools(topology)
    for name in dict.fromkeys((*frozen, *other_pools(topology))):
        key, engine = f"engines.{name}", topology.engines.get(name)
        if engine is not None and name != POLICY:
            yield from _frozen_pool(engine, key)
        elif engine is None and name in frozen:
            message = 'missing: the engines of a teacher, which algorithm.opd.type = "sglang" needs'
            yield Problem(key=key, message=message)


def _frozen_pool(engine: EngineConfig, key: str) -> Iterator[Problem]:
    if engine.hf_checkpoint is None:
        message = "missing: the model of these engines; of external engines (urls), a directory with its config"
        yield Problem(key=f"{key}.hf_checkpoint", message=message)
    for field in msgspec.structs.fields(EngineConfig):
        value = getattr(engine, field.name)
        if field.name in FOR_UPDATES and value != field.default:
            yield Problem.of(f"{key}.{field.name}", value, "has no effect: the model of this pool does not change")


def _router(engine: EngineConfig, key: str) -> Iterator[Problem]:
    """Refuse settings of SGLang's router without a router, or with one that has its own."""
    if engine.router == "direct":
        needed, without = f'has no effect: needs {key}.router = "sglang-router"', ("router_policy", "router_url")
    elif engine.router_url is not None:
        needed, without = f"has no effect on an external router ({key}.router_url)", ("router_policy",)
    else:
        return
    for field in msgspec.structs.fields(EngineConfig):
        value = getattr(engine, field.name)
        if field.name in without and value != field.default:
            yield Problem.of(f"{key}.{field.name}", value, needed)


def _engine(engine: EngineConfig, key: str) -> Iterator[Problem]:
    if engine.urls and engine.gpus is not None:
        yield Problem.of(f"{key}.gpus", engine.gpus, f"has no effect on external engines ({key}.urls)")
    if engine.kind == "tiny" and engine.gpus is not None:
        yield Problem.of(f"{key}.gpus", engine.gpus, 'kind = "tiny" runs on the CPU')
    if engine.kind != "tiny" and engine.torch_threads is not None:
        message = f'only with kind = "tiny"; SGLang on the CPU takes {key}.env.OMP_NUM_THREADS'
        yield Problem.of(f"{key}.torch_threads", engine.torch_threads, message)
    if engine.kind == "tiny" and engine.sglang:
        yield Problem.of(f"{key}.sglang", engine.sglang, 'has no meaning with kind = "tiny"')
    for name, spelled, _ in sorted(sglang_arguments(engine), key=lambda argument: argument.spelled):
        if (why := SET_ELSEWHERE.get(name)) is not None:  # without its value, which may be secret
            yield Problem(key=f"{key}.sglang.{spelled}", message=f"not allowed here: {why}")
    if engine.kind == "tiny" and engine.python is not None:
        yield Problem.of(f"{key}.python", engine.python, 'has no meaning with kind = "tiny"')
    if engine.kind == "tiny" and engine.concurrency > TINY_ENGINE_CONCURRENCY:
        message = f'allowed with kind = "tiny": at most {TINY_ENGINE_CONCURRENCY}'
        yield Problem.of(f"{key}.concurrency", engine.concurrency, message)
    if engine.min_concurrency is not None and engine.min_concurrency > engine.concurrency:
        message = f"is above {key}.concurrency, {engine.concurrency}"
        yield Problem.of(f"{key}.min_concurrency", engine.min_concurrency, message)
    if engine.gpus is not None and engine.num_engines > 1:
        yield Problem.of(
            f"{key}.num_engines",
            engine.num_engines,
            "has no effect with gpus: the number of engines follows from gpus and num_gpus_per_engine",
        )


def _least(topology: Topology, engine: EngineConfig, key: str) -> Iterator[Problem]:
    if engine.urls:
        if engine.min_engines > 1:
            yield Problem.of(f"{key}.min_engines", engine.min_engines, "needs engines that the run starts")
        return
    try:
        number = num_engines(engine)
    except ValueError:  # another rule reports the GPU list
        return
    if engine.min_engines > number:
        yield Problem.of(f"{key}.min_engines", engine.min_engines, f"is above the engines of the pool, {number}")


def _processes(engine: EngineConfig, key: str) -> Iterator[Problem]:
    number, gpus = engine.num_processes, engine.num_gpus_per_engine
    if number > 1 and (engine.kind == "tiny" or engine.urls):
        yield Problem.of(f"{key}.num_processes", number, 'needs engines of kind = "sglang" that the run starts')
    elif number > 1 and engine.gpus is not None and gpus % number:
        yield Problem.of(f"{key}.num_processes", number, f"does not divide the {gpus} GPUs of an engine")
    width = engine.num_nodes_per_engine
    if width > 1 and engine.gpus is not None:
        yield Problem.of(f"{key}.num_nodes_per_engine", width, "has no effect with gpus: the GPUs decide the nodes")
    elif width > min(number, len(engine.nodes) or 1):
        message = f"is above {key}.num_processes = {number} or the {len(engine.nodes)} nodes of {key}.nodes"
        yield Problem.of(f"{key}.num_nodes_per_engine", width, message)


def _seeds(engine: EngineConfig, key: str) -> Iterator[Problem]:
    """Refuse deterministic SGLang with batch requests.

    The router takes one seed per batch, so none is sent. SGLang would then sample all members of the batch alike.
    """
    for name, spelled, value in sglang_arguments(engine):
        if engine.batch_requests and value and name in DETERMINISTIC:
            yield Problem.of(f"{key}.batch_requests", True, f"allowed with {key}.sglang.{spelled}: false")


def _environment(engine: EngineConfig, key: str) -> Iterator[Problem]:
    if engine.env and engine.urls:
        yield Problem.of(f"{key}.env", engine.env, f"has no effect on external engines ({key}.urls)")
    for name in sorted(engine.env):
        if name.startswith(SET_BY_US):
            yield Problem.of(f"{key}.env.{name}", engine.env[name], "not allowed here: the run sets this variable")


def _sampling_masks(topology: Topology) -> Iterator[Problem]:
    """Yield engines that list fewer kept tokens than top-k keeps; they would refuse every request."""
    rollout = topology.rollout
    if not rollout.return_sampling_mask or POLICY not in topology.engines:
        return
    for name, spelled, value in sglang_arguments(topology.engines[POLICY]):
        if name == "sampling_mask_max_tokens" and isinstance(value, int) and value < rollout.top_k:
            message = f"is below rollout.top_k, so rollout.return_sampling_mask needs at least {rollout.top_k} here"
            yield Problem.of(f"engines.{POLICY}.sglang.{spelled}", value, message)
