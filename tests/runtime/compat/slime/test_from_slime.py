"""The table of slime's flags is whole, names only keys that exist, and docs/reference/from-slime.md is made of it."""

import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from bin import describe_settings
from runtime.compat.slime.flags import OWN, Flag, FlagAnswer, Rule, find_by_rule, find_flag, find_variable, from_slime
from runtime.settings.reading.schema import choices, keys_of, type_at
from runtime.settings.topology import Topology

DOCS = Path(__file__).resolve().parents[4] / "docs" / "reference"
PAGE = (DOCS / "from-slime.md").read_text(encoding="utf-8")
NUM_FLAGS = 223  # which slime/utils/arguments.py adds or gives another default, at commit 624b824a8 of 2026-08-21
FLAGS = list(from_slime().flags())
ANSWERS: list[FlagAnswer] = [*FLAGS, *from_slime().rules]
KEYS = sorted(
    {answer.key for answer in ANSWERS if answer.key is not None}
    | {ours.key for section in from_slime().sections for ours in section.ours}
    | {
        key
        for key in re.findall(r"`([a-z_]+(?:\.[a-z0-9_]+)+)`", PAGE)
        if key.partition(".")[0] in Topology.__struct_fields__
    }
)
OTHER_MEANINGS = {"load"}  # of a flag and of a key: slime's checkpoint, our dump


def test_every_flag_of_slimes_own_is_listed_once() -> None:
    assert sum(flag.origin == OWN for flag in FLAGS) == NUM_FLAGS
    names = Counter(name for flag in FLAGS for name in (flag.flag, *flag.also))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("key", KEYS)
def test_every_key_that_is_named_exists(key: str) -> None:
    type_at(Topology, key.split("."))


@pytest.mark.parametrize(
    "answer", ANSWERS, ids=lambda answer: answer.flag if isinstance(answer, Flag) else answer.whose
)
def test_every_flag_has_a_key_or_an_answer(answer: FlagAnswer) -> None:
    assert answer.remark or answer.state == "key", "a no and a not yet have a reason"
    assert answer.note is None or answer.state == "key"
    assert "|" not in answer.remark, "it is a cell of a table"
    assert not answer.remark.endswith(".")


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.state != "key"], ids=lambda flag: flag.flag)
def test_a_flag_without_a_key_has_none_by_its_own_name(flag: Flag) -> None:
    name = flag.flag.replace("-", "_")
    below = {f"rollout.{name.removeprefix('rollout_')}", f"eval.0.{name.removeprefix('eval_')}"}
    same = [key for key in keys_of(Topology) if key in below or key.rpartition(".")[2] == name]
    assert same == [] or flag.flag in OTHER_MEANINGS, "the flag has a key by now: say so in flags.toml"


@pytest.mark.parametrize("rule", [rule for rule in from_slime().rules if rule.into], ids=lambda rule: rule.key)
def test_flags_that_go_into_a_table_have_a_key_there(rule: Rule) -> None:
    for name in rule.names or (f"{rule.prefixes[0]}any-name",):
        key = rule.answer_for(name).key
        assert key is not None
        type_at(Topology, key.split("."))


def test_all_keys_of_megatrons_layout_are_flags_of_megatron() -> None:
    keys = {rule.answer_for(name).key or "" for rule in from_slime().rules for name in rule.names}
    keys |= {flag.key or "" for flag in FLAGS}
    named = {key.removeprefix("trainer.megatron.") for key in keys if key.startswith("trainer.megatron.")}
    without_a_flag = {"deallocate_pipeline_outputs"}  # Megatron-LM always does it
    assert named == set(type_at(Topology, ["trainer", "megatron"]).__struct_fields__) - without_a_flag


def test_every_recipe_key_with_a_name_of_slime_is_in_the_table() -> None:
    by_rule = {key for rule in from_slime().rules for name in rule.names if (key := rule.answer_for(name).key)}
    ours_alone = {"max_attempts", "max_barren_groups", "custom_sampling", "nodes"}  # of rollout
    for table in ("rollout", "algorithm", "optimizer"):
        for name in keys_of(type_at(Topology, [table])):
            if choices(type_at(Topology, [table, *name.split(".")])) or name.endswith((".function", ".mode")):
                continue  # its `type` has a row; what a function of slime is told
            if f"{table}.{name}".startswith("rollout.agent"):
                continue  # agents of slime are functions
            assert f"{table}.{name}" in {*KEYS, *by_rule, *(f"rollout.{key}" for key in ours_alone)}


def test_a_flag_of_a_family_is_answered_by_its_longest_rule() -> None:
    def key(name: str) -> str | None:
        found = find_by_rule(name)
        assert found is not None
        return found.answer.key

    assert key("--sglang-mem-fraction-static") == "engines.policy.sglang.mem_fraction_static"
    assert key("--sglang-router-policy") is None
    assert key("--sglang-port") is None
    assert key("tensor_model_parallel_size") == "trainer.megatron.tensor_model_parallel_size"
    assert key("--moe-router-topk") is None
    assert find_by_rule("--rollout-batch-size") is None
    assert find_by_rule("sglang-") is None


def test_names_that_slimes_code_uses_lead_to_the_flag() -> None:
    found = find_flag("rewards_normalization")
    assert found is not None
    assert found.flag == "disable-rewards-normalization"
    assert find_flag("rollout.batch") is None


@pytest.mark.parametrize("text", ['flag = "a"', 'flag = "a"\nkey = "b"\nno = "c"', 'flag = "a"\nnote = "b"'])
def test_a_flag_with_two_answers_or_none_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="exactly one of key, no and not_yet"):
        msgspec.toml.decode(f'absent = "same"\n{text}', type=Flag)


def test_a_row_that_does_not_say_what_its_absence_means_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="missing required field `absent`"):
        msgspec.toml.decode('flag = "a"\nkey = "b"', type=Flag)
    with pytest.raises(msgspec.ValidationError, match="missing required field `absent`"):
        msgspec.toml.decode('whose = "a"\nnames = ["c"]\nkey = "b"', type=Rule)


@pytest.mark.parametrize("row", [row for row in ANSWERS if row.state == "not yet"], ids=lambda row: row.remark[:40])
def test_what_is_not_implemented_says_whether_something_is_lost(row: FlagAnswer) -> None:
    assert row.loses is not None


@pytest.mark.parametrize("row", [*FLAGS, *from_slime().rules], ids=lambda row: getattr(row, "flag", row.remark[:40]))
def test_keys_for_an_absent_flag_exist_and_take_their_value(row: Flag | Rule) -> None:
    for key, value in row.absent.items() if isinstance(row.absent, dict) else ():
        expected = type_at(Topology, key.split("."))
        assert msgspec.convert(value, expected) == value


def test_a_family_of_flags_has_no_keys_for_an_absent_one() -> None:
    text = 'whose = "a"\nnames = ["c", "d"]\nkey = "b"\nabsent = { "rollout.on_halt" = "drop" }'
    with pytest.raises(msgspec.ValidationError, match="a rule of one name"):
        msgspec.toml.decode(text, type=Rule)


@pytest.mark.parametrize(
    ("name", "value", "is_lost"),
    [
        ("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1", True),
        ("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "0", False),
        ("ENABLE_FP8_TRAINING", "true", True),
        ("my_int4_qat", "1", True),
        ("USE_LORA", "1", True),
        ("USE_LORA", "False", False),
        ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", False),  # of FP8 that a flag turns on
        ("NCCL_NVLS_ENABLE", "1", False),
        ("PYTHONPATH", "/x", False),
    ],
)
def test_variables_that_quantize_are_lost(name: str, value: str, is_lost: bool) -> None:
    found = find_variable(name)
    assert (found is not None and found.is_lost([value])) == is_lost


def test_the_committed_page_is_current() -> None:
    assert describe_settings.main(["--check"]) == 0


def test_a_stale_page_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe_settings.main(["--docs", str(tmp_path)]) == 0
    assert describe_settings.main(["--docs", str(tmp_path), "--check"]) == 0
    (tmp_path / "from-slime.md").write_text("old")
    assert describe_settings.main(["--docs", str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().err == f"{tmp_path}/from-slime.md: not current: run bin/describe-settings\n"


def test_every_flag_is_on_the_page() -> None:
    assert [flag.flag for flag in FLAGS if f"`{flag.flag}`" not in PAGE] == []
