"""When the same weights are published once more, by hand."""

from dataclasses import dataclass

from actors.trainer.republishing import Republishing


@dataclass
class Told:
    """What engines said."""

    confirmed: int = 0
    refused: int = 0
    refused_again: int = 0
    unusable: int = 0


def after(*announced: tuple[int, bool, bool]) -> Republishing:
    """Version, whether again, whether whole."""
    republishing = Republishing()
    for version, again, is_whole in announced:
        republishing.announced(version, again=again, is_whole=is_whole)
    return republishing


def test_nothing_is_published_again_while_nobody_refuses_or_none_was_announced() -> None:
    assert not Republishing().is_wanted(Told(refused=7, refused_again=7, unusable=7))
    assert not after((7, False, True)).is_wanted(Told(refused=6, refused_again=6, unusable=6))


def test_files_that_are_not_what_was_announced_are_written_again_at_once_and_repeatedly() -> None:
    assert after((7, False, True)).is_wanted(Told(refused=7, unusable=7))
    assert after((7, False, True), (8, True, True)).is_wanted(Told(refused=8, unusable=8))
    assert after((7, False, True)).is_wanted(Told(confirmed=7, refused=7, unusable=7))  # by another engine


def test_changes_that_are_refused_go_whole() -> None:
    assert after((6, False, True), (7, False, False)).is_wanted(Told(confirmed=6, refused=7))
    assert not after((6, False, True), (7, False, False), (8, True, True)).is_wanted(Told(refused=8))


def test_right_files_that_every_engine_refuses_for_long_are_written_again_once() -> None:
    assert not after((7, False, True)).is_wanted(Told(refused=7))
    assert after((7, False, True)).is_wanted(Told(refused=7, refused_again=7))
    assert not after((7, False, True)).is_wanted(Told(confirmed=7, refused=7, refused_again=7))
    assert not after((7, False, True), (8, True, True)).is_wanted(Told(refused=8, refused_again=8))


def test_it_is_told_whose_weights_they_are_again() -> None:
    republishing = after((6, False, True), (7, False, True), (8, True, True), (9, True, True))
    assert (republishing.first, republishing.times) == (7, 2)
    assert (after((7, False, True), (8, True, True), (9, False, True)).first) == 9


def test_changes_are_not_made_after_refused_ones_or_against_damaged_files() -> None:
    told = after((6, False, True), (7, False, False))
    assert told.must_be_whole(Told(refused=7))
    assert told.must_be_whole(Told(refused=6, unusable=6))
    assert not told.must_be_whole(Told(refused=6, unusable=5))
