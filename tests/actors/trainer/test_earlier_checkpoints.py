"""Descriptions of models in checkpoints of the version before, as that version wrote them, are those of today."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.trainer.checkpoints import RUN_FILE, in_layers, saved_run
from actors.trainer.models.config import HfConfig, read_hf_config
from tests.actors.trainer.hf import write_model, write_mtp_model

ROPE = {
    **{"theta": 10000.0, "share": 1.0, "factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position": 8192, "yarn": None},
}
DENSE: dict[str, Any] = {
    **{"model_type": "qwen3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
    **{"rms_norm_eps": 1e-06, "rope": ROPE, "tie_word_embeddings": False, "initializer_range": 0.2},
    **{"has_qkv_bias": False, "has_qk_norm": True, "experts": None, "num_mtp_layers": 0, "num_unused_mtp_layers": 0},
    **{"mla": None, "has_value_head": False, "has_value_bias": False},
}
EXPERTS = {
    **{"layers": [False, True], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"score": "sigmoid", "has_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    **{"shared_intermediate_size": 24, "num_groups": None, "num_groups_per_tok": None},
}
WITH_MTP = DENSE | {
    **{"model_type": "glm4_moe", "rope": ROPE | {"share": 0.5}, "has_qkv_bias": True, "experts": EXPERTS},
    "num_mtp_layers": 1,
}
WITH_MLA = DENSE | {
    **{"model_type": "deepseek_v3", "num_key_value_heads": 4, "head_dim": 10, "has_qk_norm": False},
    **{"experts": EXPERTS | {"num_groups": 2, "num_groups_per_tok": 1}, "num_unused_mtp_layers": 1},
    "mla": {"query_rank": 12, "key_value_rank": 10, "plain_dim": 6, "rotated_dim": 4, "value_dim": 7},
}


@pytest.mark.parametrize("earlier", [DENSE, WITH_MTP, WITH_MLA], ids=lambda earlier: earlier["model_type"])
def test_a_model_that_was_described_as_a_whole_is_described_by_its_layers(
    earlier: dict[str, Any], tmp_path: Path
) -> None:
    if earlier["num_mtp_layers"]:
        write_mtp_model(tmp_path)
    else:
        write_model(tmp_path, earlier["model_type"])
    model = read_hf_config(tmp_path, mtp_num_layers=earlier["num_mtp_layers"] or None)
    assert msgspec.convert(in_layers(earlier), HfConfig) == model
    of_today = msgspec.to_builtins(model)
    assert in_layers(of_today) is of_today


@pytest.mark.parametrize("model", [5, {}, {**DENSE, "model_type": "none"}, {**DENSE, "experts": 5}, {"layers": 5}])
def test_a_checkpoint_that_describes_no_model_is_refused_in_words(model: object, tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_bytes(msgspec.json.encode({"model": model}))
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        saved_run(tmp_path)
