"""The trainer's model configuration: what its layers need of the configuration in runtime/models/config.py."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.models.attention import MlaConfig, Rope
from runtime.models.config import ModelError, read_model
from runtime.models.experts import Experts
from runtime.settings.derived import trains_reward_model
from runtime.settings.topology import Topology, critic_topology


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """Configuration of a decoder model, with Hugging Face's names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    initializer_range: float
    has_qkv_bias: bool  # the query, key and value projections have a bias
    has_qk_norm: bool  # queries and keys are normalised per head
    experts: Experts | None = None
    num_mtp_layers: int = 0  # trained MTP layers, built like the last decoder layer; 0 or 1
    num_unused_mtp_layers: int = 0  # further MTP layers that the files may hold, not trained
    mla: MlaConfig | None = None  # None: queries, keys and values are projected directly
    has_value_head: bool = False  # the output is one value per position, not log-probs: a critic or a reward model
    has_value_bias: bool = False  # the value head has a bias: that of a critic

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts instead of a dense MLP."""
        return self.experts is not None and self.experts.layers[min(layer, self.num_hidden_layers - 1)]


def read_hf_config(directory: Path, mtp_num_layers: int | None = None, ignored: Collection[str] = ()) -> HfConfig:
    """Read config.json of a model directory.

    Args:
        directory: model directory.
        mtp_num_layers: number of MTP layers to train; None: the model's MTP layers are left out.
        ignored: keys of config.json to leave out.

    Raises:
        ModelError, a ValueError: the trainer cannot build this model exactly. The message names the key.
    """
    model = read_model(directory, ignored)
    shape = model.shape
    if mtp_num_layers and shape.mla is not None:
        raise ModelError(
            f"{directory / 'config.json'}: trainer.megatron.mtp_num_layers = {mtp_num_layers} is not implemented yet "
            f"for a model with multi-latent attention"
        )
    if mtp_num_layers and mtp_num_layers != model.num_mtp_layers:
        raise ModelError(
            f"{directory / 'config.json'}: trainer.megatron.mtp_num_layers = {mtp_num_layers}, and the model has "
            f"{model.num_mtp_layers} MTP layers (num_nextn_predict_layers)"
        )
    for key, is_set in {"attention_bias": shape.output_bias, "mlp_bias": shape.mlp_bias}.items():
        if is_set:
            raise ModelError(f"{directory / 'config.json'}: {key} is not supported by the trainer")
    return HfConfig(
        model_type=shape.model_type,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=model.max_context,
        rms_norm_eps=shape.rms_norm_eps,
        rope=shape.rope,
        tie_word_embeddings=shape.tie_word_embeddings,
        initializer_range=model.initializer_range,
        has_qkv_bias=shape.qkv_bias,
        has_qk_norm=shape.qk_norm,
        experts=shape.experts,
        num_mtp_layers=mtp_num_layers or 0,
        num_unused_mtp_layers=model.num_mtp_layers - (mtp_num_layers or 0),
        mla=shape.mla,
    )


def with_value_head(model: HfConfig, *, bias: bool = True) -> HfConfig:
    """Replace the output layer of a model by a value head. MTP layers, which predict tokens, are left out.

    Args:
        model: configuration of a policy.
        bias: whether the head has a bias. A reward model has none: the loss of a pair does not depend on it.
    """
    return replace(
        model,
        has_value_head=True,
        has_value_bias=bias,
        tie_word_embeddings=False,
        num_mtp_layers=0,
        num_unused_mtp_layers=model.num_mtp_layers + model.num_unused_mtp_layers,
    )


def trained_model(topology: Topology) -> HfConfig:
    """Read the configuration of the model that a run trains: a policy, or a reward model.

    Raises:
        ModelError, a ValueError: as in `read_hf_config`.
    """
    directory, ignored = Path(topology.model.hf_checkpoint), topology.model.ignore_config_keys
    model = read_hf_config(directory, topology.trainer.megatron.mtp_num_layers, ignored)
    return with_value_head(model, bias=False) if trains_reward_model(topology) else model


def critic_model(topology: Topology) -> HfConfig:
    """Read the configuration of a run's critic.

    Raises:
        ModelError, a ValueError: as in `read_hf_config`.
    """
    model = critic_topology(topology).model
    return with_value_head(read_hf_config(Path(model.hf_checkpoint), ignored=model.ignore_config_keys))
