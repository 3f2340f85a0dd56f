"""The plan of a run (`--plan`): objective, processes per node, ranks and stream sizes, as data and as text."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from runtime.settings.derived import (
    eval_data,
    over_sampling_batch_size,
    trains_demonstrations,
    trains_pairs,
    uses_teacher,
)
from runtime.settings.devices import NVIDIA
from runtime.settings.gpus import Gpu, show_gpus
from runtime.settings.objective import PlannedTerm, objective_of
from runtime.settings.owners import driven_by
from runtime.settings.placement import (
    address_setting,
    bus_node,
    bus_port,
    data_parallel_size,
    home_node,
    num_critic_ranks,
    num_ranks,
)
from runtime.settings.processes import ProcessSpec
from runtime.settings.prompts import in_the_way, shares_prompts
from runtime.settings.sizes import (
    StreamSizes,
    group_bytes,
    kept_batches,
    logged_steps,
    needed_sizes,
    prompt_len_bound,
    show_bytes,
    stream_limits,
    stream_sizes,
)
from runtime.settings.tables.prompts import EvalConfig
from runtime.settings.tables.rollout import RolloutConfig
from runtime.settings.tables.trainer import TrainerConfig
from runtime.settings.terms import terms_of_all
from runtime.settings.topology import (
    POLICY,
    REFERENCE,
    Topology,
    answers_are_recorded,
    chooser_of,
    critic_topology,
    judge_pools,
    min_concurrency,
    serves_adapters,
    teacher_pools,
    why_merged,
)

__all__ = ["Plan", "PlannedNode", "PlannedProcess", "draw", "plan_of", "stream_limits", "stream_sizes"]
WIDTH = 18  # of a process name
TERM_WIDTH = 11  # of a term's name


class PlannedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a node."""

    name: str
    gpus: tuple[int, ...] = ()
    host: str | None = None  # listening address; none: it does not listen
    port: int | None = None  # none: a free port is chosen at the start
    drives: tuple[str, ...] = ()  # engines of a rollout actor that is one of several or was placed


class PlannedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node and its processes."""

    name: str
    address: str
    gpus: int
    processes: tuple[PlannedProcess, ...]
    is_home: bool = False  # of several nodes, the one whose directory belongs with the streams


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a whole run. Encodes to JSON."""

    run: str
    dir: str
    nodes: tuple[PlannedNode, ...]
    bus_url: str | None  # of an existing server
    num_ranks: int
    data_parallel_size: int
    num_critic_ranks: int = 0  # ranks of the critic alone; 0: it has the actor's, or there is none
    streams: StreamSizes
    needed: StreamSizes  # the most that the recipe can need
    kept_batches: int
    group_bytes: int
    objective: tuple[PlannedTerm, ...] = ()


def plan_of(topology: Topology, specs: Mapping[str, Sequence[ProcessSpec]]) -> Plan:
    """Compute the plan of a topology.

    Args:
        topology: a valid topology.
        specs: processes by node, without the NATS server.
    """
    return Plan(
        run=topology.run.name,
        dir=topology.run.dir,
        nodes=tuple(_node(topology, name, specs.get(name, ())) for name in topology.nodes),
        bus_url=topology.bus.url,
        num_ranks=num_ranks(topology.trainer),
        data_parallel_size=data_parallel_size(topology.trainer),
        num_critic_ranks=num_critic_ranks(topology),
        streams=stream_sizes(topology),
        needed=needed_sizes(topology),
        kept_batches=kept_batches(topology),
        group_bytes=group_bytes(topology),
        objective=() if topology.run.only == "rollout" else (*objective_of(topology), *_passes(topology)),
    )


def _passes(topology: Topology) -> tuple[PlannedTerm, ...]:
    """Say which samples get forward and backward passes, and whether they share prompts."""
    if trains_demonstrations(topology):
        return ()
    named = terms_of_all(topology)
    which = "all samples" if named else "samples with an advantage other than 0"
    behind = "computed once, where that saves enough" if shares_prompts(topology) else "computed for each sample"
    if topology.trainer.share_prompts:
        behind = "computed once"
    hindrance = "trainer.share_prompts" if topology.trainer.share_prompts is not None else ""
    return (
        PlannedTerm(name="passes", formula=which, source=", ".join(named) or "no other term"),
        PlannedTerm(
            name="prompts", formula=behind, source=hindrance or ", ".join(in_the_way(topology)) or "trainer.device"
        ),
    )


def _node(topology: Topology, name: str, specs: Sequence[ProcessSpec]) -> PlannedNode:
    node = topology.nodes[name]
    address = address_setting(topology, name)
    processes = [_process(topology, spec, address) for spec in specs]
    if bus_node(topology) == name:
        processes.insert(0, PlannedProcess(name="nats-server", host=address, port=bus_port(topology)))
    return PlannedNode(
        name=name,
        address=address,
        gpus=node.gpus,
        processes=tuple(processes),
        is_home=len(topology.nodes) > 1 and name == home_node(topology),
    )


def _process(topology: Topology, spec: ProcessSpec, address: str) -> PlannedProcess:
    visible = spec.env.get(NVIDIA, "")
    return PlannedProcess(
        name=spec.name,
        gpus=tuple(int(index) for index in visible.split(",")) if visible else (),
        host=address if spec.port else None,
        port=spec.port.fixed if spec.port else None,
        drives=driven_by(topology, spec.name),
    )


def draw(topology: Topology, plan: Plan) -> str:
    """Format the plan as text: recipe, objective, nodes with their processes, streams with their sizes."""
    return "\n".join([*_head(topology, plan), *_objective(plan), *_nodes(plan), *_streams(topology, plan)])


def _head(topology: Topology, plan: Plan) -> Iterator[str]:
    rollout = topology.rollout
    yield f"run {plan.run} in {plan.dir}/{plan.run}"
    weights = ", random weights" if topology.model.random_init else ""
    yield f"  model    {topology.model.hf_checkpoint} ({topology.model.dtype}{weights})"
    if ignored := topology.model.ignore_config_keys:
        yield f"  ignored  keys of its config.json: {', '.join(ignored)}"
    for data in topology.data:
        use = f"graded by {data.rm_type or 'the grader that each row names'}"
        if trains_demonstrations(topology):
            use = "preference pairs" if trains_pairs(topology) else "demonstrations"
        elif data.rm_type is None and uses_teacher(topology.algorithm):
            use = "reward 0, unless a row names a grader"
        elif data.rm_type in topology.reward.external:
            use += " of external workers"
        elif data.rm_type in topology.reward.judges:
            use = f"graded by the judge {data.rm_type}"
        elif data.rm_type in topology.reward.sums:
            weights = topology.reward.sums[data.rm_type]
            use = f"graded by {data.rm_type} = {' + '.join(f'{weight:g} {part}' for part, weight in weights.items())}"
        yield f"  data     {data.name}: {data.path or data.source or data.source_class}, {use}"
    requested, steps = over_sampling_batch_size(rollout), topology.algorithm.num_steps_per_rollout
    parts = [f"{_length(topology)} of {rollout.rollout_batch_size} groups x {_samples(rollout)}"]
    if requested != rollout.rollout_batch_size:
        parts.append(f"{requested} groups requested at a time")
    parts.append(_number(steps, "optimizer step") + " each")
    yield f"  train    {', '.join(parts)}"
    yield f"  trainer  {_trainer(topology, plan)}"
    if plan.num_critic_ranks and topology.run.only != "rollout":
        yield f"  critic   {_critic(topology, plan)}"
    if topology.run.load is not None:
        yield f"  samples  from the dump in {topology.run.load}, no engines"
    for name, engine in topology.engines.items() if not answers_are_recorded(topology) else ():
        where = f", colocated with the {engine.colocate}" if engine.colocate else ""
        least = min_concurrency(engine) if name == POLICY else engine.concurrency
        amount = f"{engine.concurrency} samples at a time each"
        amount = amount if least == engine.concurrency else f"{least} to {amount}"
        weights = f"weights by {engine.weight_transport}{where}"
        if engine.hf_checkpoint is not None:
            of = [data for data, pool in teacher_pools(topology).items() if pool == name]
            uses = [f"teacher of {', '.join(of)}"] if of else []
            uses += ["reference"] if name == REFERENCE else []
            judges = [judge for judge, pool in judge_pools(topology).items() if pool == name]
            uses += [f"judge {', '.join(judges)}"] if judges else []
            uses += ["generate functions"] if name in topology.rollout.pools else []
            weights = ", ".join([engine.hf_checkpoint, *uses])
        elif name == POLICY:
            weights += f"{_adapters(topology)}, dispatcher {chooser_of(engine)}"
        yield f"  engines  {name}: {engine.kind}, {amount}, {weights}"
    for item in topology.eval:
        yield f"  eval     {item.name}: {item.path}, every {item.interval} steps{_grading(topology, item)}"


def _grading(topology: Topology, item: EvalConfig) -> str:
    if trains_pairs(topology):
        return ""
    grader = eval_data(topology, item).rm_type
    inherited = grader is not None and item.rm_type is None
    of = f", the grader of data {topology.data[0].name}" if inherited else ""
    return f", graded by {grader or 'the grader that each row names'}{of}"


def _trainer(topology: Topology, plan: Plan) -> str:
    if topology.run.only == "rollout":
        return "none: only rollout, on the same weights throughout"
    parallel = _parallel(topology.trainer)
    return f"{_number(plan.num_ranks, 'rank')} on {topology.trainer.device}{parallel and f': {parallel} parallel'}"


def _critic(topology: Topology, plan: Plan) -> str:
    """Describe the critic's own ranks, and which processes they are."""
    first, number = plan.num_ranks, plan.num_critic_ranks
    names = f"trainer.{first}" if number == 1 else f"trainer.{first} to {first + number - 1}"
    parallel = _parallel(critic_topology(topology).trainer)
    ranks = f"{_number(number, 'rank')} of its own ({names})"
    return f"{ranks} on {topology.trainer.device}{parallel and f': {parallel} parallel'}"


def _length(topology: Topology) -> str:
    train = topology.train
    return f"{train.num_steps} steps" if train.num_epoch is None else _number(train.num_epoch, "epoch")


def _adapters(topology: Topology) -> str:
    """Say in which form engines get the versions of a LoRA run; empty: all weights train."""
    if not topology.trainer.lora.rank:
        return ""
    if serves_adapters(topology):
        return ", as LoRA adapters"
    merged = why_merged(topology)
    reason = f"engines.{POLICY}.serve_adapters is not true" if merged is None else merged.reason
    return f", with LoRA adapters merged ({reason})"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _samples(rollout: RolloutConfig) -> str:
    return _number(rollout.n_samples_per_prompt, "sample")


def _parallel(trainer: TrainerConfig) -> str:
    layout = trainer.megatron
    sizes = {
        "tensor": layout.tensor_model_parallel_size,
        "pipeline": layout.pipeline_model_parallel_size,
        "context": layout.context_parallel_size,
        "expert": layout.expert_model_parallel_size,
        "data": data_parallel_size(trainer),
    }
    return ", ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)


def _objective(plan: Plan) -> Iterator[str]:
    if plan.objective:
        yield "objective"
    for term in plan.objective:
        yield f"  {term.name:{TERM_WIDTH}} {term.formula}  [{term.source}]"


def _nodes(plan: Plan) -> Iterator[str]:
    if plan.bus_url is not None:
        yield f"bus {plan.bus_url}"
    for node in plan.nodes:
        yield f"node {node.name} ({'home, ' if node.is_home else ''}{node.address}, {_number(node.gpus, 'GPU')})"
        for _, alike in groupby(node.processes, key=_kind):
            yield f"  {_line(list(alike))}".rstrip()


def _kind(process: PlannedProcess) -> tuple[str, int, str | None, int | None, tuple[str, ...]]:
    """Return the key by which numbered processes that are otherwise equal are grouped."""
    return (process.name.rstrip("0123456789"), len(process.gpus), process.host, process.port, process.drives)


def _line(processes: list[PlannedProcess]) -> str:
    first, last = processes[0], processes[-1]
    name = first.name if first is last else f"{first.name}-{last.name.removeprefix(_kind(first)[0])}"
    parts: list[str] = []
    if first.gpus:
        gpus = show_gpus(Gpu("", index) for process in processes for index in process.gpus).replace(":", "")
        parts.append(f"GPU {gpus}" + (f", {len(first.gpus)} each" if first is not last else ""))
    if first.host is not None:
        parts.append(f"{first.host}, {f'port {first.port}' if first.port else 'a free port'}")
    if first.drives:
        parts.append(f"drives {', '.join(first.drives)}")
    return f"{name:{WIDTH}} {'; '.join(parts)}"


def _streams(topology: Topology, plan: Plan) -> Iterator[str]:
    prompt = prompt_len_bound(topology)
    yield "streams"
    for name, why in (
        ("event", f"{logged_steps(topology)} steps, older ones are archived"),
        ("work", "open tasks and score requests"),
        ("data", f"{plan.kept_batches} batches, {show_bytes(plan.group_bytes)} a group at {prompt} prompt tokens"),
    ):
        limit, least = getattr(plan.streams, f"{name}_bytes"), getattr(plan.needed, f"{name}_bytes")
        yield f"  {name:{WIDTH}} {show_bytes(limit):>8}, at most {show_bytes(least)} needed: {why}"
    yield f"  {'largest message':{WIDTH}} {show_bytes(plan.streams.max_payload_bytes):>8}"
