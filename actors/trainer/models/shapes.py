"""Which tensors a model has under Hugging Face's names, and their shapes."""

from actors.trainer.models.config import HfConfig

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def hf_shapes(model: HfConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model by its Hugging Face name, in the order of the layers, without a tied output weight."""
    hidden, inner = model.hidden_size, model.intermediate_size
    query, key = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for index in range(model.num_hidden_layers + model.num_mtp_layers):
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        for name, rows in zip(QKV, (query, key, key), strict=True):
            layer[f"{name}.weight"] = (rows, hidden)
            if model.has_qkv_bias:
                layer[f"{name}.bias"] = (rows,)
        if model.has_qk_norm:
            layer |= {"self_attn.q_norm.weight": (model.head_dim,), "self_attn.k_norm.weight": (model.head_dim,)}
        layer |= {"self_attn.o_proj.weight": (hidden, query), "post_attention_layernorm.weight": (hidden,)}
        layer |= _of_experts(model, hidden) if model.has_experts(index) else _mlp("mlp", hidden, inner)
        layer |= _of_further_tokens(hidden) if index == model.num_hidden_layers else {}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    return shapes | {copy: shape for name, shape in shapes.items() for copy in copies_of(name, model)}


def copies_of(name: str, model: HfConfig) -> list[str]:
    """Under which names a layer for further tokens has a top tensor again: they are written, and never read."""
    if not model.num_mtp_layers:
        return []
    embedding, head = (
        f"model.layers.{model.num_hidden_layers}.{own}.weight" for own in ("embed_tokens", "shared_head.head")
    )
    copies = {"model.embed_tokens.weight": [embedding], "lm_head.weight": [head]}
    if model.tie_word_embeddings:
        copies["model.embed_tokens.weight"].append(head)
    return copies.get(name, [])


def _of_further_tokens(hidden: int) -> dict[str, tuple[int, ...]]:
    norms = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    return {**dict.fromkeys(norms, (hidden,)), "eh_proj.weight": (hidden, 2 * hidden)}


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
