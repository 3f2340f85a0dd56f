"""What runs where: the tables of a topology file and the sizes that follow from them."""

from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from runtime.settings.reading.config import Config
from runtime.settings.recipe import Count, Name, NonNegative, Positive, Recipe, Text, trains_demonstrations

BusUrl = Annotated[str, msgspec.Meta(pattern=r"^(nats|tls|ws|wss)://[^@]*$")]  # a login is cut out before
Timeout = Annotated[float, msgspec.Meta(ge=1, le=86_400)]  # seconds, a day at most
StillFor = Annotated[float, msgspec.Meta(ge=5)]  # seconds; signs come once a second
Variable = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
LightActor = Literal["rollout", "reward", "filter", "buffer"]
SOLE_NODE: Final = "local"  # the node of a topology that names none
EXPORT_DIRECTORY: Final = "hf"  # below the run directory, written at the end with train.save_hf


class RunConfig(Config, frozen=True, kw_only=True):
    """The run's name, seed and place."""

    name: Name  # of the run, its directory, streams and subjects
    seed: Count = 1234  # of drawn weights, of the trainer and of engines
    dir: Text = "runs"  # directory of run directories; this run's is dir/name
    dump_details: Text | None = None  # directory for dumps of all samples, two files a train step; none: no dumps
    only: Literal["rollout", "trainer"] | None = None  # start this half alone; the trainer then trains on a dump
    load: Text | None = None  # that dump: a directory that dump_details of another run has written
    check_timeout_s: Timeout = 60.0  # Seconds that one check before the start may take, such as importing your grader.
    stall_after_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0  # without any event, before an event says who waits
    unresponsive_after_s: StillFor = 300.0  # an actor whose event loop stands still for so long is started again


class BusConfig(Config, frozen=True, kw_only=True):
    """The NATS server. Limits left unset are derived from the recipe."""

    node: Name | None = None  # the node that runs it; none: the only node
    url: BusUrl | None = None  # of a server that runs already
    credentials: Text | None = None  # file with the user and password of bus.url, or its token, for its owner alone
    port: Port | None = None  # of the server that is started; none: a free one is picked
    event_bytes: Positive | None = None  # limit of the event stream
    work_bytes: Positive | None = None  # limit of the stream of tasks and score requests
    data_bytes: Positive | None = None  # limit of the stream of samples
    max_payload_bytes: Positive | None = None  # largest message


class NodeConfig(Config, frozen=True, kw_only=True):
    """One machine."""

    address: Text = "auto"  # an address other nodes reach; "auto": its own, found at start
    gpus: Count = 0  # so many, numbered from 0


class MegatronConfig(Config, frozen=True, kw_only=True):
    """Fields of Megatron's TransformerConfig: the trainer's layout (data parallelism is what is left of the ranks), and
    how it computes. Why others are no keys: runtime/settings/megatron/answers.toml."""

    tensor_model_parallel_size: Positive = 1  # ranks that share each layer
    pipeline_model_parallel_size: Positive = 1  # ranks that share the layers' sequence
    context_parallel_size: Positive = 1  # ranks that share each sample's tokens
    expert_model_parallel_size: Positive = 1  # ranks that share the experts
    expert_tensor_parallel_size: Positive | None = None  # that share each expert; none: tensor_model_parallel_size
    sequence_parallel: bool = False  # split activations between the tensor-parallel ranks too
    virtual_pipeline_model_parallel_size: Positive | None = None  # stages of each pipeline rank, interleaved; none: 1
    num_layers_in_first_pipeline_stage: Positive | None = None  # none: as many as in the others
    num_layers_in_last_pipeline_stage: Positive | None = None  # the same for the last one
    recompute_granularity: Literal["selective", "full"] | None = None  # activations computed again in backward passes
    recompute_method: Literal["uniform", "block"] | None = None  # of "full": groups of layers, or the first of a stage
    recompute_num_layers: Positive | None = None  # of "full": layers of a group, or how many of a stage
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] | None = None  # of "selective"; none: core_attn
    distribute_saved_activations: bool = False  # of "full": what is kept is shared out among tensor-parallel ranks
    disable_bf16_reduced_precision_matmul: bool = False  # products of bfloat16 are summed in float32
    deallocate_pipeline_outputs: bool = False  # what was sent to the next stage is freed
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"  # how tokens reach the ranks of experts
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"  # per batch or sequence
    moe_aux_loss_coeff: NonNegative = 0.0  # weight of that loss; 0: none
    moe_z_loss_coeff: NonNegative | None = None  # weight of the router's squared log-sum; none: no such loss
    moe_router_bias_update_rate: NonNegative = 0.0  # step of experts' biases towards equal use; 0: they stay
    mtp_num_layers: Positive | None = None  # layers that predict the token after the next one, and train; none: none
    mtp_loss_scaling_factor: NonNegative = 0.2  # weight of the loss of that layer


class MegatronOptimizerConfig(Config, frozen=True, kw_only=True):
    """Megatron's own settings of its optimizer; the recipe's are in `optimizer`."""

    use_distributed_optimizer: bool = False  # optimizer state is shared out among the replicas
    optimizer_cpu_offload: bool = False  # between optimizer steps the optimizer's state is on the host
    apply_wd_to_qk_layernorm: bool = False  # weight decay is of the norms of queries and keys too


class DdpConfig(Config, frozen=True, kw_only=True):
    """Megatron's own settings of data parallelism."""

    overlap_grad_reduce: bool = False  # gradients are reduced while the backward pass goes on
    overlap_param_gather: bool = False  # parameters are gathered while the forward pass goes on
    bucket_size: Positive | None = None  # parameters of a bucket that is reduced at once; none: at least 40 million
    pad_buckets_for_high_nccl_busbw: bool = False  # buckets are multiples of 65,536 elements


class ProfileConfig(Config, frozen=True, kw_only=True):
    """Where the time of chosen train steps goes, in files of the run directory, `profiles/`."""

    steps: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()  # train steps to profile, counted from 0
    memory_snapshot: bool = False  # on a GPU also its allocations, for torch's memory viewer


class TrainerConfig(Config, frozen=True, kw_only=True):
    """The trainer's ranks: one per GPU, or num_processes on the CPU."""

    device: Literal["cuda", "cpu"] = "cuda"  # where the ranks compute
    gpus: Text | None = None  # one rank on each: "n0:0-7,n1:0-7"
    num_processes: Positive = 1  # ranks on the CPU
    packed: bool | None = None  # sequences behind each other in a row instead of padded; none: on a GPU in bfloat16
    load: Text | None = None  # what a new run begins from, another one's directory or Megatron-LM's; none: the model
    finetune: bool = False  # of load take the weights alone; else optimizer, schedule and random state too
    handover: Literal["stream", "copy"] = "stream"  # of new weights: training waits, or goes on beside a copy of them
    log_probs_ahead: bool = False  # reference and old log-probs of groups, computed while a batch is awaited
    export_bucket_bytes: Positive = 512 << 20  # of weights that are gathered before they are written
    full_export_interval: Positive = 1  # of so many weight versions one is published whole, the others as changes
    profile: ProfileConfig = ProfileConfig()
    megatron: MegatronConfig = MegatronConfig()
    optimizer: MegatronOptimizerConfig = MegatronOptimizerConfig()
    ddp: DdpConfig = DdpConfig()


WeightTransport = Literal["disk", "collective", "ipc"]
WeightFormat = Literal["as_trained", "bfloat16", "fp8"]  # fp8: matrices of layers in blocks of 128 x 128
StartWeights = Literal["files", "peer"]
Verify = Literal["always", "first", "never"]  # each load, an engine's first one, none: only its label is asked


class EngineConfig(Config, frozen=True, kw_only=True):
    """One pool of engines that serve the same model."""

    kind: Literal["sglang", "embedded"] = "sglang"  # SGLang's server, or our small one on the CPU
    gpus: Text | None = None  # of the pool: "n0:0-7"; none: num_engines engines on the CPU
    colocate: Literal["trainer"] | None = None  # take turns with it: one has the memory at a time
    num_gpus_per_engine: Positive = 1  # GPUs of one engine
    num_processes: Positive = 1  # of one engine of SGLang, each with its share of the ranks and GPUs
    num_engines: Positive = 1  # so many, without GPUs
    concurrency: Positive = 64  # samples in flight per engine
    ready_timeout_s: Timeout | None = None  # from an engine's start; none: 1800, embedded ones 120
    update_timeout_s: Timeout = 600.0  # of one weight update, requests that it waits for included
    unresponsive_after_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0  # without an answer to probes it is restarted
    first_token_after_s: Timeout = 300.0  # without a first token of our requests there it is restarted; SGLang's too
    next_token_after_s: Timeout = 120.0  # the same between two tokens
    max_total_tokens: Positive | None = None  # key-value slots per engine; none: the engine decides
    weight_transport: WeightTransport = "disk"  # how new weights come; "ipc", by memory, to engines in turns alone
    weight_format: WeightFormat = "as_trained"  # in which engines get new weights; "fp8": SGLang's on GPUs
    start_weights: StartWeights = "files"  # of a restarted one; "peer": a serving SGLang's, GPU to GPU
    local_copy: bool = False  # engines read weights from their node's own copy; of versions that are changes always
    update_groups: Positive = 1  # engines take new weights in so many groups, while the others serve; 1: all at once
    verify: Verify | None = None  # what engines prove of new weights; none: always, from 4 GiB on first; never: nothing
    batch_requests: bool = False  # one request per prompt group instead of one per sample
    python: Text | None = None  # interpreter that has SGLang; none: ours
    urls: tuple[Annotated[str, msgspec.Meta(pattern=r"^https?://")], ...] = ()  # engines that run already
    sglang: dict[str, Any] = {}  # arguments of SGLang's server; --check compares them with its own list
    env: dict[Variable, str] = {}  # variables of the engines' environment, not for secrets: the run directory has them


class RewardConfig(Config, frozen=True, kw_only=True):
    """Reward workers and what a failed score means."""

    processes: Positive = 2  # grader processes of a reward actor
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0  # of one score
    max_tries: Positive = 3  # grader processes that may die of a sample before it fails
    on_failure: Literal["drop", "zero"] = "drop"  # a sample without a score drops its group, or trains with reward 0
    reward_key: Text | None = None  # which entry of a dict that a grader returned is the reward
    group_rm: bool = False  # the function gets a whole prompt group
    graders: dict[Name, Text] = {}  # own functions by the names that rows, data.rm_type and eval.rm_type may use
    sandbox: Literal["none", "process", "isolated"] = "process"  # against nothing, accidents, or curiosity too
    env: tuple[Text, ...] = ()  # variables of the environment that graders get beside PATH, HOME and the like
    memory_bytes: Positive = 8 << 30  # of data, of a grader process
    cpu_s: Annotated[float, msgspec.Meta(gt=0)] | None = None  # processor time of a call; none: twice timeout_s
    max_files: Positive = 1024  # that a grader process has open at a time
    max_processes: Positive = 64  # that a grader process has started and that still run


class BufferConfig(Config, frozen=True, kw_only=True):
    """The buffer actor; what it does is the recipe's rollout table."""

    trim_min_events: Positive = 10_000  # so many are moved from the log to the archive at a time, after a checkpoint


def _sole_node() -> dict[str, NodeConfig]:
    return {SOLE_NODE: NodeConfig(address="127.0.0.1")}


class Topology(Recipe, frozen=True, kw_only=True):
    """A whole run: the recipe and where its actors live."""

    run: RunConfig
    bus: BusConfig = BusConfig()
    nodes: dict[Name, NodeConfig] = msgspec.field(default_factory=_sole_node)  # only one is built; left out: "local"
    trainer: TrainerConfig = TrainerConfig()
    engines: dict[Name, EngineConfig] = {}  # the pool "policy" generates samples; none runs for demonstrations
    reward: RewardConfig = RewardConfig()
    buffer: BufferConfig = BufferConfig()
    share: tuple[Annotated[tuple[LightActor, ...], msgspec.Meta(min_length=1)], ...] = ()  # actors in one process


def encode_topology(topology: Topology) -> bytes:
    """The resolved topology as the run directory keeps it: indented JSON, every default spelled out."""
    return msgspec.json.format(msgspec.json.encode(topology), indent=2) + b"\n"


def decode_topology(data: bytes) -> Topology:
    """Read what `encode_topology` wrote.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: written by another version, or edited.
    """
    return msgspec.json.decode(data, type=Topology)


class SglangArgument(NamedTuple):
    """An argument of SGLang's server, from a pool's table."""

    name: str  # with underscores
    spelled: str  # as the table spells it, where dashes are allowed too
    value: Any


def sglang_arguments(engine: EngineConfig) -> list[SglangArgument]:
    """The arguments of a pool's servers."""
    return [SglangArgument(spelled.replace("-", "_"), spelled, value) for spelled, value in engine.sglang.items()]


def takes_turns(topology: Topology) -> bool:
    """Whether trainer and engines have the same memory, one after the other."""
    return not answers_are_recorded(topology) and any(engine.colocate for engine in topology.engines.values())


def reads_copies(topology: Topology, engine: EngineConfig) -> bool:
    """Whether engines read weights from copies of their node's agent."""
    in_files = engine.weight_transport == "disk"
    return in_files and (engine.local_copy or topology.trainer.full_export_interval > 1)


def answers_are_recorded(topology: Topology) -> bool:
    """Whether prompt groups are answered with samples that exist already, so that no engine and no grader runs."""
    return trains_demonstrations(topology) or topology.run.only == "trainer"
