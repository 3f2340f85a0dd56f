"""Sampling seeds: equal in every run of a recipe, regardless of the actor and the attempt. Pure."""

import hashlib


def sampling_seed(run_seed: int, source: tuple[object, ...], index: int) -> int:
    """Return a 63-bit seed, the range that engines accept.

    The attempt is not part of the seed. Engines sample by seed and position, so a sample that continues elsewhere
    continues its random sequence.

    Args:
        run_seed: run.seed.
        source: identifies a prompt group, or an item of an evaluation set.
        index: of the sample in that source.
    """
    digest = hashlib.blake2b(repr((run_seed, source, index)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
