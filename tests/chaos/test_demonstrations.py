"""kill -9 while demonstrations are trained: each is trained once, in the order of the data."""

from pathlib import Path

import pytest

from tests.chaos.audit import audit
from tests.chaos.harness import ROOT, Run, moments_of

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

BATCH_SIZE = 16
EVENTS_PER_STEP = BATCH_SIZE + 4  # completed groups; issued, batch ready and trained, weights
SETTINGS = (f"rollout.rollout_batch_size={BATCH_SIZE}", "rollout.max_staleness=0", "train.save_interval=5")


async def test_every_process_of_a_run_on_demonstrations_is_killed(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        num_steps=14,
        eval_interval=None,
        settings=SETTINGS,
        topology=ROOT / "topologies" / "boxed-copy-sft.toml",
    )
    names = ["rollout", "buffer", "trainer", "nats-server"]
    moments = moments_of("demonstrations")
    async with run.started() as command:
        for number, name in enumerate(names):
            await command.log.until_trained(1 + 3 * number)
            await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
            await command.log.until_alive(name)
            command.log.kill(name)
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    assert (run.directory / "hf" / "model.safetensors").is_file()
    books = await audit(run, killed=names)
    assert books.trained == 14 * BATCH_SIZE
