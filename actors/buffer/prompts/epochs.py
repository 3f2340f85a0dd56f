"""Converts train.num_epoch into train.num_steps by counting the data."""

import msgspec

from actors.buffer.prompts.source import read_in_parts, training_reader
from actors.buffer.prompts.tokenizing import load_tokenizing
from runtime.data.data_files import DataError
from runtime.node.checks.apart import Doing, unlimited
from runtime.settings.reading.config import TopologyError
from runtime.settings.recipe import Recipe
from runtime.settings.rules.validate import validate
from runtime.settings.topology import Topology


def count_steps(topology: Topology, doing: Doing = unlimited) -> Topology:
    """Replace train.num_epoch by train.num_steps. Blocks: reads and tokenizes the data and reports progress.

    Raises:
        DataError: the data cannot be used, or has less than a batch of prompts.
        TopologyError: the number of steps breaks a rule.
    """
    num_epoch = topology.train.num_epoch
    if num_epoch is None:
        return topology
    num_steps = num_epoch * steps_per_epoch(topology, doing)
    train = msgspec.structs.replace(topology.train, num_steps=num_steps, num_epoch=None)
    counted = msgspec.structs.replace(topology, train=train)
    if problems := validate(counted):
        raise TopologyError(problems)
    return counted


def steps_per_epoch(recipe: Recipe, doing: Doing = unlimited) -> int:
    """Count the full batches in one pass over all usable prompts; the rest goes into the next pass's first batch.

    Raises:
        DataError: the data cannot be used, or there is no full batch.
    """
    reader = training_reader(
        recipe, load_tokenizing(recipe.model.hf_checkpoint, trust_remote_code=recipe.model.trust_remote_code)
    )
    batch_size = recipe.rollout.rollout_batch_size
    num_prompts = 0
    for index, data in enumerate(recipe.data):
        doing(f"data.{index}.path", data.path, "counting its rows")
        for prompts in read_in_parts(data, reader):
            num_prompts += sum(reader.too_long(prompt) is None for prompt in prompts)
            doing(f"data.{index}.path", data.path, f"counting its rows: {num_prompts:,} so far")
    if num_prompts < batch_size:
        raise DataError(
            f"train.num_epoch: an epoch of {num_prompts} prompts has no full batch: "
            f"rollout.rollout_batch_size is {batch_size}"
        )
    return num_prompts // batch_size
