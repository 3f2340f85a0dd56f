"""The failures in a run's summary."""

from runtime.report.summary import REASONS_SHOWN, KeptCheckpoint, checkpoint_lines, most_frequent, with_checkpoint
from tests.runtime.report.story import Story


def test_failures_are_shown_by_count_and_the_rest_is_counted() -> None:
    tally = {f"reason {chr(97 + number)}": number + 1 for number in range(20)}
    lines = most_frequent(tally)
    assert lines[0] == "20 reason t"
    assert lines[REASONS_SHOWN - 1] == "11 reason k"
    assert lines[REASONS_SHOWN:] == ["55 for 10 further reasons"]  # 10 + 9 + ... + 1
    assert most_frequent({"a": 1}) == ["1 a"]


def test_failures_of_one_exception_at_one_line_are_one() -> None:
    at = "(mylib.py:12 in with_tool)"
    tally = {f"rollout.custom_generate: {KeyError(name)!r} {at}": 1 for name in ("x", "it's 7", "z")}
    tally |= {"rollout.custom_generate: KeyError('x') (mylib.py:40 in with_tool)": 1}
    tally |= {"rollout.custom_generate: ValueError('x') (mylib.py:12 in with_tool)": 1}
    assert [line.split(" ")[0] for line in most_frequent(tally)] == ["3", "1", "1"]


def test_ports_and_samples_do_not_make_a_reason_another_one() -> None:
    tally = {f"reward: no answer from 127.0.0.1:{port}": 1 for port in range(4000, 4031)}
    assert most_frequent(tally) == ["31 reward: no answer from 127.0.0.1:4000"]


def test_a_damaged_or_missing_last_checkpoint_says_of_which_step_the_result_is() -> None:
    def lines(kept: KeptCheckpoint | None) -> list[str]:
        return checkpoint_lines(with_checkpoint(Story().report.result(0.0), kept, 8).checkpoint)

    damage = "runs/r/checkpoints/0001/step-00000008 is damaged: common.pt is missing"
    of_seven = "result    of step 7, the newest checkpoint that can be loaded"
    assert lines(None) == []
    assert lines(KeptCheckpoint(step=8)) == lines(KeptCheckpoint(step=9)) == []
    assert lines(KeptCheckpoint(step=7)) == [of_seven]
    assert lines(KeptCheckpoint(step=7, damages=(damage,))) == [of_seven, f"          {damage}"]
    assert lines(KeptCheckpoint(step=8, damages=(damage,)))[1:] == [f"          {damage}"]
    assert lines(KeptCheckpoint(step=0, damages=(damage,))) == [
        "result    no checkpoint is left",
        f"          {damage}",
    ]
