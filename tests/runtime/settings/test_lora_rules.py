"""What `[trainer.lora]` is refused with, by key."""

from typing import Any

import pytest

from runtime.settings.rules.lora import lora_problems
from runtime.settings.topology import serves_adapters
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


SERVED = {"engines": {"policy": {"kind": "tiny", "serve_adapters": True}}}
NOT_SERVED: dict[str, tuple[dict[str, Any], str]] = {
    "transport": ({"engines": {"policy": {"weight_transport": "collective"}}}, 'weight_transport is "collective"'),
    "router": ({"engines": {"policy": {"router": "sglang-router"}}}, 'router is "sglang-router"'),
    "groups": ({"engines": {"policy": {"update_groups": 2}}}, "update_groups is 2"),
    "in place": ({"rollout": {"on_weight_update": "in_place"}}, 'rollout.on_weight_update is "in_place"'),
    "random weights": (
        {"engines": {"policy": {"kind": "sglang"}}, "model": {"random_init": True}},
        "model.random_init is true, with SGLang",
    ),
    "replicas": ({"engines": {"policy": {"kind": "sglang", "sglang": {"dp_size": 2}}}}, "sglang.dp_size is 2"),
    "full training": ({"trainer": {"lora": {"rank": 0}}}, "trainer.lora.rank is 0"),
}


@pytest.mark.parametrize(("tables", "told"), NOT_SERVED.values(), ids=NOT_SERVED.keys())
def test_what_keeps_engines_from_serving_adapters_is_named_or_has_them_merged(
    tables: dict[str, Any], told: str
) -> None:
    lora = {"trainer": {"lora": {"rank": 4}}}
    by_default = topology_with(**joined(lora, {"engines": {"policy": {"kind": "tiny"}}}))
    assert serves_adapters(by_default)
    assert list(lora_problems(topology_with(**joined(lora, SERVED)))) == []
    (problem,) = lora_problems(topology_with(**joined(lora, SERVED, tables)))
    assert problem.key == "engines.policy.serve_adapters"
    assert told in problem.message
    merged = topology_with(**joined(lora, {"engines": {"policy": {"kind": "tiny"}}}, tables))
    assert not serves_adapters(merged)
    assert list(lora_problems(merged)) == []


ARGUMENTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "batch": ({"max_loras_per_batch": 4}, "max_loras_per_batch", "allowed: 5 or more, for rollout.max_staleness = 2"),
    "loaded": ({"max-loaded-loras": 3}, "max-loaded-loras", "allowed: 4 or more"),
    "rank": ({"max_lora_rank": 8}, "max_lora_rank", "it follows from trainer.lora"),
}


@pytest.mark.parametrize(("arguments", "name", "told"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_arguments_of_sglang_that_are_too_small_for_the_adapters_are_refused(
    arguments: dict[str, Any], name: str, told: str
) -> None:
    tables = {"trainer": {"lora": {"rank": 4}}, "rollout": {"max_staleness": 2}}
    engine = {"kind": "sglang", "serve_adapters": True}
    enough = {"max_loras_per_batch": 5, "max_loaded_loras": 5, "lora_backend": "torch_native"}
    assert list(lora_problems(topology_with(**tables, engines={"policy": engine | {"sglang": enough}}))) == []
    (problem,) = lora_problems(topology_with(**tables, engines={"policy": engine | {"sglang": arguments}}))
    assert problem.key == f"engines.policy.sglang.{name}"
    assert told in problem.message


def test_only_engines_of_the_policy_serve_adapters() -> None:
    engines = {"policy": {"kind": "tiny"}, "ref": {"kind": "tiny", "serve_adapters": False}}
    (problem,) = lora_problems(topology_with(trainer={"lora": {"rank": 4}}, engines=engines))
    assert problem.key == "engines.ref.serve_adapters"


def test_settings_of_adapters_without_a_rank_are_refused() -> None:
    (problem,) = lora_problems(topology_with(trainer={"lora": {"alpha": 16.0}}))
    assert problem.key == "trainer.lora.alpha"
    assert "has no effect without trainer.lora.rank" in problem.message
