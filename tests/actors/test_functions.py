"""Graders and filters that cannot be used are found before anything is started."""

from pathlib import Path
from typing import Any

import pytest

from actors.preflight import check_functions
from runtime.node.checks.context import CheckContext
from runtime.settings.load import load_topology
from tests.build.topology import topology_with
from tests.support.checks import function_problems

GOOD = "def good(sample):\n    return 1.0\n\ndef wrong(a, b):\n    return 1.0\n\nvalue = 3\n"


def problems(**tables: object) -> list[str]:
    return [str(problem) for problem in function_problems(topology_with(**tables))]


def data_with(rm_type: str) -> list[dict[str, str]]:
    return [{"name": "d", "path": "none", "rm_type": rm_type}]


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def test_built_in_names_and_usable_functions_are_no_problem(user_file: Path) -> None:
    assert problems() == []
    assert problems(data=data_with(f"{user_file}:good"), rollout={"dynamic_filter": "nonzero_std"}) == []


@pytest.mark.parametrize(
    ("function", "said"),
    [("wrong", "takes (a, b) but is called with (sample)"), ("missing", "missing"), ("value", "cannot be called")],
)
def test_a_reward_function_that_cannot_be_called_is_named_with_its_key(
    user_file: Path, function: str, said: str
) -> None:
    (problem,) = problems(data=data_with(f"{user_file}:{function}"))
    assert problem.startswith(f'data.0.rm_type = "{user_file}:{function}"')
    assert said in problem


def test_an_external_grader_is_no_function_of_ours_and_no_built_in() -> None:
    assert problems(data=data_with("judge"), reward={"external": ["judge"]}) == []
    (problem,) = problems(data=data_with("judge"), reward={"external": ["judge", "boxed_f1"]})
    assert problem == 'reward.external = "boxed_f1": boxed_f1 is a built-in grader: use another name'


def test_a_data_source_is_called_with_a_number(user_file: Path) -> None:
    def of(function: str) -> list[str]:
        return problems(data=[{"name": "d", "source": f"{user_file}:{function}", "rm_type": "f1"}])

    assert of("good") == []
    (problem,) = of("wrong")
    assert problem.startswith(f'data.0.source = "{user_file}:wrong": takes (a, b) but is called with (number)')


def test_a_plug_in_file_that_does_not_exist_is_named() -> None:
    (problem,) = problems(data=data_with("nowhere/mine.py:good"))
    assert "nowhere/mine.py" in problem


def test_a_problem_names_who_wrote_the_key_and_where_a_file_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = tmp_path / "beside", tmp_path / "here"
    for place in (beside, here):
        place.mkdir()
    monkeypatch.chdir(here)
    file = beside / "mine.toml"
    recipe = Path(__file__).parents[2] / "topologies" / "laptop.toml"
    file.write_text(f'include = "{recipe}"\nrollout.buffer_filter = "nowhere.py:f"\n')
    loaded = load_topology(file, ["rollout.dynamic_filter=nonzero_st"])
    context = CheckContext(loaded)
    context.run(check_functions)
    by_filter, by_buffer = map(str, context.problems)
    assert by_filter.startswith('--set: rollout.dynamic_filter = "nonzero_st": ')
    assert "allowed: none, nonzero_std" in by_filter
    assert by_filter.endswith('or "module:function" or "path/file.py:function"')
    looked = f"no such file; looked for {beside / 'nowhere.py'}, {here / 'nowhere.py'}"
    assert by_buffer == f'{file}: rollout.buffer_filter = "nowhere.py:f": {looked}'


@pytest.mark.parametrize(("key", "called"), [("over_sampling_filter", "(groups)"), ("buffer_filter", "(groups, n)")])
def test_a_selection_is_found_and_called_with_what_it_will_be(user_file: Path, key: str, called: str) -> None:
    fits = {"over_sampling_filter": "good", "buffer_filter": "wrong"}[key]
    assert problems(rollout={key: f"{user_file}:{fits}"}) == []
    (problem,) = problems(rollout={key: f"{user_file}:{'wrong' if fits == 'good' else 'good'}"})
    assert problem.startswith(f"rollout.{key} = ")
    assert called in problem
    (problem,) = problems(rollout={key: "sort_by_reward_sd"})
    assert problem.startswith(f'rollout.{key} = "sort_by_reward_sd": no {key}')


def test_an_unknown_built_in_is_named_with_its_neighbour() -> None:
    (problem,) = problems(rollout={"dynamic_filter": "nonzero_st"})
    assert problem.startswith('rollout.dynamic_filter = "nonzero_st"')
    assert "nonzero_std" in problem


def test_names_for_rows_are_checked_like_other_graders(user_file: Path) -> None:
    own = {"mine": f"{user_file}:good", "bad": f"{user_file}:wrong", "f1": f"{user_file}:good"}
    bad, taken = problems(reward={"graders": own}, data=data_with("mine"))
    assert bad.startswith(f'reward.graders.bad = "{user_file}:wrong": takes (a, b) but is called with (sample)')
    assert taken == f'reward.graders.f1 = "{user_file}:good": f1 is a built-in grader: use another name'


def test_limits_of_an_unknown_grader_are_refused(user_file: Path) -> None:
    limits = {name: {"timeout_s": 3} for name in ("mine", "boxed_f1", "other")}
    (problem,) = problems(reward={"graders": {"mine": f"{user_file}:good"}, "limits": limits})
    assert problem.startswith('reward.limits = "other": no such grader; allowed: names in reward.graders, and built-in')


@pytest.mark.parametrize(
    ("name", "weights", "problem"),
    [
        ("total", {}, 'reward.sums.total = "total": has no parts'),
        ("total", {"f1": float("inf")}, 'reward.sums.total.f1 = "inf": a weight must be a finite number'),
        ("total", {"ff1": 1.0}, 'reward.sums.total.ff1 = "ff1": no such grader; allowed: built-in graders, and names'),
        ("total", {"total": 1.0}, 'reward.sums.total.total = "total": no such grader'),
        ("total", {"j": 1.0}, 'reward.sums.total.j = "j": this judge scores no samples: set reward.judges.j.template'),
        ("total", {"remote_rm": 1.0}, 'reward.sums.total.remote_rm = "remote_rm": needs reward.rm_url'),
        ("f1", {"numeric": 1.0}, 'reward.sums.f1 = "f1": f1 is a built-in grader: use another name'),
        ("mine", {"f1": 1.0}, 'reward.sums.mine = "mine": reward.graders has a grader of this name too'),
        ("j", {"f1": 1.0}, 'reward.sums.j = "j": reward.judges has a grader of this name too'),
    ],
)
def test_sums_are_refused(user_file: Path, name: str, weights: dict[str, float], problem: str) -> None:
    reward: dict[str, Any] = {"graders": {"mine": f"{user_file}:good"}, "judges": {"j": {"url": "http://h/v1"}}}
    assert problems(reward={**reward, "sums": {"total": {"f1": 0.5, "boxed_f1": 0, "mine": 1}}}) == []
    (found,) = problems(reward={**reward, "sums": {name: weights}})
    assert found.startswith(problem)


def test_a_machine_that_cannot_isolate_graders_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(reward={"sandbox": "process"}) == []
    monkeypatch.setattr("runtime.functions.isolation.refusal", lambda: "unshare: Operation not permitted")
    (problem,) = problems(reward={"sandbox": "isolated"})
    assert problem.startswith(
        'reward.sandbox = "isolated": this machine cannot isolate graders: unshare: Operation not permitted'
    )


@pytest.mark.parametrize("key", ["dynamic_filter", "buffer_filter"])
def test_a_filter_is_imported_with_the_environment_of_a_run(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "k")
    file = tmp_path / "mine.py"
    file.write_text('import os\nMINE = os.environ["MY_KEY"]\ndef f(groups, n=None): return True\n')
    rollout = {key: f"{file}:f"}
    assert problems(rollout=rollout, reward={"env": ["MY_KEY"]}) == []
    (problem,) = problems(rollout=rollout)
    assert problem == f"rollout.{key} = \"{file}:f\": importing it failed: KeyError: 'MY_KEY' ({file}, line 2)"
