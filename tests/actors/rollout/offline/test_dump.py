"""Groups of a dump as answers: in the dump's order, under the names that are asked for."""

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.rollout.offline.demonstrations import Demonstrations
from actors.rollout.offline.dump import Dumped
from messages import Int32Array, Prompt, RolloutRequested, SampleStatus, SamplingParams, UInt8Array
from runtime.data.columns import DumpError
from runtime.data.dump_files import columns_path, lines_path, write_pair
from runtime.data.dumped_run import DumpedGroups, fitted
from runtime.settings.reading.config import TopologyError
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.runtime.data.test_dumps import example


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Five groups over three steps; step 10 comes after step 2, and files are read by number, not by name."""
    for step, ids in ((0, (4, 1)), (2, (5,)), (10, (3, 7))):
        write_pair(tmp_path, step, [example(group_id, step=step) for group_id in ids], (step + 1, 0))
    return tmp_path


def task(group_id: int, attempt: int = 0) -> RolloutRequested:
    prompt = Prompt(data="other", row=9, text="other", prompt_ids=Int32Array([1]), label="other")
    return RolloutRequested(
        group_id=group_id,
        attempt=attempt,
        round=0,
        min_version=1,
        prompt=prompt,
        num_samples=2,
        sampling=SamplingParams(max_new_tokens=8),
    )


def test_groups_come_by_step_then_by_group(dump: Path) -> None:
    groups = DumpedGroups(dump)
    assert [group.group_id for group in groups] == [1, 4, 5, 3, 7]
    assert [groups.group(position).group_id for position in (4, 0, 2, 3, 1)] == [7, 1, 5, 3, 4]
    assert (len(groups), groups.sizes, groups.num_kept) == (5, {2}, 5)
    with pytest.raises(IndexError, match="has 5 groups"):
        groups.group(5)


def test_the_nth_task_gets_the_nth_group_under_its_own_name(dump: Path) -> None:
    source = Dumped(dump)
    samples = source.answer(task(2, attempt=3))
    keys = {(s.sample.group_id, s.sample.attempt, s.sample.index) for sample in samples for s in sample.segments}
    assert keys == {(2, 3, 0), (2, 3, 1)}
    assert [sample.summary.reward for sample in samples] == [1.0, 0.0]
    assert [segment.response_ids.tolist() for segment in samples[1].segments] == [[9], [4, 3]]
    assert [segment.weight_spans[0].version for segment in samples[1].segments] == [1, 2]
    prompt = source.prompt(task(2))
    assert (prompt.text, prompt.label, prompt.data, prompt.metadata) == ("say", "hi", "d", {"a": 1})


def test_a_group_beyond_the_dump_is_refused_with_the_reason(dump: Path) -> None:
    with pytest.raises(ValueError, match="the dump is exhausted"):
        Dumped(dump).answer(task(5))


def test_a_missing_dump_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="no such directory"):
        Dumped(tmp_path / "nowhere")


def on(dump: Path, **tables: Any) -> Topology:
    rollout = {"rollout_batch_size": 2, **tables.pop("rollout", {})}
    return topology_with(run={"name": "t", "only": "trainer", "load": str(dump)}, rollout=rollout, **tables)


def test_a_run_is_not_longer_than_its_dump(dump: Path) -> None:
    assert fitted(on(dump)).train.num_steps == 2
    assert fitted(on(dump, train={"num_steps": 1})).train.num_steps == 1


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"n_samples_per_prompt": 4}, r"n_samples_per_prompt = 4: differs from the dump, whose groups have 2 samples"),
        ({"rollout_batch_size": 6}, r"run\.load = .*: has 5 groups to train on, .* = 6"),
    ],
)
def test_a_dump_that_does_not_fit_is_refused(dump: Path, rollout: dict[str, int], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        fitted(on(dump, rollout=rollout))


def test_columns_that_are_missing_or_of_other_samples_end_the_start(dump: Path) -> None:
    columns = columns_path(dump, 2)
    shutil.copyfile(columns_path(dump, 10), columns)
    with pytest.raises(TopologyError, match=r"rollout_2\.npz: has 4 samples, rollout_2\.jsonl has 2 lines"):
        fitted(on(dump))
    columns.unlink()
    with pytest.raises(TopologyError, match=r"run\.load = .*rollout_2\.npz: no such file"):
        fitted(on(dump))


def spoil(dump: Path, step: int, column: str, place: int, value: float) -> str:
    """Write another value into the columns of a step; the name of their file."""
    path = columns_path(dump, step)
    columns = dict(np.load(path))
    columns[column][place] = value
    np.savez(path, **columns)
    return str(path)


@pytest.mark.parametrize(
    ("column", "place", "value", "said"),
    [
        ("response_ids", 0, 64, r"response: token 0 has id 64 \(allowed: 0 to 63\)"),
        ("response_ids", 0, -1, "response: token 0 has id -1"),
        ("prompt_ids", 1, 10**6, "prompt: token 1 has id 1000000"),
        ("rollout_log_probs", 1, -1e39, "response: token 1 has log-prob -inf"),
        ("rollout_log_probs", 0, 5.0, "response: token 0 has log-prob 5"),
        ("weight_spans", (0, 2), 9, "weight spans cover 9 of 2 tokens"),
    ],
)
def test_a_sample_that_cannot_be_true_fails_alone_with_its_file(
    dump: Path, column: str, place: Any, value: float, said: str
) -> None:
    with np.errstate(over="ignore"):
        file = spoil(dump, 2, column, place, value)
    wrong, right = Dumped(dump, vocab_size=64).answer(task(2))
    assert (wrong.summary.status, wrong.segments, wrong.summary.reward) == (SampleStatus.FAILED, (), 1.0)
    assert re.search(f"^{re.escape(file)}: sample 0 of group 5: {said}", wrong.summary.reason or "")
    assert (right.summary.status, len(right.segments)) == (SampleStatus.COMPLETED, 2)
    assert all(sample.summary.reason is None for sample in Dumped(dump, vocab_size=64).answer(task(0)))


def test_a_sample_with_other_tokens_than_its_line_says_fails(dump: Path) -> None:
    lines = lines_path(dump, 2)
    lines.write_bytes(lines.read_bytes().replace(b'"response_len":2', b'"response_len":9'))
    wrong, right = Dumped(dump).answer(task(2))
    assert "its segments have 4 tokens, but 11 are reported" in (wrong.summary.reason or "")
    assert right.summary.reason is None


def test_a_demonstration_of_other_tokens_than_the_models_is_refused_with_its_row() -> None:
    prompt = msgspec.structs.replace(
        task(0).prompt, response_ids=Int32Array([3, 64]), loss_mask=UInt8Array([1, 1]), response="x"
    )
    asked = msgspec.structs.replace(task(0), prompt=prompt)
    assert len(Demonstrations(65).answer(asked)) == 2
    with pytest.raises(ValueError, match="row 9 of other: response: token 1 has id 64"):
        Demonstrations(64).answer(asked)
