"""The trainer's model configuration: what its layers need of the configuration in runtime/models/config.py."""

from collections.abc import Collection
from pathlib import Path

import msgspec

from runtime.models.blocks import Attention, Layer, Mlp, ModelShape
from runtime.models.config import ModelError, read_model
from runtime.settings.derived import trains_reward_model
from runtime.settings.topology import Topology, critic_topology


class HfConfig(ModelShape, frozen=True, kw_only=True):
    """Configuration of a decoder model that is trained: its shape, its MTP layers, and its head."""

    max_position_embeddings: int
    initializer_range: float
    num_mtp_layers: int = 0  # trained MTP layers, built like the last decoder layer; 0 or 1
    num_unused_mtp_layers: int = 0  # further MTP layers that the files may hold, not trained
    has_value_head: bool = False  # the output is one value per position, not log-probs: a critic or a reward model
    has_value_bias: bool = False  # the value head has a bias: that of a critic

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The decoder layers and the trained MTP layers."""
        return self.layers + self.layers[-1:] * self.num_mtp_layers


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
    for key, is_set in _untrained_biases(shape).items():
        if is_set:
            raise ModelError(f"{directory / 'config.json'}: {key} is not supported by the trainer")
    return HfConfig(
        **{field: getattr(shape, field) for field in shape.__struct_fields__},
        max_position_embeddings=model.max_context,
        initializer_range=model.initializer_range,
        num_mtp_layers=mtp_num_layers or 0,
        num_unused_mtp_layers=model.num_mtp_layers - (mtp_num_layers or 0),
    )


def _untrained_biases(shape: ModelShape) -> dict[str, bool]:
    """Return the biases that the trainer does not have, by key of config.json."""
    attention, mlps = shape.attention, [layer.mlp for layer in shape.layers]
    has_all_biases = shape.experts is not None and shape.experts.clamped is not None
    return {
        "attention_bias": isinstance(attention, Attention) and attention.output_bias and not has_all_biases,
        "mlp_bias": any(isinstance(mlp, Mlp) and mlp.bias for mlp in mlps),
    }


def with_value_head(model: HfConfig, *, bias: bool = True) -> HfConfig:
    """Replace the output layer of a model by a value head. MTP layers, which predict tokens, are left out.

    Args:
        model: configuration of a policy.
        bias: whether the head has a bias. A reward model has none: the loss of a pair does not depend on it.
    """
    return msgspec.structs.replace(
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
