"""The report, folded from events made by hand."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import (
    ActorExited,
    ActorStarted,
    BatchReady,
    BatchTrained,
    CheckpointRequested,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    EventLoopBlocked,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    GroupRef,
    GroupsClosed,
    Outcome,
    PairsEvaluated,
    PromptsLoaded,
    RunFinished,
    RunStalled,
    SampleStatus,
    SampleSummary,
    SelectionFailed,
    TrainerStarted,
    UserFunctionRaised,
    WeightsAnnounced,
    WeightsApplied,
    WeightsProgressed,
)
from runtime.ledger.fold import LedgerState
from runtime.report.report import Line, SampleShown
from runtime.util.formatting import duration, sparkline
from tests.runtime.report.story import STARTED, Story, one_step


def test_a_step_is_one_line_with_reward_books_and_time_left() -> None:
    story = Story()
    story.issue(0, 1, 2)
    story.judge(0, story.complete(0, 1.0, 0.0, after_s=2.0))
    story.tell(WeightsApplied(version=1, instance="rollout.0", num_engines=1, took_s=0.1))
    story.train(0, 0)
    (line,) = story.lines()
    assert "step 1/4" in line
    assert "reward 0.500" in line
    assert "groups 3 issued = 1 trained + 2 in flight |" in line
    assert "weights v1" in line
    assert "8.7s left" in line  # one step took 3 s, 0.1 s of it until engines had weights; three are left
    assert "23 tok/s" in line  # 68 tokens in 3 s


def test_the_first_sample_of_this_start_is_shown_once() -> None:
    story = Story()
    story.report.first_seq = 3  # what is before it is of an earlier start
    story.now = STARTED - 100
    story.issue(0, 1, 2)
    story.complete(0, 1.0)
    story.now = STARTED
    first = story.complete(1, 1.0, after_s=7.5)
    story.complete(2, 1.0, after_s=1.0)
    assert [notice for notice in story.notices if isinstance(notice, SampleShown)] == [SampleShown("first", first)]
    assert story.report.result(story.now).time_to_first_rollout_s == 7.5


def test_a_sample_of_the_last_group_that_was_accepted_is_shown_at_the_end() -> None:
    story = Story(num_steps=2)
    story.issue(0, 1, 2)
    seqs = [story.complete(group, 1.0) for group in (1, 0, 2)]
    for step, groups in ((0, (2,)), (1, (0, 1))):
        refs = tuple(GroupRef(group_id=group, attempt=0, event_seq=story.completed[group]) for group in groups)
        story.tell(BatchReady(incarnation=1, step=step, groups=refs))
    shown = [notice for notice in story.notices if isinstance(notice, SampleShown)]
    assert shown == [SampleShown("first", seqs[0]), SampleShown("last", seqs[1])]


def test_books_follow_a_group_through_every_end() -> None:
    story = Story()
    story.issue(0, 1, 2, 3, 4, 5)
    story.judge(0, story.complete(0, 1.0))
    story.judge(1, story.complete(1, 1.0), Outcome.DROP, "zero_std_1.0")
    story.tell(GroupFailed(group_id=2, attempt=0, lease="x", round=0, instance="i", reason="poison"))
    story.tell(GroupAborted(group_id=3, attempt=0, lease="x", round=0, instance="i"))
    story.tell(GroupAborted(group_id=4, attempt=0, lease="x", round=0, instance="i"))
    story.tell(GroupsClosed(incarnation=1, group_ids=(4,), outcome="dropped", reason="max_attempts"))
    assert story.report.result(0).groups == {
        "issued": 6,
        "trained": 0,
        "skipped": 0,
        "dropped": 2,
        "failed": 1,
        "pooled": 1,
        "ready": 1,
        "in_flight": 1,
    }
    story.issue(3, attempt=1)
    story.complete(3, 1.0, attempt=0)  # a zombie's: its attempt had ended
    assert story.report.result(0).groups["in_flight"] == 2
    assert story.report.books_line().startswith(
        "6 issued = 0 trained + 0 skipped + 2 dropped + 1 failed + 0 pooled + 1 ready + 2 in"
    )


def test_a_replayed_step_counts_once() -> None:
    story = Story()
    one_step(story, 0, 1.0, 0.0)
    story.tell(TrainerStarted(incarnation=2, step=0))
    assert story.lines()[-1] == "trainer continues after step 0: step 1 is trained again, on the same samples"
    story.tell(BatchTrained(step=0, incarnation=2, replay=True, num_groups=1, num_samples=2, num_tokens=68, metrics={}))
    assert len(story.rows()) == 1
    assert story.report.result(0).groups["trained"] == 1
    assert story.report.tokens == 68


def test_the_time_between_a_crash_and_the_next_start_is_no_step_time() -> None:
    story = Story()
    buffer = ActorStarted(actor="buffer", node="n", pid=1)
    story.tell(buffer)
    one_step(story, 0, 1.0)
    story.issue(1, round=1)
    story.tell(buffer, after_s=3600.0)
    story.tell(TrainerStarted(incarnation=2, step=1))
    story.judge(1, story.complete(1, 1.0, after_s=1.0))
    story.train(1, 1)
    one_step(story, 2, 1.0)
    assert [row["perf/step_time"] for row in story.rows()] == [2.0, 2.0, 2.0]
    assert story.report.account.stopped_s == 3600.0


def test_a_step_that_only_the_checkpoint_knows_is_trained() -> None:
    story = Story()
    story.issue(0)
    story.judge(0, story.complete(0, 1.0))
    story.tell(BatchReady(incarnation=1, step=0, groups=(GroupRef(group_id=0, attempt=0, event_seq=2),)))
    story.tell(TrainerStarted(incarnation=2, step=1))
    assert story.report.steps == 1
    assert story.report.result(0).groups["trained"] == 1
    assert story.lines() == ["trainer continues after step 1"]


def test_restarts_are_told() -> None:
    story = Story()
    story.tell(ActorStarted(actor="trainer", node="local", pid=1))
    exited = {"actor": "trainer", "node": "local", "pid": 1, "exit_code": -9, "reason": "killed by SIGKILL"}
    story.tell(ActorExited(**exited, restart_in_s=0.2))
    story.tell(ActorStarted(actor="trainer", node="local", pid=2, restarts=1))
    story.tell(ActorExited(**exited))
    assert story.lines() == [
        "trainer ended: killed by SIGKILL; restarting in 0.2 s",
        "trainer restarted (restart 1, pid 2)",
    ]


def test_a_failure_that_repeats_is_told_three_times() -> None:
    story = Story()
    story.issue(*range(10))
    for group in range(10):
        story.tell(GroupFailed(group_id=group, attempt=0, lease="x", round=0, instance="i", reason="reward raised"))
    assert story.lines() == ["group failed: reward raised"] * 2 + [
        "group failed: reward raised (no more of these are shown)"
    ]


def test_failures_that_are_never_alike_do_not_flood_the_terminal() -> None:
    story = Story()
    story.issue(*range(90))
    for group in range(90):
        reason = f"column {group % 30}"
        story.tell(GroupFailed(group_id=group, attempt=0, lease="x", round=0, instance="i", reason=reason))
    lines = story.lines()
    assert lines[:21] == [
        *(f"group failed: column {group}" for group in range(20)),
        "failures for further reasons are not shown; see bin/ledger r",
    ]
    assert len(lines) == 3 * 20 + 1


def test_a_score_that_failed_and_trains_as_zero_is_told_and_counted() -> None:
    story = Story()
    story.issue(0)
    scored = SampleSummary(index=0, status=SampleStatus.COMPLETED, response_len=4, reward=1.0)
    failed = SampleSummary(index=1, status=SampleStatus.COMPLETED, response_len=4, reward=0.0, reason="timeout")
    samples = (scored, failed, msgspec.structs.replace(failed, index=2), msgspec.structs.replace(scored, index=3))
    event = GroupCompleted(group_id=0, attempt=0, lease="x", round=0, instance="i", data="d", samples=samples)
    story.completed[0] = story.tell(event)
    assert story.lines() == ["no score, reward 0 instead: timeout"]
    story.judge(0, story.completed[0])
    story.train(0, 0)
    (row,) = story.rows()
    assert row["rollout/no_score_ratio"] == 0.5


def test_the_data_is_told_with_its_size_or_as_without_end() -> None:
    story = Story()
    story.tell(PromptsLoaded(data="a", num_prompts=3, num_too_long=2, took_s=0.1))
    story.tell(PromptsLoaded(data="b", num_prompts=0, num_too_long=0, took_s=0.1))
    assert story.lines() == [
        "data a: 3 prompts, 2 over the length limit left out",
        "data b: prompts by number, without end",
    ]


@pytest.mark.parametrize(
    ("num_steps", "first", "last", "ends"),
    [
        (1, 0.0, 0.0, "the only step"),
        (2, 0.0, 0.1, "first and last step"),
        (3, 0.0, 0.2, "first and last step"),
        (4, 0.05, 0.25, "means of the first and the last 2 steps"),
        (8, 0.15, 0.55, "means of the first and the last 4 steps"),  # of 0.0 to 0.3, and of 0.4 to 0.7
        (10, 0.2, 0.7, "means of the first and the last 5 steps"),
        (12, 0.2, 0.9, "means of the first and the last 5 steps"),
    ],
)
def test_the_result_has_means_of_the_ends_without_a_step_in_both(
    num_steps: int, first: float, last: float, ends: str
) -> None:
    story = Story(num_steps=num_steps)
    for step in range(num_steps):
        one_step(story, step, step / 10, step / 10)
    story.tell(RunFinished(incarnation=1, steps=num_steps, reason="all steps trained"))
    result = story.report.result(STARTED + 60)
    assert (result.reward_first, result.reward_last) == (pytest.approx(first), pytest.approx(last))
    (line,) = [line for line in story.report.summary(STARTED + 60) if line.startswith("reward ")]
    assert line.endswith(f"  ({ends})")
    assert line.startswith(f"reward    {first:.3f}" + (f" → {last:.3f}  " if num_steps > 1 else "  "))


def test_the_result_has_counts() -> None:
    story = Story(num_steps=8)
    for step in range(8):
        one_step(story, step, step / 10, step / 10)
    story.tell(RunFinished(incarnation=1, steps=8, reason="all steps trained"))
    result = story.report.result(STARTED + 60)
    assert result.steps == 8
    assert result.seconds == 60
    assert result.tokens == 8 * 68
    assert story.report.finished == "all steps trained"


def test_a_run_on_demonstrations_is_told_by_its_loss() -> None:
    story = Story(num_steps=2)
    for step, loss in enumerate((2.5, 1.5)):
        story.issue(step, round=step)
        story.judge(step, story.complete(step, 0.0))
        story.train(step, step, train__loss=loss, train__sft_loss=loss)
    story.tell(RunFinished(incarnation=1, steps=2, reason="all steps trained"))
    (_, line, *_), row = story.lines()[-1].split(" | "), story.rows()[-1]
    assert line == "loss 1.500"
    assert "weights" not in story.lines()[-1]
    assert (row["train/sft_loss"], [key for key in row if "reward" in key or "zero_std" in key]) == (1.5, [])
    result = story.report.result(STARTED + 60)
    assert (result.loss_first, result.loss_last, result.reward_first, result.reward_last) == (2.5, 1.5, None, None)
    assert story.report.summary(STARTED + 60)[1] == "loss      2.500 → 1.500  █▁  (first and last step)"


def test_an_evaluation_of_held_out_pairs_is_in_the_row_of_its_step() -> None:
    story = Story(num_steps=2)
    for step, accuracy in enumerate((0.5, 0.75, 1.0)):
        if step:
            story.issue(step, round=step)
            story.judge(step, story.complete(step, 0.0))
            story.train(step - 1, step, train__loss=1.0, train__preference_loss=1.0)
        metrics = {"eval/s": accuracy, "eval/s/preference_loss": 2.0}
        story.tell(PairsEvaluated(step=step, incarnation=1, metrics=metrics, took_s=0.25))
    story.tell(RunFinished(incarnation=1, steps=2, reason="all steps trained"))
    evaluated = [row for row in story.rows() if "eval/s" in row]
    assert [(row["step"], row["eval/step"], row["eval/s"], row["perf/eval_time"]) for row in evaluated] == [
        (0, 0, 0.5, 0.25),
        (1, 1, 0.75, 0.25),
        (2, 2, 1.0, 0.25),
    ]
    assert "evaluation after step 2: s 1.000" in story.lines()
    assert story.report.result(STARTED + 60).eval_last == 1.0
    assert "eval      0.500 → 1.000  s (first and newest evaluation)" in story.report.summary(STARTED + 60)


def test_metrics_that_a_function_failed_to_compute_are_a_line() -> None:
    story = Story()
    one_step(story, 0, 0.5)
    why = "eval.0.custom_metrics: no answer within 30 s"
    story.tell(
        EvalEnded(incarnation=1, step=1, version=2, metrics={"eval/s": 0.5, "eval/s/f1": 0.25}, failed={"t": why})
    )
    assert f"evaluation set t: {why}" in story.lines()
    assert "evaluation after step 1 (weights v2): s 0.500" in story.lines()


def test_a_sample_of_an_evaluation_without_a_grade_says_why() -> None:
    story = Story()
    graded = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=1.0, reason="an earlier try")
    failed = SampleSummary(index=1, status=SampleStatus.FAILED, reason="bad_answer: returned None, not a number")
    for item in range(5):
        story.tell(EvalCompleted(step=0, set="s", item=item, version=1, instance="r", samples=(graded, failed)))
    said = "evaluation set s: sample without a grade: bad_answer: returned None, not a number"
    assert story.lines() == [said, said, f"{said} (no more of these are shown)"]


def test_the_time_of_an_evaluation_is_in_its_row() -> None:
    story = Story(num_steps=2)
    one_step(story, 0, 0.5)
    story.tell(EvalIssued(incarnation=1, step=1, version=2, sets=()))
    one_step(story, 1, 0.5)
    story.tell(EvalEnded(incarnation=1, step=1, version=2, metrics={"eval/s": 0.75}), after_s=5.0)
    evaluated = [(row["step"], row.get("eval/s"), row.get("perf/eval_time", 0.0) >= 5.0) for row in story.rows()]
    assert evaluated == [(1, None, False), (2, None, False), (1, 0.75, True)]


def test_the_summary_says_where_the_time_went() -> None:
    story = Story()
    story.tell(WeightsAnnounced(version=1, step=0, incarnation=1, path="p", checksum="c", size_bytes=1, took_s=0.25))
    story.tell(WeightsApplied(version=1, instance="r", num_engines=1, took_s=0.25), after_s=0.25)
    for step in range(2):
        one_step(story, step, 0.5, 1.0)
    lines = story.report.summary(story.now)
    assert lines[0].startswith("steps     2 of 4 in 4.2s, first rollout after 1.2 s")
    assert lines[1].startswith("reward    0.750 → 0.750  ▇▇")
    books = "2 issued = 2 trained + 0 skipped + 0 dropped + 0 failed + 0 pooled + 0 ready + 0 in flight"
    assert lines[2] == f"groups    {books}"
    parts = "train 2.000 s (47.1%), rollout 1.000 s (23.5%), scores 0.500 s (11.8%), queue 0.500 s (11.8%)"
    assert lines[3] == f"time      4.2s in 2 steps, 2.125 s a step: {parts}, start 0.250 s (5.9%)"


def test_the_summary_of_a_resumed_run_says_how_many_steps_this_start_made() -> None:
    story = Story()
    story.now -= 10
    story.report.first_seq = 100
    one_step(story, 0, 0.5)
    story.now = STARTED
    story.report.first_seq = story.seq + 1
    one_step(story, 1, 0.5)
    one_step(story, 2, 0.5)
    assert story.report.summary(STARTED + 6)[0].startswith("steps     3 of 4, 2 of them in 6.0s, first rollout after")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (9.9, "9.9s"),
        (59.4, "59s"),
        (65, "1m05s"),
        (3599.9, "1h00m"),
        (7620, "2h07m"),
        (273_600, "3d04h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=500))
def test_a_curve_fits_its_columns(values: list[float]) -> None:
    assert len(sparkline(values)) == min(40, len(values))


def test_a_rising_reward_is_a_rising_curve() -> None:
    assert sparkline([0.0, 0.3, 0.6, 1.0]) == "▁▃▅█"


def test_staleness_is_in_the_step_line_as_soon_as_there_is_any() -> None:
    story = Story()
    one_step(story, 0, 1.0)
    story.issue(1, round=1)
    story.judge(1, story.complete(1, 1.0))
    story.train(1, 1, rollout__staleness_mean=0.625, rollout__staleness_max=2.0)
    first, second = story.lines()
    assert "staleness" not in first
    assert "| staleness 0.62 (max 2) |" in second


def test_a_stall_and_a_full_stream_are_told_in_a_line_each() -> None:
    story = Story()
    story.tell(RunStalled(idle_s=300.0, waiting={"buffer": "batch 2 to be trained", "trainer": "no answer in 5 s"}))
    story.tell(CheckpointRequested(step=3, stream="data", used=0.72))
    assert [notice.text for notice in story.notices if isinstance(notice, Line)] == [
        "nothing happened for 5m00s: buffer: batch 2 to be trained; trainer: no answer in 5 s",
        "the data stream is 72% full: a checkpoint is requested",
    ]


def test_a_call_that_blocks_an_event_loop_is_told_while_it_does() -> None:
    story = Story()
    place = {"actor": "rollout", "node": "n", "pid": 1, "place": "mylib.py:12 in with_tool"}
    story.tell(EventLoopBlocked(**place, blocked_s=5.4, ended=False, function="rollout.custom_generate"))
    story.tell(EventLoopBlocked(**place, blocked_s=9.4, ended=True, function="rollout.custom_generate"))
    story.tell(EventLoopBlocked(**place, blocked_s=5.0, ended=False, is_ours=True))
    assert [notice.text for notice in story.notices if isinstance(notice, Line)] == [
        "rollout.custom_generate has blocked the event loop for 5 s: mylib.py:12 in with_tool",
        "rollout: code of Physarum has blocked the event loop for 5 s: mylib.py:12 in with_tool",
    ]


def test_slow_weight_updates_are_told_with_what_the_first_engines_do() -> None:
    story, doing = Story(), "loads 140.0 GB (2m00s, limit 28m20s)"
    engines = {f"engine.policy.{index}": doing for index in range(5)}
    story.tell(WeightsProgressed(version=5, instance="rollout", engines=engines))
    (line,) = (notice.text for notice in story.notices if isinstance(notice, Line))
    assert line == (
        f"weights v5: engine.policy.0 {doing}; engine.policy.1 {doing}; engine.policy.2 {doing} and 2 more engines"
    )


def test_a_report_that_begins_in_the_middle_has_the_books_of_the_whole() -> None:
    whole, late = Story(), Story()
    whole.issue(0, 1)
    state = msgspec.json.decode(msgspec.json.encode(whole.report._ledger), type=LedgerState)
    late.report.begin(state)
    late.seq, late.completed = whole.seq, whole.completed
    for story in (whole, late):
        story.judge(0, story.complete(0, 1.0))
        story.train(0, 0)
    assert late.report.result(STARTED).groups == whole.report.result(STARTED).groups


def test_a_choice_that_fails_again_and_again_is_told_a_few_times() -> None:
    story = Story()
    for _ in range(50):
        story.tell(SelectionFailed(kind="buffer_filter", reason="RuntimeError('no')", num_groups=4))
    lines = [notice.text for notice in story.notices if isinstance(notice, Line)]
    assert lines[0] == "rollout.buffer_filter failed, first come first instead: RuntimeError('no')"
    assert len(lines) < 10


def test_the_traceback_of_a_user_is_shown_once_for_each_place() -> None:
    """Two reward actors saw the same mistake on other samples, and then another one."""
    story = Story()
    for instance, line, text in (
        ("reward.0", 3, "KeyError: 'a'"),
        ("reward.1", 3, "KeyError: 'b'"),
        ("reward.0", 9, "no"),
    ):
        trace = f'Traceback (most recent call last):\n  File "my.py", line {line}, in grade\n{text}'
        story.tell(UserFunctionRaised(instance=instance, function="the grader my.py:grade", traceback=trace))
    assert [notice.text for notice in story.notices if isinstance(notice, Line)] == [
        "the grader my.py:grade raised:",
        "  Traceback (most recent call last):",
        '    File "my.py", line 3, in grade',
        "  KeyError: 'a'",
        "the grader my.py:grade raised:",
        "  Traceback (most recent call last):",
        '    File "my.py", line 9, in grade',
        "  no",
    ]


def test_a_sample_of_a_dump_that_cannot_be_true_is_told_with_its_file() -> None:
    story = Story()
    reason = "d/rollout_0.npz: sample 0 of group 0: token 1 has id 99 (allowed: 0 to 63)"
    failed = SampleSummary(index=0, status=SampleStatus.FAILED, reward=1.0, reason=reason)
    story.tell(
        GroupCompleted(group_id=0, attempt=0, lease="a", round=0, instance="rollout", data="d", samples=(failed,))
    )
    assert story.lines() == [f"sample left out: {reason}"]
