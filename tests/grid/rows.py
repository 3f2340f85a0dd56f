"""The rows of the grid: parallel layouts, and how a micro-batch is laid out and computed in each.

CI trains the rows in `FEW`: each way to share the work (tensor, sequence, pipeline, virtual, context, expert and data
parallel, sharded optimizer, overlapped), each two of them, and each with packed rows, a tied embedding and
recomputation; bfloat16 in the layouts with code for it; each feature and kind of model on several ranks; all of them
resumed (`test_rows.py`). What a larger number or another combination of the same adds is nightly.
"""

from dataclasses import dataclass, field, replace
from typing import Any

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DISTRIBUTED = {"use_distributed_optimizer": True}
ROUTER_LOSSES = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.02}
NAMES = {"qwen3_moe": "Qwen3-MoE", "glm4_moe": "GLM-4-MoE", "deepseek_v3": "DeepSeek-V3"}
OF_BIASES = (  # kinds whose routers have biases of experts
    *("glm4_moe", "deepseek_v3", "glm4_moe_lite", "dots1", "minimax_m2", "deepseek_v32", "glm_moe_dsa"),
)
OF_ADAPTERS = ("the gradient of a narrow result is a rank's own", "a narrow result is a rank's own")
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True)
class Layout:
    """How ranks share the work."""

    world: int = 1
    megatron: dict[str, Any] = field(default_factory=dict[str, Any])
    optimizer: dict[str, Any] = field(default_factory=dict[str, Any])
    ddp: dict[str, Any] = field(default_factory=dict[str, Any])
    num_layers: int = 2


def _layout(
    world: int, *, distributed: bool = False, overlap: bool = False, num_layers: int = 2, **sizes: Any
) -> Layout:
    short = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "sp": "sequence_parallel",
        "vpp": "virtual_pipeline_model_parallel_size",
        "first": "num_layers_in_first_pipeline_stage",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "dispatcher": "moe_token_dispatcher_type",
    }
    megatron = {short[name]: size for name, size in sizes.items()}
    return Layout(world, megatron, DISTRIBUTED if distributed else {}, OVERLAP if overlap else {}, num_layers)


LAYOUTS = {
    "1": _layout(1),
    "1+DO": _layout(1, distributed=True),
    "TP2": _layout(2, tp=2),
    "TP2+SP": _layout(2, tp=2, sp=True),
    "PP2": _layout(2, pp=2),
    "PP2 uneven": _layout(2, pp=2, first=1, num_layers=4),
    "CP2": _layout(2, cp=2),
    "DP2": _layout(2),
    "DP2+DO": _layout(2, distributed=True),
    "TP2xDP2+DO": _layout(4, tp=2, distributed=True),
    "TP2+SPxPP2": _layout(4, tp=2, sp=True, pp=2),
    "PP2xDP2": _layout(4, pp=2),
    "CP2xTP2": _layout(4, cp=2, tp=2),
    "CP2xPP2": _layout(4, cp=2, pp=2),
    "CP2xDP2+DO": _layout(4, cp=2, distributed=True),
    "DP4+DO": _layout(4, distributed=True),
    "PP3xVPP2": _layout(3, pp=3, vpp=2, num_layers=6),
    "PP4xVPP2": _layout(4, pp=4, vpp=2, num_layers=8),
    "DP2+DO, overlapped": _layout(2, distributed=True, overlap=True),
    "TP2, saved activations shared out": Layout(
        2, {"tensor_model_parallel_size": 2, "distribute_saved_activations": True, **RECOMPUTE}
    ),
    "PP2, outputs deallocated": Layout(2, {"pipeline_model_parallel_size": 2, "deallocate_pipeline_outputs": True}),
}

LAYOUTS_OF_EXPERTS = {
    "EP2": _layout(2, ep=2),
    "EP2xTP2+SP": _layout(2, ep=2, tp=2, sp=True, etp=1),
    "EP2xTP2+SP, each expert on two": _layout(4, ep=2, tp=2, sp=True, etp=2),
    "EP2+DO": _layout(2, ep=2, distributed=True),
    "EP2xDP2+DO": _layout(4, ep=2, distributed=True),
    "EP2xPP2": _layout(4, ep=2, pp=2),
    "EP2xCP2": _layout(2, ep=2, cp=2),
    "EP2xCP2, gathered": _layout(2, ep=2, cp=2, dispatcher="allgather"),
    "CP2xTP2+SP": _layout(4, cp=2, tp=2, sp=True),
}


@dataclass(frozen=True)
class Row:
    """One training: a layout, a form of the micro-batches, tied or untied, with or without recomputation."""

    layout: str
    packed: bool = False
    recompute: bool = False
    tied: bool = False
    dtype: str = "float32"
    kind: str = "qwen3"  # of model
    replay: bool = False  # of the experts of a pass before
    mtp: bool = False  # with a layer for the token after the next one
    spoilt: bool = False  # some rewards are NaN: single samples, and all of an optimizer step
    ahead: bool = False  # log-probs are computed group by group, of every second one before its batch
    told: bool = False  # routed experts of all tokens come with the samples
    kept: bool = False  # log-probs are over the tokens that top-p kept
    idle: bool = False  # some groups have equal rewards, and no term but the policy loss: their samples get no passes
    prompts: bool = False  # the samples of a group have one prompt; all but the single rank train behind one copy of it
    aged: bool = False  # tokens are up to two train steps old, and old log-probs are by the weights that sampled them
    critic: bool = False  # PPO: a critic is trained, too
    critic_on: str = ""  # layout of its own ranks; empty: those of the actor
    lora: bool = False  # adapters train, and the model's weights stay
    lora_experts: bool = False  # those of experts too
    balance: str = ""  # the router's load balancing loss, beside which its z loss trains too; empty: neither

    @property
    def num_layers(self) -> int:
        """Of its model."""
        return self._sizes.num_layers

    @property
    def world(self) -> int:
        """Its ranks, those of a critic alone included."""
        return self._sizes.world + (self._sizes_of_critic.world if self.critic_on else 0)

    @property
    def max_tokens(self) -> int:
        """Of a micro-batch on each rank; with losses of the router, micro-batches are those of the single rank."""
        ranks = self._sizes.megatron.get("context_parallel_size", 1) if self.balance else 1
        return 60 // ranks

    @property
    def _sizes(self) -> Layout:
        return (LAYOUTS | LAYOUTS_OF_EXPERTS | BASELINES)[self.layout]

    @property
    def _sizes_of_critic(self) -> Layout:
        return (LAYOUTS | LAYOUTS_OF_EXPERTS)[self.critic_on]

    @property
    def baseline(self) -> "Row":
        """The single rank that it is compared with."""
        return Row(
            f"1 of {self.num_layers} layers",
            tied=self.tied,
            kind=self.kind,
            replay=self.replay,
            told=self.told,
            mtp=self.mtp,
            balance=self.balance,
            spoilt=self.spoilt,
            kept=self.kept,
            aged=self.aged,
            idle=self.idle,
            prompts=self.prompts,
            critic=self.critic,
            lora=self.lora,
            lora_experts=self.lora_experts,
        )

    @property
    def half_baseline(self) -> "Row":
        """The single rank that computes in bfloat16, too."""
        return replace(self.baseline, dtype="bfloat16")

    @property
    def name(self) -> str:
        """As the table has it."""
        parts = [self.layout, "packed" if self.packed else "padded", "tied" if self.tied else "untied"]
        parts += [NAMES.get(self.kind, self.kind)] if self.kind != "qwen3" else []
        parts += ["replay"] if self.replay else []
        parts += ["told experts"] if self.told else []
        parts += ["MTP"] if self.mtp else []
        parts += ["ahead"] if self.ahead else []
        parts += [self.balance.replace("_", " "), "z loss"] if self.balance else []
        parts += ["masked samples"] if self.spoilt else []
        parts += ["kept tokens"] if self.kept else []
        parts += ["old actors"] if self.aged else []
        parts += ["idle samples"] if self.idle else []
        parts += ["shared prompts"] if self.prompts else []
        parts += [f"critic on {self.critic_on}" if self.critic_on else "critic"] if self.critic else []
        parts += ["LoRA"] if self.lora else []
        parts += ["experts too"] if self.lora_experts else []
        return ", ".join([*parts, *(["recompute"] if self.recompute else []), *(["bf16"] if self.is_half else [])])

    @property
    def is_half(self) -> bool:
        """Whether it computes in bfloat16, on float32 main parameters."""
        return self.dtype == "bfloat16"

    def trainer(self) -> dict[str, Any]:
        """The table `trainer` of its topology."""
        layout = self._sizes
        megatron = layout.megatron | (RECOMPUTE if self.recompute else {})
        if self.kind in OF_BIASES and not self.lora:
            megatron = megatron | {"moe_router_bias_update_rate": 1e-2}
        if self.balance:
            megatron = megatron | {"moe_router_load_balancing_type": self.balance, **ROUTER_LOSSES}
        if self.mtp:
            megatron = megatron | {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.2}
        return {
            "num_processes": layout.world,
            **({"share_prompts": True} if self.prompts and self.layout not in BASELINES else {"packed": self.packed}),
            "log_probs_ahead": self.ahead,
            "lora": {"rank": 4, "alpha": 8.0, **(EXPERT_TARGETS if self.lora_experts else {})} if self.lora else {},
            "megatron": megatron,
            "optimizer": layout.optimizer,
            "ddp": layout.ddp,
            **({"critic": self._critic_ranks} if self.critic_on else {}),
        }

    @property
    def _critic_ranks(self) -> dict[str, Any]:
        layout = self._sizes_of_critic
        return {"num_processes": layout.world, "megatron": layout.megatron}


EXPERT_TARGETS = {"targets": ("q_proj", "o_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")}
BASELINES = {f"1 of {number} layers": _layout(1, num_layers=number) for number in (2, 4, 6, 8)}

# replay in all rows but one
EXPERTS = (
    Row("EP2", kind="qwen3_moe"),
    *(
        Row(layout, packed=index % 2 == 1, recompute=index % 3 == 1, kind=kind, replay=True)
        for index, layout in enumerate(LAYOUTS_OF_EXPERTS)
        for kind in ("qwen3_moe", "glm4_moe")
    ),
)
# an MTP layer, in each kind of layout that has one
FURTHER = tuple(
    Row(layout, packed=packed, recompute=recompute, kind="glm4_moe", replay=True, mtp=True)
    for layout, packed, recompute in (
        ("1", True, True),
        ("TP2+SP", False, True),
        ("CP2", True, False),
        ("DP2", False, False),
        ("DP2+DO, overlapped", True, False),
        ("EP2", False, False),
        ("EP2xTP2+SP", True, True),
        ("EP2xDP2+DO", False, False),
        ("EP2xCP2", True, False),
        ("PP2", False, False),
        ("EP2xPP2", True, True),
        ("PP4xVPP2", False, False),
    )
)
# MLA, in layouts that shard attention or the sequence
MLA = (
    Row("1", packed=True, kind="deepseek_v3", replay=True),
    Row("TP2+SP", kind="deepseek_v3", replay=True),
    Row("TP2+SP", packed=True, recompute=True, kind="deepseek_v3", replay=True),
    Row("PP2", packed=True, kind="deepseek_v3", replay=True),
    Row("DP2+DO", recompute=True, kind="deepseek_v3", replay=True),
    Row("CP2", packed=True, kind="deepseek_v3", replay=True),
    Row("EP2", kind="deepseek_v3"),
    Row("EP2xCP2", kind="deepseek_v3", replay=True),
    Row("EP2xTP2+SP", packed=True, kind="deepseek_v3", replay=True),
    Row("TP2+SPxPP2", kind="deepseek_v3", replay=True),
)
# blocks that other families have, in layouts that shard them
FAMILIES = (
    Row("TP2+SP", packed=True, tied=True, kind="glm4"),
    Row("TP2", kind="glm4"),
    Row("PP2", packed=True, tied=True, kind="glm4"),
    Row("CP2", packed=True, kind="glm4"),
    Row("EP2xTP2+SP", packed=True, kind="glm4_moe_lite", replay=True),
    Row("PP2", kind="glm4_moe_lite", replay=True),
    Row("EP2xCP2", packed=True, kind="glm4_moe_lite", replay=True),
    Row("EP2xTP2+SP", packed=True, kind="qwen2_moe", replay=True),
    Row("PP2", packed=True, kind="qwen2_moe", replay=True),
    Row("EP2", packed=True, recompute=True, kind="gpt_oss", replay=True),
    Row("PP2", recompute=True, kind="gpt_oss", replay=True, prompts=True),
    Row("EP2xCP2", packed=True, kind="gpt_oss", replay=True),
    Row("EP2xTP2+SP", packed=True, kind="gpt_oss", replay=True),
    Row("TP2+SP", packed=True, recompute=True, tied=True, kind="gemma3_text"),
    Row("PP2", packed=True, kind="gemma3_text"),
    Row("CP2", packed=True, kind="gemma3_text"),
    Row("TP2+SP", packed=True, kind="olmo2"),
    Row("TP2", tied=True, kind="olmo3"),
    Row("PP2", packed=True, kind="smollm3"),
    Row("TP2", packed=True, kind="phi3"),
    Row("CP2", packed=True, kind="exaone4"),
    Row("CP2", kind="ministral3"),
    Row("EP2xTP2+SP", packed=True, kind="dots1", replay=True),
    Row("EP2xTP2+SP", packed=True, kind="minimax_m2", replay=True),
    Row("PP2", kind="minimax_m2", replay=True),
    Row("EP2xTP2+SP", packed=True, kind="deepseek_v32", replay=True),
    Row("PP2", kind="deepseek_v32", replay=True),
    Row("TP2+SP", recompute=True, kind="glm_moe_dsa", replay=True, prompts=True),
    Row("TP2+SP", recompute=True, kind="glm_moe_dsa", replay=True),
    Row("PP2", recompute=True, kind="qwen3_5_text", prompts=True),
    Row("EP2xTP2+SP", packed=True, kind="qwen3_next", replay=True),
    Row("EP2xTP2+SP", packed=True, kind="ernie4_5_moe", replay=True),
    Row("PP2", packed=True, kind="ernie4_5_moe", replay=True),
    Row("EP2xCP2", kind="ernie4_5_moe"),
    Row("EP2xTP2+SP", packed=True, recompute=True, kind="gemma4_text", replay=True),
    Row("PP2", kind="gemma4_text", replay=True, prompts=True),
    Row("EP2xCP2", packed=True, kind="gemma4_text", replay=True),
    Row("TP2+SP", packed=True, tied=True, kind="gemma4_text, dense"),
    Row("TP2", kind="gemma4_text, dense"),
    Row("PP2", packed=True, tied=True, kind="gemma4_text, dense"),
    Row("CP2", packed=True, kind="gemma4_text, dense"),
)
# log-probs of groups before their batch
AHEAD = (
    Row("DP2", ahead=True),
    Row("PP2", packed=True, ahead=True),
    Row("CP2", ahead=True),
    Row("TP2+SP", packed=True, ahead=True),
    Row("PP2xDP2", ahead=True),
    Row("PP4xVPP2", ahead=True),
    Row("DP2+DO, overlapped", packed=True, ahead=True),
    Row("EP2", kind="qwen3_moe", replay=True, ahead=True),
    Row("DP2", kind="glm4_moe", replay=True, mtp=True, ahead=True),
)
# experts of the engine, of which each replica gets those of its tokens
TOLD = tuple(
    Row(layout, packed=packed, kind="qwen3_moe", told=True)
    for layout, packed in (
        ("DP2", True),
        ("EP2xDP2+DO", False),
        ("EP2xPP2", True),
        ("EP2xCP2", True),
    )
)
# losses of the router; that of a micro-batch depends on what is in one, so it is padded like the single rank's
BALANCED = tuple(
    Row(layout, packed=packed, recompute=recompute, kind="qwen3_moe", balance=balance)
    for balance, packed in (("aux_loss", False), ("seq_aux_loss", False), ("seq_aux_loss", True))
    for layout, recompute in (("TP2+SP", False), ("CP2", False), ("EP2xTP2+SP", True), ("CP2xTP2+SP", False))
)
# samples that are masked, and optimizer steps that are skipped, by all ranks alike
SPOILT = (
    Row("DP2", spoilt=True),
    Row("TP2+SP", packed=True, recompute=True, spoilt=True),
    Row("CP2", spoilt=True),
    Row("PP2", packed=True, spoilt=True),
    Row("CP2xTP2", packed=True, spoilt=True),
    Row("PP4xVPP2", spoilt=True),
    Row("DP2+DO, overlapped", packed=True, spoilt=True),
    Row("EP2xTP2+SP", kind="glm4_moe", replay=True, spoilt=True),
    Row("DP2", kind="glm4_moe", replay=True, mtp=True, spoilt=True),
    Row("CP2", kind="qwen3_moe", balance="seq_aux_loss", spoilt=True),
)
# the vocabulary and the sequence are split between ranks, and so are the tokens that were kept
KEPT = tuple(
    Row(layout, packed=packed, kept=True)
    for layout, packed in (("TP2+SP", True), ("TP2", False), ("CP2", True), ("DP2", False), ("PP2", True))
)
AGED = tuple(
    Row(layout, packed=packed, aged=True)
    for layout, packed in (("DP2+DO", False), ("PP2", True), ("CP2", True), ("TP2+SP", True), ("CP2xPP2", False))
)
# optimizer steps in which some replicas, or all, have only samples without passes
IDLE = tuple(
    Row(layout, packed=packed, idle=True)
    for layout, packed in (("DP2", True), ("PP2", False), ("CP2xDP2+DO", False), ("PP3xVPP2", True), ("DP4+DO", True))
)
# the prompts of groups once
SHARED = (
    Row("1", prompts=True),
    Row("TP2+SP", prompts=True, recompute=True, aged=True),
    Row("PP2", prompts=True, kept=True),
    Row("CP2", prompts=True, spoilt=True),
    Row("DP2+DO", prompts=True, idle=True),
    Row("CP2xDP2+DO", prompts=True, tied=True),
    Row("CP2xTP2", prompts=True),
    Row("PP3xVPP2", prompts=True),
    Row("TP2", prompts=True, critic=True),
    Row("EP2", prompts=True, kind="qwen3_moe", replay=True),
    Row("TP2+SP", prompts=True, kind="deepseek_v3", replay=True),
)
# values, and a second model whose output layer is not sharded
CRITIC = (
    Row("TP2+SP", packed=True, critic=True),
    Row("CP2", critic=True),
    Row("PP2", packed=True, tied=True, critic=True),
    Row("DP2+DO, overlapped", packed=True, recompute=True, tied=True, critic=True),
    Row("CP2xDP2+DO", packed=True, critic=True),
    Row("TP2+SPxPP2", recompute=True, critic=True),
    Row("PP4xVPP2", critic=True),
    Row("EP2xTP2+SP", packed=True, kind="qwen3_moe", critic=True),
)
# critics with ranks and a layout of their own; the single rank trains both models
CRITIC_APART = (
    Row("TP2", critic=True, critic_on="DP2"),
    Row("1", packed=True, tied=True, critic=True, critic_on="PP2"),
    Row("TP2+SP", recompute=True, critic=True, critic_on="PP2"),
    Row("DP2+DO", critic=True, critic_on="CP2"),
    Row("PP2", packed=True, critic=True, critic_on="TP2+SP"),
    Row("CP2", critic=True, critic_on="PP2xDP2"),
    Row("DP2", critic=True, critic_on="TP2", spoilt=True),
    Row("TP2+SP", kind="qwen3_moe", critic=True, critic_on="EP2"),
)
# adapters, whose pairs are divided like the layers that they are beside
LORA = (
    *(
        Row(layout, packed=index % 2 == 1, tied=index % 3 == 0, recompute=index % 4 == 3, lora=True)
        for index, layout in enumerate(LAYOUTS)
    ),
    Row("EP2xTP2+SP", packed=True, kind="qwen3_moe", lora=True),
    Row("EP2", packed=True, kind="qwen3_moe", lora=True, lora_experts=True),
    Row("TP2+SP", kind="deepseek_v3", lora=True),
    Row("PP2", tied=True, dtype="bfloat16", lora=True),
)
LORA_IN_CI = (
    Row("TP2+SP", packed=True, recompute=True, lora=True),
    Row("TP2", lora=True),
    Row("CP2xDP2+DO", tied=True, lora=True),
    Row("PP2", tied=True, dtype="bfloat16", lora=True),
)
HALF = tuple(Row(layout, tied=True, dtype="bfloat16") for layout in ("TP2", "DP2+DO", "PP2"))
FEW = (
    Row("1", recompute=True),
    Row("1+DO", packed=True),
    Row("TP2", tied=True),
    Row("TP2+SP", packed=True, recompute=True, spoilt=True, kept=True, aged=True),
    Row("PP2"),
    Row("PP2 uneven", packed=True, recompute=True),
    Row("CP2", recompute=True, tied=True),
    Row("DP2", packed=True, ahead=True),
    Row("DP2+DO", spoilt=True, kept=True, aged=True),
    Row("DP2", packed=True, idle=True),
    Row("TP2+SPxPP2", prompts=True, spoilt=True, recompute=True),
    Row("CP2xDP2+DO", prompts=True, tied=True),
    Row("CP2xDP2+DO", idle=True),
    Row("TP2xDP2+DO", packed=True, recompute=True),
    Row("TP2+SPxPP2", tied=True),
    Row("PP2xDP2", packed=True, tied=True),
    Row("CP2xTP2+SP", recompute=True, spoilt=True, kept=True, aged=True),
    Row("CP2xPP2", packed=True, spoilt=True, kept=True, aged=True),
    Row("CP2xDP2+DO", tied=True),
    Row("PP3xVPP2", packed=True, recompute=True, tied=True),
    Row("DP2+DO, overlapped", packed=True, recompute=True, tied=True, critic=True),
    Row("TP2, saved activations shared out", tied=True),
    Row("PP2, outputs deallocated", packed=True, tied=True),
    *HALF,
    *LORA_IN_CI,
    Row("TP2+SP", critic=True),
    Row("1", packed=True, recompute=True, tied=True, critic=True, critic_on="PP2"),
    Row("EP2+DO", packed=True, kind="qwen3_moe", told=True),
    Row("EP2xTP2+SP", recompute=True, kind="qwen3_moe", balance="aux_loss"),
    Row("CP2", packed=True, recompute=True, kind="qwen3_moe", balance="seq_aux_loss"),
    Row("EP2xCP2", kind="qwen3_moe", replay=True),
    Row("EP2xPP2", packed=True, recompute=True, kind="glm4_moe", replay=True, mtp=True),
    Row("EP2xTP2+SP", packed=True, recompute=True, kind="deepseek_v3", replay=True),
    *(FAMILIES[row] for row in (0, 4, 7, 9, 16)),
    Row("EP2xTP2+SP", packed=True, recompute=True, kind="gemma4_text", replay=True),
    Row("PP2", recompute=True, kind="qwen3_5_text", prompts=True),
    Row("EP2xTP2+SP", packed=True, kind="qwen3_next", replay=True),
)
ALL = (
    *EXPERTS,
    *FURTHER,
    *MLA,
    *FAMILIES,
    *AHEAD,
    *BALANCED,
    *TOLD,
    *SPOILT,
    *KEPT,
    *AGED,
    *IDLE,
    *SHARED,
    *CRITIC,
    *CRITIC_APART,
    *LORA,
    *(
        Row(layout, packed, recompute, tied)
        for layout in LAYOUTS
        for packed in (False, True)
        for recompute in (False, True)
        for tied in (False, True)
    ),
    *HALF,
)

# one that must break it, for every kind of sharing; tied where the embedding is what is shared
FAULTY = (
    (Row("TP2"), "every rank has the first part of a matrix"),
    (Row("TP2"), "each rank's part of the vocabulary is all of it"),
    (Row("TP2+SP"), "gradients of norms are not reduced"),
    (Row("PP2"), "layers are numbered within their stage"),
    (Row("PP2", tied=True), "the tied embedding's gradients are not reduced"),
    (Row("CP2"), "sequences are cut plainly"),
    (Row("CP2", packed=True), "keys take their own rank's gradient"),
    (Row("DP2"), "replicas' gradients are not reduced"),
    (Row("DP2+DO"), "replicas' gradients are not reduced"),
    (Row("TP2xDP2+DO"), "every rank has the first part of a matrix"),
    (Row("TP2+SPxPP2"), "gradients of norms are not reduced"),
    (Row("PP2xDP2"), "layers are numbered within their stage"),
    (Row("CP2xTP2"), "keys take their own rank's gradient"),
    (Row("CP2xPP2"), "sequences are cut plainly"),
    (Row("CP2xDP2+DO"), "replicas' gradients are not reduced"),
    (Row("DP4+DO"), "replicas' gradients are not reduced"),
    (Row("PP4xVPP2"), "layers are numbered within their stage"),
    (Row("PP2 uneven"), "layers are numbered within their stage"),
    (Row("EP2", kind="qwen3_moe"), "every rank has the first experts"),
    (Row("EP2", kind="qwen3_moe", replay=True), "routers choose anew"),
    (Row("EP2xCP2", kind="glm4_moe", replay=True), "biases of experts count padding"),  # with EP2 alone no bias moves
    (Row("EP2xTP2+SP", kind="qwen3_moe", replay=True), "gradients of norms are not reduced"),
    (Row("EP2xTP2+SP, each expert on two", kind="qwen3_moe", replay=True), "every rank has the first part of a matrix"),
    (Row("EP2xDP2+DO", kind="qwen3_moe", replay=True), "replicas' gradients are not reduced"),
    (Row("EP2xPP2", kind="qwen3_moe", replay=True), "layers are numbered within their stage"),
    (Row("EP2xCP2", kind="qwen3_moe", replay=True), "keys take their own rank's gradient"),
    (Row("EP2xCP2, gathered", kind="qwen3_moe", replay=True), "sequences are cut plainly"),
    *(
        (row, fault)
        for row in FURTHER
        for layout, fault in (
            ("EP2", "tokens of an MTP layer are counted by replica"),
            ("CP2", "an MTP layer reads its rank's next token"),
            ("PP2", "the tied embedding's gradients are not reduced"),
        )
        if row.layout == layout
    ),
    (Row("1", prompts=True), "responses see others of their prompt"),
    (Row("CP2", prompts=True, spoilt=True), "responses see others of their prompt"),
    (TOLD[0], "replicas get experts of other tokens"),
    (BALANCED[0], "losses of the router count a rank's own tokens"),
    (BALANCED[9], "losses of the router are divided by their ranks"),
    (Row("TP2+SP", kind="deepseek_v3", replay=True), "gradients of norms are not reduced"),
    (Row("TP2+SP", kind="deepseek_v3", replay=True), "MLA down projections are sharded"),
    (Row("TP2+SP", kind="deepseek_v3", replay=True), "every rank has the first part of a matrix"),
    (Row("EP2xCP2", kind="deepseek_v3", replay=True), "keys take their own rank's gradient"),
    *((Row("TP2", lora=True), f"adapters: {fault}") for fault in OF_ADAPTERS),
    (Row("TP2+SP", packed=True, recompute=True, lora=True), "gradients of norms are not reduced"),
)
FEW_FAULTY = (
    *tuple(one for one in FAULTY if one[0].world == 2)[:8],
    *(one for one in FAULTY if one[1] == "routers choose anew" or one[0].lora),
)

WITH_CRITIC, WITH_LORA = "qwen3, critic", "qwen3, LoRA"
# layouts of which each reads the others' checkpoints, by kind of model
SAVED = (
    ("qwen3", ("1", "TP2", "PP2", "CP2", "1+DO", "DP2+DO", "TP2xDP2+DO")),
    ("qwen3_moe", ("1", "TP2+SP", "PP2", "EP2", "1+DO", "DP2+DO", "EP2+DO")),
    ("deepseek_v3", ("TP2+SP", "PP2")),
    (WITH_CRITIC, ("1", "TP2+SP", "PP2", "DP2+DO", "1 & PP2", "TP2 & DP2")),  # after the &: its own ranks
    (WITH_LORA, ("1", "TP2+SP", "PP2", "DP2+DO")),
)
