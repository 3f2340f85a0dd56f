"""A trainer without a model: reads each batch as the real one does, then says, at once or later, that it is trained.

Run: PHYSARUM_BUS_URL=... python -m tests.bench.zero_trainer RUN_DIR [--step-s S]
"""

import argparse
import os
import sys
from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from actors.trainer.actor import TrainerActor
from actors.trainer.data.feed import Feed
from messages import BatchTrained, TrainerStarted, WeightsAnnounced
from runtime.bus.addresses import BUS_URL_VARIABLE
from runtime.bus.bus import Bus
from runtime.node.claims.rundir import TOPOLOGY_FILE
from runtime.process.actor import Actor
from runtime.process.hosting import Hosted
from runtime.process.logs import configure_logging
from runtime.process.main import run_process
from runtime.settings.topology import Topology, decode_topology

CHECKSUM = "sum"  # what the zero engine says of any weights


class ZeroTrainer(Actor):
    """The trainer's side of the bus without its torch thread. Nothing is lost in a crash, as nothing is learnt."""

    reads = TrainerActor.reads
    writes = TrainerActor.writes

    def __init__(self, topology: Topology, bus: Bus, *, step_s: float = 0.0) -> None:
        self._num_steps = topology.train.num_steps
        self._step_s = step_s
        self._bus = bus

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        feed = Feed(self._bus)
        async with anyio.create_task_group() as group:
            group.start_soon(feed.run)
            await feed.caught_up.wait()
            started = TrainerStarted(incarnation=1, step=0)
            feed.started(started, await self._bus.publish(started))
            await self._announce(0)
            task_status.started()
            for step in range(self._num_steps):
                await self._train(feed, step)
                await self._announce(step + 1)
                feed.settle(step + 1)
            await anyio.sleep_forever()

    async def _train(self, feed: Feed, step: int) -> None:
        batch = (await feed.batch(step)).batch
        assert batch is not None
        await anyio.sleep(self._step_s)
        trained = BatchTrained(
            step=step,
            incarnation=1,
            num_groups=len(set(batch.groups_B.tolist())),
            num_samples=len(batch.lengths_B),
            num_tokens=len(batch.tokens_N),
            metrics={},
        )
        await self._bus.publish(trained)

    async def _announce(self, step: int) -> None:
        await self._bus.publish(
            WeightsAnnounced(
                version=step + 1, step=step, incarnation=1, path="nowhere", checksum=CHECKSUM, size_bytes=0
            )
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds that a train step takes")
    args = parser.parse_args(argv)
    run_dir: Path = args.run_dir
    topology = decode_topology((run_dir / TOPOLOGY_FILE).read_bytes())
    configure_logging("trainer", topology.run.name)
    trainer = Hosted(
        name="trainer",
        role="trainer",
        actor_type=ZeroTrainer,
        build=lambda bus: ZeroTrainer(topology, bus, step_s=args.step_s),
    )
    return run_process(os.environ[BUS_URL_VARIABLE], topology.run.name, [trainer])


if __name__ == "__main__":
    sys.exit(main())
