"""The sample that is shown when all scores of a run's beginning are the same."""

from messages import GroupCompleted, SampleStatus, SampleSummary
from runtime.report.report import Report, SampleShown
from tests.runtime.report.story import STARTED, Story, one_step


def typical(story: Story) -> list[SampleShown]:
    return [notice for notice in story.notices if isinstance(notice, SampleShown) and notice.which == "typical"]


def test_after_64_equal_scores_a_sample_is_shown_with_likely_causes() -> None:
    story = Story()
    for group in range(15):
        story.complete(group, *[0.0] * 4, truncated=1)
    story.complete(15, *[0.0] * 3)
    assert not typical(story)
    seq = story.complete(16, 0.0)
    (shown,) = typical(story)
    assert shown.seq == seq
    assert shown.why == ("all of the first 64 graded samples have the same score, 0",)
    assert "15 of 64 responses were cut: rollout.max_response_len is too small" in shown.causes[1]
    assert any("rollout.skip_special_tokens = true" in line for line in shown.causes)
    story.complete(17, *[0.0] * 200)
    assert len(typical(story)) == 1


def test_a_model_with_random_weights_has_ten_steps_to_get_another_score() -> None:
    story = Story(num_steps=20)
    story.report = Report("r", 20, STARTED, random_init=True)
    for step in range(10):
        one_step(story, step, *[0.0] * 64)
        assert not typical(story)
    story.complete(10, 0.0)  # a grader that gives 0 to all is found then
    (shown,) = typical(story)
    assert shown.why == ("all of the first 641 graded samples have the same score, 0",)


def test_a_model_with_random_weights_that_gets_another_score_is_not_warned_of() -> None:
    story = Story(num_steps=20)
    story.report = Report("r", 20, STARTED, random_init=True)
    for step in range(12):
        one_step(story, step, *[0.0] * 63, float(step == 8))
    assert not typical(story)


def test_of_scores_that_differ_once_nothing_is_said_however_equal_they_become() -> None:
    story = Story()
    story.complete(0, 0.0, 1.0)
    story.complete(1, *[1.0] * 200)
    assert not typical(story)


def test_samples_without_a_score_are_not_among_equal_ones() -> None:
    story = Story()
    failed = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=0.0, reason="raised")
    event = GroupCompleted(group_id=0, attempt=0, lease="x", round=0, instance="r", data="d", samples=(failed,) * 100)
    story.tell(event)
    assert not typical(story)


def test_demonstrations_have_no_score_that_could_be_equal_or_shown() -> None:
    story = Story()
    story.report = Report("r", 4, STARTED, graded=False)
    story.complete(0, *[0.0] * 100)
    assert [notice for notice in story.notices if isinstance(notice, SampleShown)] == [
        SampleShown("first", story.seq, graded=False)
    ]
