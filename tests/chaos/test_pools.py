"""kill -9 of the engine of another model, which makes turns and is the judge, and of the reward actor that asks it.

No sample is lost, none gets another reward, and what the trainer gets are tokens of its own model.
"""

from pathlib import Path

import numpy as np
import pytest

from messages import WeightsApplied
from runtime.data.dump_files import read_pair, steps_in
from runtime.models.config import read_model
from tests.chaos import asking
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import BATCH_SIZE, EVENT_S, EVENTS_PER_STEP, NUM_SAMPLES, Run, moments_of
from tests.support import judging
from tests.support.judging import score_of

pytestmark = [pytest.mark.anyio]

NUM_STEPS = 8  # five more than the last kill waits for: it must fall into the run
ENGINE = f"engine.{asking.POOL}.0"
VICTIMS = [ENGINE, "reward", ENGINE]
CLOSE = 1e-4  # natural log, of tokens that the trainer and the engine compute from the same tokens before them


def overrides_of(directory: Path) -> tuple[str, ...]:
    """Settings of a run in which the second model makes a turn of each sample, and grades it."""
    judge = f'template = "{{response}}", pool = "{asking.POOL}", max_tokens = 3'
    return (
        f"engines.{asking.POOL}.hf_checkpoint={asking.write_second_model(directory / 'second')}",
        f'rollout.pools=["{asking.POOL}"]',
        f"rollout.custom_generate={asking.__file__}:asks_a_second_model",
        "rollout.max_response_len=16",
        f'reward.judges.digits={{{judge}, parser = "{judging.__file__}:digits"}}',
        'data.0.rm_type="digits"',
        "eval=[]",
        "run.dump_details=dump",
        "algorithm.get_mismatch_metrics=true",
    )


async def check_two_pools(run: Run, event_s: float = EVENT_S) -> None:
    """Run it, kill a process in each step, and check all that was generated and graded."""
    moments = moments_of("pools")
    async with run.started() as command:
        command.log.event_s = command.end_s = event_s
        for steps, victim in enumerate(VICTIMS, start=1):
            await command.log.until_trained(steps)
            await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
            command.log.kill(victim)
            await command.log.until_restarted(victim)
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    books = await audit(run, killed=VICTIMS)
    assert (books.issued, books.trained) == (NUM_STEPS * BATCH_SIZE, NUM_STEPS * BATCH_SIZE)
    async with run.reopened() as bus:
        updated = {event.instance for _, event in await read_all(bus, run) if isinstance(event, WeightsApplied)}
    assert not [instance for instance in updated if asking.POOL in instance]
    check_samples(run)
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in run.rows()[1:]) <= CLOSE


def check_samples(run: Run) -> None:
    """Check turns, masks, tokens and rewards of the dumped samples."""
    dump = run.directory.parents[1] / "dump"
    groups = [group for step in steps_in(dump) for group in read_pair(dump, step)]
    vocab_size = read_model(Path(run.topology.model.hf_checkpoint)).shape.vocab_size
    assert len(groups) == NUM_STEPS * BATCH_SIZE
    for group in groups:
        assert len(group.samples) == NUM_SAMPLES
        for sample, segments in zip(group.samples, group.segments, strict=True):
            assert sample.score is not None
            assert sample.reward == pytest.approx(score_of(sample.score["judge_answer"]))
            asked = sample.sample_metadata["asked"]
            assert 1 <= len(asked) <= asking.FEW
            assert set(asked) <= set(asking.DIGITS)
            untrained = [segment for segment in segments if not np.asarray(segment.loss_mask).any()]
            assert [segment.text for segment in untrained] == [asked], segments
            assert all(np.asarray(segment.loss_mask).all() for segment in segments if segment not in untrained)
            ids = np.concatenate([part for each in segments for part in (each.prompt_ids, each.response_ids)])
            assert ids.max() < vocab_size


@pytest.mark.chaos
async def test_the_engine_of_another_model_and_what_asks_it_are_killed(tmp_path: Path) -> None:
    overrides = (f'engines.{asking.POOL}.kind="tiny"', *overrides_of(tmp_path))
    await check_two_pools(Run(tmp_path, num_steps=NUM_STEPS, eval_interval=None, overrides=overrides))
