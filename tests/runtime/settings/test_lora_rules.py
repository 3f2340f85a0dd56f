"""What `[trainer.lora]` is refused with, by key."""

from typing import Any

import pytest

from runtime.settings.rules.lora import lora_problems
from tests.build.topology import joined, topology_with

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "dropout": ({"trainer": {"lora": {"dropout": 0.1}}}, "trainer.lora.dropout", "not implemented yet; allowed: 0"),
    "SFT": ({"algorithm": {"loss": {"type": "sft"}}}, "algorithm.loss.type", "not implemented yet"),
    "pairs": ({"algorithm": {"loss": {"type": "dpo"}}}, "algorithm.loss.type", "not implemented yet"),
    "reward model": ({"algorithm": {"loss": {"type": "rm"}}}, "algorithm.loss.type", "trains its value head too"),
    "critic": (
        {"algorithm": {"estimator": {"type": "ppo"}}},
        "algorithm.estimator.type",
        "a critic trains its value head too",
    ),
    "teacher": (
        {"algorithm": {"opd": {"type": "megatron", "kl_coef": 1.0}}, "model": {"opd_teacher_load": "other"}},
        "algorithm.opd",
        "serve the teacher by engines",
    ),
    "reference": (
        {"algorithm": {"kl": {"type": "k3", "loss_coef": 0.1}}, "model": {"ref_load": "other"}},
        "model.ref_load",
        "a second model; not implemented yet",
    ),
    "MTP": ({"trainer": {"megatron": {"mtp_num_layers": 1}}}, "trainer.megatron.mtp_num_layers", "changes the base"),
    "expert biases": (
        {"trainer": {"megatron": {"moe_router_bias_update_rate": 0.1}}},
        "trainer.megatron.moe_router_bias_update_rate",
        "changes the base model",
    ),
}


@pytest.mark.parametrize(("tables", "key", "told"), REFUSED.values(), ids=REFUSED.keys())
def test_what_lora_does_not_support_is_refused_by_key(tables: dict[str, Any], key: str, told: str) -> None:
    assert list(lora_problems(topology_with(**joined({"trainer": {"lora": {"rank": 4}}})))) == []
    (problem,) = lora_problems(topology_with(**joined({"trainer": {"lora": {"rank": 4}}}, tables)))
    assert problem.key == key
    assert told in problem.message
    if "dropout" not in key:
        assert list(lora_problems(topology_with(**tables))) == []


def test_settings_of_adapters_without_a_rank_are_refused() -> None:
    (problem,) = lora_problems(topology_with(trainer={"lora": {"alpha": 16.0}}))
    assert problem.key == "trainer.lora.alpha"
    assert "has no effect without trainer.lora.rank" in problem.message
