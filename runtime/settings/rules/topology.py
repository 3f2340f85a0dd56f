"""Topology rules except those of GPUs: graders, bus and sizes, engines, processes."""

import ipaddress
import math
import re
from collections.abc import Iterator

import msgspec

from runtime.settings.derived import (
    asks_teachers,
    estimator,
    eval_data,
    needs_baseline,
    precomputes_old_log_probs,
    reads_reference,
    trains_demonstrations,
    trains_pairs,
    trains_reward_model,
)
from runtime.settings.placement import home_node, is_loopback, num_engines, trainer_nodes
from runtime.settings.reading.config import Problem
from runtime.settings.sizes import MAX_MESSAGE_BYTES, needed_sizes, show_bytes
from runtime.settings.slime.functions import PREFIX
from runtime.settings.topology import (
    JUDGE,
    POLICY,
    REFERENCE,
    EngineConfig,
    GraderLimits,
    JudgeConfig,
    RewardConfig,
    Topology,
    answers_are_recorded,
    frozen_pools,
    is_colocated,
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
NAME_OR_INTERFACE = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.@-]*[A-Za-z0-9_])?")
FOR_UPDATES = (  # settings of pools whose weights change
    *("colocate", "update_stall_s", "min_load_mb_per_s", "weight_transport", "weight_format", "start_weights"),
    *("local_copy", "update_groups", "verify", "batch_requests", "next_token_after_s", "min_concurrency"),
    *("router", "router_policy", "router_url"),
)
OWN_FIELDS = ("max_tokens", "messages", "model", "n", "stream", "temperature")  # of a request to a judge
REMOTE_RM = "remote_rm"  # the grader of reward.rm_url
PARSERS = ("number", "boxed")  # of the answers of judges: actors/reward/graders/parsers.py
TAKES_TOKEN_REWARDS = ("ppo", "reinforce_plus_plus", "custom")  # estimators that read a reward per token
TINY_ENGINE_CONCURRENCY = 4096  # the maximum that the tiny engine accepts


def topology_problems(topology: Topology) -> Iterator[Problem]:
    """Yield problems of a topology's tables; those of GPUs are in gpus.py."""
    for rule in (
        _group_graders,
        _named_rewards,
        _external_graders,
        _rewards_per_token,
        _batches,
        _failures,
        _judges,
        _needs_of_graders,
        _bus,
        _addresses,
        _placed,
        _sizes,
        _engines,
        _frozen,
        _function_pools,
        _reference_pool,
        _shares,
        _load,
        _precomputed,
        _reward_model,
        _mtp_weight,
        _held_out,
        _sampling_masks,
        _tokens_in_dumps,
        _slimes_weights,
    ):
        yield from rule(topology)


def _slimes_weights(topology: Topology) -> Iterator[Problem]:
    name, layout = topology.algorithm.custom_tis, topology.trainer.megatron
    if name is not None and name.startswith(PREFIX) and layout.context_parallel_size > 1:
        message = f"must be 1: algorithm.custom_tis = {name!r} is a function of slime, which gets whole sequences"
        yield Problem.of("trainer.megatron.context_parallel_size", layout.context_parallel_size, message)


def _sampling_masks(topology: Topology) -> Iterator[Problem]:
    """Yield engines that list fewer kept tokens than top-k keeps; they would refuse every request."""
    rollout = topology.rollout
    if not rollout.return_sampling_mask or POLICY not in topology.engines:
        return
    for name, spelled, value in sglang_arguments(topology.engines[POLICY]):
        if name == "sampling_mask_max_tokens" and isinstance(value, int) and value < rollout.top_k:
            message = f"is below rollout.top_k, so rollout.return_sampling_mask needs at least {rollout.top_k} here"
            yield Problem.of(f"engines.{POLICY}.sglang.{spelled}", value, message)


def _group_graders(topology: Topology) -> Iterator[Problem]:
    if not topology.reward.group_rm or not topology.data:
        return
    graders = {item.rm_type for item in topology.data}
    for index, item in enumerate(topology.eval):
        name = eval_data(topology, item).rm_type
        if name in graders and ":" in (name or ""):
            message = "grades whole groups (reward.group_rm), but evaluation grades single samples: name another grader"
            yield Problem.of(f"eval.{index}.rm_type", name, message)


def _named_rewards(topology: Topology) -> Iterator[Problem]:
    """Refuse graders that cannot give what the estimator needs: several rewards, or the reward of a single sample."""
    if trains_demonstrations(topology):
        return
    algorithm, reward = topology.algorithm, topology.reward
    if needs_baseline(algorithm) and reward.group_rm:
        message = 'cannot be combined with algorithm.advantage_estimator = "remax", whose greedy sample is in no group'
        yield Problem.of("reward.group_rm", True, message)
    if not algorithm.gdpo_reward_keys:
        return
    if reward.reward_key is None:
        message = "needed with algorithm.gdpo_reward_keys: the value in the dict that metrics and filters read"
        yield Problem.of("reward.reward_key", None, message)
    for index, item in enumerate(topology.data):
        name = item.rm_type
        parsed = (judge for judge, config in reward.judges.items() if ":" in config.parser)
        sums = (each for each, weights in reward.sums.items() if weights.keys() >= set(algorithm.gdpo_reward_keys))
        own = (*reward.graders, *reward.external, *parsed, *sums)
        if name is not None and ":" not in name and name not in (*own, REMOTE_RM):
            needed = "a function of yours that returns a dict, or a sum with these parts"
            message = f"gives no rewards of these names; algorithm.gdpo_reward_keys needs {needed}"
            yield Problem.of(f"data[{index}].rm_type", name, message)


def _rewards_per_token(topology: Topology) -> Iterator[Problem]:
    """Refuse rewards per turn or token for estimators that read one reward per sample."""
    per, chosen = topology.reward.per, estimator(topology.algorithm)
    if per == "sample" or trains_demonstrations(topology) or chosen in TAKES_TOKEN_REWARDS:
        return
    message = f'"{chosen}" reads one reward per sample: let the grader return the sum, or set '
    message += 'algorithm.advantage_estimator = "ppo" or "reinforce_plus_plus", or algorithm.custom_advantage'
    yield Problem.of("reward.per", per, message)


def _batches(topology: Topology) -> Iterator[Problem]:
    """Refuse batches of samples for graders that get one sample or a whole prompt group."""
    reward = topology.reward
    for name, limits in reward.limits.items():
        key = f"reward.limits.{name}.batch"
        if limits.batch is None:
            if limits.wait_s != GraderLimits().wait_s:
                yield Problem.of(f"reward.limits.{name}.wait_s", limits.wait_s, f"has no effect unless {key} is set")
        elif name not in reward.graders:
            yield Problem.of(key, limits.batch, "is for functions in reward.graders; a built-in grader gets one sample")
        elif reward.group_rm:
            message = "cannot be combined with reward.group_rm, where one call gets a whole prompt group"
            yield Problem.of(key, limits.batch, message)


def _failures(topology: Topology) -> Iterator[Problem]:
    for cause, action in msgspec.structs.asdict(topology.reward.failures).items():
        if isinstance(action, float) and not math.isfinite(action):
            yield Problem.of(f"reward.failures.{cause}", action, "a reward must be a finite number")


def _external_graders(topology: Topology) -> Iterator[Problem]:
    key, external = "reward.external", list(topology.reward.external)
    if not external:
        return
    if len(set(external)) < len(external):
        yield Problem.of(key, external, "names a grader twice")
    if both := [name for name in external if name in topology.reward.graders]:
        yield Problem.of(
            key, external, f"{', '.join(both)} is in reward.graders too: the run's own actors would run it"
        )
    home = home_node(topology)
    if topology.bus.url is None and len(topology.nodes) == 1 and is_loopback(topology.nodes[home].address or "::1"):
        yield Problem.of(key, external, f"external workers cannot reach the bus: set nodes.{home}.address")


def _needs_of_graders(topology: Topology) -> Iterator[Problem]:
    reward = topology.reward
    named = [(f"data.{index}", item.rm_type) for index, item in enumerate(topology.data)]
    named += [(f"eval.{index}", item.rm_type) for index, item in enumerate(topology.eval)]
    for key, name in named:
        if name is not None and (need := unmet_need(name, reward)) is not None:
            yield Problem.of(f"{key}.rm_type", name, need)
    for key, value in (("env", reward.rm_api_key_env), ("file", reward.rm_api_key_file)):
        if value is not None and reward.rm_url is None:
            yield Problem.of(f"reward.rm_api_key_{key}", value, "has no effect without reward.rm_url")
    if reward.rm_api_key_env is not None and reward.rm_api_key_file is not None:
        message = "contradicts reward.rm_api_key_env; set one of them"
        yield Problem.of("reward.rm_api_key_file", reward.rm_api_key_file, message)


def unmet_need(name: str, reward: RewardConfig) -> str | None:
    """Return which setting a built-in grader needs and does not have; None if it can be used."""
    if name == REMOTE_RM and reward.rm_url is None:
        return "needs reward.rm_url, the server that it asks"
    if name == REMOTE_RM and reward.sandbox == "isolated":
        return 'cannot be combined with reward.sandbox = "isolated", which has no network'
    if name.removeprefix("boxed_") == "code" and reward.sandbox != "isolated":
        # The run's data files, with the right outputs, are hidden from its graders only then
        return 'needs reward.sandbox = "isolated": it runs programs that the model writes'
    return None


def _judges(topology: Topology) -> Iterator[Problem]:
    reward = topology.reward
    for name, judge in reward.judges.items():
        key = f"reward.judges.{name}"
        if name in reward.graders or name in reward.external:
            where = "reward.graders" if name in reward.graders else "reward.external"
            yield Problem(key=key, message=f"{where} has a grader of this name too: use another name")
        yield from _server_of_judge(topology, judge, key)
        yield from _request_of_judge(judge, key)
    graded = [(f"data.{index}", item.rm_type) for index, item in enumerate(topology.data)]
    graded += [(f"eval.{index}", item.rm_type) for index, item in enumerate(topology.eval)]
    for key, name in graded:
        if name in reward.judges and reward.judges[name].template is None:
            message = f"this judge scores no samples: set reward.judges.{name}.template"
            yield Problem.of(f"{key}.rm_type", name, message)


def _server_of_judge(topology: Topology, judge: JudgeConfig, key: str) -> Iterator[Problem]:
    if judge.url is None:
        pool = judge.pool or JUDGE
        for name in ("model", "api_key_env", "api_key_file"):
            if getattr(judge, name) is not None:
                yield Problem.of(f"{key}.{name}", getattr(judge, name), f"has no effect without {key}.url")
        if pool == POLICY:
            message = "is the pool of the model that is trained; a judge has a pool of its own"
            yield Problem.of(f"{key}.pool", pool, message)
        elif pool not in topology.engines and not answers_are_recorded(topology):
            own = ", ".join(name for name in topology.engines if name != POLICY) or "none yet"
            message = f"missing: the engines of this judge, engines.{pool}; or a URL ({key}.url). Pools: {own}"
            yield Problem(key=f"{key}.pool", message=message)
        return
    if judge.pool is not None:
        yield Problem.of(f"{key}.pool", judge.pool, f"contradicts {key}.url; set one of them")
    if judge.model is None:
        yield Problem(key=f"{key}.model", message=f"missing: the name of the model on the server of {key}.url")
    if judge.api_key_env is not None and judge.api_key_file is not None:
        yield Problem.of(f"{key}.api_key_file", judge.api_key_file, f"contradicts {key}.api_key_env; set one of them")


def _request_of_judge(judge: JudgeConfig, key: str) -> Iterator[Problem]:
    if judge.template is not None and "{response}" not in judge.template:
        yield Problem.of(f"{key}.template", judge.template, 'lacks "{response}": the judge would not see the sample')
    for name in sorted(judge.extra_body):
        if name in OWN_FIELDS:
            why = (
                f"the run sets this field; set {key}.{name}" if name in ("temperature", "max_tokens") else "not allowed"
            )
            yield Problem.of(f"{key}.extra_body.{name}", judge.extra_body[name], why)
    if judge.parser not in PARSERS and ":" not in judge.parser:
        allowed = f"allowed: {', '.join(PARSERS)}, module:function, path/file.py:function"
        yield Problem.of(f"{key}.parser", judge.parser, allowed)


def _bus(topology: Topology) -> Iterator[Problem]:
    bus, nodes = topology.bus, topology.nodes
    if not nodes:
        yield Problem(key="nodes", message="at least one node is needed")
    if bus.node is not None and bus.url is not None:
        yield Problem.of("bus.node", bus.node, "has no effect with bus.url, which names an existing server")
    elif bus.node is not None and bus.node not in nodes:
        yield Problem.of("bus.node", bus.node, f"no such node; allowed: {', '.join(nodes)}")
    elif bus.node is None and bus.url is None and len(nodes) > 1:
        yield Problem(
            key="bus", message="a topology with several nodes needs bus.node or bus.url, which places the NATS server"
        )
    if bus.port is not None and bus.url is not None:
        yield Problem.of("bus.port", bus.port, "has no effect with bus.url: put the port into the URL")
    if bus.replicas > 1 and bus.url is None:
        yield Problem.of("bus.replicas", bus.replicas, "needs bus.url, a cluster: the run itself starts one server")
    if bus.credentials is not None and bus.url is None:
        yield Problem.of(
            "bus.credentials",
            bus.credentials,
            "has no effect without bus.url: the run generates the password of its own server",
        )


def _addresses(topology: Topology) -> Iterator[Problem]:
    given = {name: node.address for name, node in topology.nodes.items() if node.address is not None}
    on_loopback = [name for name, address in given.items() if is_loopback(address)]
    for name, address in given.items():
        key = f"nodes.{name}.address"
        if (why := _no_address(address)) is not None:
            yield Problem.of(key, address, f'{why}; allowed: an IP address, a DNS name, an interface, or "auto"')
        elif name in on_loopback and len(on_loopback) < len(topology.nodes):
            yield Problem.of(key, address, "other nodes cannot reach loopback; it is allowed if all nodes have it")


def _no_address(text: str) -> str | None:
    """Return why a text is not the address of one machine, or None."""
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        if NAME_OR_INTERFACE.fullmatch(text) is None:
            return "not an address: it stands without scheme, path and port (bus.port)"
        return None
    if address.is_unspecified or address.is_multicast:
        return "not the address of one machine"
    return "a link-local address is not unique: name its interface" if address.is_link_local else None


def _placed(topology: Topology) -> Iterator[Problem]:
    """Yield problems of pools, reward actors and trainer ranks that are placed on nodes without GPUs."""
    placed = [(f"engines.{name}.nodes", engine.nodes) for name, engine in topology.engines.items()]
    placed += [("reward.nodes", topology.reward.nodes), ("trainer.nodes", topology.trainer.nodes)]
    placed.append(("trainer.critic.nodes", topology.trainer.critic.nodes))
    for key, nodes in placed:
        unknown = [name for name in nodes if name not in topology.nodes]
        if unknown:
            message = f"no node {', '.join(unknown)}; allowed: {', '.join(topology.nodes)}"
            yield Problem.of(key, list(nodes), message)
        elif len(set(nodes)) < len(nodes):
            yield Problem.of(key, list(nodes), "names a node twice")
    for name, engine in topology.engines.items():
        key, nodes = f"engines.{name}.nodes", list(engine.nodes)
        if nodes and engine.gpus is not None:
            yield Problem.of(key, nodes, f"engines run where their GPUs are (engines.{name}.gpus)")
        elif nodes and engine.urls:
            yield Problem.of(key, nodes, f"the run does not start engines that run already (engines.{name}.urls)")
        elif nodes and engine.colocate is not None:
            yield Problem.of(key, nodes, f"engines run where the trainer is (engines.{name}.colocate)")
    yield from _placed_ranks(topology)
    yield from _placed_critic(topology)
    if topology.reward.nodes and any("reward" in roles for roles in topology.share):
        message = 'a reward actor that shares a process (share) runs on the node with the bus: leave "reward" out there'
        yield Problem.of("reward.nodes", list(topology.reward.nodes), message)


def _placed_ranks(topology: Topology) -> Iterator[Problem]:
    trainer, key = topology.trainer, "trainer.nodes"
    if not trainer.nodes:
        return
    value = list(trainer.nodes)
    if trainer.device == "cuda":
        yield Problem.of(key, value, "ranks run where their GPUs are (trainer.gpus)")
    elif trainer.num_processes < len(trainer.nodes):
        message = f"{len(trainer.nodes)} nodes, but trainer.num_processes = {trainer.num_processes}: some have no rank"
        yield Problem.of(key, value, message)
    elif is_colocated(topology):
        message = "colocated engines on the CPU share memory with the trainer, on the node with the bus: leave it out"
        yield Problem.of(key, value, message)


def _placed_critic(topology: Topology) -> Iterator[Problem]:
    own, device = topology.trainer.critic, topology.trainer.device
    key, value = "trainer.critic.nodes", list(own.nodes)
    if value and device == "cuda":
        yield Problem.of(key, value, "ranks run where their GPUs are (trainer.critic.gpus)")
    elif value and own.num_processes < len(value):
        message = f"{len(value)} nodes, but trainer.critic.num_processes = {own.num_processes}: some have no rank"
        yield Problem.of(key, value, message)


def _sizes(topology: Topology) -> Iterator[Problem]:
    needed = needed_sizes(topology)
    for name in ("event_bytes", "work_bytes", "data_bytes", "max_payload_bytes"):
        given: int | None = getattr(topology.bus, name)
        least: int = getattr(needed, name)
        if given is not None and given < least:
            message = f"too small: this recipe can need {least} ({show_bytes(least)}); unset it to have it derived"
            yield Problem.of(f"bus.{name}", given, message)
    largest = max(needed.max_payload_bytes, topology.bus.max_payload_bytes or 0)
    if largest > MAX_MESSAGE_BYTES:
        message = (
            f"a prompt group of this size can need a message of {show_bytes(largest)}, "
            f"over the server's limit of {show_bytes(MAX_MESSAGE_BYTES)}"
        )
        yield Problem.of("rollout.max_response_len", topology.rollout.max_response_len, message)


def _engines(topology: Topology) -> Iterator[Problem]:
    if POLICY not in topology.engines and not answers_are_recorded(topology):
        message = (
            "missing: the pool that generates the samples to train on; "
            'only demonstrations (algorithm.loss_type = "sft_loss") need none'
        )
        yield Problem(key=f"engines.{POLICY}", message=message)
    used = tuple(dict.fromkeys((POLICY, *frozen_pools(topology), *_may_have(topology), *other_pools(topology))))
    for name, engine in topology.engines.items():
        if name not in used:
            allowed = f"{', '.join(used)}, a pool of a judge (reward.judges.NAME.pool), and pools in rollout.pools"
            yield Problem(key=f"engines.{name}", message=f"no actor uses this pool; allowed: {allowed}")
        if trains_demonstrations(topology):
            message = f'no actor uses this pool with algorithm.loss_type = "{topology.algorithm.loss_type}": remove it'
            yield Problem(key=f"engines.{name}", message=message)
        yield from _engine(engine, f"engines.{name}")
        if name == POLICY:
            yield from _router(engine, f"engines.{name}")
        yield from _processes(engine, f"engines.{name}")
        yield from _least(topology, engine, f"engines.{name}")
        yield from _seeds(engine, f"engines.{name}")
        yield from _environment(engine, f"engines.{name}")


def _function_pools(topology: Topology) -> Iterator[Problem]:
    """Yield problems of pools that generate functions may choose."""
    rollout, key = topology.rollout, "rollout.pools"
    functions = (rollout.custom_generate, rollout.custom_rollout, *(item.custom_generate for item in topology.eval))
    if rollout.pools and not any(functions):
        yield Problem.of(key, list(rollout.pools), "has no effect without rollout.custom_generate or custom_rollout")
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
            message = 'has no effect without algorithm.use_opd = true and algorithm.opd_type = "sglang"'
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
            message = 'missing: the engines of a teacher, which algorithm.opd_type = "sglang" needs'
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


def _shares(topology: Topology) -> Iterator[Problem]:
    roles = [role for shared in topology.share for role in shared]
    for role in dict.fromkeys(role for role in roles if roles.count(role) > 1):
        yield Problem.of("share", topology.share, f"{role} is listed twice; list each actor at most once")


def _load(topology: Topology) -> Iterator[Problem]:
    if topology.trainer.load_weights_only and topology.trainer.load is None:
        yield Problem.of("trainer.load_weights_only", True, "has no effect without trainer.load")


def _tokens_in_dumps(topology: Topology) -> Iterator[Problem]:
    if not topology.observe.tokens:
        return
    if topology.run.dump_details is None:
        yield Problem.of("observe.tokens", True, "has no dumps to add to; set run.dump_details to a directory")
    if trains_demonstrations(topology) or topology.run.only == "rollout":
        message = "has nothing to add: no trainer computes log-probs of sampled tokens in this run"
        yield Problem.of("observe.tokens", True, message)


def _reward_model(topology: Topology) -> Iterator[Problem]:
    if trains_reward_model(topology) and (layers := topology.trainer.megatron.mtp_num_layers):
        message = (
            'has no effect with algorithm.loss_type = "rm_loss": MTP layers predict tokens, and the model scores them'
        )
        yield Problem.of("trainer.megatron.mtp_num_layers", layers, message)


def _mtp_weight(topology: Topology) -> Iterator[Problem]:
    megatron = topology.trainer.megatron
    if megatron.mtp_num_layers and megatron.mtp_loss_scaling_factor == 0:
        message = "trains no MTP layer, and still computes it; leave out trainer.megatron.mtp_num_layers instead"
        yield Problem.of("trainer.megatron.mtp_loss_scaling_factor", 0.0, message)


def _held_out(topology: Topology) -> Iterator[Problem]:
    """Refuse evaluation sets of preference pairs where the trainer does not run beside the data."""
    first, home = trainer_nodes(topology)[0], home_node(topology)
    if topology.eval and trains_pairs(topology) and first != home:
        message = (
            f"not implemented yet: the trainer reads held-out pairs on its node {first}, and the data is on {home}"
        )
        yield Problem.of("eval.0.path", topology.eval[0].path, message)


def _precomputed(topology: Topology) -> Iterator[Problem]:
    if (
        not topology.trainer.log_probs_ahead
        or (reads_reference(topology.algorithm) and not reference_in_pool(topology))
        or precomputes_old_log_probs(topology)
    ):
        return
    message = (
        "has no log-probs to compute: it needs algorithm.kl_loss_coef or kl_coef above 0, or log-probs of the old "
        "policy. Those need algorithm.num_steps_per_rollout above 1 and rollout.max_staleness = 0, without "
        "algorithm.use_rollout_logprobs or replayed experts"
    )
    yield Problem.of("trainer.log_probs_ahead", True, message)
