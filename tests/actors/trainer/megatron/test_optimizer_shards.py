"""Each rank saves and loads its own part of the distributed optimizer's state, and no more."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.megatron.optimizer_shards import Box, boxes
from runtime.node.supervisor.ports import free_port
from runtime.settings.devices import HIDDEN

RANKS = 2
ROOT = Path(__file__).parents[4]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_cover_a_stretch_in_its_order(shape: list[int], data: st.DataObject) -> None:
    numbers = np.arange(math.prod(shape))
    begin = data.draw(st.integers(0, len(numbers)))
    end = data.draw(st.integers(begin, len(numbers)))
    found = list(boxes(shape, begin, end))
    whole = numbers.reshape(shape)
    covered = [whole[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))] for box in found]
    assert np.array_equal(np.concatenate([np.empty(0, int), *(part.ravel() for part in covered)]), numbers[begin:end])
    assert len(found) <= 2 * len(shape) - 1


def test_a_stretch_of_a_matrix_is_the_end_of_a_row_whole_rows_and_the_begin_of_one() -> None:
    assert list(boxes((4, 10), 7, 33)) == [Box((0, 7), (1, 3)), Box((1, 0), (2, 10)), Box((3, 0), (1, 3))]
    assert list(boxes((4, 10), 13, 17)) == [Box((1, 3), (1, 4))]
    assert list(boxes((4, 10), 10, 10)) == []


@pytest.mark.slow
def test_a_rank_needs_memory_for_its_share_of_a_checkpoint_alone(tmp_path: Path) -> None:
    program = "tests.actors.trainer.megatron.saving_peaks"
    command = [sys.executable, "-m", program, str(tmp_path)]
    environment = os.environ | HIDDEN | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    port = str(free_port())
    ranks = [
        subprocess.Popen([*command, str(rank), str(RANKS), port], env=environment, cwd=ROOT, stdout=subprocess.PIPE)
        for rank in range(RANKS)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    share = found[0]["parameters"] * 16 / RANKS  # weights, main parameters and two moments, all float32
    for rank in found:
        assert rank["written"] == pytest.approx(share, rel=0.1), found
        assert rank["save"] <= 1.5 * share, found  # the copy of what it writes; 3.7 where all was gathered
        assert rank["load"] <= 0.6 * share, found  # what is read at a time; 3.0 where all was gathered
