"""Skipped optimizer steps: how many are too many, in a row and as a share of the last ones."""

from actors.trainer.step.skips import Skips, too_many
from runtime.settings.tables.training import TrainConfig


def after(*skipped: bool, train: TrainConfig) -> Skips:
    skips = Skips()
    for each in skipped:
        skips = skips.then(skipped=each, window=train.skip_window)
    return skips


def test_one_more_in_a_row_than_allowed_is_too_many() -> None:
    train = TrainConfig(max_skipped=2)
    assert too_many(after(True, True, train=train), train) == ""
    assert too_many(after(True, True, True, train=train), train) == "3 in a row; train.max_skipped = 2 are allowed"
    assert too_many(after(True, True, False, True, train=train), train) == ""


def test_more_than_the_share_of_the_window_is_too_many_however_many_steps_there_were() -> None:
    train = TrainConfig(skip_window=20, max_skipped_share=0.25)
    lost_half = (False, True) * 6
    assert too_many(after(*lost_half[:-2], train=train), train) == ""
    assert too_many(after(*lost_half, train=train), train).startswith("6 of the last 20 optimizer steps")


def test_steps_before_the_window_are_forgotten() -> None:
    train = TrainConfig(skip_window=4, max_skipped_share=0.25)
    skips = after(True, False, False, False, True, train=train)
    assert skips.recent == (False, False, False, True)
    assert too_many(skips, train) == ""


def test_a_share_is_counted_in_whole_steps_without_a_rounding_error() -> None:
    train = TrainConfig(skip_window=100, max_skipped_share=0.29)  # 0.29 * 100 = 28.999999999999996
    assert too_many(after(*(True, False) * 29, train=train), train) == ""
    assert "allows 29" in too_many(after(*(True, False) * 30, train=train), train)
