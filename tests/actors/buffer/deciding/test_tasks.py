"""What a recipe's settings become in tasks."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from actors.buffer.deciding.decide import EvalPlan
from actors.buffer.deciding.tasks import PrefixHolders, eval_tasks, rollout_task, schedule_of, tasks_in_flight
from actors.buffer.prompts.source import LoadedData, PromptSet
from messages import (
    GroupAborted,
    Int32Array,
    Prompt,
    RolloutRequested,
    SampleStatus,
    SampleSummary,
    SamplingParams,
    SegmentRef,
)
from runtime.ledger.fold import EvalItem, Evaluation, Group, LedgerState, Stage
from runtime.ledger.state import Spilled
from runtime.settings.load import load_topology
from runtime.settings.topology import Topology

TOPOLOGIES = Path(__file__).resolve().parents[4] / "topologies"
ENDED = EvalItem(rewards=(1.0,), num_truncated=0)


def laptop(*overrides: str) -> Topology:
    return load_topology(TOPOLOGIES / "laptop.toml", overrides).topology


def prompts(size: int = 5, length: int = 3) -> PromptSet:
    items = tuple(
        Prompt(data="d", row=row, text=str(row), prompt_ids=Int32Array(range(length)), rm_type="x")
        for row in range(size)
    )
    return PromptSet([LoadedData(name="d", prompts=items, num_too_long=0, took_s=0.0)])


def group(**fields: Any) -> Group:
    defaults = {"group_id": 7, "attempt": 2, "prompt": 8, "round": 4, "min_version": 3, "payload_seq": 1}
    return Group(**{**defaults, "stage": Stage.IN_FLIGHT, **fields})


def test_a_task_asks_for_all_samples_of_its_prompt() -> None:
    task = rollout_task(laptop("rollout.n_samples_per_prompt=6"), group(), prompts(), LedgerState())
    assert (task.group_id, task.attempt, task.round, task.min_version, task.num_samples) == (7, 2, 4, 3, 6)
    assert task.prompt.row == 3  # prompt 8 of an epoch of 5


def test_a_group_is_asked_for_what_the_log_says_of_it_whatever_the_recipe_says_now() -> None:
    left = tuple(SampleSummary(index=index, status=SampleStatus.ABORTED, response_len=1) for index in range(6))
    task = rollout_task(
        laptop("rollout.n_samples_per_prompt=6"), group(num_samples=4, carried=left), prompts(), LedgerState()
    )
    assert task.num_samples == 4
    assert [sample.index for sample in task.carried] == [0, 1, 2, 3]


def test_every_group_in_flight_has_one_task_and_no_other_group_has() -> None:
    state = LedgerState(groups={n: group(group_id=n, stage=stage) for n, stage in enumerate([*Stage, *Stage])})
    tasks = list(tasks_in_flight(laptop(), state, prompts()))
    assert [task.group_id for task in tasks] == [list(Stage).index(Stage.IN_FLIGHT) + n for n in (0, len(Stage))]


def test_every_sampling_setting_of_the_recipe_reaches_the_engine() -> None:
    topology = laptop(
        "rollout.max_response_len=21",
        "rollout.temperature=0.7",
        "rollout.top_p=0.9",
        "rollout.top_k=40",
        'rollout.stop=["a", "b"]',
        "rollout.stop_token_ids=[5, 6]",
        "rollout.skip_special_tokens=true",
    )
    assert rollout_task(topology, group(), prompts(), LedgerState()).sampling == SamplingParams(
        max_new_tokens=21,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        stop=("a", "b"),
        stop_token_ids=(5, 6),
        skip_special_tokens=True,
    )


def test_the_response_gets_what_the_prompt_leaves_of_the_context() -> None:
    overrides = ("rollout.max_context_len=64", "rollout.max_response_len=60")
    lengths = [
        rollout_task(laptop(*overrides), group(), prompts(length=n), LedgerState()).sampling.max_new_tokens
        for n in (2, 10)
    ]
    assert lengths == [60, 54]


CARRIED = (SampleSummary(index=0, status=SampleStatus.ABORTED, segments=(SegmentRef(seq=9, position=0),)),)


@pytest.mark.parametrize(("on_halt", "carried"), [("resume", CARRIED), ("restart", ())])
def test_a_group_issued_again_goes_on_or_begins_anew_as_the_recipe_says(
    on_halt: str, carried: tuple[SampleSummary, ...]
) -> None:
    task = rollout_task(laptop(f"rollout.on_halt={on_halt}"), group(carried=CARRIED), prompts(), LedgerState())
    assert task.carried == carried


def test_what_an_attempt_spilled_goes_with_its_task_again_whatever_becomes_of_halted_groups() -> None:
    longer = SampleSummary(index=0, status=SampleStatus.ABORTED, response_len=5)
    for on_halt in ("resume", "restart"):
        task = rollout_task(
            laptop(f"rollout.on_halt={on_halt}"),
            group(carried=CARRIED, spilled=[Spilled(lease="l", sample=longer)]),
            prompts(),
            LedgerState(),
        )
        assert task.carried == (longer,)


@pytest.mark.parametrize(("limit", "carried"), [("none", [0, 1]), ("3", [0, 1]), ("2", [1])])
@pytest.mark.parametrize("halts_before", [0, 30])
def test_a_sample_whose_tokens_would_be_too_old_to_train_begins_anew(
    limit: str, carried: list[int], halts_before: int
) -> None:
    samples = tuple(
        SampleSummary(index=index, status=SampleStatus.ABORTED, response_len=5, first_version=version)
        for index, version in enumerate((2, 3))
    )
    halted = group(round=4 + halts_before, carried=samples)
    state = LedgerState(version_steps={2: 1, 3: 2, 5: 4}, rounds_ahead=halts_before)  # halted by hand
    task = rollout_task(laptop(f"rollout.max_token_staleness={limit}"), halted, prompts(), state)
    assert [sample.index for sample in task.carried] == carried


def test_an_evaluation_asks_for_what_has_not_ended_under_its_own_sampling() -> None:
    topology = laptop("eval.0.n_samples_per_eval_prompt=3", "eval.0.temperature=0.25")
    name = topology.eval[0].name
    running = Evaluation(step=4, version=5, sizes={name: 4}, items={name: {1: ENDED}})
    items = [prompts(4).prompt(number) for number in range(4)]
    tasks = list(eval_tasks(topology, running, {name: items}))
    assert [task.item for task in tasks] == [0, 2, 3]
    assert {(task.step, task.version, task.num_samples, task.sampling.temperature) for task in tasks} == {
        (4, 5, 3, 0.25)
    }


def test_decisions_know_the_batch_sizes_and_evaluation_sets_of_the_recipe() -> None:
    topology = load_topology(TOPOLOGIES / "colocate-8gpu.toml").topology
    schedule = schedule_of(topology, {item.name: 11 for item in topology.eval})
    assert (schedule.rollout_batch_size, schedule.over_sampling_batch_size, schedule.num_steps) == (32, 64, 500)
    assert (schedule.max_staleness, schedule.on_halt) == (0, "resume")
    assert schedule.evals == (EvalPlan(name="gsm8k-test", interval=20, num_items=11),)
    assert schedule_of(laptop(), {"reverse-digits-held-out": 22}).over_sampling_batch_size == 64  # the batch size


def test_the_next_attempt_prefers_the_actor_that_aborted_the_last_one_with_tokens() -> None:
    two = laptop("engines.policy.num_engines=2", "rollout.nodes=['local','local']")
    tokens = SampleSummary(index=0, status=SampleStatus.ABORTED, response_len=3)
    none = SampleSummary(index=0, status=SampleStatus.ABORTED)
    requested = rollout_task(two, group(carried=(tokens,)), prompts(), LedgerState())
    anew = rollout_task(two, group(), prompts(), LedgerState())

    def preferred(topology: Topology, task: RolloutRequested, *samples: SampleSummary, held: Any = UNSET) -> Any:
        holders = PrefixHolders(topology)
        aborted = GroupAborted(group_id=7, attempt=1, lease="l", round=3, instance="rollout.1", samples=samples)
        holders.note(msgspec.structs.replace(aborted, held=held))
        hinted = holders.hinted(task)
        assert holders.hinted(task) is task  # a hint is for one attempt
        assert isinstance(hinted, RolloutRequested)
        assert hinted.held is held or hinted.prefers is UNSET
        return hinted.prefers

    assert preferred(two, requested, tokens) == "rollout.1"
    assert preferred(two, requested, none) is UNSET
    assert (
        preferred(two, rollout_task(two, group(carried=(none,)), prompts(), LedgerState()), none, held=1) == "rollout.1"
    )
    assert preferred(two, anew, tokens) is UNSET  # it starts over
    assert preferred(laptop(), requested, tokens) is UNSET  # there is no other actor
    assert preferred(laptop("rollout.on_halt=restart"), requested, tokens) is UNSET
