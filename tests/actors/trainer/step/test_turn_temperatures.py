"""Turns at temperatures of their own: the trainer's log-probs are those of each turn, by transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from actors.trainer.commands import TrainerRank
from actors.trainer.data.assembly import CollectedGroup, assemble, problems_of
from messages import SampleKey, Segment, SegmentsPublished
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.logs import group_of, segment, summary
from tests.build.topology import trainer_topology

RECIPE = 0.7
TURNS = ((None, [3, 4, 5], [6, 7, 8]), (0.5, [9], [10, 11]), (2.5, [12, 13], [14, 15, 16]))
DIFFERENCE = "train/train_rollout_logprob_abs_diff_max"


def log_probs_by_hand(model: Any) -> list[NDArray[np.float64]]:
    """The log-softmax of transformers' logits over each turn's temperature."""
    tokens = [token for _, given, sampled in TURNS for token in (*given, *sampled)]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    found, first = list[NDArray[np.float64]](), 0
    for temperature, given, sampled in TURNS:
        first += len(given)
        rows = (logits[first - 1 : first + len(sampled) - 1] / (temperature or RECIPE)).log_softmax(-1)
        found.append(rows[torch.arange(len(sampled)), torch.tensor(sampled)].numpy())
        first += len(sampled)
    return found


def of_turns(index: int, log_probs: Sequence[NDArray[np.float64]], *, recorded: bool = True) -> list[Segment]:
    key = SampleKey(group_id=5, attempt=0, index=index)
    parts = [
        segment(key, given, sampled, ((1, 0, len(sampled)),), log_probs=by_hand)
        for (_, given, sampled), by_hand in zip(TURNS, log_probs, strict=True)
    ]
    temperatures = [temperature if recorded else None for temperature, _, _ in TURNS]
    return [
        msgspec.structs.replace(part, temperature=temperature)
        for part, temperature in zip(parts, temperatures, strict=True)
    ]


def group(*samples: Sequence[Segment]) -> CollectedGroup:
    payloads = {
        10 + index: SegmentsPublished(group_id=5, attempt=0, lease="lease", segments=tuple(segments))
        for index, segments in enumerate(samples)
    }
    members = [
        summary(index, [(10 + index, place) for place in range(len(segments))], reward=float(index))
        for index, segments in enumerate(samples)
    ]
    return CollectedGroup(group_of(5, tuple(members)), payloads)


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_computes_log_probs_at_the_temperature_of_each_turn(tmp_path: Path, packed: bool) -> None:
    """They differ by rounding alone from log-probs by hand, which stand in for the engine's."""
    expected = log_probs_by_hand(write_model(tmp_path / "model"))
    topology = trainer_topology(
        tmp_path / "model",
        tmp_path,
        model={"random_init": False},
        trainer={"packed": packed},
        rollout={"temperature": RECIPE, "rollout_batch_size": 1, "n_samples_per_prompt": 2},
        algorithm={"num_steps_per_rollout": 1},
        optimizer={"lr": 0.0},
    )
    engine = TrainerRank(topology, tmp_path / "run")
    engine.publish(1, confirmed=0)
    found = dict[bool, float]()
    for step, recorded in enumerate((True, False)):
        samples = [of_turns(index, expected, recorded=recorded) for index in range(2)]
        batch = assemble(step, [group(*samples)], {1: step})
        assert batch is not None
        found[recorded] = engine.train(batch).metrics[DIFFERENCE]
    engine.close()
    assert found[True] < 1e-5
    assert found[False] > 0.1  # at the recipe's temperature they would be others


def test_trained_tokens_of_a_greedy_turn_are_invalid() -> None:
    key = SampleKey(group_id=5, attempt=0, index=0)
    for temperature, mask, num_problems in ((0.0, [1], 1), (0.0, [0], 0), (1e-3, [1], 0)):
        part = segment(key, [1], [2], ((1, 0, 1),), mask=mask)
        found = group([msgspec.structs.replace(part, temperature=temperature)])
        assert len(problems_of(found.completed, found.payloads, 16)) == num_problems
