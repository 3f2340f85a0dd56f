"""A bucket in shared memory: what a reader finds there, and that nothing is left."""

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.trainer.weights.engines import aligned, flattened
from actors.trainer.weights.shared_memory import SEGMENTS, Segments, remove_segments, segment, segment_prefix
from messages import BucketSent, Message

ROOT = Path(__file__).parents[4]
BUCKET = [
    ("small", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
    ("large", torch.arange(6, dtype=torch.float32).reshape(2, 3)),
    ("empty", torch.empty(0, 4, dtype=torch.float32)),
]
STEP = BucketSent(
    session="1.1",
    stage=2,
    index=3,
    names=tuple(name for name, _ in aligned(BUCKET)),
    dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in aligned(BUCKET)),
    shapes=tuple(tuple(tensor.shape) for _, tensor in aligned(BUCKET)),
)


READER = """
import json, sys
from actors.tiny_engine.model.payloads import named_of
found = [named_of(payload, "flattened_bucket") for payload in sys.argv[1:]]
print(json.dumps([{name: tensor.tolist() for name, tensor in named} for named in found]))
"""


def read_elsewhere(payloads: Sequence[str]) -> Any:
    """In a process of its own, as engines do: torch starts a helper where it reads."""
    done = subprocess.run(
        [sys.executable, "-c", READER, *payloads], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def left(prefix: str) -> list[str]:
    return [path.name for path in SEGMENTS.glob(f"{prefix}*")]


def test_tensors_of_larger_numbers_come_first_so_that_each_lies_where_it_may() -> None:
    assert [name for name, _ in aligned(BUCKET)] == ["large", "empty", "small"]
    assert flattened(aligned(BUCKET)).nbytes == 24 + 4


@pytest.mark.slow
def test_each_reader_finds_the_tensors_by_a_name_of_its_own_and_none_is_left(tmp_path: object) -> None:
    prefix = f"physarum-test-{id(tmp_path)}"

    def ask(step: Message, _: float) -> "Future[dict[str, str]]":
        assert isinstance(step, BucketSent)
        assert sorted(step.payloads) == ["a", "b"]
        assert len({*step.payloads["a"], *step.payloads["b"]}) == 3
        assert sorted(left(prefix)) == sorted(step.segments)
        found = read_elsewhere((*step.payloads["a"], *step.payloads["b"]))
        assert found == [{name: tensor.tolist() for name, tensor in BUCKET}] * 3
        answer: Future[dict[str, str]] = Future()
        answer.set_result({"b": "it is tired"})
        return answer

    failed = Segments(prefix, {"a": 2, "b": 1}).carry(STEP, flattened(aligned(BUCKET)), ask, 5.0, lambda: None)
    assert failed == {"b": "it is tired"}
    assert not left(prefix)


def test_a_failure_leaves_none_either(tmp_path: object) -> None:
    prefix = f"physarum-test-{id(tmp_path)}"
    with suppress(RuntimeError), segment(prefix, flattened(aligned(BUCKET)), 2) as names:
        assert sorted(left(prefix)) == sorted(names)
        raise RuntimeError("gone")
    assert not left(prefix)


def test_runs_of_one_name_or_of_names_that_begin_alike_do_not_share_segments(tmp_path: Path) -> None:
    prefixes = [segment_prefix(tmp_path / name) for name in ("a/r", "b/r", "a/r-1")]
    assert not any(one != other and one.startswith(other) for one in prefixes for other in prefixes)
    assert len(set(prefixes)) == 3
    assert segment_prefix(tmp_path / "b" / ".." / "a" / "r") == prefixes[0]


def test_what_a_death_has_left_of_a_run_is_removed_and_of_another_is_not(tmp_path: object) -> None:
    prefix = f"physarum-test-{id(tmp_path)}"
    mine, other = SEGMENTS / f"{prefix}-1.4-0-0", SEGMENTS / f"{prefix}x-1.4-0-0"
    try:
        mine.touch()
        other.touch()
        remove_segments(prefix)
        assert left(prefix) == [other.name]
    finally:
        other.unlink()
