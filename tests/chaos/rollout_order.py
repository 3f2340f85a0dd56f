"""A rollout function as a user writes it: the first sample, and then the others together."""

from typing import Any

import anyio


async def one_then_others(group: Any) -> None:
    await group.sample(0)
    async with anyio.create_task_group() as tasks:
        for index in range(1, group.num_samples):
            tasks.start_soon(group.sample, index)
