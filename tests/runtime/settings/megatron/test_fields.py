"""Every setting of Megatron-core's is a key here, or says why it is none."""

from typing import get_args

import pytest

from runtime.settings.megatron.fields import Table, answers, megatron_fields, why_no_key
from runtime.settings.reading.schema import type_at
from runtime.settings.tables.trainer import DdpConfig, MegatronConfig, MegatronOptimizerConfig
from runtime.settings.topology import Topology

KEYS = {"megatron": MegatronConfig, "optimizer": MegatronOptimizerConfig, "ddp": DdpConfig}


def test_every_key_is_a_field_and_every_other_field_has_a_reason() -> None:
    for table in get_args(Table):
        fields, keys = getattr(megatron_fields(), table), set(KEYS[table].__struct_fields__)
        assert keys <= set(fields)
        assert {name for name in fields if why_no_key(table, name) is None} == keys


def test_no_reason_is_of_a_field_that_is_not_there() -> None:
    for table, reasons in answers().items():
        fields = getattr(megatron_fields(), table)
        for reason in reasons:
            assert set(reason.names) <= set(fields)
            assert all(any(name.startswith(prefix) for name in fields) for prefix in reason.prefixes)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (
            "trainer.megatron.hidden_size",
            "Megatron-core's hidden_size has no key here: read from the model's config.json",
        ),
        ("trainer.megatron.fp8", "TransformerEngine"),
        ("trainer.megatron.attention_backend", "attention, loss and logits are the trainer's own"),
        ("trainer.megatron.tp_comm_overlap", "TransformerEngine"),
        ("trainer.megatron.moe_router_topk", "read from the model's config.json"),
        ("trainer.megatron.moe_grouped_gemm", "experts are computed one after the other"),
        ("trainer.optimizer.optimizer_offload_fraction", "moves the optimizer's whole state"),
        ("trainer.ddp.check_for_nan_in_grad", "train.on_nonfinite says it"),
    ],
)
def test_a_field_that_is_no_key_is_refused_with_its_reason(key: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        type_at(Topology, key.split("."))


def test_a_name_that_megatron_does_not_have_gets_no_reason_of_its() -> None:
    with pytest.raises(ValueError, match="unknown key, did you mean bucket_size"):
        type_at(Topology, ["trainer", "ddp", "bucket_sise"])
