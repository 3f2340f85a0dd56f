"""What `[trainer.lora]` is refused with, by key."""

from typing import Any

import pytest

from runtime.settings.rules.lora import lora_problems
from runtime.settings.topology import serves_adapters
from tests.build.topology import joined, topology_with

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "dropout": ({"trainer": {"lora": {"dropout": 0.1}}}, "trainer.lora.dropout", "not implemented yet; allowed: 0"),
    "reward model": (
        {"algorithm": {"loss": {"type": "rm"}}},
        "algorithm.loss.type",
        "its value head too; not implemented yet with trainer.lora.rank; allowed otherwise: trainer.lora.rank = 0",
    ),
    "critic": (
        {"algorithm": {"estimator": {"type": "ppo"}}},
        "algorithm.estimator.type",
        "a critic trains its value head too; not implemented yet with trainer.lora.rank; allowed: an estimator without",
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
    "tensor-parallel experts": (
        {
            "trainer": {
                "lora": {"targets": ("mlp.experts.down_proj",)},
                "megatron": {"tensor_model_parallel_size": 2},
            }
        },
        "trainer.megatron.tensor_model_parallel_size",
        "not implemented yet with mlp.experts.down_proj in trainer.lora.targets; allowed: 1",
    ),
    "experts of tensor-parallel ranks": (
        {
            "trainer": {
                "lora": {"targets": ("mlp.experts.down_proj",)},
                "megatron": {"expert_tensor_parallel_size": 2},
            }
        },
        "trainer.megatron.expert_tensor_parallel_size",
        "not implemented yet with mlp.experts.down_proj in trainer.lora.targets; allowed: 1",
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
    if "dropout" not in key and "targets" not in str(tables):
        assert list(lora_problems(topology_with(**tables))) == []


@pytest.mark.parametrize("loss", ["sft", "dpo", "preference_ipo"])
def test_demonstrations_and_pairs_train_adapters(loss: str) -> None:
    topology = topology_with(**joined({"trainer": {"lora": {"rank": 4}}, "algorithm": {"loss": {"type": loss}}}))
    assert list(lora_problems(topology)) == []
    assert not serves_adapters(topology)  # nothing is generated


SERVED = {"engines": {"policy": {"kind": "tiny", "serve_adapters": True}}}
POOL = "engines.policy"
NOT_SERVED: dict[str, tuple[dict[str, Any], str]] = {
    "broadcast": (
        {"engines": {"policy": {"weight_transport": "collective"}}},
        f'{POOL}.weight_transport is "collective"; allowed: false, or {POOL}.weight_transport = "disk" or "http"',
    ),
    "shared memory": (
        {"engines": {"policy": {"weight_transport": "ipc", "colocate": "trainer"}}},
        f'{POOL}.weight_transport is "ipc"; allowed: false, or {POOL}.weight_transport = "disk" or "http"',
    ),
    "router": (
        {"engines": {"policy": {"router": "sglang-router"}}},
        f'{POOL}.router is "sglang-router"; allowed: false, or {POOL}.router = "direct"',
    ),
    "engines of others": (
        {"engines": {"policy": {"urls": ["http://10.0.0.7:30000"]}}},
        f'{POOL}.urls is ["http://10.0.0.7:30000"]; allowed: false, or {POOL}.urls = []',
    ),
    "FP8": (
        {"engines": {"policy": {"weight_format": "fp8"}}},
        f'{POOL}.weight_format is "fp8"; allowed: false, or {POOL}.weight_format = "as_trained" or "bfloat16"',
    ),
    "in place": (
        {"rollout": {"on_weight_update": "in_place"}},
        'is "in_place"; allowed: false, or rollout.on_weight_update = "drain" or "abort"',
    ),
    "random weights": (
        {"engines": {"policy": {"kind": "sglang"}}, "model": {"random_init": True}},
        "model.random_init is true, with SGLang; allowed: false, or a model with weights",
    ),
    "experts": (
        {"trainer": {"lora": {"targets": ("q_proj", "mlp.experts.down_proj")}}},
        "trainer.lora.targets has mlp.experts.down_proj; allowed: false, or trainer.lora.targets without experts",
    ),
    "experts, with SGLang": (
        {"trainer": {"lora": {"targets": ("mlp.experts.gate_up_proj",)}}, "engines": {"policy": {"kind": "sglang"}}},
        "trainer.lora.targets has mlp.experts.gate_up_proj; allowed: false, or trainer.lora.targets without experts",
    ),
    "replicas": (
        {"engines": {"policy": {"kind": "sglang", "sglang": {"dp_size": 2}}}},
        f"{POOL}.sglang.dp_size is 2; allowed: false, or {POOL}.sglang.dp_size = 1, with more engines",
    ),
    "full training": (
        {"trainer": {"lora": {"rank": 0}}},
        "trainer.lora.rank is 0; allowed: false, or trainer.lora.rank of 1 or more",
    ),
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


ALSO_SERVED: dict[str, dict[str, Any]] = {
    "files over HTTP": {"weight_transport": "http"},
    "copies of files": {"local_copy": True},
    "colocated": {"colocate": "trainer"},
    "update groups": {"update_groups": 2, "num_engines": 2},
    "rounded base": {"weight_format": "bfloat16"},
}


@pytest.mark.parametrize("pool", ALSO_SERVED.values(), ids=ALSO_SERVED.keys())
def test_engines_serve_adapters_with_these_settings_too(pool: dict[str, Any]) -> None:
    assert serves_adapters(
        topology_with(**joined({"trainer": {"lora": {"rank": 4}}}, SERVED, {"engines": {"policy": pool}}))
    )


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
