"""kill -9 of a trainer with a critic: both continue from the checkpoint, and train the lost steps again to the bit."""

from pathlib import Path

import pytest

from messages import BatchTrained, Message, WeightsAnnounced
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import SMALL, Run, moments_of

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

CRITIC_ONLY = 3
STEPS = 14
PPO = (
    "algorithm.estimator.type=ppo",
    "algorithm.normalize_advantages=true",
    f"algorithm.estimator.num_critic_only_steps={CRITIC_ONLY}",
    "critic.lr=6e-3",
    "train.save_hf=true",
)
OF_POLICY = ("train/loss", "train/grad_norm")
OF_CRITIC = ("train/value_loss", "train/critic-grad_norm", "train/explained_variance", "rollout/values")


async def test_a_killed_trainer_trains_the_lost_steps_of_both_models_again_to_the_bit(tmp_path: Path) -> None:
    run = Run(tmp_path, num_steps=STEPS, settings=(*SMALL, *PPO))
    log = await killed(run, "trainer", [2, 8], also=[])  # while the critic trains alone; after the checkpoint of step 5
    assert {0, 1, 5, 6, 7} <= replayed_alike(log)
    checksums = {event.step: event.checksum for event in log if isinstance(event, WeightsAnnounced)}
    assert len({checksums[step] for step in range(CRITIC_ONLY + 1) if step in checksums}) == 1
    assert checksums[CRITIC_ONLY + 1] != checksums[0]


@pytest.mark.nightly  # CI kills a rank of one restart group in test_broadcast.py
async def test_a_killed_rank_of_the_critic_restarts_both_models_which_train_the_lost_steps_to_the_bit(
    tmp_path: Path,
) -> None:
    own = ("trainer.critic.num_processes=2", "trainer.critic.megatron.tensor_model_parallel_size=2")
    run = Run(tmp_path, num_steps=STEPS, settings=(*SMALL, *PPO, *own))
    log = await killed(run, "trainer.2", [8], also=["trainer.0", "trainer.1"])
    assert {5, 6, 7} <= replayed_alike(log)


async def killed(run: Run, name: str, killed_at: list[int], *, also: list[str]) -> list[Message]:
    """Kill a process some events after each of these steps, audit the run to its end, and return its log.

    Args:
        run: The run.
        name: Process to kill.
        killed_at: Numbers of train steps.
        also: Processes that end with it.
    """
    moments = moments_of("critic")
    async with run.started() as command:
        for steps in killed_at:
            await command.log.until_trained(steps)
            await command.log.pass_over(moments.randrange(3))
            command.log.kill(name)
            await command.log.until_restarted(name)
        family = command.family()
        assert await command.end() == 0
        await run.gone(family)
    await audit(run, killed=[name, *also] * len(killed_at))
    assert (run.directory / "hf" / "critic" / "model.safetensors").is_file()
    async with run.reopened() as bus:
        return [event for _, event in await read_all(bus, run)]


def replayed_alike(log: list[Message]) -> set[int]:
    """Check that every step trained the same each time, and return those that were trained again."""
    first: dict[int, dict[str, float]] = {}
    replayed: set[int] = set()
    for event in log:
        if not isinstance(event, BatchTrained):
            continue
        names = OF_CRITIC + (OF_POLICY if event.step >= CRITIC_ONLY else ())
        found = {name: event.metrics[name] for name in names}
        assert found == first.setdefault(event.step, found), event.step
        assert OF_POLICY[0] not in event.metrics or event.step >= CRITIC_ONLY
        replayed |= {event.step} if event.replay else set()
    assert sorted(first) == list(range(STEPS))
    return replayed
