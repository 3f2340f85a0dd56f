"""kill -9 of a judge's engine and of the reward actor that asks it: no sample is lost, and none gets another reward."""

from pathlib import Path

import pytest

from runtime.data.dump_files import read_pair, steps_in
from tests.chaos.audit import killed_in_turn
from tests.chaos.harness import BATCH_SIZE, NUM_SAMPLES, Run, moments_of
from tests.support import judging
from tests.support.distilling import write_teacher
from tests.support.judging import score_of

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(400)]
STEPS = 8


async def test_the_engine_of_the_judge_is_killed_and_its_callers_too(tmp_path: Path) -> None:
    model, moments = write_teacher(tmp_path / "judge"), moments_of("judge")
    overrides = (
        f'engines.judge={{kind = "tiny", hf_checkpoint = "{model}"}}',
        f'reward.judges.digits={{template = "{{response}}", max_tokens = 3, parser = "{judging.__file__}:digits"}}',
        'data.0.rm_type="digits"',
        "run.dump_details=dump",
    )
    run = Run(tmp_path, num_steps=STEPS, overrides=overrides)
    names = ["engine.judge.0", "reward", "engine.judge.0"]
    books = await killed_in_turn(run, names, moments)
    assert books.failed == 0
    dumped = [group for step in steps_in(tmp_path / "dump") for group in read_pair(tmp_path / "dump", step)]
    samples = [sample for group in dumped for sample in group.samples]
    assert len(samples) == STEPS * BATCH_SIZE * NUM_SAMPLES
    for sample in samples:
        assert sample.score is not None
        assert sample.reward == pytest.approx(score_of(sample.score["judge_answer"]))
