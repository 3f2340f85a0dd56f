"""Which groups are taken first, and what becomes of a function that answers nonsense."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.buffer.deciding.selecting import Selector, answering
from actors.buffer.deciding.selection import (
    Chosen,
    Kind,
    Selection,
    SelectionError,
    by_reward,
    chosen_of,
    fifo,
    first_come,
    newest,
    sort_by_reward_std,
    summary_of,
)
from messages import SelectionFailed
from runtime.ledger.fold import Group, Stage
from tests.build.topology import topology_with


def group(group_id: int, *rewards: float | None, indices: tuple[int, ...] = ()) -> Group:
    return Group(
        group_id=group_id,
        attempt=0,
        prompt=group_id,
        round=0,
        min_version=1,
        stage=Stage.READY,
        payload_seq=1,
        indices=indices or tuple(range(len(rewards))),
        rewards=rewards,
        response_lens=(3,) * len(rewards),
    )


def test_groups_whose_rewards_differ_most_come_first_and_equal_ones_as_they_came() -> None:
    groups = [group(5, 1.0, 1.0), group(2, 0.0, 1.0), group(9, 0.0, 3.0), group(1, 1.0, 0.0), group(3, 1.0)]
    assert sort_by_reward_std(groups) == [9, 2, 1, 5, 3]


def test_fan_out_siblings_vote_together_and_samples_without_reward_do_not() -> None:
    siblings = group(1, 0.0, 2.0, 1.0, indices=(0, 0, 1))  # means 1 and 1
    assert sort_by_reward_std([siblings, group(2, 0.0, None, 0.5), group(3, None, None)]) == [2, 1, 3]


def test_orders_of_the_pool() -> None:
    pool = [group(4, 0.2, None), group(7), group(1, 0.5, 0.1), group(2, 0.9)]
    assert fifo(pool) == [1, 2, 4, 7]
    assert newest(pool) == [7, 4, 2, 1]
    assert by_reward(pool) == [2, 1, 4, 7]  # means 0.9, 0.3, 0.2, unknown


def selection(kind: Kind, count: int, *group_ids: int) -> Selection:
    return Selection(kind=kind, groups=tuple(summary_of(group(number, 0.5)) for number in group_ids), count=count)


POOL = selection("buffer_filter", 2, 3, 4, 5)
KEPT = selection("over_sampling_filter", 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("asked", "answer", "taken"),
    [
        (POOL, [5, 3], (5, 3)),
        (POOL, (), ()),
        (POOL, [POOL.groups[2]], (5,)),
        (POOL, iter([4]), (4,)),
        (KEPT, [5, 4, 3], (5, 4, 3)),
        (KEPT, (4, 5), (4, 5)),
    ],
)
def test_groups_or_their_ids_are_an_answer(asked: Selection, answer: Any, taken: tuple[int, ...]) -> None:
    assert chosen_of(asked, answer) == Chosen(kind=asked.kind, group_ids=taken)


@pytest.mark.parametrize(
    ("asked", "answer", "said"),
    [
        (POOL, None, "expected groups or their ids"),
        (POOL, "345", "expected groups or their ids"),
        (POOL, [3, 4, 5], "at most 2 are allowed"),
        (POOL, [3, 3], "twice"),
        (POOL, [6], "is not the id of a group"),
        (POOL, [True], "is not the id of a group"),
        (POOL, ["3"], "is not the id of a group"),
        (KEPT, [3], "at least 2 are needed"),
    ],
)
def test_nonsense_is_no_answer(asked: Selection, answer: Any, said: str) -> None:
    with pytest.raises(SelectionError, match=said):
        chosen_of(asked, answer)


@given(st.lists(st.one_of(st.integers(0, 9), st.none(), st.text(max_size=2))), st.integers(0, 5))
def test_whatever_is_answered_no_group_is_invented_or_taken_twice(answer: list[Any], count: int) -> None:
    asked = selection("buffer_filter", count, 3, 4, 5)
    try:
        chosen = chosen_of(asked, answer)
    except SelectionError:
        chosen = first_come(asked)
    assert len(chosen.group_ids) == len(set(chosen.group_ids)) <= count
    assert {3, 4, 5}.issuperset(chosen.group_ids)


FUNCTIONS = """
import pathlib
import itertools
import time
def longest(groups, n): return sorted(groups, key=lambda group: -group.group_id)[:n]
def raises(groups, n): raise RuntimeError("no")
def doubles(groups, n): return [groups[0], groups[0]]
def hangs_once(groups, n):
    mark = pathlib.Path(__file__).with_name("called")
    if not mark.exists():
        mark.touch()
        time.sleep(60)
    return []
def empties(groups, n): groups.clear(); return []
def lazily_hangs(groups, n): return (time.sleep(each) for each in [60])
def endless(groups, n): return itertools.repeat(groups[0])
"""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "taken", "failed"),
    [
        ("longest", (5, 4), 0),
        ("raises", (3, 4), 1),
        ("lazily_hangs", (3, 4), 1),
    ],
)
async def test_a_users_function_chooses_or_the_first_come_first(
    tmp_path: Path, name: str, taken: tuple[int, ...], failed: int
) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    told: list[SelectionFailed] = []

    async def report(event: SelectionFailed) -> None:
        told.append(event)

    async def show(key: str, trace: str) -> None:
        shown.extend((key, line) for line in trace.splitlines()[-1:])

    topology, shown = topology_with(rollout={"buffer_filter": f"{tmp_path}/mine.py:{name}"}), list[tuple[str, str]]()
    selector = Selector(topology, report, show, timeout_s=0.5 if name == "lazily_hangs" else 50.0)
    await selector.start()
    try:
        assert await selector.choose(POOL) == Chosen(kind="buffer_filter", group_ids=taken)
    finally:
        await selector.close()
    assert [(event.kind, event.num_groups) for event in told] == [("buffer_filter", len(POOL.groups))] * failed
    assert shown == [("rollout.buffer_filter", "RuntimeError: no")] * (name == "raises")


def test_an_answer_is_read_where_the_function_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)

    def answer(name: str) -> Chosen:
        answers = answering("rollout.buffer_filter", f"{tmp_path}/mine.py:{name}")(msgspec.msgpack.encode(POOL))
        return msgspec.msgpack.decode(answers, type=Chosen)

    assert answer("longest").group_ids == (5, 4)
    assert answer("empties").group_ids == ()
    for name in ("doubles", "endless"):
        with pytest.raises(SelectionError, match="returned a group twice"):
            answer(name)


@pytest.mark.anyio
async def test_a_function_that_hangs_costs_its_process_alone(tmp_path: Path) -> None:
    """Another process answers the next call."""
    reasons: list[str] = []

    async def report(event: SelectionFailed) -> None:
        reasons.append(event.reason)

    (tmp_path / "mine.py").write_text(FUNCTIONS)
    topology = topology_with(rollout={"buffer_filter": f"{tmp_path}/mine.py:hangs_once"})
    selector = Selector(topology, report, timeout_s=0.5)
    await selector.start()
    try:
        assert await selector.choose(POOL) == first_come(POOL)
        selector._timeout_s = 50.0  # the next call is not late on a busy machine
        assert await selector.choose(POOL) == Chosen(kind="buffer_filter", group_ids=())
    finally:
        await selector.close()
    assert reasons == ["no answer within 0.5 s"]


@pytest.mark.anyio
async def test_a_function_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    selector = Selector(topology_with(rollout={"buffer_filter": f"{tmp_path}/mine.py:nothing"}))
    with pytest.raises(ValueError, match="there is no 'nothing' in it"):
        await selector.start()


def test_a_name_of_nothing_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="allowed: fifo, newest, by_reward"):
        Selector(topology_with(rollout={"buffer_filter": "lifo"}))
