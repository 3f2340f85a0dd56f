"""The table `trainer`: its ranks, Megatron's layout, how weights are exported."""

from typing import Annotated, Final, Literal

import msgspec

from runtime.settings.reading.access import Harmless, Reads
from runtime.settings.reading.config import Config
from runtime.settings.tables.values import Count, Name, NonNegative, Positive, Text


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
    sequence_parallel: Harmless[bool] = False
    # Number of virtual pipeline stages per pipeline rank, interleaved. By default 1.
    virtual_pipeline_model_parallel_size: Positive | None = None
    # Number of layers in the first pipeline stage. By default all stages have equally many.
    num_layers_in_first_pipeline_stage: Positive | None = None
    # Number of layers in the last pipeline stage. By default all stages have equally many.
    num_layers_in_last_pipeline_stage: Positive | None = None
    # Recompute activations in the backward pass: of whole layers ("full") or of `recompute_modules` ("selective").
    # By default nothing is recomputed.
    recompute_granularity: Harmless[Literal["selective", "full"] | None] = None
    # Layers that "full" recomputation covers: "uniform" all, in groups; "block" the first ones of each pipeline stage.
    recompute_method: Harmless[Literal["uniform", "block"] | None] = None
    # Number of layers per group ("uniform"), or recomputed per pipeline stage ("block").
    recompute_num_layers: Positive | None = None
    # Modules that "selective" recomputation covers. By default `core_attn`.
    recompute_modules: Harmless[tuple[Literal["core_attn", "mlp"], ...] | None] = None
    # Shard the activations that "full" recomputation keeps across the tensor-parallel ranks.
    distribute_saved_activations: Harmless[bool] = False
    # Accumulate bfloat16 matrix products in float32.
    disable_bf16_reduced_precision_matmul: Harmless[bool] = False
    # Free a pipeline stage's output once it is sent to the next stage.
    deallocate_pipeline_outputs: Harmless[bool] = False  # expert
    # How tokens reach the ranks of their experts.
    moe_token_dispatcher_type: Harmless[Literal["alltoall", "allgather"]] = "alltoall"
    # Load-balancing loss of the router, per micro-batch ("aux_loss") or per sequence ("seq_aux_loss").
    moe_router_load_balancing_type: Harmless[Literal["aux_loss", "seq_aux_loss", "none"]] = "aux_loss"
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
    use_distributed_optimizer: Harmless[bool] = False
    # Keep the optimizer state on the host between optimizer steps.
    optimizer_cpu_offload: Harmless[bool] = False
    # Apply weight decay also to the norms of queries and keys.
    apply_wd_to_qk_layernorm: Harmless[bool] = False


class DdpConfig(Config, frozen=True, kw_only=True):
    """Megatron's own data-parallel settings."""

    # Reduce gradients during the backward pass.
    overlap_grad_reduce: Harmless[bool] = False
    # Gather parameters during the forward pass. Needs the distributed optimizer and `overlap_grad_reduce`.
    overlap_param_gather: Harmless[bool] = False
    # Number of parameters per gradient bucket. By default Megatron's, at least 40 million.
    bucket_size: Positive | None = None
    # Pad buckets to multiples of 65,536 elements. Needs the distributed optimizer.
    pad_buckets_for_high_nccl_busbw: Harmless[bool] = False  # expert


class ProfileConfig(Config, frozen=True, kw_only=True):
    """PyTorch profiles of chosen train steps, written to `profiles/` in the run directory."""

    # Train steps to profile, counted from 0.
    steps: Harmless[tuple[Annotated[int, msgspec.Meta(ge=0)], ...]] = ()
    # On a GPU, also record its allocations, for torch's memory viewer.
    memory_snapshot: Harmless[bool] = False


class CriticRanksConfig(Config, frozen=True, kw_only=True):
    """Ranks of the critic alone, with a layout of their own. By default the critic has the actor's ranks and layout."""

    # GPUs of the critic, with one rank on each, such as "n1:0-3". None of them may be the actor's or an engine's.
    gpus: Harmless[Text | None] = None
    # Number of the critic's ranks on the CPU, besides `trainer.num_processes`. 0 gives it the actor's ranks.
    num_processes: Count = 0
    # Nodes of the critic's ranks on the CPU, as in `trainer.nodes`.
    nodes: tuple[Name, ...] = ()
    megatron: MegatronConfig = MegatronConfig()

    @property
    def are_set(self) -> bool:
        """Whether the critic has ranks of its own."""
        return self.gpus is not None or self.num_processes > 0


EXPERTS: Final = "mlp.experts."  # how names of targets that are experts begin


class LoraConfig(Config, frozen=True, kw_only=True):
    """LoRA: the model's weights stay, and two narrow matrices beside each chosen linear layer train."""

    # Rank of the matrices. 0 trains all weights instead.
    rank: Count = 0
    # Numerator of the scale: products of the matrices are multiplied by `alpha / rank`.
    alpha: Harmless[Annotated[float, msgspec.Meta(gt=0)]] = 32.0
    # Multiply by `alpha / sqrt(rank)` instead, as rank-stabilized LoRA does.
    rslora: Harmless[bool] = False
    # Linear layers with such matrices: "all-linear", or the names that they have in Hugging Face's class, such as
    # `q_proj`. Each name stands for that layer of every decoder layer. "all-linear" leaves out `lm_head`
    # and experts. Routed experts are named as peft's `target_parameters`: `mlp.experts.gate_up_proj` and
    # `mlp.experts.down_proj`; engines then get merged weights. Not implemented yet: other MLPs of a model with experts.
    targets: Harmless[Literal["all-linear"] | tuple[Text, ...]] = "all-linear"
    # Directory of an adapter in peft's format to start from: `adapter_config.json` and `adapter_model.safetensors`. Its
    # rank, scale and targets must be those of this table. By default new adapters change nothing at the start: the
    # first matrix is random, the second zero.
    load: Reads[Text | None] = None
    # Probability of dropout before the first matrix. Not implemented yet: above 0.
    dropout: NonNegative = 0.0  # expert

    @property
    def of_experts(self) -> tuple[str, ...]:
        """Targets that are routed experts."""
        return () if self.targets == "all-linear" else tuple(name for name in self.targets if name.startswith(EXPERTS))

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class TrainerConfig(Config, frozen=True, kw_only=True):
    """The trainer's ranks: one per GPU, or `num_processes` on the CPU."""

    # Device of the ranks.
    device: Harmless[Literal["cuda", "cpu"]] = "cuda"
    # GPUs of the trainer, with one rank on each, such as "n0:0-7,n1:0-3". Needed with `device = "cuda"`. Ranks on
    # several nodes need a run directory that all of these nodes share.
    gpus: Harmless[Text | None] = None
    # Number of ranks on the CPU. On GPUs there is one rank per GPU.
    num_processes: Positive = 1
    # Nodes of the ranks on the CPU. Each node gets a contiguous block of ranks. By default all ranks run on the node
    # with the bus. Ranks on several nodes need a run directory that all of these nodes share.
    nodes: tuple[Name, ...] = ()
    # Number of torch threads of each rank on the CPU: at most its share of the cores of its node, and by default that
    # share, or one for models under 20 million weights. Processes that compute at the same time share the cores: the
    # ranks, and with `rollout.max_staleness` or `log_probs_ahead` the engines on the CPU too. Results depend on this
    # number in their last bits.
    torch_threads: Positive | None = None
    # Pack sequences into one row instead of padding them. By default this is done on a GPU in bfloat16.
    packed: Harmless[bool | None] = None
    # Compute a prompt once for all samples of an optimizer step that have it, in place of once for each. By default
    # this is done on the CPU, where it saves enough and no other setting is in its way; `--plan` says which is. Not
    # implemented yet: on GPUs, whose attention kernel has no mask.
    share_prompts: Harmless[bool | None] = None
    # Checkpoint that a new run starts from: another run's directory, or Megatron-LM's. By default a new run starts
    # from `model.hf_checkpoint`.
    load: Reads[Text | None] = None
    # Load only the weights from `load`. By default optimizer, schedule and random state are loaded too.
    load_weights_only: Harmless[bool] = False
    # How new weights are exported: "live" blocks training until they are written; "async" copies them to the host
    # first and exports that copy while training continues.
    weight_export: Harmless[Literal["live", "async"]] = "live"
    # Compute reference and old log-probs of finished groups while the trainer waits for a batch.
    log_probs_ahead: Harmless[bool] = False
    # Size of one weight export bucket in bytes. A rank gathers one bucket at a time.
    export_bucket_bytes: Positive = 512 << 20  # expert
    # Publish every Nth weight version in full and the others as deltas. 1 publishes every version in full. Not
    # implemented yet: above 1 with an engine over several nodes.
    full_export_interval: Positive = 1
    profile: ProfileConfig = ProfileConfig()
    lora: LoraConfig = LoraConfig()
    megatron: MegatronConfig = MegatronConfig()
    optimizer: MegatronOptimizerConfig = MegatronOptimizerConfig()
    ddp: DdpConfig = DdpConfig()
    critic: CriticRanksConfig = CriticRanksConfig()
