"""kill -9 of the buffer, again and again: a curriculum by outcome draws the same prompts in the same order."""

from pathlib import Path

import pytest

from messages import GroupCompleted, GroupsIssued
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import BATCH_SIZE, EVENTS_PER_STEP, Run, moments_of
from tests.support import curriculum

pytestmark = [pytest.mark.chaos, pytest.mark.anyio, pytest.mark.timeout(600)]

DATA = (
    f"{{name = 'levels', source_class = '{curriculum.__file__}:Curriculum', "
    f"rm_type = '{curriculum.__file__}:grade', label_key = 'label'}}"
)


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.nightly)])
async def test_a_curriculum_by_outcome_draws_the_same_prompts_after_many_kills(tmp_path: Path, kills: int) -> None:
    overrides = (f"data=[{DATA}]", "eval=[]", "rollout.shuffle=false")
    run = Run(tmp_path, num_steps=2 * kills + 2, eval_interval=None, overrides=overrides)
    moments = moments_of("curriculum")
    async with run.started() as command:
        for number in range(1, kills + 1):
            await command.log.until_trained(number)
            await command.log.pass_over(moments.randrange(EVENTS_PER_STEP // 2))
            command.log.kill("buffer")
            await command.log.until_restarted("buffer")
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    await audit(run, killed=["buffer"] * kills)
    async with run.reopened() as bus:
        log = [event for _, event in await read_all(bus, run)]
    numbers = {
        group.group_id: group.prompt for event in log if isinstance(event, GroupsIssued) for group in event.groups
    }
    rows = {numbers[event.group_id]: event.metadata for event in log if isinstance(event, GroupCompleted)}
    assert [rows[number] for number in sorted(rows)] == curriculum.expected(run.num_steps, BATCH_SIZE)
