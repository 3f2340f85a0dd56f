"""Members of a weight session, their places, and how it ended."""

from actors.trainer.weights.members import Membership, Outcome, joined
from messages import WeightSyncAnswered, WeightSyncMember


def member(engine: str, num_ranks: int = 1, life: str = "a", *, is_compared: bool = False) -> WeightSyncMember:
    return WeightSyncMember(engine=engine, key=f"{engine}.{life}", num_ranks=num_ranks, is_compared=is_compared)


def given(*members: WeightSyncMember) -> WeightSyncAnswered:
    return WeightSyncAnswered(members=members)


TWO = Membership.of({"rollout.1": given(member("c", 2)), "rollout.0": given(member("a"), member("b", 4))})


def test_the_order_of_members_does_not_depend_on_who_answered_first() -> None:
    assert TWO.engines == ("a", "b", "c")
    assert TWO.instances == ("rollout.0", "rollout.1")
    other = Membership.of({"rollout.0": given(member("a"), member("b", 4)), "rollout.1": given(member("c", 2))})
    assert other == TWO


def test_the_trainer_is_rank_0_and_each_engine_has_its_ranks_behind_those_before_it() -> None:
    assert TWO.offsets == {"a": 1, "b": 2, "c": 6}
    assert TWO.world_size == 8


def test_a_restart_of_an_engine_is_another_epoch() -> None:
    again = Membership.of(
        {"rollout.0": given(member("a", life="b"), member("b", 4)), "rollout.1": given(member("c", 2))}
    )
    assert again.epoch != TWO.epoch
    assert again.engines == TWO.engines


def test_fingerprints_are_wanted_where_one_member_is_compared_with_others() -> None:
    assert not TWO.is_compared
    assert Membership.of({"rollout.0": given(member("a"), member("b", is_compared=True))}).is_compared


def test_one_that_refused_in_the_end_is_out_and_the_others_hold() -> None:
    outcome = Outcome(TWO, failed={"b": "its probe differs"}, is_finished=True)
    assert outcome.out == {"b": "its probe differs"}
    assert outcome.holds == ("a", "c")


def test_a_rollout_actor_that_is_silent_takes_all_of_its_engines_with_it() -> None:
    outcome = Outcome(TWO, failed={"rollout.0": "no answer"}, is_finished=True)
    assert outcome.out == {"a": "no answer", "b": "no answer"}
    assert outcome.holds == ("c",)


def test_before_the_end_nobody_holds_anything() -> None:
    assert set(Outcome(TWO, failed={"c": "it was killed"}).out) == {"a", "b", "c"}
    assert Outcome(TWO, failed={"": "bucket 3: connection closed"}, is_finished=True).holds == ()
    assert Outcome(TWO).holds == ()


def test_of_several_ranks_the_first_reason_counts() -> None:
    assert joined([{"a": "x"}, {"a": "y", "b": "z"}, {}]) == {"a": "x", "b": "z"}
