"""Rows of metrics, folded from events made by hand, and their file."""

import math
from pathlib import Path

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from messages import (
    EngineNumbers,
    EngineUpdate,
    EvalEnded,
    EvalIssued,
    EvalSetSize,
    EventLoopBlocked,
    GroupCompleted,
    SampleStatus,
    SampleSummary,
    WeightsApplied,
    WeightsLost,
    WeightSyncEnded,
    decode,
    encode,
)
from runtime.report.group_numbers import mean_of
from runtime.report.report import RowDone
from runtime.report.rows import MetricsFile
from runtime.util.formatting import sparkline
from tests.runtime.report.story import Story, one_step


def test_a_row_holds_rollout_train_and_time_metrics() -> None:
    story = Story()
    story.issue(0)
    story.judge(0, story.complete(0, 1.0, 1.0, after_s=2.0, truncated=1))
    story.train(0, 0, after_s=1.0, train__loss=0.5, perf__train_time=0.75, perf__train_wait_time=2.25)
    (row,) = story.rows()
    expected = {
        "step": 1,
        "rollout/step": 0,
        "rollout/raw_reward": 1.0,
        "rollout/response_len/mean": 15.0,
        "rollout/response_len/max": 20,
        "rollout/truncated_ratio": 0.5,
        "rollout/zero_std/count_1": 1,
        "train/loss": 0.5,
        "perf/step_time": 3.0,
        "perf/rollout_time": 0.5,
        "perf/time/rollout": 0.5,
        "perf/time/queue": 1.25,
        "perf/time/scores": 0.25,
        "perf/train_time": 0.75,
        "perf/wait_time_ratio": 0.75,
        "perf/group_rollout_time": 0.5,
        "perf/group_reward_time": 0.25,
        "groups/trained": 1,
    }
    assert {key: row[key] for key in expected} == expected


def updated(version: int, instance: str, took_s: float, *pauses_s: float) -> WeightsApplied:
    engines = tuple(
        EngineUpdate(engine=f"{instance}.{index}", pause_s=pause_s, took_s=took_s)
        for index, pause_s in enumerate(pauses_s)
    )
    return WeightsApplied(version=version, instance=instance, num_engines=len(engines), took_s=took_s, engines=engines)


def session(version: int, sent_bytes: int, took_s: float) -> WeightSyncEnded:
    return WeightSyncEnded(
        session="1.1",
        incarnation=1,
        version=version,
        transport="collective",
        holds=("e",),
        out={},
        num_buckets=1,
        sent_bytes=sent_bytes,
        took_s=took_s,
    )


def test_a_row_says_how_long_the_newest_update_took_and_its_engines_stood_still() -> None:
    story = Story()
    story.tell(updated(1, "rollout.0", 9.0, 8.0))
    story.tell(updated(2, "rollout.0", 3.0, 0.5, 2.0))
    story.tell(updated(2, "rollout.1", 4.0, 1.0))
    one_step(story, 0, 1.0)
    (row,) = story.rows()
    assert (row["perf/update_weights_applied_time"], row["perf/update_weights_pause_time"]) == (4.0, 2.0)
    assert not [name for name in row if "session" in name or "wire" in name]


def test_a_row_counts_requests_that_had_to_take_a_newer_adapter_since_the_step_before() -> None:
    story = Story()
    for version, moved in ((1, (2, 1)), (2, (4,))):
        engines = tuple(EngineUpdate(engine="e", pause_s=0.0, took_s=1.0, num_moved_on=number) for number in moved)
        story.tell(WeightsApplied(version=version, instance="r", num_engines=1, took_s=1.0, engines=engines))
    one_step(story, 0, 1.0)
    story.tell(updated(3, "r", 1.0, 0.0))
    one_step(story, 1, 1.0)
    first, second = story.rows()
    assert first["perf/adapter_requests_moved_on"] == 7
    assert "perf/adapter_requests_moved_on" not in second


def test_a_row_says_how_long_event_loops_were_blocked_since_the_step_before() -> None:
    story = Story()
    for seconds, ended in ((5.0, False), (9.0, True), (1.5, True)):
        story.tell(EventLoopBlocked(actor="rollout", node="n", pid=1, blocked_s=seconds, ended=ended))
    one_step(story, 0, 1.0)
    one_step(story, 1, 1.0)
    first, second = story.rows()
    assert first["perf/event_loop_blocked_time"] == 10.5
    assert "perf/event_loop_blocked_time" not in second


def test_a_row_says_what_the_weight_sessions_since_the_step_before_took_and_sent() -> None:
    story = Story()
    story.tell(session(1, 100, 2.0))
    one_step(story, 0, 1.0)
    story.tell(session(2, 40, 0.25))  # failed in the middle
    story.tell(session(2, 100, 0.5))
    one_step(story, 1, 1.0)
    one_step(story, 2, 1.0)
    names = ("perf/update_weights_session_time", "perf/update_weights_wire_bytes")
    said = [[row.get(name) for name in names] for row in story.rows()]
    assert said == [[2.0, 100], [0.75, 140], [None, None]]


def test_an_evaluation_joins_the_row_of_its_step() -> None:
    story = Story()
    story.tell(EvalIssued(incarnation=1, step=0, version=1, sets=(EvalSetSize(set="held-out", num_items=8),)))
    story.tell(EvalEnded(incarnation=1, step=0, version=1, metrics={"eval/held-out": 0.125}), after_s=1.0)
    one_step(story, 0, 0.5, 0.5)
    metrics = {"eval/held-out": 0.75, "eval/held-out-pass@1": 0.7, "eval/held-out-truncated_ratio": 0.0}
    story.tell(EvalEnded(incarnation=1, step=1, version=2, metrics=metrics))
    one_step(story, 1, 0.5, 0.5)
    rows = story.rows()
    assert [row["step"] for row in rows] == [0, 1, 1, 2]
    del rows[1]  # the row of step 1 before its evaluation
    assert rows[0]["eval/held-out"] == 0.125
    assert rows[1]["eval/held-out"] == 0.75
    assert rows[1]["eval/step"] == 1
    assert "eval/held-out" not in rows[2]
    assert story.report.result(story.now).eval_last == 0.75
    assert "evaluation after step 1 (weights v2): held-out 0.750" in story.lines()


def test_an_evaluation_that_newer_weights_ended_says_so() -> None:
    story = Story()
    story.tell(WeightsLost(version=1, newer=2, instance="rollout"))
    metrics = {"eval/held-out": 0.75, "eval/held-out-newer_weights_ratio": 0.5}
    story.tell(EvalEnded(incarnation=1, step=0, version=1, metrics=metrics, newest_version=2))
    assert story.lines() == [
        "no engine of rollout holds weights v1 any more: their evaluation goes on with v2",
        "evaluation after step 0 (begun with weights v1, ended with v2): held-out 0.750",
    ]
    (row,) = story.rows()
    assert row["eval/held-out-newer_weights_ratio"] == 0.5
    assert story.report.evals == {"held-out": 0.75}


def test_an_evaluation_without_some_or_all_grades_says_so() -> None:
    story = Story()
    metrics = {"eval/a": 0.75, "eval/a-ungraded_ratio": 0.125, "eval/b-ungraded_ratio": 1.0}
    story.tell(EvalEnded(incarnation=1, step=0, version=1, metrics=metrics))
    line = "evaluation after step 0 (weights v1): a 0.750 (12% without a grade), b: no sample has a grade"
    assert story.lines() == [line]
    assert story.report.evals == {"a": 0.75}


def test_an_evaluation_function_that_left_prompts_out_or_failed_says_so() -> None:
    story = Story()
    metrics = {"eval/a": 0.75, "eval/a-not_asked": 12.0}
    story.tell(EvalEnded(incarnation=1, step=0, version=1, metrics=metrics))
    story.tell(EvalEnded(incarnation=1, step=1, version=2, metrics={}, failed={"a": "eval.0.custom_evaluation: no"}))
    assert story.lines() == [
        "evaluation after step 0 (weights v1): a 0.750, a: 12 prompts not asked",
        "evaluation set a: eval.0.custom_evaluation: no",
        "evaluation after step 1 (weights v2): no metrics",
    ]
    assert story.report.evals == {"a": 0.75}


def test_an_evaluation_that_ends_after_the_next_step_still_joins_the_row_of_its_own() -> None:
    story = Story()
    for step in (0, 2):
        one_step(story, step, 0.0, 1.0)
        sets = (EvalSetSize(set="s", num_items=1),)
        story.tell(EvalIssued(incarnation=1, step=step + 1, version=2, sets=sets))
        one_step(story, step + 1, 0.0, 1.0)
        story.tell(EvalEnded(incarnation=1, step=step + 1, version=2, metrics={"eval/s": 0.25}))
        (row,) = [row for row in story.rows() if row["step"] == step + 1 and "eval/s" in row]
        assert (row["eval/step"], row["rollout/raw_reward"], row["train/loss"]) == (step + 1, 0.5, 0.5)


def test_an_evaluation_before_the_first_step_may_end_after_it() -> None:
    story = Story()
    story.tell(EvalIssued(incarnation=1, step=0, version=1, sets=(EvalSetSize(set="s", num_items=1),)))
    one_step(story, 0, 0.0, 1.0)
    story.tell(EvalEnded(incarnation=1, step=0, version=1, metrics={"eval/s": 0.25}))
    one_step(story, 1, 0.0, 1.0)
    assert [(row["step"], row.get("eval/s")) for row in story.rows()] == [(1, None), (0, 0.25), (2, None)]


def test_what_engines_said_of_the_requests_of_a_batch_becomes_metrics() -> None:
    story = Story()
    story.issue(0, 1)
    scored = SampleSummary(index=0, status=SampleStatus.COMPLETED, response_len=4, reward=1.0)
    said = (
        EngineNumbers(
            num_requests=2, prompt_tokens=30, cached_tokens=10, num_timed=2, queue_time_s=3, max_queue_time_s=2
        ),
        EngineNumbers(
            num_requests=1,
            prompt_tokens=10,
            num_retractions=1,
            num_timed=1,
            queue_time_s=3,
            max_queue_time_s=3,
            draft_tokens=8,
            accepted_draft_tokens=6,
            verify_steps=4,
            verified_tokens=10,
        ),
    )
    for group, numbers in enumerate(said):
        event = GroupCompleted(
            group_id=group, attempt=0, lease="x", round=0, instance="i", data="d", samples=(scored,), engine=numbers
        )
        story.completed[group] = story.tell(event)
        story.judge(group, story.completed[group])
    story.train(0, 0, 1)
    (row,) = story.rows()
    assert row["rollout/prefix_cache_hit_rate"] == 0.25
    assert row["rollout/avg_cached_tokens_per_sample"] == 5
    assert row["rollout/num_retractions"] == 1
    assert row["rollout/spec_accept_rate"] == 0.75
    assert row["rollout/spec_accept_length"] == 2.5
    assert (row["perf/request/queue_time/mean"], row["perf/request/queue_time/max"]) == (2, 3)


def test_metrics_have_one_row_per_step_over_restarts_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.put({"step": 1, "a": 1})
    first.put({"step": 2, "a": 2})
    with path.open("ab") as file:
        file.write(b'{"step": 3, "a"')  # cut off by a crash
    second = MetricsFile(path)
    second.put({"step": 1, "a": 1})
    second.put({"step": 2, "a": 2, "eval/x": 0.5})  # the evaluation ended after the crash
    second.put({"step": 3, "a": 3})
    rows = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    assert rows == [{"step": 1, "a": 1}, {"step": 2, "a": 2, "eval/x": 0.5}, {"step": 3, "a": 3}]


def test_a_number_of_turns_that_only_a_later_sample_names_is_kept() -> None:
    story = Story()
    story.issue(0)
    samples = tuple(
        SampleSummary(index=index, status=SampleStatus.COMPLETED, response_len=3, reward=1.0, metadata=metadata)
        for index, metadata in enumerate([{}, {"round_number": 4}, {"round_number": 2}, {"round_number": "?"}])
    )
    event = GroupCompleted(group_id=0, attempt=0, lease="x", round=0, instance="rollout.0", data="d", samples=samples)
    story.completed[0] = story.tell(decode(*encode(event)))  # as it comes from the wire
    story.judge(0, story.completed[0])
    story.train(0, 0)
    (row,) = story.rows()
    assert [row[f"multi_turn/round_number_{name}"] for name in ("mean", "max", "min")] == [3.0, 4.0, 2.0]


def test_a_metric_that_is_no_number_is_in_the_line_the_row_and_the_file(tmp_path: Path) -> None:
    story = Story()
    story.issue(0)
    story.judge(0, story.complete(0, 1.0))
    story.train(0, 0, train__loss=math.nan, train__kl=-math.inf, train__grad_norm=2.0)
    assert story.lines()[-1].endswith(" | not finite: train/loss nan, train/kl -inf")
    (done,) = [notice for notice in story.notices if isinstance(notice, RowDone)]
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).put(done.row)
    MetricsFile(path)  # of the next start, which reads it
    row = msgspec.json.decode(path.read_bytes())
    assert (row["train/loss"], row["train/kl"], row["train/grad_norm"]) == ("NaN", "-Infinity", 2.0)
    assert math.isnan(float(row["train/loss"]))


def test_a_step_has_its_row_at_once_and_the_file_has_one_of_each_step(tmp_path: Path) -> None:
    story, path = Story(num_steps=2), tmp_path / "metrics.jsonl"
    one_step(story, 0, 0.5)
    assert [row["step"] for row in story.rows()] == [1]
    story.tell(EvalEnded(incarnation=1, step=1, version=2, metrics={"eval/s": 0.75}))
    one_step(story, 1, 0.5)
    for _ in range(2):  # a start after kill -9 writes the rows of the log again
        file = MetricsFile(path)
        for row in story.rows():
            file.put(row)
    found = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    assert [(row["step"], row.get("eval/s")) for row in found] == [(1, 0.75), (2, None)]


def test_a_loss_on_demonstrations_that_is_no_number_is_the_steps_loss() -> None:
    story = Story()
    story.issue(0)
    story.judge(0, story.complete(0, 0.0))
    story.train(0, 0, train__sft_loss=math.nan)
    assert "| loss nan |" in story.lines()[-1]
    assert "?" in "\n".join(story.report.summary(story.now))


def test_an_evaluation_whose_mean_is_no_number_is_told() -> None:
    story = Story()
    story.tell(EvalEnded(incarnation=1, step=0, version=1, metrics={"eval/math": math.inf}))
    assert story.lines()[-1] == "evaluation after step 0 (weights v1): math inf"
    (row,) = [notice.row for notice in story.notices if isinstance(notice, RowDone)]
    assert row["eval/math"] == math.inf


@given(st.lists(st.floats(), min_size=1))
@example([1.7976931348623157e308, -9.9792015476736e291])  # their difference is infinite
def test_any_numbers_have_a_mean_and_a_curve(values: list[float]) -> None:
    assert isinstance(mean_of(values), float)
    assert len(sparkline(values)) == min(40, len(values))
