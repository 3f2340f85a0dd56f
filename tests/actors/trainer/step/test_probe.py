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
from actors.trainer.step.probe import SPREAD_EVERY, drawn_tokens, log_probs_of, probe_tokens, shaken, special_tokens
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


def rank_of(directory: Path, kind: str = "qwen3", **tables: Any) -> TrainerRank:
    ranks.leave()
    write_model(directory / "model", kind)
    topology = trainer_topology(directory / "model", directory, **tables)
    return TrainerRank(topology, directory / "run")


@pytest.mark.parametrize("packed", [False, True])
def test_a_probe_is_computed_alike_alone_and_beside_others(packed: bool, tmp_path: Path) -> None:
    rank = rank_of(tmp_path, model={"random_init": False}, trainer={"packed": packed})
    one, other, third = (3, 5, 7, 11, 13), (9, 8, 7), (2, 4, 6, 8, 10, 12, 14)
    together = log_probs_of(rank._replica, [one, other, third])  # pyright: ignore[reportPrivateUsage]
    for tokens, found in zip((one, other, third), together, strict=True):
        (alone,) = log_probs_of(rank._replica, [tokens])  # pyright: ignore[reportPrivateUsage]
        assert len(found) == len(tokens)
        assert found == pytest.approx(alone, abs=1e-5)
    rank.close()


def test_the_tokens_are_those_of_prompts_as_far_as_there_are_any(tmp_path: Path) -> None:
    rank = rank_of(tmp_path)
    last = rank._replica.hf.vocab_size - 1  # pyright: ignore[reportPrivateUsage]
    drawn = rank.unwritten().probe
    rank.prompt_ids = lambda: (5, last, 6, 7, last + 1)
    told = rank.unwritten().probe
    rank.close()
    assert drawn is not None
    assert told is not None
    assert told.token_ids == (5, 6, 7, *drawn.token_ids)[: len(drawn.token_ids)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_spread_is_what_rounding_does_to_the_weights_that_are_published(dtype: str, tmp_path: Path) -> None:
    """It grows with the log-probs' sensitivity: a head 30 times as large makes it larger, in the next measurement."""
    rank = rank_of(tmp_path, model={"dtype": dtype})
    first = spreads(rank)
    assert set(first) == {dtype, "bfloat16"}
    assert 0 < first["bfloat16"] < 0.02
    assert dtype == "bfloat16" or first["float32"] < 1e-5
    with torch.no_grad():
        for name, tensor in rank._replica.chunks[0].named_parameters():  # pyright: ignore[reportPrivateUsage]
            if "output_layer" in name:
                tensor.mul_(30.0)
    assert [spreads(rank) for _ in range(SPREAD_EVERY - 1)] == [first] * (SPREAD_EVERY - 1)
    assert spreads(rank)["bfloat16"] > 5 * first["bfloat16"]
    rank.close()


def spreads(rank: TrainerRank) -> dict[str, float]:
    probe = rank.unwritten().probe
    assert probe is not None
    return probe.spreads


def test_rounding_is_shaken_in_the_block_alone(tmp_path: Path) -> None:
    rank, tokens = rank_of(tmp_path), (3, 5, 7, 11, 13)
    replica = rank._replica  # pyright: ignore[reportPrivateUsage]
    (before,) = log_probs_of(replica, [tokens])
    with shaken(replica, 2.0**-8):
        (inside,) = log_probs_of(replica, [tokens])
    (after,) = log_probs_of(replica, [tokens])
    rank.close()
    assert (before == after).all()
    assert (before != inside).any()


def test_a_trainer_whose_padding_matters_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = rank_of(tmp_path)
    right = log_probs_of

    def wrong(replica: Any, sequences: Any) -> Any:
        return [each - len(sequences) for each in right(replica, sequences)]

    monkeypatch.setattr("actors.trainer.step.probe.log_probs_of", wrong)
    with pytest.raises(FloatingPointError, match="differ by 1 nats on average between a sequence alone and beside"):
        rank.unwritten()
    rank.close()
