"""Advice on hand-made logs: each rule names its cause with the figure, and says nothing on too few steps or groups."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.observer.advice import DROPPED, RULES, STALL, Advice, Adviser, advice_lines
from actors.observer.run_facts import WINDOW, RunFacts, StepFacts
from messages import (
    ActorStarted,
    BatchTrained,
    EventLoopBlocked,
    GroupFailed,
    LastSample,
    Message,
    Outcome,
    RunFinished,
    RunStalled,
    SampleStatus,
    SampleSummary,
    SegmentRef,
)
from runtime.report.fold.account import Account
from tests.build.events import batch, completed, failed, issued, trained, verdict
from tests.runtime.report.fold.test_account import LOADED, Log, a_step, started

SETTINGS = Path(__file__).parents[3] / "docs" / "reference" / "settings.md"
Samples = Callable[[int, int], Sequence[SampleSummary]]  # of a step and a group of it, both from 0


def sample(
    index: int, reward: float, *, length: int = 10, truncated: bool = False, signs: tuple[str, ...] = ()
) -> SampleSummary:
    status = SampleStatus.TRUNCATED if truncated else SampleStatus.COMPLETED
    return SampleSummary(index=index, status=status, prompt_len=4, response_len=length, reward=reward, signs=signs)


def usual(step: int, group: int) -> list[SampleSummary]:
    """Eight samples with rewards 0 and 1 in turn, all of one length."""
    return [sample(index, float(index % 2)) for index in range(8)]


def a_run(
    num_steps: int,
    samples: Samples = usual,
    *,
    dropped: int = 0,
    engine_s: Callable[[int], float] = lambda group: 1.0,
) -> Log:
    """The log of steps of eight groups each; `dropped` more are dropped, and a group takes `engine_s` on its engine."""
    log, at = started(), LOADED
    for step in range(num_steps):
        groups = [100 * step + number for number in range(8 + dropped)]
        log.append((at, issued(*groups)))
        for number, group in enumerate(groups):
            last = LastSample(engine=f"engine.policy.{number % 2}", grader="math")
            given = samples(step, number)
            event = completed(group, samples=tuple(given), rollout_time_s=engine_s(number % 2), last_sample=last)
            log.append((at + 1.0, event))
            judged = verdict(group, 1) if number < 8 else verdict(group, 1, Outcome.DROP, reason="dull")
            log.append((at + 1.0, judged))
        log.append((at + 1.0, batch(step, *((group, 1) for group in groups[:8]))))
        at += 2.0
        metrics = {"perf/train_wait_time": 1.0, "perf/train_time": 1.0}
        log.append((at, trained(step, metrics=metrics)))
    return log


def advised(*logs: Log, more: Sequence[Message] = ()) -> list[Advice]:
    adviser, account = folded(*logs)
    for event in more:
        adviser.apply(event, account.apply(event, account.last))
    return adviser.advice(account)


def folded(*logs: Log) -> tuple[Adviser, Account]:
    adviser, account = Adviser(), Account()
    for log in logs:
        for time, event in log:
            adviser.apply(event, account.apply(event, 1000.0 + time))
    return adviser, account


def the_only(found: Sequence[Advice]) -> tuple[str, str, int]:
    (advice,) = found
    return advice.name, advice.figure, advice.since


def test_a_usual_run_gets_no_advice() -> None:
    assert advised(a_run(40)) == []


def test_equal_rewards_are_groups_without_spread() -> None:
    def equal(step: int, group: int) -> list[SampleSummary]:
        return [sample(index, 1.0) for index in range(8)]

    assert advised(a_run(5, equal)) == []  # found once
    assert the_only(advised(a_run(6, equal))) == ("groups without spread", "100% of 48 groups", 1)


def test_a_run_that_has_solved_its_prompts_is_not_blamed_for_equal_rewards() -> None:
    def learning(last: float) -> Samples:
        return lambda step, group: usual(step, group) if step < 10 else [sample(index, last) for index in range(8)]

    assert advised(a_run(40, learning(1.0))) == []
    assert the_only(advised(a_run(40, learning(0.0))))[0] == "groups without spread"  # it has collapsed


def test_a_filter_that_drops_nine_of_ten_groups_is_named_with_its_reason() -> None:
    name, figure, _ = the_only(advised(a_run(8, dropped=72)))
    assert (name, figure) == ("filter drops groups", "90% of 640 groups, 576 with the reason 'dull'")
    assert advised(a_run(8, dropped=16)) == []  # two of three


def test_an_engine_that_takes_twice_as_long_per_token_is_named() -> None:
    slow = advised(a_run(8, engine_s=lambda engine: 0.5 if engine else 0.1))
    assert the_only(slow)[:2] == ("slow engine", "engine.policy.1 takes 50.0 ms a token, the others 10.0 ms")
    assert advised(a_run(8, engine_s=lambda engine: 0.19 if engine else 0.1)) == []


def test_responses_that_do_not_end_or_are_garbled_are_named() -> None:
    def cut(step: int, group: int) -> list[SampleSummary]:
        return [sample(index, float(index % 2), truncated=index < 6) for index in range(8)]

    def at_first(step: int, group: int) -> list[SampleSummary]:
        return cut(step, group) if step < 12 else usual(step, group)

    assert the_only(advised(a_run(25, cut)))[:2] == ("no end token", "75% of 640 responses ran into a token limit")
    assert advised(a_run(15, cut)) == []  # a model that was drawn at random does so at first
    assert advised(a_run(25, at_first)) == []

    def garbled(first: int, *signs: str) -> Samples:
        def of(step: int, group: int) -> list[SampleSummary]:
            return [sample(i, float(i % 2), signs=signs if i < 2 and step >= first else ()) for i in range(8)]

        return of

    found = [advice.name for advice in advised(a_run(30, garbled(10, "repetition", "script", "bytes")))]
    assert found == ["repetition", "wrong script", "bytes that are not text"]
    assert advised(a_run(30, garbled(0, "script"))) == []  # the task asks for it


def test_agents_whose_turns_fork_are_named_with_the_cause_and_wanted_forks_are_not() -> None:
    def forking(**forks: int) -> Samples:
        def of(step: int, group: int) -> list[SampleSummary]:
            noted = {"session": {"turns": 10, "extended": 8, "forks": forks}}
            first, *others = usual(step, group)
            own = {"session": "a user's own"}
            return [msgspec.structs.replace(first, metadata=noted), msgspec.structs.replace(others[0], metadata=own)]

        return of

    found = advised(a_run(12, forking(arguments=2, text=1, compaction=4)))
    assert the_only(found)[:2] == ("agents fork", "30% of 800 turns, 160 because of arguments")
    assert advised(a_run(12, forking(compaction=4, tools=3, repeat=1))) == []


def test_a_reward_for_length_is_named_when_responses_grow() -> None:
    def longer(growth: float) -> Samples:
        def of(step: int, group: int) -> list[SampleSummary]:
            base = int(20 * growth**step)
            return [sample(index, float(index), length=base + index) for index in range(8)]

        return of

    assert the_only(advised(a_run(30, longer(1.05))))[0] == "reward for length"
    assert advised(a_run(30, longer(1.0))) == []  # as long as ever
    assert advised(a_run(15, longer(1.05))) == []

    def with_a_tool(step: int, group: int) -> list[SampleSummary]:
        """Calls of a tool are rewarded, and become more; a sample with a call has two segments."""
        calls = [index < 8 * step / 30 for index in range(8)]
        made = [sample(index, 0.8 if call else 0.2, length=12 if call else 4) for index, call in enumerate(calls)]
        refs = SegmentRef(seq=1, position=0), SegmentRef(seq=2, position=0)
        return [
            msgspec.structs.replace(each, segments=refs[: 1 + call]) for each, call in zip(made, calls, strict=True)
        ]

    assert advised(a_run(30, with_a_tool)) == []

    def without_a_tool(step: int, group: int) -> list[SampleSummary]:
        return [msgspec.structs.replace(each, segments=each.segments[:1]) for each in with_a_tool(step, group)]

    assert the_only(advised(a_run(30, without_a_tool)))[0] == "reward for length"

    def worse(step: int, group: int) -> list[SampleSummary]:
        return [sample(index, float(index % 2), length=20 if index % 2 else 20 + 2 * step) for index in range(8)]

    assert the_only(advised(a_run(30, worse)))[0] == "worse responses grow"


@pytest.mark.parametrize("reward", [1e200, 1e307])
def test_rewards_whose_squares_overflow_say_nothing_about_length(reward: float) -> None:
    """Longer responses get more reward in one step and less in the next."""

    def huge(step: int, group: int) -> list[SampleSummary]:
        signs = (1 if (index + step) % 2 else -1 for index in range(8))
        return [sample(i, sign * reward, length=10 + 20 * (i % 2) + step) for i, sign in enumerate(signs)]

    assert advised(a_run(30, huge)) == []


def timed(num_steps: int, **parts: float) -> Log:
    log, at = started(), LOADED
    for step in range(num_steps):
        more, at = a_step(step, at, **parts)
        log += more
    return log


@pytest.mark.parametrize(
    ("parts", "name", "figure"),
    [
        ({"scores": 8.0}, "slow grader", "group 70 by math: 8.000 s"),
        ({"rollout": 40.0}, "trainer waits for the engines", "93% of the time"),
        ({"queue": 40.0}, "trainer waits for the engines", "all slots of the engines are taken"),
        ({"train": 40.0}, "engines wait for the trainer", "of the time"),
    ],
)
def test_what_takes_nearly_all_of_the_time_is_named(parts: dict[str, float], name: str, figure: str) -> None:
    found = the_only(advised(timed(8, **parts)))
    assert found[0] == name
    assert figure in found[1]
    assert advised(timed(5, **parts)) == []
    assert advised(timed(8)) == []


@pytest.mark.parametrize(
    "parts",
    [
        {"queue": 0.914, "train": 0.263, "weights": 0.181, "long tail": 0.106, "fetch": 0.075, "scores": 0.024},
        {"rollout": 1.409, "weights": 0.893, "queue": 0.801, "train": 0.414, "long tail": 0.15, "fetch": 0.094},
    ],
    ids=["laptop", "tool-use"],
)
def test_the_times_of_shipped_runs_on_a_busy_machine_get_no_advice(parts: dict[str, float]) -> None:
    """Mean seconds of a step, measured on two cores with a load of 9 to 12."""
    run = RunFacts(steps=[StepFacts(step=step, parts=parts) for step in range(1, 21)], num_steps=20)
    assert [rule.name for rule in RULES if rule.found(run) is not None] == []


def test_a_stall_and_a_step_that_lasts_are_named_until_the_run_is_over() -> None:
    stalled = RunStalled(idle_s=300.0, waiting={"trainer": "batch 3"})
    name, figure, since = the_only(advised(a_run(6), more=[stalled]))
    assert (name, figure, since) == ("stall", "no event for 5m00s: trainer waits for batch 3", 7)
    assert advised(a_run(6), more=[stalled, issued(9)]) == []
    late: Log = [(LOADED + 12.0 + 61.0, issued(9))]
    assert the_only(advised(a_run(6), late))[:2] == ("stall", "step 7 has lasted 1m01s, and others 2.0s")
    assert advised(a_run(6), late, [(200.0, RunFinished(incarnation=1, steps=6, reason=""))]) == []


def with_failures(num_steps: int, per_step: int, reason: str, *, samples: Samples = usual) -> Log:
    """A usual run in which some groups more fail in each step."""
    log = a_run(num_steps, samples)
    found: Log = []
    for time, event in log:
        if isinstance(event, BatchTrained):
            groups = range(10_000 + 100 * event.step, 10_000 + 100 * event.step + per_step)
            found += [(time - 0.5, failed(group, reason=reason)) for group in groups]
        found.append((time, event))
    return found


def test_failed_groups_are_named_from_five_percent_on() -> None:
    """The window has 20 steps of eight groups, and those that failed."""
    assert the_only(advised(with_failures(20, 1, "reward: KeyError('x')"))) == (
        "failed groups",
        "11% of 180 groups, 20 with \"reward: KeyError('x')\"",
        1,
    )
    few = with_failures(20, 1, "reward: no")
    rare = [each for each in few if not isinstance(each[1], GroupFailed) or each[1].group_id % 400 == 0]
    assert [advice.name for advice in advised(rare)] == []  # 5 of 165


def test_samples_without_a_score_and_time_outs_are_named() -> None:
    def one_failed(step: int, group: int) -> list[SampleSummary]:
        reason = "timeout: no answer within 10 s (timeout_s)"
        found = usual(step, group)
        return [msgspec.structs.replace(found[0], status=SampleStatus.FAILED, reward=None, reason=reason), *found[1:]]

    found = {advice.name: advice.figure for advice in advised(a_run(12, one_failed))}
    assert found == {
        "failed samples": "12% of 768 samples, 96 with 'timeout: no answer within 10 s (timeout_s)'",
        "time-outs": "in 100% of 96 groups, 96 with 'timeout: no answer within 10 s (timeout_s)'",
    }


def test_two_restarts_in_ten_minutes_are_named_and_one_death_of_many_ranks_is_one() -> None:
    def again(*processes: str) -> list[Message]:
        return [ActorStarted(actor=process, node="n", pid=2, restarts=1) for process in processes]

    assert advised(a_run(5), more=again("trainer.0", "trainer.1", "trainer.2")) == []
    (advice,) = advised(a_run(5), more=again("rollout", "reward"))
    assert (advice.name, advice.figure) == ("restarts", "2 restarts in 10m00s: rollout 1, reward 1")
    adviser, account = folded(a_run(5))
    for at, process in ((5000.0, "rollout"), (5700.0, "rollout"), (6200.0, "rollout")):
        for event in again(process):
            adviser.apply(event, account.apply(event, at))
    found = [advice.figure for advice in adviser.advice(account) if advice.name == "restarts"]
    assert found == ["2 restarts in 10m00s: rollout 2"]


def test_a_blocked_event_loop_is_named_at_once_and_after_three_steps_with_a_lag() -> None:
    def block(seconds: float, *, ended: bool) -> EventLoopBlocked:
        place = {"function": "rollout.custom_generate", "place": "mylib.py:12 in with_tool"}
        return EventLoopBlocked(actor="rollout", node="n", pid=1, blocked_s=seconds, ended=ended, **place)

    (advice,) = advised(a_run(1), more=[block(5.0, ended=False)])
    assert advice.name == "event loop blocked"
    assert advice.figure == "rollout.custom_generate has blocked the event loop for 5 s: mylib.py:12 in with_tool"
    assert advised(a_run(1), more=[block(5.0, ended=False), block(9.0, ended=True)]) == []
    log: Log = []
    for time, event in a_run(12):
        if isinstance(event, BatchTrained) and 4 <= event.step < 7:
            log.append((time - 0.1, block(1.5, ended=True)))
        log.append((time, event))
    (advice,) = advised(log)
    assert (advice.name, advice.since) == ("event loop blocked", 1)  # at the begin of a run, the first step
    assert advice.figure == "in 3 of 12 steps; 4.5 s by rollout.custom_generate: mylib.py:12 in with_tool"


def test_a_finding_goes_after_three_steps_without_it() -> None:
    def cut_until(last: int) -> Samples:
        def of(step: int, group: int) -> list[SampleSummary]:
            return [sample(index, float(index % 2), truncated=step < last) for index in range(8)]

        return of

    # over 10 steps half of the responses are cut until 5 others follow
    assert len(advised(a_run(30 + 5, cut_until(30)))) == 1
    assert len(advised(a_run(30 + 7, cut_until(30)))) == 1
    assert advised(a_run(30 + 8, cut_until(30))) == []


def test_each_setting_that_advice_names_exists() -> None:
    known = set(re.findall(r"^\| `([^`]+)` \|", SETTINGS.read_text(), re.MULTILINE))
    named = {key for rule in (*RULES, STALL) for key in rule.keys}
    assert len(known) > 100
    assert named - known == set()
    assert all(rule.keys for rule in RULES)


def test_advice_is_two_lines() -> None:
    advice = Advice(name="slow grader", figure="92%", since=3, meaning="It waits.", keys=("reward.processes",))
    assert advice_lines([advice]) == [
        "advice: slow grader, since step 3: 92%",
        "  It waits. Settings: reward.processes",
    ]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=12))
def test_its_memory_is_bounded_and_it_says_nothing_about_a_few_groups(dropped: list[int]) -> None:
    adviser, account = folded(a_run(len(dropped), dropped=dropped[0]))
    assert len(adviser.facts.steps) <= 2 * WINDOW
    shown = {advice.name for advice in adviser.advice(account)}
    assert shown <= {"filter drops groups"}
    assert not (shown and dropped[0] / (8 + dropped[0]) < DROPPED)
