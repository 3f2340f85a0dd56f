"""A run follows a teacher in an engine pool, with the log-probs of transformers; its dump trains the same."""

import json
from pathlib import Path

import pytest

from runtime.data.dump_files import read_pair, steps_in
from tests.support.distilling import write_teacher
from tests.support.tiny_models import all_logits, teacher_forced
from tests.support.whole_runs import run_topology

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, BATCH, SAMPLES, WIDTH = 3, 8, 4, 5
SETTINGS = (
    *(f"train.num_steps={STEPS}", f"rollout.rollout_batch_size={BATCH}", f"rollout.n_samples_per_prompt={SAMPLES}"),
    *("eval.0.interval=2", "algorithm.opd.type=sglang", "algorithm.kl.loss_coef=0.01"),
    *("algorithm.opd.distillation.type=forward", "algorithm.opd.distillation.coef=0.5"),
    f"algorithm.opd.distillation.topk={WIDTH}",
)


def test_a_run_trains_on_the_log_probs_of_its_teacher_and_on_its_dump_alike(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    pools = tuple(f'engines.{name}={{kind = "tiny", hf_checkpoint = "{teacher}"}}' for name in ("teacher", "ref"))
    settings = (*SETTINGS, *pools)
    first = run_topology(tmp_path, "topologies/laptop.toml", *settings, "run.name=opd", "run.dump_details=dump")
    assert first.result["groups"]["trained"] == STEPS * BATCH
    num_compared = 0
    for step in steps_in(tmp_path / "dump"):
        for group in read_pair(tmp_path / "dump", step):
            assert len(group.columns) == len(group.samples) == SAMPLES
            (segment,), columns = group.segments[0], group.columns[0]
            expected = teacher_forced(teacher, segment.prompt_ids.tolist(), segment.response_ids.tolist())
            assert columns["teacher_log_probs"].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
            likeliest = all_logits(teacher, segment.prompt_ids.tolist(), segment.response_ids.tolist()).log_softmax(-1)
            values = likeliest.topk(WIDTH).values.flatten()
            assert columns["teacher_topk_log_probs"].tolist() == pytest.approx(values.tolist(), abs=1e-4)
            assert len(columns["teacher_topk_ids"]) == len(segment.response_ids) * WIDTH
            num_compared += 1
    assert num_compared >= BATCH * STEPS
    assert all(row["train/opd_reverse_kl"] > 0.1 for row in first.steps)
    assert all(row["train/kl_loss"] > 0.01 for row in first.steps)  # the same engines serve a reference
    load = ("--only", "trainer", "--load", str(tmp_path / "dump"))  # the trainer then keeps the reference, no teacher
    again = run_topology(tmp_path, "topologies/laptop.toml", *load, *settings, "run.name=again")
    for one, other in zip(first.steps, again.steps, strict=True):
        for key in ("train/opd_reverse_kl", "train/loss", "train/grad_norm", "train/kl_loss", "train/distillation_kl"):
            assert one[key] == pytest.approx(other[key], rel=1e-3)
    assert json.loads((again.run_dir / "topology.json").read_text())["engines"] == {}
