"""Which tensors a model has under Hugging Face's names, and their shapes."""

from actors.trainer.models.config import HfConfig

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def hf_shapes(model: HfConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model by its Hugging Face name, in the order of the layers, without a tied output weight."""
    hidden, inner = model.hidden_size, model.intermediate_size
    query, key = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for index in range(model.num_hidden_layers):
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for name, rows in zip(QKV, (query, key, key), strict=True):
            layer[f"{name}.weight"] = (rows, hidden)
            if model.has_qkv_bias:
                layer[f"{name}.bias"] = (rows,)
        if model.has_qk_norm:
            layer |= {"self_attn.q_norm.weight": (model.head_dim,), "self_attn.k_norm.weight": (model.head_dim,)}
        layer |= {"self_attn.o_proj.weight": (hidden, query), "post_attention_layernorm.weight": (hidden,)}
        layer |= _of_experts(model, hidden) if model.has_experts(index) else _mlp("mlp", hidden, inner)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _of_experts(model: HfConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    experts = model.experts
    assert experts is not None
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts.num_experts, hidden)}
    if experts.has_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (experts.num_experts,)
    for number in range(experts.num_experts):
        shapes |= _mlp(f"mlp.experts.{number}", hidden, experts.moe_intermediate_size)
    if experts.shared_intermediate_size:
        shapes |= _mlp("mlp.shared_experts", hidden, experts.shared_intermediate_size)
    return shapes
