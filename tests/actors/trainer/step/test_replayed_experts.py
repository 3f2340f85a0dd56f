"""Tokens train with the experts that they had before, against a transformers model whose routers are told them."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from actors.rollout.offline.dump import Dumped
from actors.trainer.data.assembly import CollectedGroup, assemble
from actors.trainer.data.batch import TrainBatch
from messages import Int32Array, Outcome, Prompt, RolloutRequested, SamplingParams, SegmentRef, SegmentsPublished
from runtime.data.dump_files import write_pair
from runtime.data.dumps import Fate, group_of
from runtime.settings.topology import Topology
from tests.actors.trainer import logs
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.step.reference import ReferenceTrainer
from tests.actors.trainer.step.test_train_step import trainer
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

LAYERS, EXPERTS, CHOSEN = 2, 4, 2
TASK = RolloutRequested(
    group_id=0,
    attempt=0,
    round=0,
    min_version=1,
    prompt=Prompt(data="d", row=0, text="", prompt_ids=Int32Array([1]), label=None),
    num_samples=4,
    sampling=SamplingParams(max_new_tokens=8),
)


class Replaying(ReferenceTrainer):
    """Each token keeps the experts that it is told, or those that it has before the first optimizer step of a batch."""

    def __init__(self, topology: Topology, model: Any, told: Tensor | None = None) -> None:
        super().__init__(topology, model)
        self._told = told  # [N, layers, chosen]
        self._wanted: Tensor | None = None  # of the samples that come
        self._taken: dict[int, Tensor] = {}
        for layer, block in enumerate(model.model.layers):
            block.mlp.gate.forward = partial(self._choose, block.mlp.gate, layer)

    def _choose(self, gate: Any, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        shares = logits.softmax(-1)
        chosen = shares.topk(gate.top_k).indices if self._wanted is None else self._wanted[:, layer]
        self._taken[layer] = chosen
        weights = shares.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    def _sample(self, batch: TrainBatch, index: int) -> dict[str, Any]:
        sample = super()._sample(batch, index)
        begin = int(batch.starts_B[index])
        if self._told is None:
            self._wanted = None
            with torch.no_grad():
                self.model(sample["tokens"][None])
            return sample | {"experts": torch.stack([self._taken[layer] for layer in range(LAYERS)], 1)}
        return sample | {"experts": self._told[begin : begin + len(sample["tokens"])]}

    def _spreads(self, model: Any, samples: list[dict[str, Any]]) -> list[Tensor]:
        self._wanted = pad_sequence([sample["experts"] for sample in samples], batch_first=True).flatten(0, 1)
        return super()._spreads(model, samples)


def differences(topology: Topology, reference: ReferenceTrainer, batch: TrainBatch) -> dict[str, float]:
    metrics, expected = trainer(topology)[0](batch).metrics, reference.train(batch)
    return {
        name: abs(metrics[f"train/{name}"] - sum(one[name] for one in expected) / len(expected)) for name in expected[0]
    }


def topology_of(
    make_topology: MakeTopology, directory: Path, trainer: dict[str, Any] | None = None, **algorithm: Any
) -> Topology:
    return make_topology(
        model={"hf_checkpoint": str(directory), "random_init": False},
        algorithm={"num_steps_per_rollout": 2, **algorithm},
        optimizer={"lr": 5e-2, "adam_eps": 1e-4},
        trainer=trainer or {},
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_experts_are_those_of_the_old_log_probs(make_topology: MakeTopology, tmp_path: Path, recompute: bool) -> None:
    model = write_model(tmp_path / "hf", "qwen3_moe", initializer_range=0.1)
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    trained = {"megatron": again if recompute else {}}
    topology = topology_of(make_topology, tmp_path / "hf", trained, use_routing_replay=True)
    assert max(differences(topology, Replaying(topology, model), random_batch()).values()) < 1e-4


def test_without_a_replay_routers_choose_anew(make_topology: MakeTopology, tmp_path: Path) -> None:
    model = write_model(tmp_path / "hf", "qwen3_moe", initializer_range=0.1)
    topology = topology_of(make_topology, tmp_path / "hf")
    assert max(differences(topology, Replaying(topology, model), random_batch()).values()) > 1e-3


def dumped_batch(directory: Path, *, told: bool = True) -> TrainBatch:
    """Of a dump of two groups whose samples say, of all tokens but the last one, which experts they had."""
    generator = np.random.default_rng(5)
    dumped = []
    for group_id in range(2):
        message = logs.payload(group_id)
        segments = []
        for one in message.segments:
            num_tokens = len(one.prompt_ids) + len(one.response_ids)
            experts = generator.random((num_tokens, LAYERS, EXPERTS)).argsort(-1)[..., :CHOSEN]
            experts[-1] = -1
            routed = Int32Array(experts.reshape(-1)) if told else None
            segments.append(msgspec.structs.replace(one, routed_experts=routed))
        message = msgspec.structs.replace(message, segments=tuple(segments))
        dumped.append(group_of(logs.completed(group_id, 9), {9: message}, Fate(verdict=Outcome.KEEP, step=0)))
    directory.mkdir()
    write_pair(directory, 0, dumped, (1, 0))
    source = Dumped(directory)
    batch = assemble(0, [collected(source, group_id) for group_id in range(2)], {1: 0})
    assert batch is not None
    return batch


def collected(source: Dumped, group_id: int) -> CollectedGroup:
    """What a trainer would have of a group, as the recorded rollout actor answers it."""
    samples = source.answer(msgspec.structs.replace(TASK, group_id=group_id))
    segments = tuple(segment for sample in samples for segment in sample.segments)
    refs = [(SegmentRef(seq=3, position=position),) for position in range(len(segments))]
    summaries = [
        msgspec.structs.replace(sample.summary, segments=ref) for sample, ref in zip(samples, refs, strict=True)
    ]
    payload = SegmentsPublished(group_id=group_id, attempt=0, lease="l", segments=segments)
    return CollectedGroup(logs.group_of(group_id, tuple(summaries)), {3: payload})


@pytest.mark.parametrize("packed", [False, True])
def test_experts_are_those_that_a_dump_tells(make_topology: MakeTopology, tmp_path: Path, packed: bool) -> None:
    batch = dumped_batch(tmp_path / "dump")
    assert batch.routed_experts_N is not None
    told = torch.from_numpy(batch.routed_experts_N).long().reshape(-1, LAYERS, CHOSEN).clamp(min=0)
    told[(told[..., 0] == told[..., 1]).all(-1)] = torch.arange(CHOSEN)  # of a last token, which decides nothing
    model = write_model(tmp_path / "hf", "qwen3_moe", initializer_range=0.1)
    topology = topology_of(make_topology, tmp_path / "hf", {"packed": packed}, use_rollout_routing_replay=True)
    assert max(differences(topology, Replaying(topology, model, told), batch).values()) < 1e-4


def test_a_dump_without_experts_cannot_be_replayed(make_topology: MakeTopology, tmp_path: Path) -> None:
    batch = dumped_batch(tmp_path / "dump", told=False)
    assert batch.routed_experts_N is None
    write_model(tmp_path / "hf", "qwen3_moe")
    step, _ = trainer(topology_of(make_topology, tmp_path / "hf", use_rollout_routing_replay=True))
    with pytest.raises(
        ValueError, match="needs 4 routed experts of each token, those of all layers, but samples have none"
    ):
        step(batch)
