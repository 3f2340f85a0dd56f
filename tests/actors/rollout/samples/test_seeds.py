"""Equal seeds give equal tokens, whichever engine draws them and who runs beside."""

from itertools import product
from pathlib import Path

import pytest

from actors.rollout.samples.generating import sampling_seed
from actors.rollout.sglang.body import generate_body
from messages import Int32Array, SamplingParams
from tests.support.tiny_engine import post, running_engine, write_config

PARAMS = SamplingParams(max_new_tokens=12)


def drawn(url: str, seed: int) -> list[int]:
    """What an engine answers to one sample's request."""
    body = generate_body(f"r{seed}", [Int32Array([3, 4])], PARAMS, max_new_tokens=12, seeds=[seed])
    status, answer = post(f"{url}/generate", body)
    assert status == 200, answer
    return answer["output_ids"]


def test_every_sample_of_a_run_has_a_seed_of_its_own_that_engines_take() -> None:
    sources = [("group", 0), ("group", 1), ("eval", "e", 0), ("eval", "f", 0)]
    seeds = [sampling_seed(*parts) for parts in product((1, 2), sources, range(4))]
    assert len(set(seeds)) == len(seeds) == 32
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_the_seed_of_a_sample_does_not_change_over_versions_of_this_product() -> None:
    """By hand: the first 8 bytes of BLAKE2b of the text below, little-endian, without the lowest bit."""
    import hashlib

    digest = hashlib.blake2b(b"(1234, ('group', 5), 2)", digest_size=8).digest()
    assert sampling_seed(1234, ("group", 5), 2) == int.from_bytes(digest, "little") // 2


@pytest.mark.slow
def test_equal_seeds_give_equal_tokens_on_two_engines(tmp_path: Path) -> None:
    write_config(tmp_path)
    with (
        running_engine(tmp_path, "--load-format", "dummy", "--random-seed", "1") as first,
        running_engine(tmp_path, "--load-format", "dummy", "--random-seed", "1") as second,
    ):
        drawn(second.url, 99)  # the order of arrival differs, too
        seeds = [sampling_seed(1234, ("group", 0), index) for index in range(4)]
        answers = [[drawn(engine.url, seed) for seed in seeds] for engine in (first, second)]
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) == 4


def test_a_batch_is_sent_without_seeds() -> None:
    """The router takes one set of sampling parameters for all of it."""
    body = generate_body("r", [Int32Array([3]), Int32Array([4])], PARAMS, max_new_tokens=12, seeds=[1, 2])
    assert "sampling_seed" not in body["sampling_params"]
