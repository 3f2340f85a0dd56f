"""The index of dumped groups: order, search, bounds, and what it does with damaged and replaced files."""

import os
from pathlib import Path

import pytest

from actors.observer.sample_index import Found, SampleIndex, Sort
from messages import Outcome
from runtime.data.columns import DumpError
from runtime.data.dump_files import columns_path, lines_path, write_pair
from runtime.data.dumps import Fate
from tests.build.dumps import dumped_group

LONG_S = 60.0  # more time than a test needs


def write(directory: Path, step: int, *groups: int) -> None:
    write_pair(directory, step, [dumped_group(group_id) for group_id in groups], (step, 0))


def ids(found: Found) -> list[int]:
    return [group.group_id for group in found.groups]


@pytest.fixture
def index(tmp_path: Path) -> SampleIndex:
    """Steps 0 and 1: (rewards, tokens) of groups 1 to 4."""
    write_pair(
        tmp_path,
        0,
        [
            dumped_group(1, (1.0, 0.0), texts=("Yes", "no")),
            dumped_group(2, (None,), fate=Fate(verdict=Outcome.DROP, verdict_reason="zero std")),
        ],
        (1, 0),
    )
    write_pair(
        tmp_path,
        1,
        [dumped_group(3, (0.25, 0.25, 0.25), prompt="PROMPT"), dumped_group(4, (1.0,), label={"a": "ZE"})],
        (2, 0),
    )
    index = SampleIndex(tmp_path)
    index.advance(LONG_S)
    return index


def test_numbers_of_a_group_by_hand(index: SampleIndex) -> None:
    group = index.group(1)
    assert group is not None
    assert (group.step, group.rewards, group.lengths, group.versions) == (0, (1.0, 0.0), (1, 2), (1, 2))
    assert (group.mean_reward, group.spread, group.mean_length, group.outcome) == (0.5, 1.0, 1.5, "in batch")
    dropped = index.group(2, step=0)
    assert dropped is not None
    assert (dropped.mean_reward, dropped.outcome, dropped.reason) == (None, "dropped", "zero std")
    assert index.group(2, step=1) is None


@pytest.mark.parametrize(
    ("sort", "expected"),
    [("step", [4, 3, 2, 1]), ("reward", [4, 1, 3, 2]), ("spread", [1, 4, 3, 2]), ("length", [3, 1, 4, 2])],
)
def test_groups_are_sorted_and_those_without_a_number_come_last(
    index: SampleIndex, sort: Sort, expected: list[int]
) -> None:
    assert ids(index.find(sort=sort, limit=9, budget_s=LONG_S)) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("YES", [1]), ("prompt", [3]), ("ze", [4]), ("say", [4, 2, 1]), ("%", [])]
)
def test_a_search_reads_prompts_labels_and_responses(index: SampleIndex, text: str, expected: list[int]) -> None:
    assert ids(index.find(text, limit=9, budget_s=LONG_S)) == expected


def test_a_search_goes_on_where_it_paused(index: SampleIndex) -> None:
    first = index.find("say", limit=9, budget_s=0.0)
    assert (ids(first), first.next, first.total) == ([4], 1, 4)
    found, offset = ids(first), first.next
    while offset is not None:
        part = index.find("say", offset=offset, limit=1, budget_s=0.0)
        found, offset = found + ids(part), part.next
    assert found == [4, 2, 1]
    assert index.find(offset=99, limit=1, budget_s=0.0) == Found([], None, 4)


def test_samples_and_tokens_of_one_group_are_read_from_the_middle_of_the_files(index: SampleIndex) -> None:
    group = index.group(4)
    assert group is not None
    (sample,) = index.samples(group)
    assert (sample.label, sample.response) == ({"a": "ZE"}, "a")
    (segment,) = index.tokens(group, 0, sample)
    assert (segment.prompt_ids.tolist(), segment.response_ids.tolist()) == ([5], [10])


def test_damaged_steps_are_named_and_skipped_and_read_again_when_they_change(tmp_path: Path) -> None:
    for step in range(4):
        write(tmp_path, step, step)
    lines_path(tmp_path, 0).write_bytes(b'{"group_id": "x"}\n')
    columns_path(tmp_path, 1).unlink()
    lines_path(tmp_path, 2).write_bytes(b"")
    write(tmp_path, 4, 4)
    content = bytearray(columns_path(tmp_path, 4).read_bytes())
    content[content.find(b"PK\x01\x02") + 6] = 100  # the version of zip that is needed
    columns_path(tmp_path, 4).write_bytes(content)
    os.mkfifo(tmp_path / "rollout_7.jsonl")  # opening it would wait for ever
    index = SampleIndex(tmp_path)
    index.advance(LONG_S)
    assert [group.group_id for group in index.groups()] == [3]
    assert [problem.removeprefix(str(tmp_path)) for _, problem in sorted(index.problems.items())] == [
        "/rollout_0.jsonl:1: Expected `int`, got `str` - at `$.group_id`",
        "/rollout_1.npz: no such file",
        "/rollout_2.jsonl: is empty",
        "/rollout_4.npz: cannot be read: zip file version 10.0",
    ]
    write(tmp_path, 0, 9)
    index.advance(LONG_S)
    assert [group.group_id for group in index.groups()] == [3, 9]
    assert sorted(index.problems) == [1, 2, 4]


def test_files_that_a_run_replaces_or_adds_are_noticed(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    index = SampleIndex(tmp_path)
    index.advance(LONG_S)
    old = index.group(1)
    assert old is not None
    write(tmp_path, 0, 22)
    write(tmp_path, 1, 5)
    with pytest.raises(DumpError, match=r"was replaced while group 1 was read"):
        index.samples(old)
    assert ids(index.find("say", limit=9, budget_s=LONG_S)) == []
    index.advance(LONG_S)
    assert [group.group_id for group in index.groups()] == [5, 22]


def test_newest_steps_are_read_first_and_a_full_index_leaves_out_the_oldest(tmp_path: Path) -> None:
    for step in range(4):
        write(tmp_path, step, 2 * step, 2 * step + 1)
    index = SampleIndex(tmp_path, kept_groups=4)
    index.advance(0.0)
    assert ([group.group_id for group in index.groups()], index.num_unread) == ([6, 7], 3)
    index.advance(LONG_S)
    assert ([group.group_id for group in index.groups()], index.num_unread, index.num_left_out) == ([6, 7, 4, 5], 0, 2)
    write(tmp_path, 4, 8, 9)
    index.advance(LONG_S)
    assert [group.step for group in index.groups()] == [4, 4, 3, 3]


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="nowhere: cannot be read: No such file"):
        SampleIndex(tmp_path / "nowhere").advance(LONG_S)
