"""The sampling temperature applies to both: log-probs of the tiny engine are those that the trainer computes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.tiny_engine.engine.requests import Request, Sampling, Stopping
from actors.tiny_engine.engine.scheduler import Scheduler
from actors.tiny_engine.model import forward
from actors.tiny_engine.model.kv_slots import KvSlots
from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.metrics import DIFF, DIFF_MAX
from actors.trainer.step.train_step import TrainStep
from runtime.models.config import read_model
from runtime.settings.tables.trainer import MegatronConfig
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import trainer_topology


def sampled(directory: Path, temperature: float) -> TrainBatch:
    """A batch of responses that the engine sampled, with the log-probs that it reports."""
    weights = forward.load(read_model(directory).shape, directory)
    scheduler = Scheduler(KvSlots(weights, num_slots=8, context_length=64), version="0")
    requests = [
        Request(str(number), [3 + number, 4, 5], Sampling(temperature=temperature), Stopping(limit=9), seed=number)
        for number in range(4)
    ]
    with torch.inference_mode():
        scheduler.submit(requests)
        while not scheduler.idle:
            scheduler.step()
    wholes = [request.prompt_ids + request.output_ids for request in requests]
    masks_N = np.concatenate([np.repeat([0, 1], [3, len(request.output_ids)]) for request in requests])
    reported_N = np.zeros(len(masks_N), dtype=np.float32)
    reported_N[masks_N == 1] = np.concatenate([request.log_probs for request in requests])
    batch = random_batch(0, num_groups=1, group_size=4)
    first_B = np.unique(batch.rollouts_B, return_index=True)[1]  # without the second parts
    by_sample = {
        name: values[first_B]
        for name, values in vars(batch).items()
        if name.endswith("_B") and isinstance(values, np.ndarray) and len(values) == len(batch.lengths_B)
    }
    by_sample["lengths_B"] = np.array([len(whole) for whole in wholes], dtype=np.int64)
    return replace(
        batch,
        **by_sample,
        tokens_N=np.concatenate(wholes).astype(np.int32),
        loss_mask_N=masks_N.astype(np.uint8),
        rollout_log_probs_N=reported_N,
        staleness_N=np.where(masks_N, 0, -1).astype(np.int32),
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_log_probs_of_engine_and_trainer_are_the_same(tmp_path: Path, temperature: float) -> None:
    torch.set_num_threads(1)
    ranks.join(ranks.Ranks(), MegatronConfig(), torch.device("cpu"), seed=1)
    write_model(tmp_path / "model")
    batch = sampled(tmp_path / "model", temperature)

    def differences(trains_at: float) -> tuple[float, float]:
        tables = {"model": {"random_init": False}, "rollout": {"temperature": trains_at}}
        topology = trainer_topology(
            tmp_path / "model", tmp_path, **tables, algorithm={"num_steps_per_rollout": 1, "entropy_coef": 0.1}
        )
        metrics = TrainStep(topology, Replica(topology, torch.device("cpu")))(batch).metrics
        return metrics[DIFF], metrics[DIFF_MAX]

    assert max(differences(temperature)) < 1e-5
    assert min(differences(temperature * 1.1)) > 1e-3
