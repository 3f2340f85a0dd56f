"""Creates the pools of a run whose model does not change, from its topology."""

from pathlib import Path

from actors.rollout.engines.external import ServerRequirements
from actors.rollout.pools.frozen import FrozenPool, PoolSettings
from actors.rollout.sglang.served_model import ServedModel
from runtime.bus.bus import Bus
from runtime.settings.placement import num_engines
from runtime.settings.topology import Topology, model_of


def pool_settings(topology: Topology, name: str) -> PoolSettings:
    """Return the settings of a pool.

    Raises:
        OSError, ValueError: the directory of its model cannot be read.
    """
    engine = topology.engines[name]
    return PoolSettings(
        name=name,
        vocab_size=ServedModel.read(Path(model_of(topology, engine))).vocab_size,
        at_once=engine.concurrency * num_engines(engine),
        answer_timeout_s=engine.first_token_after_s,
        give_up_after_s=topology.rollout.generate_timeout_s,
        confuses_last=engine.kind == "sglang",
    )


async def run_pool(pool: FrozenPool, topology: Topology, bus: Bus) -> None:
    """Follow the engines of a pool. Never returns."""
    engine = topology.engines[pool.name]
    wanted = ServerRequirements.by(topology, engine) if engine.urls else None
    await pool.run(bus, engine.urls, wanted)
