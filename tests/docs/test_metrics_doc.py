"""docs/reference/metrics.md has a row for every metric that is written, and none for another."""

from tests.support.metric_names import documented, undocumented, written


def test_every_metric_that_is_written_has_a_row_that_says_by_whom() -> None:
    assert sorted(written() - documented()) == []


def test_every_row_is_of_a_metric_that_is_written() -> None:
    assert sorted(documented() - written()) == []
    assert len({name for _, name in written()}) > 55


def test_a_name_that_has_no_row_is_found() -> None:
    row = {"step": 1, "eval/a-b_c": 0.5, "eval/a-b_c-pass@4": 0.5, "rollout/dynamic_filter/drop_zero_std_-0.5": 1}
    assert undocumented([row, {"groups/pooled": 0, "train/kl_lost": 0.1}]) == {"train/kl_lost"}
