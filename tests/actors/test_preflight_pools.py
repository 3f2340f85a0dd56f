"""What a start refuses of a teacher's model: another tokenizer, a short context, a missing file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.preflight_pools import memory_of_pools, pool_problems
from runtime.settings.load import load_topology
from runtime.settings.topology import Topology
from tests.runtime.settings.shipped import LAPTOP
from tests.support.distilling import write_teacher

CONTEXT = 64  # of the trained model


def with_teacher(directory: Path, **pool: Any) -> Topology:
    overrides = (
        *("algorithm.use_opd=true", "algorithm.opd_type=sglang"),
        f'engines.teacher={{kind = "tiny", hf_checkpoint = "{directory}"}}',
    )
    topology = load_topology(LAPTOP, overrides).topology
    teacher = msgspec.structs.replace(topology.engines["teacher"], **pool)
    return msgspec.structs.replace(topology, engines=topology.engines | {"teacher": teacher})


def edited(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def swap_tokens(tokenizer: dict[str, Any]) -> None:
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokenizer.json", swap_tokens, "its tokenizer.json is another one: '"),
        ("config.json", lambda config: config.update(vocab_size=5), "its vocabulary has 5 tokens, and the tokenizer"),
        ("config.json", lambda config: config.update(max_position_embeddings=20), "its context has 20 tokens; samples"),
        ("config.json", lambda config: config.pop("vocab_size"), "vocab_size is missing"),
    ],
)
def test_a_teacher_that_cannot_read_the_samples_is_refused(
    file: str, change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    topology = with_teacher(teacher)
    assert list(pool_problems(topology, CONTEXT, set())) == []
    edited(teacher / file, change)
    (problem,) = pool_problems(topology, CONTEXT, set())
    assert problem.key == "engines.teacher.hf_checkpoint"
    assert message in problem.message
    assert list(pool_problems(topology, CONTEXT, {problem.key})) == []


def test_external_engines_need_neither_weights_nor_a_model_that_the_tiny_engine_reads(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    edited(teacher / "config.json", lambda config: config.update(model_type="another", architectures=["Another"]))
    assert list(pool_problems(with_teacher(teacher), CONTEXT, set()))
    assert list(pool_problems(with_teacher(teacher, urls=("http://h:1",)), CONTEXT, set())) == []


def test_the_memory_of_a_teacher_is_that_of_its_files_in_each_engine(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    size = (teacher / "model.safetensors").stat().st_size
    assert memory_of_pools(with_teacher(teacher, num_engines=3)) == 3 * 2 * size
    assert memory_of_pools(with_teacher(teacher, urls=("http://h:1",))) == 0
