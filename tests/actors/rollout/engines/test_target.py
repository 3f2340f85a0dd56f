"""Which weights are wanted at each point of the log."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.engines.target import TargetWeights
from messages import EvalEnded, EvalIssued, EvalSetSize, Phase, PhaseChanged, TrainerStarted, WeightsAnnounced
from tests.support.rollout import announcement

Event = TrainerStarted | WeightsAnnounced | EvalIssued | EvalEnded


def issued(step: int, version: int) -> EvalIssued:
    return EvalIssued(incarnation=1, step=step, version=version, sets=(EvalSetSize(set="s", num_items=1),))


def ended(step: int, version: int) -> EvalEnded:
    return EvalEnded(incarnation=1, step=step, version=version, metrics={})


def wanted_after(*events: Event) -> list[int]:
    """The version that is wanted after each event; 0: none."""
    wanted, versions = TargetWeights(), list[int]()
    for event in events:
        wanted.fold(event)
        versions.append(wanted.newest.version if wanted.newest else 0)
    return versions


def test_the_newest_announcement_is_wanted_and_a_late_older_one_is_not() -> None:
    assert wanted_after(announcement(1), announcement(3), announcement(2)) == [1, 3, 3]


def test_weights_of_a_trainer_that_was_replaced_are_not_wanted() -> None:
    started, late = TrainerStarted(incarnation=2, step=0), announcement(2)
    of_successor = msgspec.structs.replace(announcement(2), incarnation=2, path="successor")
    assert wanted_after(announcement(1), started, late) == [1, 1, 1]
    wanted = TargetWeights()
    for event in (announcement(1), started, late, of_successor):
        wanted.fold(event)
    assert wanted.newest == of_successor


def test_of_two_trainers_that_started_at_once_the_last_one_counts() -> None:
    first, second = (TrainerStarted(incarnation=2, step=0, start=start) for start in ("a", "b"))
    late = msgspec.structs.replace(announcement(2), incarnation=2, start="a")
    own = msgspec.structs.replace(announcement(2), incarnation=2, start="b")
    phase = PhaseChanged(phase=Phase.GENERATE, step=0, incarnation=2, start="a")
    wanted = TargetWeights()
    for event in (announcement(1), first, second, first, late):
        wanted.fold(event)
    assert (wanted.newest, wanted.is_replaced(phase)) == (announcement(1), True)
    wanted.fold(own)
    assert wanted.newest == own


def test_newer_weights_wait_for_the_end_of_an_evaluation() -> None:
    events = (announcement(1), issued(0, 1), announcement(2), announcement(3), ended(0, 1))
    assert wanted_after(*events) == [1, 1, 1, 1, 3]


def test_an_evaluation_gets_its_own_weights_though_they_were_announced_after_its_issue() -> None:
    assert wanted_after(issued(0, 2), announcement(1), announcement(2), announcement(3)) == [0, 1, 2, 2]


def test_of_two_evaluations_the_one_of_older_weights_holds_them() -> None:
    events = (announcement(1), issued(0, 1), issued(2, 2), announcement(2), announcement(3), ended(0, 1), ended(2, 2))
    assert wanted_after(*events) == [1, 1, 1, 1, 1, 2, 3]


def test_weights_that_engines_hold_already_are_not_taken_back() -> None:
    assert wanted_after(announcement(1), announcement(2), issued(0, 1), announcement(3), ended(0, 1)) == [1, 2, 2, 2, 3]


def test_weights_that_are_given_up_make_way_for_the_newest_which_are_held_on_to_then() -> None:
    wanted = TargetWeights()
    for event in (announcement(1), issued(0, 1), announcement(2), announcement(3)):
        wanted.fold(event)
    assert wanted.holds_back
    wanted.give_up()
    versions = [wanted.newest and wanted.newest.version]
    for event in (announcement(4), ended(0, 1)):
        wanted.fold(event)
        versions.append(wanted.newest and wanted.newest.version)
    assert versions == [3, 3, 4]
    assert not wanted.holds_back


def test_an_evaluation_of_weights_that_are_still_to_come_waits_for_them_whatever_is_given_up() -> None:
    wanted = TargetWeights()
    for event in (announcement(1), issued(0, 1), announcement(2), issued(2, 3)):
        wanted.fold(event)
    wanted.give_up()
    for event in (announcement(3), announcement(4)):
        wanted.fold(event)
    assert wanted.newest == announcement(2)  # of the first, which runs on with them
    wanted.fold(ended(0, 1))
    assert wanted.newest == announcement(3)


@given(st.lists(st.tuples(st.sampled_from(["announce", "issue", "end"]), st.integers(0, 4), st.integers(1, 6))))
def test_what_is_wanted_never_goes_back_and_never_passes_an_evaluation_that_runs(
    drawn: list[tuple[str, int, int]],
) -> None:
    kinds = {"announce": lambda _, version: announcement(version), "issue": issued, "end": ended}
    wanted, running, before = TargetWeights(), dict[int, int](), 0
    for kind, step, version in drawn:
        wanted.fold(kinds[kind](step, version))
        if kind == "issue":
            running[step] = version
        elif kind == "end":
            running.pop(step, None)
        now = wanted.newest.version if wanted.newest else 0
        assert now >= before
        assert now == before or now <= min(running.values(), default=99)
        before = now


def test_the_same_weights_published_again_are_not_held_back() -> None:
    """Else an evaluation would wait for ever for weights of which no engine can read the files."""
    again, twice = announcement(2, again_of=1), announcement(3, again_of=1)
    assert wanted_after(announcement(1), issued(0, 1), again, twice, announcement(4), ended(0, 1)) == [1, 1, 2, 3, 3, 4]
    assert wanted_after(announcement(1), issued(0, 1), announcement(2), announcement(3, again_of=2)) == [1, 1, 1, 1]
