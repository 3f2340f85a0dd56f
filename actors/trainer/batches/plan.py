"""Which samples of a batch train together: optimizer steps, replicas and micro-batches. B samples."""

from typing import Final

import numpy as np

from actors.trainer.batches.batch import Ints, TrainBatch

PADDING_FLOOR: Final = 1024  # tokens of padding in a micro-batch that are always accepted: a further one costs more
PADDING_RATIO: Final = 0.25  # of a micro-batch


def split_steps(batch: TrainBatch, num_steps: int) -> list[Ints]:
    """Cut a batch into optimizer steps of equally many rollouts, in order; the first ones get what does not divide.

    Returns:
        The samples of each step; fewer steps if there are fewer rollouts.
    """
    num_rollouts = int(batch.rollouts_B[-1]) + 1
    cuts = [part[0] for part in np.array_split(np.arange(num_rollouts), min(num_steps, num_rollouts))]
    bounds = np.searchsorted(batch.rollouts_B, cuts[1:])
    return np.split(np.arange(len(batch.rollouts_B)), bounds)


def plan_micro_batches(
    lengths_B: Ints, samples: Ints, *, max_tokens: int, num_replicas: int, packed: bool
) -> list[list[Ints]]:
    """Share samples among replicas, in equally many micro-batches each.

    Args:
        lengths_B: tokens of every sample of the batch.
        samples: those to share out.
        max_tokens: per micro-batch, padding included; a longer sample sits alone.
        num_replicas: data-parallel replicas of the model.
        packed: one row of sequences behind each other; else rows of like length, padded.

    Returns:
        For each replica its micro-batches, each the samples in it; empty where there are too few samples.
    """
    order = samples[np.argsort(-lengths_B[samples], kind="stable")]
    bins = _first_fit(lengths_B, order, max_tokens) if packed else _by_length(lengths_B, order, max_tokens)
    while len(bins) % num_replicas:
        bins.sort(key=len, reverse=True)
        largest = bins.pop(0)
        half = (len(largest) + 1) // 2
        bins += [largest[:half], largest[half:]]
    bins.sort(key=lambda members: -int(lengths_B[members].sum()))
    return [bins[replica::num_replicas] for replica in range(num_replicas)]


def _by_length(lengths_B: Ints, order: Ints, max_tokens: int) -> list[Ints]:
    """Cut samples, longest first, where the token limit or the padding asks for it."""
    bins: list[Ints] = []
    start, tokens = 0, 0
    longest = int(lengths_B[order[0]])
    for end, sample in enumerate(order):
        length = int(lengths_B[sample])
        padded = (end - start + 1) * longest
        padding = padded - tokens - length
        if end > start and (padded > max_tokens or padding > max(PADDING_FLOOR, PADDING_RATIO * padded)):
            bins.append(order[start:end])
            start, tokens, longest = end, 0, length
        tokens += length
    bins.append(order[start:])
    return bins


def _first_fit(lengths_B: Ints, order: Ints, max_tokens: int) -> list[Ints]:
    """Put each sample, longest first, where it fits first."""
    bins: list[list[int]] = []
    free: list[int] = []
    for sample in order.tolist():
        length = int(lengths_B[sample])
        place = next((index for index, room in enumerate(free) if room >= length), len(bins))
        if place == len(bins):
            bins.append([])
            free.append(max_tokens)
        bins[place].append(sample)
        free[place] -= length
    return [np.array(members, dtype=np.int64) for members in bins]
