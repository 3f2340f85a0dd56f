"""Memory that a tiny engine gives back to the system and takes again: of its process what no file backs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.tiny_engine import RunningEngine, post, running_engine, write_config

pytestmark = pytest.mark.slow
MB: Final = 1 << 20
MODEL: Final = {"vocab_size": 16384, "hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
WEIGHTS: Final = 45 * MB  # at least: embedding and head alone are 2 x 16384 x 384 numbers, 48 MB
CACHE: Final = 25 * MB  # likewise: 16 requests of 256 tokens, 2 layers of 2 x 4 x 128 numbers, 32 MB
KEPT: Final = 20 * MB  # at most, of what generating took: 44 MB where free memory is not given back


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    model = tmp_path_factory.mktemp("model")
    write_config(model, **MODEL, **HEADS)
    with running_engine(model, "--load-format", "dummy") as engine:
        yield engine


def held(engine: RunningEngine) -> int:
    lines = Path(f"/proc/{engine.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def ask(engine: RunningEngine, path: str, body: dict[str, Any]) -> Any:
    status, answer = post(engine.url + path, body)
    assert status == 200, answer
    return answer


def generate(engine: RunningEngine) -> Any:
    """Long ones, so that the cache is filled."""
    body = {"input_ids": [[3] * 256] * 16, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    return [answer["output_ids"] for answer in ask(engine, "/generate", body)]


def test_released_memory_is_the_systems_and_comes_back(engine: RunningEngine) -> None:
    started = held(engine)  # weights, and no cache yet
    generate(engine)
    full = held(engine)
    ask(engine, "/release_memory_occupation", {"tags": ["kv_cache"]})
    without_cache = held(engine)
    ask(engine, "/release_memory_occupation", {"tags": ["weights"]})
    without_both = held(engine)
    assert full - without_cache > CACHE
    assert without_cache - without_both > WEIGHTS
    assert without_both < started + KEPT
    ask(engine, "/resume_memory_occupation", {"tags": ["weights"]})
    assert held(engine) - without_both > WEIGHTS // 2  # what the process still had goes first
    ask(engine, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    generate(engine)
