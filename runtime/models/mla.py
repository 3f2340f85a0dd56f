"""Multi-latent attention (MLA) of a model, read from config.json: DeepSeek-V3."""

from typing import Final

import msgspec


class MlaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of MLA: low-rank queries, low-rank keys and values, and a rotated part of each head."""

    query_rank: int | None  # None: queries are projected from the hidden state directly
    key_value_rank: int
    plain_dim: int  # part of a head's query and key without RoPE
    rotated_dim: int  # part with RoPE; the keys' part is shared by all heads
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Dimension of a query or key."""
        return self.plain_dim + self.rotated_dim


class DeepseekV3Attention(msgspec.Struct, frozen=True):
    """Keys of DeepSeek-V3's attention, with the class's defaults."""

    num_attention_heads: int
    num_key_value_heads: int | None = None
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    qk_head_dim: int | None = None  # sum of the two previous sizes, which transformers writes
    head_dim: int | None = None  # of the part with RoPE
    v_head_dim: int = 128
    rope_interleave: bool = True

    def read(self) -> MlaConfig:
        """Read as transformers does: DeepseekV3Attention.

        Raises:
            ValueError: a key is unsupported; the text names it.
        """
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} is not supported with multi-latent attention; "
                f"supported: num_attention_heads, {self.num_attention_heads}"
            )
        if not self.rope_interleave:
            raise ValueError("rope_interleave false is not supported; supported: true")
        if self.head_dim not in (None, self.qk_rope_head_dim):
            raise ValueError(
                f"head_dim {self.head_dim} is not supported; supported: qk_rope_head_dim, {self.qk_rope_head_dim}"
            )
        for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if (size := getattr(self, key)) is not None and size < 1:
                raise ValueError(f"{key} {size} is not positive")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim {self.qk_rope_head_dim} is not even")
        return MlaConfig(
            query_rank=self.q_lora_rank,
            key_value_rank=self.kv_lora_rank,
            plain_dim=self.qk_nope_head_dim,
            rotated_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
        )


MLA_KEYS: Final[dict[str, type[DeepseekV3Attention]]] = {"DeepseekV3ForCausalLM": DeepseekV3Attention}
