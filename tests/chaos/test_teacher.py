"""kill -9 of a teacher's engine and of those that ask it: the run finishes, and every trained sample has its column."""

from pathlib import Path

import pytest

from runtime.data.dump_files import read_pair, steps_in
from tests.chaos.audit import killed_in_turn
from tests.chaos.harness import Run, moments_of
from tests.support.distilling import write_teacher

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]


@pytest.mark.nightly  # CI kills an engine of a second pool and its callers in test_pools.py
async def test_the_engine_of_the_teacher_is_killed_and_its_callers_too(tmp_path: Path) -> None:
    teacher, moments = write_teacher(tmp_path / "teacher"), moments_of("teacher")
    overrides = (
        "algorithm.opd.type=sglang",
        "algorithm.opd.distillation.type=forward",
        "algorithm.opd.distillation.coef=1",
        "algorithm.opd.distillation.topk=3",
        f'engines.teacher={{kind = "tiny", hf_checkpoint = "{teacher}"}}',
        "run.dump_details=dump",
    )
    run = Run(tmp_path, num_steps=9, overrides=overrides)
    names = ["engine.teacher.0", "rollout", "engine.teacher.0"]
    books = await killed_in_turn(run, names, moments)
    assert books.failed == 0
    trained = [row for row in run.rows() if "train/opd_reverse_kl" in row]
    assert len(trained) == run.num_steps
    dumped = [group for step in steps_in(tmp_path / "dump") for group in read_pair(tmp_path / "dump", step)]
    for group in dumped:
        for own, columns in zip(group.segments, group.columns, strict=True):
            num_tokens = sum(len(segment.response_ids) for segment in own)
            assert len(columns["teacher_log_probs"]) == num_tokens
            assert len(columns["teacher_topk_ids"]) == len(columns["teacher_topk_log_probs"]) == 3 * num_tokens
