"""Names of an engine's tensors, and what they were made of."""

import pytest

from runtime.models.fused import made_of, place_of

LAYER = "model.layers.12."


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("model.embed_tokens.weight", ["model.embed_tokens.weight"]),
        (f"{LAYER}self_attn.qkv_proj.bias", [f"{LAYER}self_attn.{part}_proj.bias" for part in "qkv"]),
        (f"{LAYER}self_attn.q_norm.weight", [f"{LAYER}self_attn.q_norm.weight"]),
        (f"{LAYER}self_attn.o_proj.weight", [f"{LAYER}self_attn.o_proj.weight"]),
        (f"{LAYER}mlp.gate_up_proj.weight", [f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"]),
        (f"{LAYER}mlp.down_proj.weight", [f"{LAYER}mlp.down_proj.weight"]),
        (f"{LAYER}mlp.gate.weight", [f"{LAYER}mlp.gate.weight"]),
        (
            f"{LAYER}mlp.experts.w13_weight",
            [f"{LAYER}mlp.experts.{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up")],
        ),
        (f"{LAYER}mlp.experts.w2_weight", [f"{LAYER}mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)]),
    ],
)
def test_what_is_joined_and_back(name: str, parts: list[str]) -> None:
    assert made_of(name, num_experts=2) == parts
    assert [place_of(part) for part in parts] == [(name, number) for number in range(len(parts))]
