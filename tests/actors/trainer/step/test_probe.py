"""The probe of an announcement: which tokens are asked about, and that its log-probs are those of the files."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from actors.trainer.commands import TrainerRank
from actors.trainer.megatron import groups as ranks
from actors.trainer.step.probe import drawn_tokens, probe_tokens, special_tokens
from messages import WeightProbe
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology, trainer_topology

DEMO = Path(__file__).parents[4] / "topologies/demo/models/boxed-copy"


@given(st.integers(1, 300), st.integers(2, 64), st.sets(st.integers(0, 400)), st.integers(0, 9))
def test_tokens_are_of_the_vocabulary_not_special_and_drawn_alike_every_time(
    vocab_size: int, length: int, special: set[int], seed: int
) -> None:
    tokens = drawn_tokens(vocab_size, length, special=special, seed=seed)
    assert len(tokens) == length
    assert set(tokens) <= set(range(vocab_size))
    assert special >= set(range(max(1, vocab_size - 1))) or not special & set(tokens)
    assert tokens == drawn_tokens(vocab_size, length, special=special, seed=seed)
    assert vocab_size == 1 or vocab_size - 1 not in tokens, "SGLang takes it for token 0"


def test_special_tokens_are_read_from_the_tokenizer(tmp_path: Path) -> None:
    assert special_tokens(DEMO) == {0, 1, 2, 3, 4}
    assert special_tokens(tmp_path) == frozenset()
    (tmp_path / "tokenizer.json").write_text("{")
    assert special_tokens(tmp_path) == frozenset()


@pytest.mark.parametrize(
    ("tables", "length"),
    [
        ({}, 64),
        ({"rollout": {"max_context_len": 40}}, 20),
        ({"rollout": {"max_context_len": 3}}, 2),
        ({"engines": {"policy": {"kind": "tiny", "max_total_tokens": 50}}}, 25),
    ],
)
def test_a_probe_takes_at_most_half_of_the_context(
    make_topology: MakeTopology, tables: dict[str, Any], length: int
) -> None:
    assert len(probe_tokens(make_topology(**tables), 1000, 4096)) == length


def expected(path: Path, probe: WeightProbe) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    tokens = torch.tensor([probe.token_ids])
    with torch.inference_mode():
        log_probs = model(tokens).logits[0].log_softmax(-1)
    return [0.0, *log_probs[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_log_probs_are_those_of_the_files_at_temperature_1(kind: str, tmp_path: Path) -> None:
    """By transformers; before and after a train step, whatever temperature rollout samples at."""
    ranks.leave()
    write_model(tmp_path / "model", kind)
    topology = trainer_topology(
        tmp_path / "model", tmp_path, model={"random_init": False}, rollout={"temperature": 0.7}, optimizer={"lr": 1.0}
    )
    engine = TrainerRank(topology, tmp_path / "run")
    first = engine.publish(1, confirmed=0)
    engine.train(random_batch(0))
    second = engine.publish(2, confirmed=0)
    engine.close()
    for published in (first, second):
        assert published.path is not None
        assert published.probe is not None
        assert published.probe.log_probs == pytest.approx(expected(published.path, published.probe), abs=2e-5, rel=1e-5)
    assert first.probe != second.probe
