"""docs/reference/settings.md has a row for every key of the schema, and every setting has a description."""

import re
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from bin import describe_settings
from runtime.node.checks.check import not_built
from runtime.settings.reading.config import Config
from runtime.settings.reading.schema import is_config, keys_of, type_at
from runtime.settings.reference.page import Table, expert_settings, meanings, tables_of
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.tables.rollout import RolloutConfig
from runtime.settings.tables.run import NodeConfig, RunConfig
from runtime.settings.tables.trainer import TrainerConfig
from runtime.settings.tables.training import ModelConfig, TrainConfig
from runtime.settings.topology import Topology

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \| (.+?) \| (.+?) \| (.*?) \|$", PAGE, re.MULTILINE)
TABLES = list(tables_of(Table(config=Topology, place="", heading="")))


class Inner(Config, frozen=True, kw_only=True):
    """What is inherited."""

    first: int  # of all


class Sample(Inner, frozen=True, kw_only=True):
    """A table to read."""

    name: str = "#"  # what it is called; "#" by itself
    size: Annotated[  # it stands where the field ends
        int, msgspec.Meta(ge=1)
    ] = 3  # of it
    bare: bool = False
    # A block of comment lines
    # above the field.
    above: int = 1
    # The block counts.
    both: int = 1  # not this
    # An expert setting.
    rare: int = 1  # expert
    # Not a description.

    apart: bool = False


def test_the_page_has_a_row_for_every_key_and_no_other() -> None:
    tables = {place for table in TABLES for place in (table.place, table.place.rpartition(".")[0])}
    assert {key for key, *_ in ROWS} == set(keys_of(Topology)) - tables
    assert len(ROWS) > 130


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.place or "the whole")
def test_every_setting_has_a_description(table: Table) -> None:
    plain = [f.name for f in msgspec.structs.fields(table.config) if not _holds_a_table(table, f.encode_name)]
    assert [name for name in plain if not meanings(table.config)[name]] == []
    assert table.config.__doc__


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.place or "the whole")
def test_every_description_is_whole_sentences(table: Table) -> None:
    """They begin with a capital letter or a backtick and end with a full stop."""
    given = {name: text for name, text in meanings(table.config).items() if text}
    assert {name: text for name, text in given.items() if not re.fullmatch(r"[A-Z`].*\.", text)} == {}
    assert [name for name, text in given.items() if "  " in text] == []


def _holds_a_table(table: Table, name: str) -> bool:
    key = f"{table.place}.{name}".lstrip(".").split(".")
    return is_config(type_at(Topology, key)) or any(other.place.startswith(".".join(key) + ".") for other in TABLES)


def test_a_description_is_the_comment_block_above_its_field_or_at_its_end() -> None:
    assert meanings(Sample) == {
        "first": "of all",
        "name": 'what it is called; "#" by itself',
        "size": "of it",
        "bare": "",
        "above": "A block of comment lines above the field.",
        "both": "The block counts.",
        "rare": "An expert setting.",
        "apart": "",
    }
    assert expert_settings(Sample) == {"rare"}


def test_expert_settings_are_listed_apart() -> None:
    sections = re.findall(r"^### Expert settings$(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^\| `([^`]+)` \|", "".join(sections), re.MULTILINE) == [
        *("data.0.max_row_bytes", "bus.work_bytes", "bus.max_payload_bytes", "trainer.export_bucket_bytes"),
        "trainer.lora.dropout",
        *("trainer.megatron.deallocate_pipeline_outputs", "trainer.ddp.pad_buckets_for_high_nccl_busbw"),
        "trainer.critic.megatron.deallocate_pipeline_outputs",
        *("reward.max_files", "reward.max_processes", "buffer.trim_min_events"),
    ]


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("rollout.top_p", ("float > 0 and <= 1", "`1.0`")),
        ("rollout.max_response_len", ("int >= 1", "required")),
        ("engines.<name>.urls", ("a list, each a string matching ^https?://", "`[]`")),
        (
            "bus.url",
            (r"a string matching ^(nats\|tls\|ws\|wss)://[^@,]*(,(nats\|tls\|ws\|wss)://[^@,]*)*$, or unset", "none"),
        ),
        ("trainer.megatron.sequence_parallel", ("true or false", "`false`")),
    ],
)
def test_a_row_says_what_is_allowed_and_the_default(key: str, cells: tuple[str, str]) -> None:
    assert [row[1:3] for row in ROWS if row[0] == key] == [cells]


def test_a_key_that_a_start_refuses_for_what_is_not_built_says_so() -> None:
    asked = Topology(
        run=RunConfig(name="r"),
        model=ModelConfig(hf_checkpoint="m"),
        data=(),
        rollout=RolloutConfig(rollout_batch_size=1, max_response_len=1),
        train=TrainConfig(),
        nodes={"n0": NodeConfig(gpus=2), "n1": NodeConfig(gpus=2)},
        trainer=TrainerConfig(full_export_interval=2),
        engines={"<name>": EngineConfig(gpus="n0:1,n1:1", num_gpus_per_engine=2, local_copy=True)},
    )
    refused = {problem.key for problem in not_built(asked)}
    assert refused == {"engines.<name>.local_copy", "trainer.full_export_interval"}
    assert [key for key, *_, meaning in ROWS if key in refused and "Not implemented yet" not in meaning] == []


def test_a_change_of_the_schema_makes_the_page_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe_settings.main(["--docs", str(tmp_path)]) == 0
    assert (tmp_path / "settings.md").read_text(encoding="utf-8") == PAGE
    (tmp_path / "settings.md").write_text(PAGE.replace("`rollout.top_p` | float", "`rollout.top_p` | int"))
    assert describe_settings.main(["--docs", str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().err == f"{tmp_path}/settings.md: not current: run bin/describe-settings\n"
