"""Training of a reward model: against plain torch, its rewards, and its directory as transformers reads it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from actors.trainer.commands import TrainerRank
from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.config import trained_model
from actors.trainer.models.shapes import VALUE_HEAD, check_weights
from actors.trainer.step.reward_model import RewardModelStep, at_last_tokens
from runtime.settings.tables.trainer import MegatronConfig
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import whole_weights, write_model
from tests.actors.trainer.tiny import pairs
from tests.build.topology import MakeTopology, joined

CPU = torch.device("cpu")
ADAM_EPS = 1e-4  # as for DPO


def topology_of(make_topology: MakeTopology, directory: Path, *, max_tokens: int = 4096, **tables: Any) -> Topology:
    return make_topology(
        model={"hf_checkpoint": str(directory), "random_init": False},
        rollout={"rollout_batch_size": 8, "n_samples_per_prompt": 1},
        algorithm=joined({"loss": {"type": "rm"}}, tables.pop("algorithm", {})),
        optimizer={"weight_decay": 0.0, "adam_eps": ADAM_EPS},
        train={"max_tokens_per_gpu": max_tokens},
        **tables,
    )


def as_classifier(directory: Path, replica: Replica) -> Any:
    """The policy in a directory as transformers' classifier with one label and the replica's new head."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1).float().eval()
    with torch.no_grad():
        model.score.weight.copy_(replica.complete_chunks()[0].output_layer.weight)
    return model


def score(model: Any, batch: TrainBatch, sample: int) -> torch.Tensor:
    tokens = slice(batch.starts_B[sample], batch.starts_B[sample] + batch.lengths_B[sample])
    return model(input_ids=torch.from_numpy(batch.tokens_N[tokens]).long()[None]).logits[0, 0]


def plain_losses(model: Any, batch: TrainBatch, pair: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a pair as anyone would write it, and its margin."""
    both = [2 * pair, 2 * pair + 1]
    margin = score(model, batch, both[0]) - score(model, batch, both[1])
    counts = all(batch.mask_sums_B[sample] > 0 for sample in both)
    return (-logsigmoid(margin), margin) if counts else (margin * 0.0, margin * 0.0)


@pytest.mark.parametrize(
    ("max_tokens", "packed", "tied"),
    [(20, False, False), (4096, True, True)],
    ids=["many micro-batches", "packed, tied"],
)
def test_training_equals_a_plain_loop(
    make_topology: MakeTopology, tmp_path: Path, max_tokens: int, packed: bool, tied: bool
) -> None:
    write_model(tmp_path / "weights", tied=tied)
    settings: dict[str, Any] = {"algorithm": {"num_steps_per_rollout": 2}, "trainer": {"packed": packed}}
    topology = topology_of(make_topology, tmp_path / "weights", max_tokens=max_tokens, **settings)
    replica = Replica(topology, CPU)
    model, step = as_classifier(tmp_path / "weights", replica), RewardModelStep(topology, replica)
    adam = torch.optim.AdamW(model.parameters(), lr=topology.optimizer.lr, weight_decay=0.0, eps=ADAM_EPS)
    for batch in map(pairs, range(3)):
        losses: list[float] = []
        margins: list[float] = []
        for half in (range(4), range(4, 8)):
            adam.zero_grad()
            both = [plain_losses(model, batch, pair) for pair in half]
            loss = torch.stack([one for one, _ in both]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), topology.optimizer.clip_grad)
            adam.step()
            losses.append(loss.item())
            margins.append(float(np.mean([margin.item() for _, margin in both])))
        metrics = step(batch).metrics
        assert metrics["train/preference_loss"] == pytest.approx(np.mean(losses), abs=1e-5)
        assert metrics["train/rewards_margins"] == pytest.approx(np.mean(margins), abs=1e-5)
    state = model.state_dict()
    for name, weight in whole_weights(replica.complete_chunks(), replica.hf).items():
        torch.testing.assert_close(weight, state[name], rtol=0, atol=2e-4)


def test_an_evaluation_has_the_metrics_of_the_next_train_step(make_topology: MakeTopology, tmp_path: Path) -> None:
    write_model(tmp_path / "weights")
    topology = topology_of(make_topology, tmp_path / "weights", algorithm={"num_steps_per_rollout": 1})
    replica = Replica(topology, CPU)
    step, batch = RewardModelStep(topology, replica), pairs(0)
    before = whole_weights(replica.complete_chunks(), replica.hf)
    known = {name: weight.clone() for name, weight in before.items()}
    found = step.evaluate(batch)
    assert all(torch.equal(weight, known[name]) for name, weight in before.items())
    model = as_classifier(tmp_path / "weights", replica)
    with torch.no_grad():
        margins = [score(model, batch, 2 * pair) - score(model, batch, 2 * pair + 1) for pair in range(8)]
    assert found.num_pairs == 8
    assert found.sums["train/rewards_margins"] == pytest.approx(sum(margins).item(), abs=1e-4)
    assert found.sums["train/rewards_accuracies"] == sum(margin.item() > 0 for margin in margins)
    trained = step(batch).metrics
    unmasked = [bool(batch.mask_sums_B[2 * pair : 2 * pair + 2].all()) for pair in range(8)]
    kept = [margin.item() for margin, whole in zip(margins, unmasked, strict=True) if whole]
    assert trained["train/rewards_margins"] == pytest.approx(sum(kept) / 8, abs=1e-5)


def test_one_token_after_each_sample_trains() -> None:
    batch = pairs(0, num_pairs=2)
    read = at_last_tokens(batch)
    for sample, (begin, length) in enumerate(zip(read.starts_B, read.lengths_B, strict=True)):
        own = slice(batch.starts_B[sample], batch.starts_B[sample] + batch.lengths_B[sample])
        assert read.tokens_N[begin : begin + length - 1].tolist() == batch.tokens_N[own].tolist()
        trains = [0] * (length - 1) + [int(batch.mask_sums_B[sample] > 0)]
        assert read.loss_mask_N[begin : begin + length].tolist() == trains


@pytest.mark.parametrize("distributed", [False, True], ids=["", "distributed optimizer"])
def test_a_run_continues_exactly_and_transformers_reads_its_export(
    make_topology: MakeTopology, tmp_path: Path, distributed: bool
) -> None:
    write_model(tmp_path / "weights", tied=True)
    trainer = {"optimizer": {"use_distributed_optimizer": distributed}}
    algorithm = {"num_steps_per_rollout": 1}
    topology = topology_of(make_topology, tmp_path / "weights", algorithm=algorithm, trainer=trainer)
    rank = TrainerRank(topology, tmp_path / "run")
    try:
        rank.train(pairs(0))
        rank.begin_save(step=1, incarnation=1).result()
        rank.finish_save()
        straight = rank.train(pairs(1)).metrics
        rank.export(tmp_path / "hf")
        rewards = rank._train_step.rewards(pairs(2))
    finally:
        rank.close()
    again = TrainerRank(topology, tmp_path / "run")
    try:
        assert again.resume() == 1
        found = again.train(pairs(1)).metrics
        again.export(tmp_path / "again")
    finally:
        again.close()
    names = [name for name in straight if name.startswith("train/")]
    assert {name: found[name] for name in names} == {name: straight[name] for name in names}
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "again")]
    assert files[0] == files[1]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    model, missing = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(missing.values()), missing
    assert model.config.num_labels == 1
    with torch.no_grad():
        scores = [score(model, pairs(2), sample).item() for sample in range(16)]
    assert rewards.tolist() == pytest.approx(scores, abs=1e-5)
    assert_a_run_starts_from(make_topology, tmp_path / "hf")


def assert_a_run_starts_from(make_topology: MakeTopology, directory: Path) -> None:
    """A reward model starts with the head in the files, and no policy starts from them."""
    ranks.join(ranks.Ranks(), MegatronConfig(), CPU, seed=1)  # the ranks above have left
    topology = topology_of(make_topology, directory)
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        stored = file.get_tensor(VALUE_HEAD)
    assert torch.equal(Replica(topology, CPU).complete_chunks()[0].output_layer.weight.detach(), stored)
    policy = make_topology(model={"hf_checkpoint": str(directory), "random_init": False})
    with pytest.raises(ValueError, match=r"has no tensor score\.weight"):
        check_weights(directory, trained_model(policy))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe", "deepseek_v3"])
def test_transformers_reads_the_reward_model_of_each_kind(
    make_topology: MakeTopology, tmp_path: Path, kind: str
) -> None:
    write_model(tmp_path / "weights", kind)
    rank = TrainerRank(topology_of(make_topology, tmp_path / "weights"), tmp_path / "run")
    try:
        rank.export(tmp_path / "hf")
        rewards = rank._train_step.rewards(pairs(2))
    finally:
        rank.close()
    model, missing = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(missing.values()), missing
    with torch.no_grad():
        scores = [score(model.eval(), pairs(2), sample).item() for sample in range(16)]
    assert rewards.tolist() == pytest.approx(scores, abs=2e-5)
