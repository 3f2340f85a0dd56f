"""The seed of each sample: the same in every run of a recipe, whoever generates it and how often. Pure."""

import hashlib


def sampling_seed(run_seed: int, source: tuple[object, ...], index: int) -> int:
    """A 63-bit seed, as engines take it.

    It leaves out attempts: engines draw by seed and position, so a sample that goes on elsewhere goes on in its draws.

    Args:
        run_seed: run.seed.
        source: what the sample is of: a prompt group, or an item of an evaluation set.
        index: of the sample there.
    """
    digest = hashlib.blake2b(repr((run_seed, source, index)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
