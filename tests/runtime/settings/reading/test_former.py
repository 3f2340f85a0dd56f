"""Keys of [algorithm] before they were tables with a `type`: hints, the changelog, run directories and dumps."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.observer.page import observed_of
from runtime.node.claims.rundir import FORMAT, FORMAT_FILE, TOPOLOGY_FILE, changes_since
from runtime.node.reopen import FoundRun
from runtime.settings.load import load_topology, without_rules
from runtime.settings.reading.config import TopologyError
from runtime.settings.reading.former import FORMER, former_keys
from runtime.settings.reading.schema import chosen_keys, type_at, unknown_key
from runtime.settings.reading.toml import load_tables
from runtime.settings.tables.algorithm import AlgorithmConfig, ClipTis, RatioRs
from runtime.settings.tables.estimators import Gae
from runtime.settings.tables.losses import DpoLoss, GspoLoss, IpoLoss
from runtime.settings.topology import Topology, decode_topology, encode_topology
from tests.runtime.settings.shipped import LAPTOP

ROOT = Path(__file__).parents[4]
STORED: dict[str, Any] = json.loads((Path(__file__).parent / "former.json").read_text())  # what the last version wrote
SHIPPED: dict[str, dict[str, Any]] = STORED["shipped"]


def old_json(topology: Topology, **algorithm: Any) -> bytes:
    """The topology.json that the last version would have written."""
    tables = msgspec.json.decode(encode_topology(topology))
    return msgspec.json.encode(tables | {"algorithm": STORED["defaults"] | algorithm})


def read(**algorithm: Any) -> AlgorithmConfig:
    """The table that is made of these former keys."""
    return decode_topology(old_json(load_topology(LAPTOP).topology, **algorithm)).algorithm


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_trains_what_it_trained(name: str) -> None:
    topology = load_topology(ROOT / "topologies" / f"{name}.toml").topology
    assert decode_topology(old_json(topology, **SHIPPED[name])) == topology


def test_the_former_defaults_are_todays() -> None:
    assert read() == AlgorithmConfig()


@pytest.mark.parametrize(
    ("former", "table", "expected"),
    [
        ({"advantage_estimator": "gspo", "eps_clip": 3e-4}, "loss", GspoLoss(eps_clip=3e-4)),
        ({"loss_type": "dpo_loss", "dpo_beta": 0.3}, "loss", DpoLoss(beta=0.3)),
        ({"loss_type": "dpo_loss", "preference_loss": "ipo"}, "loss", IpoLoss()),
        ({"use_tis": True, "tis_clip": 3.0, "tis_clip_low": 0.5}, "tis", ClipTis(upper_bound=3.0, lower_bound=0.5)),
        ({"tis_clip": 3.0}, "tis", None),
        ({"use_rs": True, "tis_clip": 3.0}, "rs", RatioRs(upper_bound=3.0)),
        (
            {"advantage_estimator": "ppo", "lambd": 0.9, "gae_lambda_value": 1.0},
            "estimator",
            Gae(lambd=0.9, critic_lambd=1.0),
        ),
        ({"use_opsm": True}, "opsm_delta", 1e-4),
        ({"opsm_delta": 0.5}, "opsm_delta", None),
    ],
)
def test_a_former_table_is_the_same_algorithm(former: dict[str, Any], table: str, expected: object) -> None:
    assert getattr(read(**former), table) == expected


def test_every_former_key_is_another_key_now_and_is_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for name, place in FORMER.items():
        assert type_at(Topology, ["algorithm", *place.split(".")]) is not None
        assert f"  | `{name}` | `{place}`" in changelog
    assert set(STORED["defaults"]) - set(FORMER) <= set(AlgorithmConfig.__struct_fields__)


def test_a_former_key_is_refused_with_what_to_write() -> None:
    for key, said in former_keys():
        assert unknown_key(key, (), Topology) == f"unknown key, {said}"
    with pytest.raises(TopologyError) as caught:
        load_topology(LAPTOP, ["algorithm.eps_clip=0.1"])
    (problem,) = caught.value.problems
    assert str(problem).startswith("--set: algorithm.eps_clip=0.1: unknown key, it is algorithm.loss.eps_clip now")


def test_a_run_of_the_last_version_is_resumed_watched_and_replayed(tmp_path: Path) -> None:
    topology = load_topology(LAPTOP).topology
    (tmp_path / TOPOLOGY_FILE).write_bytes(old_json(topology, **SHIPPED["laptop"]))
    (tmp_path / FORMAT_FILE).write_text(f"{FORMAT}\n")
    assert changes_since(tmp_path, topology) == []
    _, settings = observed_of(FoundRun(name="laptop", directory=tmp_path))
    assert settings["algorithm.loss.type"] == '"ppo"'
    assert settings["algorithm.loss.eps_clip_high"] == "0.28"
    assert "algorithm.eps_clip_high" not in settings
    replayed = load_topology(tmp_path / TOPOLOGY_FILE, ("algorithm.loss.eps_clip=0.1",)).topology
    assert replayed.algorithm == msgspec.structs.replace(
        topology.algorithm, loss=msgspec.structs.replace(topology.algorithm.loss, eps_clip=0.1)
    )


def test_a_strangers_dump_of_the_last_version_gives_its_harmless_keys(tmp_path: Path) -> None:
    stored = old_json(load_topology(LAPTOP).topology, custom_loss="/evil.py:loss", eps_clip_high=0.3, kl_loss_coef=0.1)
    (tmp_path / TOPOLOGY_FILE).write_bytes(stored)
    loaded = load_tables(tmp_path / TOPOLOGY_FILE, (), Topology, foreign=True)
    algorithm = without_rules(loaded).topology.algorithm
    assert algorithm.kl.loss_coef == 0.1
    assert algorithm.loss.type == "ppo"
    assert "algorithm.loss.function" in [each.key for each in loaded.left_out]


def test_todays_topology_is_read_as_it_is() -> None:
    topology = load_topology(
        LAPTOP, ("algorithm.loss.type=gspo", "algorithm.rs.type=ratio", "algorithm.bypass_mode=true")
    ).topology
    assert decode_topology(encode_topology(topology)) == topology
    assert set(chosen_keys(Topology)) >= {"algorithm.loss", "algorithm.opd.distillation"}
