"""The table `engines`: pools of inference engines."""

from typing import Annotated, Any, Literal

import msgspec

from runtime.settings.reading.access import Address, Code, Harmless, Program, Reads
from runtime.settings.reading.config import Config
from runtime.settings.tables.values import Name, Positive, Text, Timeout, Variable

WeightTransport = Literal["disk", "http", "collective", "ipc"]
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
    kind: Harmless[Literal["sglang", "tiny"]] = "sglang"
    # Model directory or hub name of a pool other than `policy`, with weights. Its tokens are those of the trained
    # model, except for a judge. `policy` serves `model.hf_checkpoint`.
    hf_checkpoint: Reads[Text | None] = None
    # GPUs of the pool, such as "n0:0-7". By default the pool has `num_engines` engines on the CPU.
    gpus: Harmless[Text | None] = None
    # Share memory with the trainer: engines and trainer use it alternately. Needs `rollout.max_staleness = 0`.
    colocate: Harmless[Literal["trainer"] | None] = None
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
    # Number of torch threads of each tiny engine, with the bound and the default of `trainer.torch_threads`. SGLang on
    # the CPU takes `env.OMP_NUM_THREADS`.
    torch_threads: Positive | None = None
    # Seconds from an engine's start until it must serve; a slower one is killed and restarted. By default 1800 for
    # SGLang and 120 for the tiny engine.
    ready_timeout_s: Timeout | None = None
    # Seconds without any progress after which a step of a weight update fails. A load from files and a checksum show
    # no progress, so they get more time for each byte: see `min_load_mb_per_s`.
    update_stall_s: Timeout = 300.0
    # Lowest speed in MB/s at which an engine loads or sums up the weights of an update. A step without visible
    # progress may take `update_stall_s` plus the size of the weights divided by this speed.
    min_load_mb_per_s: Harmless[Annotated[float, msgspec.Meta(gt=0)]] = 100.0
    # Seconds without an answer to liveness probes before the engine is restarted.
    unresponsive_after_s: Harmless[Annotated[float, msgspec.Meta(gt=0)]] = 60.0
    # Seconds without a first token for our requests before the engine is restarted. Requests to an engine of `urls`
    # are given up instead and sent again.
    first_token_after_s: Timeout = 300.0
    # Seconds without a further token before the engine is restarted.
    next_token_after_s: Timeout = 120.0
    # Number of key-value cache slots (tokens) per engine. By default the engine decides.
    max_total_tokens: Positive | None = None
    # How new weights reach the engines: through files of a common directory ("disk"), through files that nodes fetch
    # from home and from each other ("http"), a broadcast ("collective"), or shared memory ("ipc"). "http" needs the
    # trainer at home; "ipc" needs `colocate`; "collective" needs engines outside the trainer's memory.
    weight_transport: Harmless[WeightTransport] = "disk"
    # Engines serve the adapters of a LoRA run themselves: a weight version is an adapter of its own, and an update
    # pauses nothing. If false, adapters are merged into full weights. By default true for the tiny engine where the
    # other settings allow it, and false for SGLang. Needs `trainer.lora.rank`.
    serve_adapters: Harmless[bool | None] = None
    # Dtype or quantization in which engines receive new weights. "fp8" needs SGLang on GPUs.
    weight_format: Harmless[WeightFormat] = "as_trained"
    # Source of a restarted engine's first weights: files, or a serving SGLang engine on the same node ("peer").
    start_weights: Harmless[StartWeights] = "files"
    # Engines read full versions from their node's local copy of the weights. Deltas always use the local copy. Not
    # implemented yet: for an engine over several nodes.
    local_copy: Harmless[bool] = False
    # Number of update groups. Engines of one group take new weights while the others serve; 1 updates all at once.
    update_groups: Positive = 1
    # Weight updates to verify in full: every one, an engine's first after its start or a failure, or none but their
    # label. By default "always", and "first" for weights over 4 GiB.
    verify: Harmless[Verify | None] = None
    # Send one request per prompt group instead of one per sample.
    batch_requests: Harmless[bool] = False
    # What chooses the engine of a request: the rollout actor itself ("direct"), or SGLang's router ("sglang-router").
    # The actor takes the least loaded engine that holds the weight version. Samples of a prompt and turns of a
    # conversation stay on one engine, unless it has 1.5 times the mean load.
    router: Harmless[Literal["direct", "sglang-router"]] = "direct"
    # How SGLang's router chooses. "cache_aware" takes the engine that had the longest common prefix, "manual" keeps a
    # conversation on one engine by its routing key, and "power_of_two" takes the less loaded one of two.
    router_policy: Harmless[RouterPolicy] = "round_robin"
    # URL of a sglang-router that already runs, with its own policy, such as "http://10.0.0.5:30000". It may serve this
    # run alone. By default the run starts one, if `router` names it.
    router_url: Address[Annotated[str, msgspec.Meta(pattern=r"^https?://[^/]+$")] | None] = None
    # Python interpreter that has SGLang installed. By default the interpreter of the run.
    python: Program[Text | None] = None
    # URLs of engines that already run. The run neither starts nor restarts them.
    urls: Address[tuple[Annotated[str, msgspec.Meta(pattern=r"^https?://")], ...]] = ()
    # Arguments of SGLang's server. `--check` compares them with SGLang's own list.
    sglang: Code[dict[str, Any]] = {}
    # Environment variables of the engines. Do not put secrets here: the run directory stores them.
    env: Code[dict[Variable, str]] = {}
