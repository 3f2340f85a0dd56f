"""A rollout function of slime that generates the first samples of its groups, and then the others."""

import asyncio
from typing import Any

from slime.rollout.sglang_rollout import GenerateState, generate_and_rm  # pyright: ignore
from slime.utils.async_utils import run  # pyright: ignore


async def generated(args: Any, groups: list[list[Any]]) -> None:
    """Generate the samples in two steps: a sample stays open while others of its call are generated."""
    params = GenerateState(args).sampling_params
    for samples in ([group[0] for group in groups], [sample for group in groups for sample in group[1:]]):
        await asyncio.gather(*[generate_and_rm(args, each, params.copy(), evaluation=False) for each in samples])


def first_and_others(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> list[list[Any]]:
    groups = data_buffer.get_samples(args.rollout_batch_size)
    run(generated(args, groups))
    return groups
