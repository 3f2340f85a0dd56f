"""Cross-field rules of a topology: what types and bounds cannot say. Each rule names the keys a person would change."""

from collections.abc import Iterator
from itertools import combinations

from runtime.settings.gpus import Gpu, parse_gpus, show_gpus
from runtime.settings.halves import half_problems
from runtime.settings.recipe import (
    EvalConfig,
    Recipe,
    eval_data,
    max_prompt_len,
    over_sampling_batch_size,
    trains_demonstrations,
)
from runtime.settings.sizes import MAX_MESSAGE_BYTES, needed_sizes, show_bytes
from runtime.settings.toml import Problem, show
from runtime.settings.topology import (
    EngineConfig,
    Topology,
    answers_are_recorded,
    data_parallel_size,
    num_ranks,
)

POLICY = "policy"  # the pool whose samples are trained


def validate(topology: Topology) -> list[Problem]:
    """Apply every rule and report all that fail, not only the first."""
    rules = (
        _batches,
        _collection,
        _sources,
        _lengths,
        _algorithm,
        _demonstrations,
        _masks,
        _weight_updates,
        _schedule,
        _names,
        _evaluation,
        _group_graders,
        _bus,
        _sizes,
        _gpus_exist,
        _trainer,
        _engines,
        _shares,
        half_problems,
    )
    problems = [problem for rule in rules for problem in rule(topology)]
    if not any(problem.key.endswith("gpus") for problem in problems):  # the lists are readable
        problems += [problem for rule in (_layout, _engine_sizes, _booking, _colocation) for problem in rule(topology)]
    return problems


def _problem(key: str, value: object, message: str) -> Problem:
    return Problem(key=key, value=show(value), message=message)


def _batches(recipe: Recipe) -> Iterator[Problem]:
    rollout, steps = recipe.rollout, recipe.algorithm.num_steps_per_rollout
    batch, asked = rollout.rollout_batch_size, rollout.over_sampling_batch_size
    if not recipe.data:
        yield Problem(key="data", message="at least one [[data]] table is needed")
    if asked is not None and asked < batch:
        message = f"must be at least rollout.rollout_batch_size, which is {batch}"
        yield _problem("rollout.over_sampling_batch_size", asked, message)
    num_samples = batch * rollout.n_samples_per_prompt
    if num_samples % steps:
        message = f"must divide the samples of a batch, rollout_batch_size x n_samples_per_prompt = {num_samples}"
        yield _problem("algorithm.num_steps_per_rollout", steps, message)


def _collection(recipe: Recipe) -> Iterator[Problem]:
    """Filters and refills that would have no effect, or no end."""
    rollout = recipe.rollout
    if rollout.over_sampling_filter is not None and over_sampling_batch_size(rollout) == rollout.rollout_batch_size:
        message = "has nothing to choose from unless rollout.over_sampling_batch_size is above rollout_batch_size"
        yield _problem("rollout.over_sampling_filter", rollout.over_sampling_filter, message)
    if rollout.keep_when_insufficient and rollout.dynamic_filter is None:
        yield _problem("rollout.keep_when_insufficient", True, "has no effect without rollout.dynamic_filter")
    if rollout.buffer_filter != "fifo" and rollout.on_halt == "drop":
        yield _problem("rollout.buffer_filter", rollout.buffer_filter, 'has no effect with rollout.on_halt = "drop"')
    stale = rollout.max_token_staleness
    if stale is not None and stale < rollout.max_staleness:
        message = f"is below rollout.max_staleness = {rollout.max_staleness}: whole batches would be too stale to train"
        yield _problem("rollout.max_token_staleness", stale, message)
    if not rollout.eval_overlap and not recipe.eval:
        yield _problem("rollout.eval_overlap", False, "has no effect without an [[eval]] table")


def _sources(recipe: Recipe) -> Iterator[Problem]:
    for index, item in enumerate(recipe.data):
        key = f"data.{index}"
        if item.path is None and item.source is None:
            yield Problem(key=f"{key}.path", message=f"missing: a data file; or {key}.source, a function")
        if item.source is None:
            continue
        if item.path is not None:
            yield _problem(f"{key}.source", item.source, f"a source is a file or a function, and {key}.path is set")
        if len(recipe.data) > 1:
            message = "must be the only data source: it has no length in proportion to which others could be mixed in"
            yield _problem(f"{key}.source", item.source, message)
        if recipe.rollout.shuffle:
            message = f"has no effect on {key}.source, which is called with 0, 1, 2 and so on"
            yield _problem("rollout.shuffle", recipe.rollout.shuffle, message)


def _lengths(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    context = rollout.max_context_len
    if context is not None and (rollout.max_prompt_len or 1) >= context:
        message = f"leaves no room for a response in rollout.max_context_len = {context}"
        yield _problem("rollout.max_prompt_len", max_prompt_len(rollout), message)


def _algorithm(recipe: Recipe) -> Iterator[Problem]:
    algorithm, samples = recipe.algorithm, recipe.rollout.n_samples_per_prompt
    if samples == 1 and not algorithm.disable_rewards_normalization and not trains_demonstrations(recipe):
        yield _problem(
            "rollout.n_samples_per_prompt",
            samples,
            "a group of one minus its own mean is always 0: use at least 2, "
            "or set algorithm.disable_rewards_normalization = true",
        )
    if algorithm.kl_loss_coef > 0 and not algorithm.use_kl_loss:
        message = "has no effect unless algorithm.use_kl_loss = true"
        yield _problem("algorithm.kl_loss_coef", algorithm.kl_loss_coef, message)
    if recipe.model.ref_load is not None and not algorithm.use_kl_loss:
        message = "no reference model is needed unless algorithm.use_kl_loss = true"
        yield _problem("model.ref_load", recipe.model.ref_load, message)
    if algorithm.eps_clip >= 1:
        yield _problem("algorithm.eps_clip", algorithm.eps_clip, "must be below 1: ratios are clipped at 1 - eps_clip")


def _masks(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    if rollout.stale_tokens == "mask" and rollout.max_token_staleness is None:
        message = "has no effect unless rollout.max_token_staleness says from when on"
        yield _problem("rollout.stale_tokens", rollout.stale_tokens, message)
    never_resumed = rollout.on_halt != "resume" and rollout.on_weight_update == "drain"
    if rollout.mask_off_policy and never_resumed and rollout.custom_generate is None:
        message = (
            f'has no effect with rollout.on_halt = "{rollout.on_halt}" and rollout.on_weight_update = "drain": '
            "every sample is then of one set of weights"
        )
        yield _problem("rollout.mask_off_policy", True, message)


def _demonstrations(recipe: Recipe) -> Iterator[Problem]:
    if not trains_demonstrations(recipe):
        return
    rollout, algorithm, why = recipe.rollout, recipe.algorithm, 'with algorithm.loss_type = "sft_loss"'
    if rollout.n_samples_per_prompt > 1:
        message = f"must be 1 {why}: a demonstration is one sample"
        yield _problem("rollout.n_samples_per_prompt", rollout.n_samples_per_prompt, message)
    if rollout.temperature != 1:
        message = f"must be 1 {why}: nothing is sampled, and the loss is that of the model itself"
        yield _problem("rollout.temperature", rollout.temperature, message)
    if rollout.dynamic_filter is not None:
        message = f"has nothing to judge {why}: demonstrations have no reward"
        yield _problem("rollout.dynamic_filter", rollout.dynamic_filter, message)
    if rollout.over_sampling_filter is not None:
        message = f"has nothing to compare {why}: demonstrations have no reward"
        yield _problem("rollout.over_sampling_filter", rollout.over_sampling_filter, message)
    for key, value in (("use_kl_loss", algorithm.use_kl_loss), ("entropy_coef", algorithm.entropy_coef)):
        if value:
            yield _problem(f"algorithm.{key}", value, f"has no effect {why}")
    for index, item in enumerate(recipe.eval):
        message = f"no engine runs {why}: evaluate the exported model (train.save_hf) in a run with engines"
        yield _problem(f"eval.{index}.name", item.name, message)


def _weight_updates(recipe: Recipe) -> Iterator[Problem]:
    rollout = recipe.rollout
    if rollout.on_weight_update != "drain" and not rollout.max_staleness:
        message = "has no effect with rollout.max_staleness = 0: nothing runs while engines take new weights"
        yield _problem("rollout.on_weight_update", rollout.on_weight_update, message)


def _schedule(recipe: Recipe) -> Iterator[Problem]:
    optimizer = recipe.optimizer
    planned = recipe.train.num_steps * recipe.algorithm.num_steps_per_rollout
    yield from _length(recipe)
    if optimizer.min_lr > optimizer.lr:
        yield _problem("optimizer.min_lr", optimizer.min_lr, f"is above optimizer.lr = {optimizer.lr}")
    decays = optimizer.lr_decay_style != "constant" and bool(optimizer.lr_decay_iters or planned)
    if decays and optimizer.lr_warmup_iters >= (optimizer.lr_decay_iters or planned):
        message = f"must end before the decay does, after {optimizer.lr_decay_iters or planned} optimizer steps"
        yield _problem("optimizer.lr_warmup_iters", optimizer.lr_warmup_iters, message)


def _length(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.train
    if not train.num_steps and train.num_epoch is None:
        yield Problem(key="train.num_steps", message="missing: train steps, at least 1; or train.num_epoch")
    if train.num_steps and train.num_epoch is not None:
        message = f"a run is as long as train.num_steps = {train.num_steps} or train.num_epoch says; unset one"
        yield _problem("train.num_epoch", train.num_epoch, message)
    if train.num_epoch is not None and any(item.source is not None for item in recipe.data):
        message = "a function as data source has no length; set train.num_steps"
        yield _problem("train.num_epoch", train.num_epoch, message)


def _names(recipe: Recipe) -> Iterator[Problem]:
    for table, items in (("data", recipe.data), ("eval", recipe.eval)):
        seen: set[str] = set()
        for index, item in enumerate(items):
            if item.name in seen:
                yield _problem(f"{table}.{index}.name", item.name, f"another [[{table}]] has this name")
            seen.add(item.name)


def _evaluation(recipe: Recipe) -> Iterator[Problem]:
    for index, item in enumerate(recipe.eval):
        yield from _evaluation_set(recipe, item, f"eval.{index}")


def _group_graders(topology: Topology) -> Iterator[Problem]:
    if not topology.reward.group_rm or not topology.data:
        return
    graders = {item.rm_type for item in topology.data}
    for index, item in enumerate(topology.eval):
        name = eval_data(topology, item).rm_type
        if name in graders and ":" in (name or ""):
            message = "grades whole groups (reward.group_rm), but evaluation is scored sample by sample: name another"
            yield _problem(f"eval.{index}.rm_type", name, message)


def _evaluation_set(recipe: Recipe, item: EvalConfig, key: str) -> Iterator[Problem]:
    context = recipe.rollout.max_context_len
    if item.max_response_len is not None and context is not None and item.max_response_len >= context:
        message = f"leaves no room for a prompt in rollout.max_context_len = {context}"
        yield _problem(f"{key}.max_response_len", item.max_response_len, message)


def _bus(topology: Topology) -> Iterator[Problem]:
    bus, nodes = topology.bus, topology.nodes
    if not nodes:
        yield Problem(key="nodes", message="at least one node is needed")
    if bus.node is not None and bus.url is not None:
        yield _problem("bus.node", bus.node, "no node starts a server when bus.url names an existing one")
    elif bus.node is not None and bus.node not in nodes:
        yield _problem("bus.node", bus.node, f"no such node; allowed: {', '.join(nodes)}")
    elif bus.node is None and bus.url is None and len(nodes) > 1:
        yield Problem(key="bus", message="with several nodes, bus.node or bus.url says where the NATS server is")
    if bus.port is not None and bus.url is not None:
        yield _problem("bus.port", bus.port, "the port belongs into bus.url")


def _sizes(topology: Topology) -> Iterator[Problem]:
    needed = needed_sizes(topology)
    for name in ("event_bytes", "work_bytes", "data_bytes", "max_payload_bytes"):
        given: int | None = getattr(topology.bus, name)
        least: int = getattr(needed, name)
        if given is not None and given < least:
            message = f"too small: this recipe can need {least} ({show_bytes(least)}); unset, it is derived"
            yield _problem(f"bus.{name}", given, message)
    largest = max(needed.max_payload_bytes, topology.bus.max_payload_bytes or 0)
    if largest > MAX_MESSAGE_BYTES:
        message = (
            f"a prompt group of this size can make a message of {show_bytes(largest)}; "
            f"the server carries {show_bytes(MAX_MESSAGE_BYTES)}"
        )
        yield _problem("rollout.max_response_len", topology.rollout.max_response_len, message)


def _gpu_lists(topology: Topology) -> Iterator[tuple[str, str]]:
    """Key and text of every GPU list."""
    if topology.trainer.gpus is not None:
        yield "trainer.gpus", topology.trainer.gpus
    for name, engine in topology.engines.items():
        if engine.gpus is not None:
            yield f"engines.{name}.gpus", engine.gpus


def _gpus_exist(topology: Topology) -> Iterator[Problem]:
    for key, text in _gpu_lists(topology):
        try:
            gpus = parse_gpus(text)
        except ValueError as error:
            yield _problem(key, text, f'{error}; allowed: such as "n0:0-7,n1:0-3"')
            continue
        unknown = {gpu.node for gpu in gpus} - topology.nodes.keys()
        for node in sorted(unknown):
            yield _problem(key, text, f"no node {node}; allowed: {', '.join(topology.nodes)}")
        beyond = [gpu for gpu in gpus if gpu.node not in unknown and gpu.index >= topology.nodes[gpu.node].gpus]
        if beyond:
            counts = ", ".join(f"nodes.{node}.gpus = {topology.nodes[node].gpus}" for node in _nodes(beyond))
            yield _problem(key, text, f"there is no GPU {show_gpus(beyond)}: {counts}")
        if len(set(gpus)) < len(gpus):
            yield _problem(key, text, "names a GPU twice")


def _nodes(gpus: list[Gpu]) -> list[str]:
    return list(dict.fromkeys(gpu.node for gpu in gpus))


def _trainer(topology: Topology) -> Iterator[Problem]:
    trainer = topology.trainer
    if trainer.device == "cuda" and trainer.gpus is None:
        yield Problem(key="trainer.gpus", message='missing: the trainer\'s GPUs, such as "n0:0-7"; or device = "cpu"')
    if trainer.device == "cpu" and trainer.gpus is not None:
        yield _problem("trainer.gpus", trainer.gpus, 'has no meaning with trainer.device = "cpu"')
    if trainer.device == "cuda" and trainer.num_processes > 1:
        yield _problem("trainer.num_processes", trainer.num_processes, "is for the CPU; GPUs get one rank each")


def _layout(topology: Topology) -> Iterator[Problem]:
    layout, ranks = topology.trainer.megatron, num_ranks(topology.trainer)
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    dense = tensor * pipeline * layout.context_parallel_size
    expert = layout.expert_model_parallel_size * (layout.expert_tensor_parallel_size or tensor) * pipeline
    if ranks % dense:
        message = f"tensor x pipeline x context = {dense} does not divide the trainer's {ranks} ranks"
        yield Problem(key="trainer.megatron", message=message)
    elif (in_step := _samples_per_step(topology)) % data_parallel_size(topology.trainer):
        message = (
            f"{data_parallel_size(topology.trainer)} data-parallel replicas do not divide "
            f"the {in_step} samples of an optimizer step"
        )
        yield Problem(key="trainer.megatron", message=message)
    if layout.expert_model_parallel_size > 1 and ranks % expert:
        message = f"expert x expert-tensor x pipeline = {expert} does not divide the trainer's {ranks} ranks"
        yield Problem(key="trainer.megatron.expert_model_parallel_size", message=message)
    if layout.sequence_parallel and tensor == 1:
        yield _problem(
            "trainer.megatron.sequence_parallel", True, "needs trainer.megatron.tensor_model_parallel_size above 1"
        )


def _shares(topology: Topology) -> Iterator[Problem]:
    roles = [role for shared in topology.share for role in shared]
    for role in dict.fromkeys(role for role in roles if roles.count(role) > 1):
        yield _problem("share", topology.share, f"{role} is in two processes; each actor may be named once")


def _samples_per_step(recipe: Recipe) -> int:
    samples = recipe.rollout.rollout_batch_size * recipe.rollout.n_samples_per_prompt
    return max(1, samples // recipe.algorithm.num_steps_per_rollout)


def _engines(topology: Topology) -> Iterator[Problem]:
    if POLICY not in topology.engines and not answers_are_recorded(topology):
        message = (
            "missing: the pool that generates the samples to train on; "
            'only demonstrations (algorithm.loss_type = "sft_loss") do without'
        )
        yield Problem(key=f"engines.{POLICY}", message=message)
    for name, engine in topology.engines.items():
        yield from _engine(engine, f"engines.{name}")


def _engine(engine: EngineConfig, key: str) -> Iterator[Problem]:
    if engine.urls and engine.gpus is not None:
        yield _problem(f"{key}.gpus", engine.gpus, f"engines that run already ({key}.urls) bring their own")
    if engine.kind == "embedded" and engine.gpus is not None:
        yield _problem(f"{key}.gpus", engine.gpus, 'kind = "embedded" runs on the CPU')
    if engine.kind == "embedded" and engine.sglang:
        yield _problem(f"{key}.sglang", engine.sglang, 'has no meaning with kind = "embedded"')
    if engine.kind == "embedded" and engine.python is not None:
        yield _problem(f"{key}.python", engine.python, 'has no meaning with kind = "embedded"')
    if engine.gpus is not None and engine.num_engines > 1:
        yield _problem(f"{key}.num_engines", engine.num_engines, "follows from gpus and num_gpus_per_engine")
    if engine.weight_transport == "ipc" and engine.colocate is None:
        message = f'needs {key}.colocate = "trainer"; allowed otherwise: disk, collective'
        yield _problem(f"{key}.weight_transport", engine.weight_transport, message)


def _engine_sizes(topology: Topology) -> Iterator[Problem]:
    for name, engine in topology.engines.items():
        gpus, size = parse_gpus(engine.gpus), engine.num_gpus_per_engine
        key = f"engines.{name}.num_gpus_per_engine"
        if not gpus:
            if size > 1 and not engine.urls:
                yield _problem(key, size, f"engines.{name}.gpus is not set")
            continue
        on_node = {node: sum(gpu.node == node for gpu in gpus) for node in _nodes(list(gpus))}
        if len(gpus) % size:
            yield _problem(key, size, f"does not divide the pool's {len(gpus)} GPUs")
        elif any(count % size and size % count for count in on_node.values()):
            counts = ", ".join(f"{count} on {node}" for node, count in on_node.items())
            yield _problem(key, size, f"does not fit the GPUs per node: {counts}")


def _booking(topology: Topology) -> Iterator[Problem]:
    trainer = set(parse_gpus(topology.trainer.gpus))
    pools = {name: set(parse_gpus(engine.gpus)) for name, engine in topology.engines.items()}
    for name, gpus in pools.items():
        shared, key = gpus & trainer, f"engines.{name}.gpus"
        if shared and topology.engines[name].colocate is None:
            message = f'{show_gpus(sorted(shared))} belong to the trainer; sharing needs colocate = "trainer"'
            yield _problem(key, topology.engines[name].gpus, message)
        if topology.engines[name].colocate and gpus - trainer:
            message = f"colocated engines use the trainer's GPUs; not among them: {show_gpus(sorted(gpus - trainer))}"
            yield _problem(key, topology.engines[name].gpus, message)
    for first, second in combinations(pools, 2):
        if shared := pools[first] & pools[second]:
            message = f"{show_gpus(sorted(shared))} belong to engines.{first} too"
            yield _problem(f"engines.{second}.gpus", topology.engines[second].gpus, message)


def _colocation(topology: Topology) -> Iterator[Problem]:
    staleness = topology.rollout.max_staleness
    if staleness and any(engine.colocate for engine in topology.engines.values()):
        message = "colocated engines and trainer take turns: allowed: 0, or engines on GPUs of their own"
        yield _problem("rollout.max_staleness", staleness, message)
