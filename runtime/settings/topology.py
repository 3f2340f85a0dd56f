"""The topology, which says what runs where: its tables, and what follows from them."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from runtime.settings.derived import (
    asks_teachers,
    critic_optimizer,
    has_critic,
    quantization,
    reads_reference,
    topk_divergence,
    trains_demonstrations,
)
from runtime.settings.reading.access import Running
from runtime.settings.reading.schema import stored_tables
from runtime.settings.recipe import Recipe
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.tables.observe import ObserveConfig
from runtime.settings.tables.reward import GraderLimits, RewardConfig, SampleField
from runtime.settings.tables.run import BufferConfig, BusConfig, NodeConfig, RunConfig
from runtime.settings.tables.trainer import CriticRanksConfig, TrainerConfig
from runtime.settings.tables.values import Name

LightActor = Literal["rollout", "reward", "filter", "buffer"]
SOLE_NODE: Final = "local"  # the node of a topology that names none
POLICY: Final = "policy"  # the pool that generates samples; all other pools serve models that do not change
TEACHER_LOG_PROBS: Final = "teacher_log_probs"  # columns of a sample
REF_LOG_PROBS: Final = "ref_log_probs"
TOKEN_REWARDS: Final = "token_rewards"  # a column, too, of samples whose grader gave a reward per token or per turn
REFERENCE: Final = "ref"  # the pool of the reference model, if engines serve it
TEACHER: Final = "teacher"  # the pool of a data source that names no teacher
JUDGE: Final = "judge"  # the pool of a judge that names none
EXPORT_DIRECTORY: Final = "hf"  # below the run directory, written at the end with train.save_hf
# Values of a pool's settings with which its engines can serve LoRA adapters. A router knows no names of single engines;
# broadcasts and shared memory replace whole weights; engines of others would keep the adapters of a run that ended.
WITH_ADAPTERS: Final[Mapping[str, tuple[Any, ...]]] = {
    "weight_transport": ("disk", "http"),
    "router": ("direct",),
    "weight_format": ("as_trained", "bfloat16"),
    "urls": ((),),
}


def _sole_node() -> dict[str, NodeConfig]:
    return {SOLE_NODE: NodeConfig()}


class Topology(Recipe, frozen=True, kw_only=True):
    """A whole run: the recipe, and where its actors run."""

    run: RunConfig
    bus: BusConfig = BusConfig()
    # The machines of the run. Without this table there is one node, "local".
    nodes: dict[Name, NodeConfig] = msgspec.field(default_factory=_sole_node)
    trainer: TrainerConfig = TrainerConfig()
    # The pool "policy" generates samples. With `algorithm.opd.type = "sglang"`, "teacher" and the pools that
    # `data.teacher` names compute log-probs of the samples. So does "ref" for the reference, in place of the trainer.
    # The pools of `reward.judges` serve judges. Training on demonstrations runs no engines.
    engines: dict[Name, EngineConfig] = {}
    reward: RewardConfig = RewardConfig()
    buffer: BufferConfig = BufferConfig()
    observe: ObserveConfig = ObserveConfig()
    # Groups of actors that share one process. By default each actor has its own process.
    share: Running[tuple[Annotated[tuple[LightActor, ...], msgspec.Meta(min_length=1)], ...]] = ()


def encode_topology(topology: Topology) -> bytes:
    """Encode the resolved topology for the run directory: indented JSON with all defaults."""
    return msgspec.json.format(msgspec.json.encode(topology), indent=2) + b"\n"


def decode_topology(data: bytes) -> Topology:
    """Decode what `encode_topology` wrote, in this version or the last one.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: another version wrote it, or it was edited.
    """
    return msgspec.convert(stored_tables(data, Topology), Topology)


class SglangArgument(NamedTuple):
    """An argument of SGLang's server, from a pool's `sglang` table."""

    name: str  # with underscores
    spelled: str  # as in the table, which also allows dashes
    value: Any


def sglang_arguments(engine: EngineConfig) -> list[SglangArgument]:
    """Return the SGLang server arguments of a pool."""
    return [SglangArgument(spelled.replace("-", "_"), spelled, value) for spelled, value in engine.sglang.items()]


def grader_names(topology: Topology) -> tuple[str, ...]:
    """Return the graders that the topology names, under the names that score requests use.

    Each has a queue of score requests. Rows may name other built-in graders, which only the run's own actors run.
    """
    if answers_are_recorded(topology):
        return ()
    reward = topology.reward
    return (*own_graders(topology), *reward.judges, *reward.sums, *reward.external)


def critic_topology(topology: Topology) -> Topology:
    """Return the topology with the critic's model, optimizer and ranks in place of the actor's."""
    replace, own = msgspec.structs.replace, topology.critic.hf_checkpoint
    model = replace(
        topology.model,
        hf_checkpoint=own or topology.model.hf_checkpoint,
        random_init=topology.model.random_init and own is None,
        ref_load=None,
    )
    trainer, ranks = topology.trainer, topology.trainer.critic
    if ranks.are_set:
        number = max(ranks.num_processes, 1)
        trainer = replace(trainer, gpus=ranks.gpus, num_processes=number, nodes=ranks.nodes, megatron=ranks.megatron)
    megatron = replace(trainer.megatron, mtp_num_layers=None)  # MTP layers predict tokens
    return replace(
        topology,
        model=model,
        optimizer=critic_optimizer(topology),
        algorithm=replace(topology.algorithm, use_routing_replay=False, use_rollout_routing_replay=False),
        trainer=replace(trainer, megatron=megatron, critic=CriticRanksConfig()),
    )


def critic_has_ranks(topology: Topology) -> bool:
    """Return whether a critic is trained on ranks of its own."""
    return has_critic(topology) and topology.trainer.critic.are_set


def has_filter(topology: Topology) -> bool:
    """Return whether a filter judges completed groups. Without one, the run has no filter actor and keeps them all."""
    return topology.rollout.dynamic_filter not in (None, "none")


def is_colocated(topology: Topology) -> bool:
    """Return whether trainer and engines are colocated: they use the same memory alternately."""
    return not answers_are_recorded(topology) and any(engine.colocate for engine in topology.engines.values())


class NamedModel(NamedTuple):
    """A model that a setting names: a directory, or a hub name."""

    key: str  # of the setting
    name: str
    weights: bool  # its weights are needed
    code: bool  # its code is needed
    pool: str | None = None  # whose engines serve it; None: the trainer reads it


def named_models(topology: Topology) -> Iterator[NamedModel]:
    """Yield the models that settings name, the trained one first."""
    model, code = topology.model, topology.model.trust_remote_code
    yield NamedModel("model.hf_checkpoint", model.hf_checkpoint, not model.random_init, code)
    others = {"model.ref_load": model.ref_load, "model.opd_teacher_load": model.opd_teacher_load}
    others["critic.hf_checkpoint"] = topology.critic.hf_checkpoint
    yield from (NamedModel(key, name, True, code) for key, name in others.items() if name is not None)
    for pool, engine in topology.engines.items():
        if engine.hf_checkpoint is not None:
            yield NamedModel(f"engines.{pool}.hf_checkpoint", engine.hf_checkpoint, not engine.urls, code, pool)


def model_of(topology: Topology, engine: EngineConfig) -> str:
    """Return the model directory of a pool's engines."""
    return engine.hf_checkpoint or topology.model.hf_checkpoint


def teacher_pools(topology: Topology) -> dict[str, str]:
    """Return the pool of the teacher of each data source; none if no engine computes log-probs of a teacher."""
    if not asks_teachers(topology.algorithm):
        return {}
    return {data.name: data.teacher or TEACHER for data in topology.data}


def reference_in_pool(topology: Topology) -> bool:
    """Return whether the engines of the pool "ref" compute log-probs of the reference model."""
    needed = reads_reference(topology.algorithm) and not trains_demonstrations(topology)
    return needed and REFERENCE in topology.engines


def pools_of_columns(topology: Topology, data: str) -> dict[str, str]:
    """Return the pool of each column that engines compute of the samples of a data source."""
    teacher = teacher_pools(topology).get(data)
    found = {} if teacher is None else {TEACHER_LOG_PROBS: teacher}
    return found | ({REF_LOG_PROBS: REFERENCE} if reference_in_pool(topology) else {})


def column_names(topology: Topology) -> tuple[str, ...]:
    """Return the columns of trained samples: those that engine pools compute, and rewards per token."""
    of_pools = dict.fromkeys(name for data in topology.data for name in pools_of_columns(topology, data.name))
    return (*of_pools, *(() if topology.reward.per == "sample" else (TOKEN_REWARDS,)))


def topk_of_column(topology: Topology, column: str) -> int:
    """Return how many of the likeliest tokens come with each log-prob of a column. 0: none."""
    distillation = topk_divergence(topology.algorithm)
    return 0 if distillation is None or column != TEACHER_LOG_PROBS else distillation.topk


def frozen_pools(topology: Topology) -> tuple[str, ...]:
    """Return the pools that compute columns of samples and whose model does not change."""
    named = (pool for data in topology.data for pool in pools_of_columns(topology, data.name).values())
    return tuple(dict.fromkeys(named))


def judge_pools(topology: Topology) -> dict[str, str]:
    """Return the engine pool of each judge that has one; of a judge with a URL there is none."""
    judges = topology.reward.judges.items()
    return {name: judge.pool or JUDGE for name, judge in judges if judge.url is None}


def other_pools(topology: Topology) -> tuple[str, ...]:
    """Return the pools whose models only answer: those of judges, and those that generate functions may choose."""
    return tuple(dict.fromkeys((*judge_pools(topology).values(), *topology.rollout.pools)))


def only_answers(topology: Topology, pool: str) -> bool:
    """Return whether the engines of a pool compute no log-probs of whole samples of the trained model."""
    return pool in other_pools(topology) and pool != POLICY and pool not in frozen_pools(topology)


def min_concurrency(engine: EngineConfig) -> int:
    """Least number of samples in flight per engine: the setting, or a quarter of the most."""
    return engine.min_concurrency or max(1, engine.concurrency // 4)


def scoring_time_s(topology: Topology) -> float:
    """Return the seconds that one score may take: of a function, or of the slowest judge with all of its tries."""
    reward = topology.reward
    own = ((limits.timeout_s or reward.timeout_s) * _calls_of_sample(limits) for limits in reward.limits.values())
    judges = (judge.timeout_s * judge.max_tries for judge in reward.judges.values())
    return max([reward.timeout_s, *own, *judges])


def _calls_of_sample(limits: GraderLimits) -> int:
    """Return how many calls a sample is in at most: a batch that fails is halved until the sample is alone."""
    return ((limits.batch or 1) - 1).bit_length() + 1


def takes_list(reward: RewardConfig, name: str | None) -> bool:
    """Return whether a call of a grader gets a list of samples, of a prompt group or of a batch."""
    limits = reward.limits.get(name or "")
    return reward.group_rm or (limits is not None and limits.batch is not None)


def reads_copies(topology: Topology, engine: EngineConfig) -> bool:
    """Return whether engines read weights from their node's local copy."""
    in_files = engine.weight_transport == "disk"
    has_copies = in_files and (engine.local_copy or topology.trainer.full_export_interval > 1)
    return has_copies or engine.weight_transport == "http"


class Merged(NamedTuple):
    """A setting with which engines cannot serve LoRA adapters themselves."""

    reason: str  # the setting and its value
    allowed: str  # what to write to have them serve adapters


def why_merged(topology: Topology) -> Merged | None:
    """Return what keeps engines from serving LoRA adapters themselves. None: nothing does."""
    pool = topology.engines.get(POLICY)
    if not topology.trainer.lora.rank:
        return Merged("trainer.lora.rank is 0", "trainer.lora.rank of 1 or more")
    if pool is None or answers_are_recorded(topology):
        return Merged("no engine serves the policy", f"a table engines.{POLICY}")
    if experts := topology.trainer.lora.of_experts:
        return Merged(f"trainer.lora.targets has {experts[0]}", "trainer.lora.targets without experts")
    for name, allowed in WITH_ADAPTERS.items():
        if (value := getattr(pool, name)) not in allowed:
            values = " or ".join(msgspec.json.encode(each).decode() for each in allowed)
            return Merged(
                f"engines.{POLICY}.{name} is {msgspec.json.encode(value).decode()}",
                f"engines.{POLICY}.{name} = {values}",
            )
    if pool.kind == "sglang" and topology.model.random_init:  # its loader reads no adapter beside dummy weights
        return Merged("model.random_init is true, with SGLang", "a model with weights")
    if pool.kind == "sglang" and quantization(topology) is not None:
        return Merged("the weights of model.hf_checkpoint are quantized, with SGLang", "a model without quantization")
    for name, spelled, value in sglang_arguments(pool):
        if name in ("dp_size", "data_parallel_size") and value != 1:
            key = f"engines.{POLICY}.sglang.{spelled}"
            return Merged(f"{key} is {value}", f"{key} = 1, with more engines in its place")
    if (mode := topology.rollout.on_weight_update) not in ("drain", "abort"):
        return Merged(f'rollout.on_weight_update is "{mode}"', 'rollout.on_weight_update = "drain" or "abort"')
    return None


def serves_adapters(topology: Topology) -> bool:
    """Return whether engines serve the adapters of a LoRA run themselves; else versions are merged into the weights."""
    pool = topology.engines.get(POLICY)
    if pool is None or why_merged(topology) is not None:
        return False
    return pool.kind == "tiny" if pool.serve_adapters is None else pool.serve_adapters


def max_adapters(topology: Topology) -> int:
    """Return the number of adapters that an engine holds at once: those that samples may be of, and the next one."""
    return topology.rollout.max_staleness + 2


def fetches_weights(topology: Topology) -> bool:
    """Return whether nodes fetch weights from home and from each other, instead of reading home's directory."""
    policy = topology.engines.get(POLICY)
    return policy is not None and policy.weight_transport == "http" and not answers_are_recorded(topology)


def sample_fields(reward: RewardConfig) -> tuple[SampleField, ...]:
    """Return the further fields of samples that graders get. With a reward per turn they get the turns."""
    return (*reward.sample_fields, "turns") if reward.per == "turn" else reward.sample_fields


def own_graders(topology: Topology) -> dict[str, str]:
    """Return the graders that a topology names and grader processes run, by the names that requests use.

    The parts of sums are among them, the sums are not.
    """
    reward = topology.reward
    own, elsewhere = reward.graders, {*reward.external, *reward.judges, *reward.sums}
    parts = [part for weights in reward.sums.values() for part in weights]
    named = (item.rm_type for item in (*topology.data, *topology.eval) if item.rm_type is not None)
    return {name: own.get(name, name) for name in (*named, *own, *parts) if name not in elsewhere}


def chooser_of(engine: EngineConfig) -> str:
    """Return what chooses the engines of requests, as users see it."""
    if engine.router == "direct":
        return engine.router
    return f"{engine.router} ({engine.router_url or engine.router_policy})"


def keeps_prefixes(topology: Topology, engine: EngineConfig) -> bool:
    """Return whether engines of the policy may keep cached prefixes of older weights during an update.

    The rollout actor then compares the version of each answer's first token with that of its engine at sending.
    """
    return topology.rollout.on_weight_update == "in_place" and engine.router == "direct"


def caches_prompts(engine: EngineConfig) -> bool:
    """Return whether engines find a prompt in their cache once a request computed it.

    The tiny engine shares the prompts of requests that come together.
    """
    disabled = any(name == "disable_radix_cache" and value is True for name, _, value in sglang_arguments(engine))
    return engine.kind == "sglang" and not disabled


def answers_are_recorded(topology: Topology) -> bool:
    """Return whether rollout is offline: it reads existing samples, so no engine and no grader runs."""
    return trains_demonstrations(topology) or topology.run.only == "trainer"
