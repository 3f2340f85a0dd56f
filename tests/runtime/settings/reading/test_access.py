"""What settings declare, and what is taken of a stranger's file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from runtime.functions.table import FILTER, GRADER, LOSS
from runtime.settings.load import load_topology
from runtime.settings.reading.access import Access, Address, Code, Harmless, Reads, Running, access_of
from runtime.settings.reading.config import Config, TopologyError
from runtime.settings.reading.foreign import harmless_part, is_own
from runtime.settings.reading.schema import (
    choices,
    declared,
    functions_in,
    is_config,
    item_type,
    named_function,
    type_at,
)
from runtime.settings.reading.toml import load_tables
from runtime.settings.tables.values import Count, Name, Positive, Text
from runtime.settings.topology import Topology


class Inner(Config, frozen=True, kw_only=True):
    harmless = True

    size: Positive = 1
    place: Reads[Text | None] = None


class Pool(Config, frozen=True, kw_only=True):
    """It does not declare itself harmless."""

    size: Positive = 1
    choice: Harmless[Literal["a", "b"]] = "a"
    function: Annotated[Text | None, FILTER] = None
    place: Reads[Text | None] = None


class Outer(Config, frozen=True, kw_only=True):
    harmless = True

    forgotten: Text | None = None
    forgotten_switch: bool = False
    forgotten_choice: Literal["a", "b"] = "a"
    name: Harmless[Text | None] = None
    function: Annotated[Text | None, FILTER] = None
    functions: Annotated[dict[Name, Text], GRADER] = {}
    url: Address[Text] = "none"
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()
    called: dict[Name, Inner] = {}
    limit: Running[Positive] = 1
    pool: Pool = Pool()
    pools: dict[Name, Pool] = {}
    listed: tuple[Pool, ...] = ()


def test_every_key_of_the_tables_declares_what_it_gives_access_to() -> None:
    forgotten = [key for key, kind in keys(Topology) if access_of(kind) is None]
    assert not forgotten, "see runtime/settings/reading/access.py"


def test_a_stranger_sets_only_what_is_trained() -> None:
    """A number or a choice of any other table can ask for processes, memory or time."""
    found = {key for key, kind, table in all_keys(Topology) if declared(table, kind) is Access.HARMLESS}
    what = {"model", "rollout", "algorithm", "optimizer", "train", "data", "run"}
    assert {key.partition(".")[0] for key in found} == what
    assert {key for key in found if key.startswith("run.")} == {"run.name", "run.seed", "run.only"}
    assert not found & {"data.timeout_s", "data.max_row_bytes", "train.save_hf"}


def keys(table: type[Config]) -> Iterator[tuple[str, Any]]:
    yield from ((key, kind) for key, kind, _ in all_keys(table))


def all_keys(table: type[Config], place: str = "") -> Iterator[tuple[str, Any, type[Config]]]:
    """Yield each key with its type and its table."""
    for field in msgspec.structs.fields(table):
        inner = item_type(field.type) or field.type
        for chosen in choices(field.type).values():
            yield from all_keys(chosen, f"{place}{field.encode_name}.")
        if choices(field.type):
            continue
        if is_config(inner):
            yield from all_keys(inner, f"{place}{field.encode_name}.")
        else:
            yield f"{place}{field.encode_name}", field.type, table


@pytest.mark.parametrize(
    ("kind", "access"),
    [
        (bool, None),
        (str, None),
        (dict[str, Any], None),
        (Annotated[str, msgspec.Meta(min_length=1)], None),
        (Harmless[bool], Access.HARMLESS),
        (Positive, Access.HARMLESS),
        (Positive | None, Access.HARMLESS),
        (tuple[Count, ...], Access.HARMLESS),
        (dict[Name, Positive], Access.HARMLESS),
        (dict[Name, str], None),
        (Positive | str, None),
        (Positive | Address[str], None),
        (Code[Positive], Access.CODE),
        (Reads[dict[Name, Text]], Access.READ),
    ],
)
def test_a_type_declares_what_all_of_its_parts_declare(kind: Any, access: Access | None) -> None:
    assert access_of(kind) is access


@pytest.mark.parametrize(
    ("given", "taken", "asked"),
    [
        ({"forgotten": "x"}, {}, {"forgotten": None}),
        ({"forgotten_switch": True}, {}, {"forgotten_switch": None}),
        ({"forgotten_choice": "b"}, {}, {"forgotten_choice": None}),
        ({"forgotten_switch": False}, {"forgotten_switch": False}, {}),  # its default
        ({"no_such_key": 1}, {}, {"no_such_key": None}),
        ({"name": "x", "inner": {"size": 2}}, {"name": "x", "inner": {"size": 2}}, {}),
        ({"function": "nonzero_std"}, {"function": "nonzero_std"}, {}),
        ({"function": "m:f"}, {}, {"function": Access.FUNCTION}),
        ({"function": 5}, {}, {"function": Access.FUNCTION}),
        ({"functions": {"a": "m:f", "b": "b"}}, {"functions": {"b": "b"}}, {"functions.a": Access.FUNCTION}),
        ({"url": "none"}, {"url": "none"}, {}),
        ({"url": "http://x"}, {}, {"url": Access.ADDRESS}),
        ({"inner": {"place": "/x", "size": 2}}, {"inner": {"size": 2}}, {"inner.place": Access.READ}),
        ({"many": [{"size": 2}, {"place": "/x"}]}, {"many": [{"size": 2}, {}]}, {"many.1.place": Access.READ}),
        ({"called": {"n": {"place": "/x"}}}, {"called": {"n": {}}}, {"called.n.place": Access.READ}),
        ({"limit": 2}, {}, {"limit": Access.RUNNING}),
        ({"pool": {"size": 9, "choice": "a"}}, {"pool": {"choice": "a"}}, {"pool.size": Access.RUNNING}),
        ({"pool": {"choice": "b"}}, {"pool": {}}, {"pool.choice": Access.RUNNING}),
        ({"pool": {"function": "built_in"}}, {"pool": {}}, {"pool.function": Access.FUNCTION}),
        ({"pools": {"n": {"place": "/x"}}}, {}, {"pools.n.place": Access.READ}),
        ({"pools": {"n": {}, "m": {"size": 1}}}, {}, {"pools.n": Access.RUNNING, "pools.m": Access.RUNNING}),
        ({"listed": [{"size": 9}, {}]}, {}, {"listed.0.size": Access.RUNNING, "listed.1": Access.RUNNING}),
        ({"pools": {}, "listed": []}, {"pools": {}, "listed": []}, {}),  # the defaults
        ({"inner": "text", "many": 3, "called": [1]}, {"inner": "text", "many": 3, "called": [1]}, {}),  # refused later
    ],
)  # fmt: skip
def test_only_harmless_keys_of_a_stranger_are_taken(given: dict[str, Any], taken: Any, asked: Any) -> None:
    found, more = harmless_part(given, Outer)
    assert (found, {each.key: each.access for each in more}) == (taken, asked)


def test_what_a_table_names_is_found_by_its_declaration() -> None:
    table = Outer(function="m:f", functions={"a": "m:g"}, called={"n": Inner(place="/x")})
    assert list(functions_in(table)) == [("function", "m:f", FILTER), ("functions.a", "m:g", GRADER)]
    assert named_function(table, GRADER) == ("functions.a", "m:g")
    assert named_function(table, LOSS) is None


def test_a_stranger_includes_no_file_and_an_override_needs_no_consent(tmp_path: Path) -> None:
    secret = tmp_path / "secret.toml"
    secret.write_text('[run]\nname = "secret"\n')
    file = tmp_path / "topology.json"
    file.write_text(json.dumps({"include": str(secret), "model": {"hf_checkpoint": "/x", "trust_remote_code": True}}))
    loaded = load_tables(file, ["model.hf_checkpoint=mine"], Topology, foreign=True)
    assert loaded.tables == {"model": {"hf_checkpoint": "mine"}}
    assert [each.key for each in loaded.left_out] == ["include", "model.trust_remote_code"]
    assert load_tables(file, (), Topology).tables["run"]["name"] == "secret"
    file.write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(TopologyError, match="nested too deeply"):
        load_topology(file, foreign=True)


def test_a_directory_is_own_below_the_runs_if_nobody_else_can_write_it(tmp_path: Path) -> None:
    runs, other = tmp_path / "runs", tmp_path / "other"
    for place in (runs / "a", other):
        place.mkdir(parents=True, mode=0o700)
        (place / "topology.json").write_text("{}")
    assert is_own(runs / "a", runs, ["topology.json", "bus.url"])
    assert not is_own(other, runs, ["topology.json"])
    assert not is_own(runs / "missing", runs, ["topology.json"])
    (runs / "link").symlink_to(other)
    assert not is_own(runs / "link", runs, ["topology.json"])
    (runs / "a" / "bus.url").write_text("nats://127.0.0.1:1")
    (runs / "a" / "bus.url").chmod(0o646)
    assert not is_own(runs / "a", runs, ["topology.json", "bus.url"])
    assert is_own(runs / "a", runs, ["topology.json"])
    (runs / "a").chmod(0o777)
    assert not is_own(runs / "a", runs, ["topology.json"])


def test_a_declaration_changes_nothing_of_how_a_key_is_set() -> None:
    assert type_at(Topology, ["model", "random_init"]) is bool
    assert type_at(Topology, ["engines", "policy", "sglang", "any"]) is Any
