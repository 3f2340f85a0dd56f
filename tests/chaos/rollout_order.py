"""A rollout function as a user writes it: the first samples of some prompts, and then the others together."""

from typing import Any

import anyio


async def one_then_others(groups: list[Any]) -> None:
    for group in groups:
        await group.sample(0)
    async with anyio.create_task_group() as tasks:
        for group in groups:
            for index in range(1, group.num_samples):
                tasks.start_soon(group.sample, index)
