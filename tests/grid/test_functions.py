"""Every estimator, loss, correction, reduction and KL estimator trains in every kind of layout what one rank trains."""

import json
import math
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from runtime.settings.rules.algorithm import algorithm_problems
from runtime.settings.topology import Topology, encode_topology
from tests.actors.trainer.hf import write_model
from tests.build.topology import trainer_topology
from tests.grid.functions import DISTILLED, PAIRS, algorithm, cases
from tests.grid.running import run_ranks

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = Path(__file__).with_name("functions_program.py")
TIMEOUT_S: Final = 900.0  # 130 s with all else of a CI beside it
MAX_TOKENS: Final = 48  # of a micro-batch on all its ranks
LAYOUTS: Final[dict[str, dict[str, Any]]] = {  # settings of [trainer]
    "one rank, packed": {"packed": True},
    "CP2": {"num_processes": 2, "megatron": {"context_parallel_size": 2}},
    "CP2, packed": {"num_processes": 2, "packed": True, "megatron": {"context_parallel_size": 2}},
    "DP2": {"num_processes": 2},
    "PP2, packed": {"num_processes": 2, "packed": True, "megatron": {"pipeline_model_parallel_size": 2}},
}
NIGHTLY: Final = ("one rank, packed", "CP2", "PP2, packed")  # CI trains all cases packed in CP2, and some in PP2
FURTHER: Final[dict[str, dict[str, Any]]] = {  # layouts in which only `CASES_OF_FURTHER` are trained
    "PP2": {"num_processes": 2, "megatron": {"pipeline_model_parallel_size": 2}},
    "TP2+SP": {"num_processes": 2, "megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    "DP2+DO": {"num_processes": 2, "optimizer": {"use_distributed_optimizer": True}},
}
ONE: Final = "one rank"
FAULT: Final = "sums over a sequence are a rank's own"  # planted in CP2
NEEDS_SEQUENCES: Final = (
    "loss gspo",
    "loss gmpo",
    "loss ppo, sequences, clipped",
    "loss ppo, sequences rejected",
    "loss ppo, OPSM",
    "pairs, DPO",
    "pairs, IPO",
    "pairs, reward model",
)
CASES: Final = cases()
CASES_OF_FURTHER: Final = PAIRS | {DISTILLED: CASES[DISTILLED]}
RELATIVE, ABSOLUTE = 2e-5, 2e-6

pytestmark = [pytest.mark.grid, pytest.mark.timeout(TIMEOUT_S + 60), pytest.mark.xdist_group("grid")]


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The metrics of all cases, by layout that this session asks about: two processes train all of them."""
    place = tmp_path_factory.mktemp("functions")
    write_model(place / "model", initializer_range=0.1)
    items = (
        item for item in request.session.items if isinstance(item, pytest.Function) and item.path == Path(__file__)
    )
    asked = {item.callspec.params["layout"] for item in items if hasattr(item, "callspec")}
    trained = {ONE: {}} | {name: tables for name, tables in LAYOUTS.items() if name in asked}
    jobs = [described(place, name, tables, CASES) for name, tables in trained.items()]
    jobs += [described(place, name, tables, CASES_OF_FURTHER) for name, tables in FURTHER.items()]
    some = {name: CASES[name] for name in NEEDS_SEQUENCES}
    jobs.append(described(place, "fault", LAYOUTS["CP2"], some) | {"fault": FAULT})
    (place / "jobs.json").write_text(json.dumps(jobs))
    run_ranks(PROGRAM, place, timeout_s=TIMEOUT_S)
    return place


def described(place: Path, name: str, trainer: dict[str, Any], some: dict[str, Any]) -> dict[str, Any]:
    topology = topology_of(place, trainer)
    encoded = json.loads(encode_topology(topology))
    return {"name": name, "world": trainer.get("num_processes", 1), "topology": encoded, "cases": some, "fault": None}


def topology_of(place: Path, trainer: dict[str, Any]) -> Topology:
    ranks = trainer.get("megatron", {}).get("context_parallel_size", 1)
    tables: dict[str, Any] = {
        "model": {"random_init": False},
        "algorithm": {"kl": {"type": "k1", "loss_coef": 0.1}},
        "optimizer": {"lr": 0.0},
        "train": {"max_tokens_per_gpu": MAX_TOKENS // ranks, "num_steps": 4},
        "trainer": {"device": "cpu", "log_probs_ahead": True, **trainer},
    }
    return trainer_topology(place / "model", place, **tables)


def metrics(place: Path, layout: str) -> dict[str, dict[str, float]]:
    return json.loads((place / f"{layout}.json").read_text())


def different(found: dict[str, float], expected: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Metrics that differ, with both values."""
    assert found.keys() == expected.keys()
    return {
        name: (found[name], value)
        for name, value in expected.items()
        if not math.isclose(found[name], value, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    }


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in LAYOUTS]
)
def test_a_layout_trains_every_function_like_one_rank(place: Path, layout: str) -> None:
    found, expected = metrics(place, layout), metrics(place, ONE)
    assert found.keys() == expected.keys() == CASES.keys()
    wrong = {name: different(found[name], expected[name]) for name in CASES}
    assert {name: values for name, values in wrong.items() if values} == {}


@pytest.mark.parametrize("layout", FURTHER)
def test_a_further_layout_trains_some_like_one_rank(place: Path, layout: str) -> None:
    found, expected = metrics(place, layout), metrics(place, ONE)
    assert found.keys() == CASES_OF_FURTHER.keys()
    assert {name: wrong for name in CASES_OF_FURTHER if (wrong := different(found[name], expected[name]))} == {}


def test_every_case_is_trained_with_a_gradient_of_its_own(place: Path) -> None:
    found = metrics(place, ONE)
    """Few are the same: k3+ has the gradient of k2, and no token reaches the limit of low_var_kl."""
    norms = {name: values["train/grad_norm"] for name, values in found.items()}
    assert all(math.isfinite(norm) and norm > 0 for norm in norms.values()), norms
    assert len({round(norm, 7) for norm in norms.values()}) > 0.8 * len(norms), norms


def test_a_sum_over_the_sequences_of_one_rank_is_found(place: Path) -> None:
    found, expected = metrics(place, "fault"), metrics(place, ONE)
    assert [name for name in NEEDS_SEQUENCES if not different(found[name], expected[name])] == []


def test_the_start_allows_every_case(tmp_path: Path) -> None:
    topology = topology_of(tmp_path, {})
    found = {
        name: list(algorithm_problems(msgspec.structs.replace(topology, algorithm=algorithm(settings))))
        for name, settings in CASES.items()
    }
    assert {name: problems for name, problems in found.items() if problems} == {}
