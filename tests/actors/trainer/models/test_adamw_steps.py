"""Three steps of AdamW of each family against transformers and torch: choices first, then every parameter.

A gradient that is rounding alone has no sign, and AdamW moves its weight by the learning rate all the same. Such
weights are not compared: those whose first gradient is below `DECIDED` of the largest of its tensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.imports import quiet
from actors.trainer.megatron.layers.router import Router
from actors.trainer.megatron.layers.sparse import Indexer
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.models.shapes import frozen_names
from actors.trainer.step.train_step import TrainStep
from tests.actors.trainer.hf import gradients_of, state_of, whole_weights, write_model
from tests.actors.trainer.tiny import OF_KIND, VOCAB, kinds
from tests.build.topology import MakeTopology

LR, EPS, STEPS = 1e-3, 1e-8, 3
SAMPLES, LENGTH = 4, 24  # tokens: over four times index_topk
DECIDED = 1e-5  # of the largest: by how much gradients may differ
MARGIN = 1e-5  # between the last score that is chosen and the next, of the largest
IN_CI = ("gemma3_text", "glm_moe_dsa", "gpt_oss", "qwen3_next")  # which have most blocks; the others are nightly


def demonstrations(step: int) -> TrainBatch:
    """Samples of one length, whose tokens all train but the first."""
    total, each = SAMPLES * LENGTH, np.arange(SAMPLES)
    mask = np.ones(total, np.uint8)
    mask[::LENGTH] = 0
    return TrainBatch(
        step=step,
        groups_B=each,
        rollouts_B=each,
        indices_B=np.zeros(SAMPLES, np.int64),
        parts_B=np.zeros(SAMPLES, np.int64),
        rewards_B=np.zeros(SAMPLES),
        raw_rewards_B=np.zeros(SAMPLES),
        truncated_B=np.zeros(SAMPLES, np.uint8),
        left_out_B=np.zeros(SAMPLES, np.uint8),
        lengths_B=np.full(SAMPLES, LENGTH),
        tokens_N=np.random.default_rng(step).integers(0, VOCAB, total).astype(np.int32),
        loss_mask_N=mask,
        rollout_log_probs_N=np.zeros(total, np.float32),
        staleness_N=np.where(mask, 0, -1).astype(np.int32),
    )


class Choices:
    """Which keys and experts a model takes, each [positions, all of them], in the order of its layers."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.experts: list[Tensor] = []
        self.margins: list[float] = [torch.inf]

    def take_experts(self, chosen: Tensor, number: int) -> None:
        """Add a layer's choice, [T, k]."""
        self.experts.append(torch.zeros(len(chosen), number, dtype=torch.bool).scatter_(1, chosen.long(), True))

    def take_margin(self, scores: Tensor, number: int) -> None:
        """Add the least distance between a score that is chosen and the next, where there is a choice."""
        if number < scores.size(-1):
            best = scores.detach().topk(number + 1).values
            last, following = best[..., -2], best[..., -1]
            gaps = (last - following)[last.isfinite() & following.isfinite()]
            self.margins += [float(gaps.min() / best[best.isfinite()].abs().max())] if len(gaps) else []


@contextmanager
def choices_of_transformers(model: Any) -> Iterator[Choices]:
    """Record the choices of a forward pass."""
    found, topk, method = Choices(), torch.topk, Tensor.topk

    def watched(of: Callable[..., Any]) -> Callable[..., Any]:
        def called(scores: Tensor, k: int, *args: Any, **options: Any) -> Any:
            with pytest.MonkeyPatch.context() as plain:
                plain.setattr(Tensor, "topk", method)
                found.take_margin(scores, k)
            return of(scores, k, *args, **options)

        return called

    def experts(module: Any, inputs: Any) -> None:
        found.take_experts(inputs[1], module.num_experts)

    def keys(_module: Any, inputs: Any, chosen: Tensor) -> None:
        mask = torch.zeros(*chosen.shape[:2], LENGTH, dtype=torch.bool).scatter(-1, chosen.long(), True)
        found.keys.append(mask & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    named = [(type(module).__name__, module) for module in model.modules()]
    hooks = [module.register_forward_pre_hook(experts) for name, module in named if name.endswith("Experts")]
    hooks += [module.register_forward_hook(keys) for name, module in named if name.endswith("Indexer")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", watched(topk))
        patch.setattr(Tensor, "topk", watched(method))
        yield found
    for hook in hooks:
        hook.remove()


def own_choices(built: Any, tokens: Tensor) -> Choices:
    """The choices of the trainer's model in a forward pass of its own."""
    found, taken = Choices(), Router.taken

    def recorded(router: Router, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        by_sample = chosen.view(LENGTH, SAMPLES, -1).transpose(0, 1).flatten(0, 1)
        found.take_experts(by_sample, scores.size(1))
        return taken(router, scores, chosen)

    def keys(_module: Any, _inputs: Any, plans: Any) -> None:
        mask = torch.zeros(SAMPLES, LENGTH, LENGTH, dtype=torch.bool)
        for own, plan in zip(mask, plans, strict=True):
            for pair in plan:
                own[pair.queries, pair.keys] = pair.mask
        found.keys.append(mask)

    hooks = [module.register_forward_hook(keys) for module in built.modules() if isinstance(module, Indexer)]
    with pytest.MonkeyPatch.context() as patch, quiet(), torch.no_grad():
        patch.setattr(Router, "taken", recorded)
        built(tokens, None, None)
    for hook in hooks:
        hook.remove()
    return found


def assert_same_choices(own: Choices, theirs: Choices) -> None:
    assert min(theirs.margins) > MARGIN
    assert bool(theirs.keys or theirs.experts) == (theirs.margins != [torch.inf])
    for ours, expected in ((own.keys, theirs.keys), (own.experts, theirs.experts)):
        assert len(ours) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in IN_CI else pytest.mark.nightly) for kind in kinds()]
)
def test_three_steps_of_adamw_are_those_of_transformers(kind: str, make_topology: MakeTopology, tmp_path: Path) -> None:
    directory = tmp_path / "weights"
    model = write_model(directory, kind, tied=OF_KIND.get(kind, {}).get("tie_word_embeddings", False), noise=0.2)
    before = load_file(directory / "model.safetensors")
    topology = make_topology(
        model={"hf_checkpoint": str(directory), "random_init": False},
        rollout={"rollout_batch_size": SAMPLES, "n_samples_per_prompt": 1},
        algorithm={"num_steps_per_rollout": 1, "loss": {"type": "sft"}, "reduction": {"type": "token-mean"}},
        optimizer={"lr": LR, "weight_decay": 0.0, "adam_eps": EPS},
    )
    replica = Replica(topology, torch.device("cpu"))
    train, (built,) = TrainStep(topology, replica), replica.chunks
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, eps=EPS)
    first: dict[str, Tensor] = {}
    for batch in map(demonstrations, range(STEPS)):
        tokens = torch.from_numpy(batch.tokens_N).long().view(SAMPLES, LENGTH)
        with choices_of_transformers(model) as theirs:
            logits = model(tokens).logits
        assert_same_choices(own_choices(built, tokens), theirs)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        assert train(batch).metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), topology.optimizer.clip_grad)
        first = first or gradients_of(model)
        adam.step()

    after, expected, left_out = whole_weights([built], replica.hf), state_of(model), 0
    unchanged = frozen_names(replica.hf) | {name for name in after if name.endswith("e_score_correction_bias")}
    for name, weight in after.items():
        if name in unchanged:
            assert torch.equal(weight, before[name])
            continue
        size = first[name].abs()
        is_decided = (size > DECIDED * size.max()) | (size == 0)
        left_out += int((~is_decided).sum())
        torch.testing.assert_close(weight[is_decided], expected[name][is_decided], rtol=0, atol=0.05 * LR)
        assert (weight - before[name]).abs().max() > LR, name
    assert left_out < 0.01 * sum(weight.numel() for weight in after.values())
