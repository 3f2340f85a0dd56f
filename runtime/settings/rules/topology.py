"""Rules between tables of a topology: bus, nodes, sizes, trainer, dumps; with those of graders and engines."""

import ipaddress
import re
from collections.abc import Iterator
from contextlib import suppress

from runtime.functions.load import project_of
from runtime.settings.derived import (
    precomputes_old_log_probs,
    reads_reference,
    trains_demonstrations,
    trains_pairs,
    trains_reward_model,
)
from runtime.settings.owners import owner_problems
from runtime.settings.placement import home_node, is_loopback, trainer_nodes, weight_nodes
from runtime.settings.prompts import in_the_way
from runtime.settings.reading.config import Problem
from runtime.settings.rules.engines import engine_problems
from runtime.settings.rules.graders import grader_problems
from runtime.settings.rules.limits import limit_problems
from runtime.settings.rules.weights import IN_FILES
from runtime.settings.sizes import MAX_MESSAGE_BYTES, needed_sizes, show_bytes
from runtime.settings.tables.run import BusConfig
from runtime.settings.topology import (
    POLICY,
    Topology,
    critic_has_ranks,
    is_colocated,
    reference_in_pool,
)
from runtime.util.formatting import count_of

NAME_OR_INTERFACE = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.@-]*[A-Za-z0-9_])?")


def topology_problems(topology: Topology) -> Iterator[Problem]:
    """Yield problems of a topology's tables; those of GPUs are in gpus.py."""
    for rule in (
        grader_problems,
        _bus,
        _addresses,
        _placed,
        owner_problems,
        _sizes,
        engine_problems,
        limit_problems,
        _shares,
        _load,
        _precomputed,
        _reward_model,
        _mtp_weight,
        _shared_prompts,
        _held_out,
        _tokens_in_dumps,
        _weights_of_whole_sequences,
    ):
        yield from rule(topology)


def _weights_of_whole_sequences(topology: Topology) -> Iterator[Problem]:
    name, layout = getattr(topology.algorithm.tis, "function", None), topology.trainer.megatron
    project = project_of(name or "")
    if project is not None and layout.context_parallel_size > 1:
        message = f"must be 1: algorithm.tis.function = {name!r} is a function of {project}, which gets whole sequences"
        yield Problem.of("trainer.megatron.context_parallel_size", layout.context_parallel_size, message)


def _own_server(bus: BusConfig) -> Iterator[Problem]:
    """Settings of the server that the run starts."""
    for name in ("unresponsive_after_s", "sync"):
        given = getattr(bus, name)
        if bus.url is not None and given != getattr(BusConfig(), name):
            yield Problem.of(
                f"bus.{name}", given, "has no effect with bus.url: it is a setting of the run's own server"
            )


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
    yield from _own_server(bus)
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
    yield from _copies(topology)
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


def _copies(topology: Topology) -> Iterator[Problem]:
    """Yield what copies of checkpoints on several machines cannot do."""
    key, copies = "train.checkpoint_copies", topology.train.checkpoint_copies
    if copies == 1 or topology.run.only == "rollout":
        return
    if copies > len(topology.nodes):
        yield Problem.of(key, copies, f"the run has {count_of(len(topology.nodes), 'node')}; allowed: up to that, or 1")
    if critic_has_ranks(topology):
        yield Problem.of(key, copies, "not implemented yet with a critic on ranks of its own; allowed: 1")
    policy = topology.engines.get(POLICY)
    writes = topology.train.save_hf or (policy is not None and policy.weight_transport in IN_FILES)
    with suppress(ValueError):  # another rule reports the GPU list
        if writes and len(nodes := weight_nodes(topology)) > 1:
            message = (
                f"not implemented yet with weights in files (weight_transport, train.save_hf) of {', '.join(nodes)}"
            )
            yield Problem.of(key, copies, f"{message}: pipeline stages on one node, or 1")


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
        message = 'has no effect with algorithm.loss.type = "rm": MTP layers predict tokens, and the model scores them'
        yield Problem.of("trainer.megatron.mtp_num_layers", layers, message)


def _shared_prompts(topology: Topology) -> Iterator[Problem]:
    named = [name for name in in_the_way(topology) if name != "trainer.packed"]
    if topology.trainer.share_prompts and named:
        yield Problem.of("trainer.share_prompts", True, f"cannot be combined with {', '.join(named)}")


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
        "has no log-probs to compute: it needs algorithm.kl.loss_coef or reward_coef above 0, or log-probs of the old "
        "policy. Those need algorithm.num_steps_per_rollout above 1 and rollout.max_staleness = 0, without "
        "algorithm.use_rollout_logprobs or replayed experts"
    )
    yield Problem.of("trainer.log_probs_ahead", True, message)
