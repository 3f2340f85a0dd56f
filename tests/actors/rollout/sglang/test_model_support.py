"""Which models SGLang reads in FP8, by the shapes of their matrices: numbers by hand."""

import pytest

from actors.rollout.sglang.model_support import fp8_refusal

# Qwen3-0.6B: 16 heads and 8 key-value heads of 128, 3072 inside the MLP; Qwen3-30B-A3B's experts have 768.
DENSE = {
    "model.embed_tokens.weight": (151936, 1024),
    "model.layers.0.self_attn.q_proj.weight": (2048, 1024),
    "model.layers.0.self_attn.k_proj.weight": (1024, 1024),
    "model.layers.0.self_attn.v_proj.weight": (1024, 1024),
    "model.layers.0.self_attn.o_proj.weight": (1024, 2048),
    "model.layers.0.self_attn.q_norm.weight": (128,),
    "model.layers.0.mlp.gate_proj.weight": (3072, 1024),
    "model.layers.0.mlp.up_proj.weight": (3072, 1024),
    "model.layers.0.mlp.down_proj.weight": (1024, 3072),
}
EXPERTS = {
    "model.layers.0.mlp.gate.weight": (100, 1024),
    "model.layers.0.mlp.experts.0.gate_proj.weight": (768, 1024),
    "model.layers.0.mlp.experts.0.up_proj.weight": (768, 1024),
    "model.layers.0.mlp.experts.0.down_proj.weight": (1024, 768),
}
LATENT = {
    "model.layers.0.self_attn.q_a_proj.weight": (1536, 7168),
    "model.layers.0.self_attn.q_b_proj.weight": (24576, 1536),
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "model.layers.0.self_attn.kv_b_proj.weight": (32768, 512),
    "model.layers.0.self_attn.o_proj.weight": (7168, 16384),
}


@pytest.mark.parametrize(
    ("shapes", "ranks", "in_the_way"),
    [
        (DENSE, 1, None),
        (DENSE, 8, None),
        (DENSE | EXPERTS, 1, None),
        (DENSE | EXPERTS, 2, None),
        (LATENT, 8, None),  # 576 rows are whole on every rank
        (DENSE, 16, "intermediate_size = 3072 of the model, 192 on each of 16 ranks"),  # a key-value head each is 128
        (DENSE | EXPERTS, 4, "moe_intermediate_size = 768 of the model, 192 on each of 4 ranks"),
        (
            DENSE | {"model.layers.0.self_attn.k_proj.weight": (192, 1024)},
            1,
            "num_key_value_heads x head_dim = 192 of the model",
        ),
        ({"model.layers.0.mlp.gate_proj.weight": (192, 128)}, 1, "intermediate_size = 192 of the model"),
        (
            LATENT | {"model.layers.0.self_attn.q_b_proj.weight": (640, 1536)},
            2,
            "model.layers.0.self_attn.q_b_proj.weight = 640 of the model, 320 on each of 2 ranks",
        ),
    ],
)
def test_a_size_that_blocks_do_not_divide_is_named(
    shapes: dict[str, tuple[int, ...]], ranks: int, in_the_way: str | None
) -> None:
    expected = None if in_the_way is None else f"{in_the_way}: SGLang reads FP8 in multiples of 128 there"
    assert fp8_refusal(shapes, 128, tp_size=ranks) == expected


def test_experts_that_are_shared_out_whole_are_not_cut() -> None:
    assert fp8_refusal(DENSE | EXPERTS, 128, tp_size=8, ep_size=8) is None
