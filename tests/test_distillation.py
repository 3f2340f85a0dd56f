"""A run follows a teacher in an engine pool, with the log-probs of transformers; its dump trains the same."""

import json
import shutil
from pathlib import Path

import pytest

from runtime.data.dump_files import read_pair, steps_in
from tests.support.distilling import write_teacher
from tests.support.tiny_models import teacher_forced
from tests.test_halves import rows, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 3  # of the run in test_halves


def test_a_run_trains_on_the_log_probs_of_its_teacher_and_on_its_dump_alike(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    follows = ("algorithm.use_opd=true", "algorithm.opd_type=sglang", "model.random_init=true")
    pool = f'engines.teacher={{kind = "tiny", hf_checkpoint = "{teacher}"}}'
    result = start(tmp_path, "opd", overrides=(*follows, pool, "run.dump_details=dump"))
    assert result["groups"]["trained"] == result["groups"]["issued"]
    num_samples = 0
    for step in steps_in(tmp_path / "dump"):
        for group in read_pair(tmp_path / "dump", step):
            assert len(group.columns) == len(group.samples)
            for own, columns in list(zip(group.segments, group.columns, strict=True))[:1]:
                (segment,) = own
                expected = teacher_forced(teacher, segment.prompt_ids.tolist(), segment.response_ids.tolist())
                assert columns["teacher_log_probs"].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
                num_samples += 1
    assert num_samples >= 8 * STEPS
    trained = rows(tmp_path, "opd")
    assert all(row["train/opd_reverse_kl"] > 0.1 for row in trained)
    shutil.rmtree(teacher)  # the dump has all that training needs
    load = ("--only", "trainer", "--load", str(tmp_path / "dump"))
    start(tmp_path, "again", *load, overrides=follows)
    for one, other in zip(trained, rows(tmp_path, "again"), strict=True):
        for key in ("train/loss", "train/grad_norm", "train/opd_reverse_kl"):
            assert one[key] == other[key]
    assert json.loads((tmp_path / "runs/again/topology.json").read_text())["engines"] == {}
