"""Topology settings: which process runs where. The schema of a topology file."""

from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from runtime.settings.derived import (
    asks_teachers,
    asks_topk,
    critic_optimizer,
    has_critic,
    reads_reference,
    trains_demonstrations,
)
from runtime.settings.observe import ObserveConfig
from runtime.settings.reading.config import Config
from runtime.settings.recipe import Recipe
from runtime.settings.tables.values import Count, Name, NonNegative, Positive, Text

_SERVER = r"(nats|tls|ws|wss)://[^@,]*"
BusUrl = Annotated[str, msgspec.Meta(pattern=f"^{_SERVER}(,{_SERVER})*$")]  # a login is cut out before
Timeout = Annotated[float, msgspec.Meta(ge=1, le=86_400)]  # seconds; at most a day
StillFor = Annotated[float, msgspec.Meta(ge=5)]  # seconds; heartbeats come once a second
Variable = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
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


class RunConfig(Config, frozen=True, kw_only=True):
    """The run's name, seed and directory."""

    # Name of the run, of its directory, its NATS streams and its subjects.
    name: Name
    # Seed of randomly initialized weights, of the trainer's ranks, and of sampling.
    seed: Count = 1234
    # Directory that holds the run directories. This run's is `dir/name`.
    dir: Text = "runs"
    # Directory for dumps of all samples, two files per train step. By default nothing is dumped.
    dump_details: Text | None = None
    # Run only this half of the topology. "rollout" generates without training; "trainer" trains on the dump in `load`.
    only: Literal["rollout", "trainer"] | None = None
    # Dump to train on with `only = "trainer"`: a directory that `dump_details` of another run wrote.
    load: Text | None = None
    # Seconds that one pre-start check may take, such as importing your grader. A slower check is stopped and reported.
    check_timeout_s: Timeout = 60.0
    # Seconds without any event before the event `run.stalled` says what each actor waits for.
    stall_after_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    # Seconds without a heartbeat from an actor's event loop before the actor is killed and restarted.
    unresponsive_after_s: StillFor = 300.0


class BusConfig(Config, frozen=True, kw_only=True):
    """The bus: its NATS server and the limits of its streams. Unset limits are derived from the recipe."""

    # Node that runs the NATS server. Needed only with several nodes and without `url`.
    node: Name | None = None
    # URL of a NATS server that already runs, or URLs of the servers of one cluster, separated by commas. By default the
    # run starts its own server.
    url: BusUrl | None = None
    # File with the login for `url`: a user and password, a token, or a NATS credentials file (`.creds`) with a JWT and
    # a seed. Only its owner may be able to read it.
    credentials: Text | None = None
    # Number of servers of the cluster at `url` that hold each stream. With 3, one of them may fail without loss, and
    # the run waits while two are away. A change takes effect at the next start.
    replicas: Literal[1, 3] = 1
    # Port of the server that the run starts. By default 4222 if other machines use the server, and otherwise a free
    # port that is chosen at each start.
    port: Port | None = None
    # Seconds for which a node that does not run the NATS server goes on without it: its processes stay, and its engines
    # keep their weights. After that the node ends with an error. A cluster without a majority of its servers counts as
    # away.
    outage_s: Timeout = 600.0
    # Size limit of the event stream in bytes. A limit below what the recipe can need is refused.
    event_bytes: Positive | None = None
    # Size limit of the work stream (tasks and score requests) in bytes. One below what the recipe can need is refused.
    work_bytes: Positive | None = None  # expert
    # Size limit of the data stream (sample payloads) in bytes. A limit below what the recipe can need is refused.
    data_bytes: Positive | None = None
    # Size limit of one message in bytes. A limit below what the recipe can need is refused.
    max_payload_bytes: Positive | None = None  # expert


class NodeConfig(Config, frozen=True, kw_only=True):
    """One machine: its GPUs and its address."""

    # Address at which this node's servers listen and other nodes reach them: an IP address, a DNS name, a network
    # interface, or "auto". "auto" is the address of the default route on the node with the bus, and of the route to the
    # bus on other nodes. By default "auto" with several nodes, and loopback with one. External clients need an address
    # that is not loopback.
    address: Text | None = None
    # Number of GPUs that the run may use here. They are numbered from 0.
    gpus: Count = 0
    # Seconds that this node waits at its start for the run's bus. After that it ends with an error. As long, the run
    # waits for this node if it cannot go on without it.
    wait_s: Timeout = 600.0


class MegatronConfig(Config, frozen=True, kw_only=True):
    """Megatron's parallel layout, activation recomputation, MoE and MTP: fields of its TransformerConfig.

    Data parallelism uses the ranks that tensor, pipeline and context parallelism leave. runtime/settings/megatron/
    answers.toml says why Megatron's other fields are not settings here.
    """

    # Tensor-parallel size: the number of ranks that share each layer.
    tensor_model_parallel_size: Positive = 1
    # Pipeline-parallel size: the number of ranks that share the sequence of layers.
    pipeline_model_parallel_size: Positive = 1
    # Context-parallel size: the number of ranks that share the tokens of each sample.
    context_parallel_size: Positive = 1
    # Expert-parallel size: the number of ranks that share the experts.
    expert_model_parallel_size: Positive = 1
    # Number of ranks that share each expert. By default `tensor_model_parallel_size`.
    expert_tensor_parallel_size: Positive | None = None
    # Split activations along the sequence between tensor-parallel ranks. Needs a tensor-parallel size above 1.
    sequence_parallel: bool = False
    # Number of virtual pipeline stages per pipeline rank, interleaved. By default 1.
    virtual_pipeline_model_parallel_size: Positive | None = None
    # Number of layers in the first pipeline stage. By default all stages have equally many.
    num_layers_in_first_pipeline_stage: Positive | None = None
    # Number of layers in the last pipeline stage. By default all stages have equally many.
    num_layers_in_last_pipeline_stage: Positive | None = None
    # Recompute activations in the backward pass: of whole layers ("full") or of `recompute_modules` ("selective").
    # By default nothing is recomputed.
    recompute_granularity: Literal["selective", "full"] | None = None
    # Layers that "full" recomputation covers: "uniform" all, in groups; "block" the first ones of each pipeline stage.
    recompute_method: Literal["uniform", "block"] | None = None
    # Number of layers per group ("uniform"), or recomputed per pipeline stage ("block").
    recompute_num_layers: Positive | None = None
    # Modules that "selective" recomputation covers. By default `core_attn`.
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] | None = None
    # Shard the activations that "full" recomputation keeps across the tensor-parallel ranks.
    distribute_saved_activations: bool = False
    # Accumulate bfloat16 matrix products in float32.
    disable_bf16_reduced_precision_matmul: bool = False
    # Free a pipeline stage's output once it is sent to the next stage.
    deallocate_pipeline_outputs: bool = False  # expert
    # How tokens reach the ranks of their experts.
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    # Load-balancing loss of the router, per micro-batch ("aux_loss") or per sequence ("seq_aux_loss").
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"
    # Weight of the load-balancing loss. 0 turns it off.
    moe_aux_loss_coeff: NonNegative = 0.0
    # Weight of the router's z-loss, the squared log-sum-exp of its logits. By default there is none.
    moe_z_loss_coeff: NonNegative | None = None
    # Change per optimizer step of the expert biases, towards equal load. 0 leaves the biases as they are.
    moe_router_bias_update_rate: NonNegative = 0.0
    # Number of MTP layers to train. At most 1; by default MTP layers are not trained.
    mtp_num_layers: Positive | None = None
    # Weight of the MTP loss, above 0 if there is an MTP layer.
    mtp_loss_scaling_factor: NonNegative = 0.2


class MegatronOptimizerConfig(Config, frozen=True, kw_only=True):
    """Megatron's own optimizer settings. The recipe's are in `optimizer`."""

    # Shard the optimizer state across the data-parallel replicas.
    use_distributed_optimizer: bool = False
    # Keep the optimizer state on the host between optimizer steps.
    optimizer_cpu_offload: bool = False
    # Apply weight decay also to the norms of queries and keys.
    apply_wd_to_qk_layernorm: bool = False


class DdpConfig(Config, frozen=True, kw_only=True):
    """Megatron's own data-parallel settings."""

    # Reduce gradients during the backward pass.
    overlap_grad_reduce: bool = False
    # Gather parameters during the forward pass. Needs the distributed optimizer and `overlap_grad_reduce`.
    overlap_param_gather: bool = False
    # Number of parameters per gradient bucket. By default Megatron's, at least 40 million.
    bucket_size: Positive | None = None
    # Pad buckets to multiples of 65,536 elements. Needs the distributed optimizer.
    pad_buckets_for_high_nccl_busbw: bool = False  # expert


class ProfileConfig(Config, frozen=True, kw_only=True):
    """PyTorch profiles of chosen train steps, written to `profiles/` in the run directory."""

    # Train steps to profile, counted from 0.
    steps: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    # On a GPU, also record its allocations, for torch's memory viewer.
    memory_snapshot: bool = False


class CriticRanksConfig(Config, frozen=True, kw_only=True):
    """Ranks of the critic alone, with a layout of their own. By default the critic has the actor's ranks and layout."""

    # GPUs of the critic, with one rank on each, such as "n1:0-3". None of them may be the actor's or an engine's.
    gpus: Text | None = None
    # Number of the critic's ranks on the CPU, besides `trainer.num_processes`. 0 gives it the actor's ranks.
    num_processes: Count = 0
    # Nodes of the critic's ranks on the CPU, as in `trainer.nodes`.
    nodes: tuple[Name, ...] = ()
    megatron: MegatronConfig = MegatronConfig()

    @property
    def are_set(self) -> bool:
        """Whether the critic has ranks of its own."""
        return self.gpus is not None or self.num_processes > 0


class TrainerConfig(Config, frozen=True, kw_only=True):
    """The trainer's ranks: one per GPU, or `num_processes` on the CPU."""

    # Device of the ranks.
    device: Literal["cuda", "cpu"] = "cuda"
    # GPUs of the trainer, with one rank on each, such as "n0:0-7,n1:0-3". Needed with `device = "cuda"`. Ranks on
    # several nodes need a run directory that all of these nodes share.
    gpus: Text | None = None
    # Number of ranks on the CPU. On GPUs there is one rank per GPU.
    num_processes: Positive = 1
    # Nodes of the ranks on the CPU. Each node gets a contiguous block of ranks. By default all ranks run on the node
    # with the bus. Ranks on several nodes need a run directory that all of these nodes share.
    nodes: tuple[Name, ...] = ()
    # Pack sequences into one row instead of padding them. By default this is done on a GPU in bfloat16.
    packed: bool | None = None
    # Checkpoint that a new run starts from: another run's directory, or Megatron-LM's. By default a new run starts
    # from `model.hf_checkpoint`.
    load: Text | None = None
    # Load only the weights from `load`. By default optimizer, schedule and random state are loaded too.
    load_weights_only: bool = False
    # How new weights are exported: "live" blocks training until they are written; "async" copies them to the host
    # first and exports that copy while training continues.
    weight_export: Literal["live", "async"] = "live"
    # Compute reference and old log-probs of finished groups while the trainer waits for a batch.
    log_probs_ahead: bool = False
    # Size of one weight export bucket in bytes. A rank gathers one bucket at a time.
    export_bucket_bytes: Positive = 512 << 20  # expert
    # Publish every Nth weight version in full and the others as deltas. 1 publishes every version in full. Not
    # implemented yet: above 1 with an engine over several nodes.
    full_export_interval: Positive = 1
    profile: ProfileConfig = ProfileConfig()
    megatron: MegatronConfig = MegatronConfig()
    optimizer: MegatronOptimizerConfig = MegatronOptimizerConfig()
    ddp: DdpConfig = DdpConfig()
    critic: CriticRanksConfig = CriticRanksConfig()


WeightTransport = Literal["disk", "collective", "ipc"]
WeightFormat = Literal["as_trained", "bfloat16", "fp8"]  # fp8: the layers' matrices, in blocks of 128 x 128
StartWeights = Literal["files", "peer"]
Verify = Literal["always", "first", "never"]
RouterPolicy = Literal["round_robin", "random", "cache_aware", "power_of_two", "manual"]


class EngineConfig(Config, frozen=True, kw_only=True):
    """One pool of engines that serve the same model.

    The pool `policy` serves the model that is trained. Other pools serve a model that does not change: `ref` the
    reference of the KL loss, those that `data.teacher` names a teacher, and those of `reward.judges` a judge.
    """

    # Inference server: SGLang, or the tiny engine, which runs on the CPU.
    kind: Literal["sglang", "tiny"] = "sglang"
    # Model directory or hub name of a pool other than `policy`, with weights. Its tokens are those of the trained
    # model, except for a judge. `policy` serves `model.hf_checkpoint`.
    hf_checkpoint: Text | None = None
    # GPUs of the pool, such as "n0:0-7". By default the pool has `num_engines` engines on the CPU.
    gpus: Text | None = None
    # Share memory with the trainer: engines and trainer use it alternately. Needs `rollout.max_staleness = 0`.
    colocate: Literal["trainer"] | None = None
    # Number of GPUs per engine. An engine with GPUs of several nodes has a process on each of them.
    num_gpus_per_engine: Positive = 1
    # Number of processes per SGLang engine. Each takes an equal share of the engine's ranks and GPUs. An engine with
    # GPUs of several nodes has at least one process on each of them.
    num_processes: Positive = 1
    # Number of CPU engines. With `gpus` set, the GPUs decide the number.
    num_engines: Positive = 1
    # Number of engines that the run needs. With fewer it waits for the nodes of the others, up to
    # `nodes.<name>.wait_s`, and ends if they do not come. It ends at once if the missing engines were given up after
    # too many restarts.
    min_engines: Positive = 1
    # Nodes of a pool without GPUs. Its engines are assigned to them in turn. By default all run on the node with the
    # bus.
    nodes: tuple[Name, ...] = ()
    # Number of nodes of each SGLang engine without GPUs. Its processes are assigned to them in contiguous blocks. With
    # `gpus` set, the GPUs decide the nodes.
    num_nodes_per_engine: Positive = 1
    # Maximum number of samples in flight per engine. At the limit, further samples wait for a free slot. With
    # `batch_requests` a group waits until all of its samples have one.
    concurrency: Positive = 64
    # Lower bound of the samples in flight per engine. An engine whose requests wait in its queue or lose their place in
    # the KV cache gets fewer samples, down to this number, and then gradually more again, up to `concurrency`. By
    # default a quarter of `concurrency`. Equal numbers keep it fixed.
    min_concurrency: Positive | None = None
    # Seconds from an engine's start until it must serve; a slower one is killed and restarted. By default 1800 for
    # SGLang and 120 for the tiny engine.
    ready_timeout_s: Timeout | None = None
    # Seconds without any progress after which a step of a weight update fails. A load from files and a checksum show
    # no progress, so they get more time for each byte: see `min_load_mb_per_s`.
    update_stall_s: Timeout = 300.0
    # Lowest speed in MB/s at which an engine loads or sums up the weights of an update. A step without visible
    # progress may take `update_stall_s` plus the size of the weights divided by this speed.
    min_load_mb_per_s: Annotated[float, msgspec.Meta(gt=0)] = 100.0
    # Seconds without an answer to liveness probes before the engine is restarted.
    unresponsive_after_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    # Seconds without a first token for our requests before the engine is restarted. Requests to an engine of `urls`
    # are given up instead and sent again.
    first_token_after_s: Timeout = 300.0
    # Seconds without a further token before the engine is restarted.
    next_token_after_s: Timeout = 120.0
    # Number of key-value cache slots (tokens) per engine. By default the engine decides.
    max_total_tokens: Positive | None = None
    # How new weights reach the engines: through files ("disk"), a broadcast ("collective"), or shared memory ("ipc").
    # "ipc" needs `colocate`; "collective" needs engines outside the trainer's memory.
    weight_transport: WeightTransport = "disk"
    # Dtype or quantization in which engines receive new weights. "fp8" needs SGLang on GPUs.
    weight_format: WeightFormat = "as_trained"
    # Source of a restarted engine's first weights: files, or a serving SGLang engine on the same node ("peer").
    start_weights: StartWeights = "files"
    # Engines read full versions from their node's local copy of the weights. Deltas always use the local copy. Not
    # implemented yet: for an engine over several nodes.
    local_copy: bool = False
    # Number of update groups. Engines of one group take new weights while the others serve; 1 updates all at once.
    update_groups: Positive = 1
    # Weight updates to verify in full: every one, an engine's first after its start or a failure, or none but their
    # label. By default "always", and "first" for weights over 4 GiB.
    verify: Verify | None = None
    # Send one request per prompt group instead of one per sample.
    batch_requests: bool = False
    # What chooses the engine of a request: the rollout actor itself ("direct"), or SGLang's router ("sglang-router").
    # The actor takes the least loaded engine that holds the weight version. Samples of a prompt and turns of a
    # conversation stay on one engine, unless it has 1.5 times the mean load.
    router: Literal["direct", "sglang-router"] = "direct"
    # How SGLang's router chooses. "cache_aware" takes the engine that had the longest common prefix, "manual" keeps a
    # conversation on one engine by its routing key, and "power_of_two" takes the less loaded one of two.
    router_policy: RouterPolicy = "round_robin"
    # URL of a sglang-router that already runs, with its own policy, such as "http://10.0.0.5:30000". It may serve this
    # run alone. By default the run starts one, if `router` names it.
    router_url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^/]+$")] | None = None
    # Python interpreter that has SGLang installed. By default the interpreter of the run.
    python: Text | None = None
    # URLs of engines that already run. The run neither starts nor restarts them.
    urls: tuple[Annotated[str, msgspec.Meta(pattern=r"^https?://")], ...] = ()
    # Arguments of SGLang's server. `--check` compares them with SGLang's own list.
    sglang: dict[str, Any] = {}
    # Environment variables of the engines. Do not put secrets here: the run directory stores them.
    env: dict[Variable, str] = {}


class JudgeConfig(Config, frozen=True, kw_only=True):
    """A judge: a language model that scores samples. Reward actors send its requests.

    Its model is served by an engine pool of the run, or by a server with OpenAI's API.
    """

    # Engine pool of the judge's model: a name in `engines`. By default "judge", unless `url` is set.
    pool: Name | None = None
    # Base URL of a server with OpenAI's API, up to "/v1", in place of a pool.
    url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^@\s]+$")] | None = None
    # Name of the model on the server of `url`.
    model: Text | None = None
    # Environment variable with the API key of `url`. It must be set where the node daemon starts, on each node with a
    # reward actor.
    api_key_env: Variable | None = None
    # File with the API key of `url`, on each node with a reward actor. Only its owner may be able to read it.
    api_key_file: Text | None = None
    # Message to the judge. "{prompt}", "{response}", "{label}" and "{metadata.KEY}" stand for the sample's values.
    # Without a template only functions of yours call the judge, and no sample names it as its grader.
    template: Text | None = None
    # How a score is read from the answer: "number" takes the last number, "boxed" the number in the last box.
    # "module:function" or "path/file.py:function" is a grader that reads `sample.judge_answer`.
    parser: Text = "number"
    # Sampling temperature of the judge. 0 takes the likeliest token.
    temperature: NonNegative = 0.0
    # Maximum length of an answer in tokens. The parsers "number" and "boxed" refuse an answer that reached it.
    max_tokens: Positive = 1024
    # More fields of the request, such as `chat_template_kwargs`.
    extra_body: dict[str, Any] = {}
    # Seconds that one request to the judge may take.
    timeout_s: Timeout = 60.0
    # Number of requests for one score that may fail. Then the sample fails. Requests that an engine of the pool lost
    # because it ended do not count.
    max_tries: Positive = 3
    # Seconds that a request may wait for an engine of the pool: for the first one, or for one in place of an engine
    # that ended. Then the sample fails.
    wait_s: Timeout = 600.0
    # Number of requests that the run may send. Further samples fail. Reward actors share it equally.
    budget_requests: Positive | None = None
    # Number of tokens of prompts and answers that the run may use, as the server reports them. Further samples fail.
    # Reward actors share it equally. Requests in flight may exceed it.
    budget_tokens: Positive | None = None
    # Bytes of answers that each reward actor keeps in the run directory. An equal request gets the kept answer. With 0
    # none are kept.
    cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    # Use the kept answers in evaluation too.
    cache_in_eval: bool = False
    # Number of requests in flight per reward actor. By default 64 for a URL, and for a pool its `concurrency` times its
    # engines, divided by the number of reward actors.
    concurrency: Positive | None = None


class GraderLimits(Config, frozen=True, kw_only=True):
    """Limits of the calls of one grader."""

    # Seconds that one call may take, in place of `reward.timeout_s`.
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # Calls per second and reward actor. Further calls wait for their turn. By default there is no limit.
    requests_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # Number of samples that one call gets at most, as a list. They may be of many prompt groups and of evaluations. By
    # default a call gets one sample. Only for names in `graders`.
    batch: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    # Seconds that a sample waits for others of its batch while a process is free.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.05


FailureAction = Literal["retry", "drop_sample", "drop_group"] | float


class FailuresConfig(Config, frozen=True, kw_only=True):
    """What a sample without a score does, by the cause. A number becomes its reward. By default `reward.on_failure`.

    "drop_sample" trains the other samples of the group, "drop_group" none. "retry" grades the sample again, `max_tries`
    times in all, and then follows `reward.on_failure`. Requests to a judge are repeated by the judge alone.
    """

    # The call took longer than its timeout or its CPU time.
    timeout: FailureAction | None = None
    # A server that the grader needs did not answer or failed, or no reward worker answered.
    worker_lost: FailureAction | None = "retry"
    # The grader's process, or the sandbox in which `code` runs a program, ended before it answered, or the program
    # waited too long for a core. The sample is tried `max_tries` times first, whatever the action.
    sandbox_lost: FailureAction | None = "retry"
    # A server that the grader needs answered with status 429.
    rate_limited: FailureAction | None = "retry"
    # A server refused the request, or the sample cannot be graded: it is too large, or its grader is not allowed.
    refused: FailureAction | None = None
    # The answer is not a finite number: null, text, a list, NaN or infinity, or a dict without the reward key.
    bad_answer: FailureAction | None = None
    # The function raised an exception.
    raised: FailureAction | None = None


SampleField = Literal["prompt_ids", "tokens", "log_probs", "turns"]
RewardPer = Literal["sample", "turn", "token"]


class RewardConfig(Config, frozen=True, kw_only=True):
    """Reward workers, and how failed scores are handled."""

    # Nodes with a reward actor, one each. By default there is one, on the node with the bus.
    nodes: tuple[Name, ...] = ()
    # Number of grader processes per reward actor, and as many again for async functions.
    processes: Positive = 2
    # Number of calls of async functions that run together in a grader process. Plain functions run one call at a time.
    concurrency: Positive = 64
    # Limits of single graders: of a built-in one by its name, or of your functions by their names in `graders`.
    limits: dict[Name, GraderLimits] = {}
    # Seconds that one score may take. After that the sample fails and its grader process is killed.
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    # Number of grader processes that may die while grading one sample. Then the sample fails.
    max_tries: Positive = 3
    # What a sample without a score does: "drop" drops its group, "drop_sample" only the sample, "zero" trains it with
    # reward 0.
    on_failure: Literal["drop", "drop_sample", "zero"] = "drop"
    # What a sample without a score does, by the cause.
    failures: FailuresConfig = FailuresConfig()
    # Key of the reward in a dict that a grader returns.
    reward_key: Text | None = None
    # What a list holds that a grader returns for one sample: "turn", a reward for each turn of the model, or "token",
    # one for each token of the response. The sample's reward is their sum. By default a list is not a reward.
    per: RewardPer = "sample"
    # Call the grader once per prompt group, with all of its samples.
    group_rm: bool = False
    # Further fields of the samples that graders get: token ids of the prompt; token ids, log-probs and turns of the
    # response. Without them score requests stay small.
    sample_fields: tuple[SampleField, ...] = ()
    # Your own grader functions by name. Rows, `data.rm_type` and `eval.rm_type` may use these names.
    graders: dict[Name, Text] = {}
    # Names of graders that only external workers run. `data.rm_type`, `eval.rm_type` and rows may use these names.
    external: tuple[Name, ...] = ()
    # Judges by name: language models that score samples. Rows, `data.rm_type` and `eval.rm_type` may use these names.
    judges: dict[Name, JudgeConfig] = {}
    # URL to which the grader `remote_rm` posts samples.
    rm_url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^@\s]+$")] | None = None
    # Environment variable with the API key of `rm_url`. It must be set where the node daemon starts, on each node with
    # a reward actor.
    rm_api_key_env: Variable | None = None
    # File with the API key of `rm_url`, on each node with a reward actor. Only its owner may be able to read it.
    rm_api_key_file: Text | None = None
    # Folder with NLTK's data, for rules of the graders `ifeval` and `ifbench` that need it. By default NLTK looks in
    # its own folders and in the environment variable NLTK_DATA. Nothing is downloaded.
    nltk_data: Text | None = None
    # Weighted sums of graders by name: the weight of each part. Parts are built-in graders, and names in `graders` and
    # `judges`. They run together. Rows, `data.rm_type` and `eval.rm_type` may use these names.
    sums: dict[Name, dict[Name, float]] = {}
    # Isolation of grader processes: "process" limits resources, "isolated" also blocks network, files and other
    # processes, "none" sets no limits.
    sandbox: Literal["none", "process", "isolated"] = "process"
    # Environment variables that graders, filters and selections get in addition to PATH, HOME and the like.
    env: tuple[Text, ...] = ()
    # Memory limit of the process of a grader, filter or selection in bytes (data segment). Beyond it an allocation
    # raises MemoryError.
    memory_bytes: Positive = 8 << 30
    # CPU seconds of one call of a plain function. A call that uses more fails; by default twice `timeout_s`.
    cpu_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # Number of files that a grader process may have open at a time.
    max_files: Positive = 1024  # expert
    # Number of running processes that a grader process may have started. With more they are killed and the sample is
    # tried again.
    max_processes: Positive = 64  # expert


class BufferConfig(Config, frozen=True, kw_only=True):
    """The buffer actor. The recipe's `rollout` table decides what it issues."""

    # Minimum number of events to move from the log to the archive at a time. Fewer stay until the log is half full.
    trim_min_events: Positive = 10_000  # expert


def _sole_node() -> dict[str, NodeConfig]:
    return {SOLE_NODE: NodeConfig()}


class Topology(Recipe, frozen=True, kw_only=True):
    """A whole run: the recipe, and where its actors run."""

    run: RunConfig
    bus: BusConfig = BusConfig()
    # The machines of the run. Without this table there is one node, "local".
    nodes: dict[Name, NodeConfig] = msgspec.field(default_factory=_sole_node)
    trainer: TrainerConfig = TrainerConfig()
    # The pool "policy" generates samples. With `algorithm.opd_type = "sglang"`, "teacher" and the pools that
    # `data.teacher` names compute log-probs of the samples. So does "ref" for the reference, in place of the trainer.
    # The pools of `reward.judges` serve judges. Training on demonstrations runs no engines.
    engines: dict[Name, EngineConfig] = {}
    reward: RewardConfig = RewardConfig()
    buffer: BufferConfig = BufferConfig()
    observe: ObserveConfig = ObserveConfig()
    # Groups of actors that share one process. By default each actor has its own process.
    share: tuple[Annotated[tuple[LightActor, ...], msgspec.Meta(min_length=1)], ...] = ()


def encode_topology(topology: Topology) -> bytes:
    """Encode the resolved topology for the run directory: indented JSON with all defaults."""
    return msgspec.json.format(msgspec.json.encode(topology), indent=2) + b"\n"


def decode_topology(data: bytes) -> Topology:
    """Decode what `encode_topology` wrote.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: another version wrote it, or it was edited.
    """
    return msgspec.json.decode(data, type=Topology)


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
    algorithm = topology.algorithm
    return algorithm.distillation_topk if column == TEACHER_LOG_PROBS and asks_topk(algorithm) else 0


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
    return in_files and (engine.local_copy or topology.trainer.full_export_interval > 1)


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


def answers_are_recorded(topology: Topology) -> bool:
    """Return whether rollout is offline: it reads existing samples, so no engine and no grader runs."""
    return trains_demonstrations(topology) or topology.run.only == "trainer"
