"""The ranks of many trainings, one after the other: `rank_program.py WORLD DIRECTORY HALF`.

The imports of torch and Megatron-core take longer than a row of the grid does, so a set of processes trains them all:
the first step of each in one set, the others, from the checkpoint, in a fresh one.
"""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from actors.trainer.commands import TrainerRank
from actors.trainer.critic_rank import CriticRank, build_rank
from actors.trainer.data.batch import TrainBatch
from actors.trainer.data.precomputed import PrecomputedLogProbs
from runtime.settings.topology import Topology, decode_topology
from tests.actors.trainer.tiny import VOCAB, groups_of, random_batch, with_prompts
from tests.grid import faults
from tests.grid.forked import begin_job, fork_ranks, meet
from tests.support.checkpoint_tensors import tensors_of
from tests.support.checkpoints import save

STUCK_S = 40.0
STEPS = {"first": (0,), "second": (1, 2)}
LAST = 2
FLAT: dict[int, tuple[int, ...]] = {0: (1, 2), 1: (0, 1, 2), LAST: ()}  # groups, by step
SPOILT = {0: (3, 7, 8, 9, 10, 11, 12, 13, 14, 15), 1: (6,), LAST: (1,)}  # rollouts, by step


def batch_of(step: int, *, spoilt: bool, idle: bool, prompts: bool) -> TrainBatch:
    """The last one is so small that some replicas have nothing to do in it.

    Args:
        step: its number.
        spoilt: the rewards of some rollouts are NaN.
        idle: the rewards of some groups are equal, all of the first optimizer step of the second train step.
        prompts: the samples of each group have one prompt.
    """
    batch = random_batch(step) if step < LAST else random_batch(step, num_groups=1, group_size=2)
    batch = with_prompts(batch) if prompts else batch
    bad_B = np.isin(batch.rollouts_B, SPOILT[step] if spoilt else ())
    rewards_B = np.where(np.isin(batch.groups_B, FLAT[step] if idle else ()), 1.0, batch.rewards_B)
    return replace(batch, rewards_B=np.where(bad_B, np.nan, rewards_B))


def with_told(batch: TrainBatch, topology: Topology) -> TrainBatch:
    """With the experts of most tokens, where they are asked for: 2 of 4 in each layer."""
    if not topology.algorithm.use_rollout_routing_replay:
        return batch
    layers = json.loads((Path(topology.model.hf_checkpoint) / "config.json").read_text())["num_hidden_layers"]
    draw, num_tokens = np.random.default_rng(batch.step), len(batch.tokens_N)
    chosen = draw.permuted(np.tile(np.arange(4), (num_tokens * layers, 1)), axis=1)[:, :2].reshape(num_tokens, -1)
    is_told = draw.random(num_tokens) < 0.9
    return replace(batch, routed_experts_N=np.where(is_told[:, None], chosen, 255).astype(np.uint8))


def with_kept(batch: TrainBatch, topology: Topology) -> TrainBatch:
    """With the tokens that the engine kept, where they are asked for: each of most tokens, and up to 7 others."""
    if not topology.rollout.return_sampling_mask:
        return batch
    draw = np.random.default_rng(batch.step)
    counts: list[int] = []
    ids: list[int] = []
    for token, trains in zip(batch.tokens_N.tolist(), batch.loss_mask_N.tolist(), strict=True):
        others = draw.choice(VOCAB, int(draw.integers(0, 8)), replace=False).tolist()
        kept = list(dict.fromkeys([token, *others])) if trains and draw.random() < 0.9 else []
        counts.append(len(kept))
        ids += kept
    return replace(batch, kept_counts_N=np.array(counts, dtype=np.int32), kept_ids_K=np.array(ids, dtype=np.int32))


def with_ages(batch: TrainBatch, topology: Topology) -> TrainBatch:
    """With tokens of older weights, where those are kept."""
    if not topology.algorithm.keep_old_actor:
        return batch
    ages_N = np.random.default_rng(batch.step).integers(0, min(batch.step, 2) + 1, len(batch.tokens_N))
    return replace(batch, staleness_N=np.where(batch.loss_mask_N, ages_N, -1).astype(np.int32))


def main(rank: int, world: int, listener: socket, directory: Path, half: str) -> None:
    torch.set_num_threads(1)
    jobs: list[dict[str, Any]] = json.loads((directory / "jobs.json").read_text())
    store = meet(rank, world, listener)
    for number, job in enumerate(jobs):
        begin_job(directory, rank, job["name"], stuck_s=STUCK_S)
        if rank < job["world"]:
            with faults.planted(job["fault"]):
                own = dist.PrefixStore(f"{half} {number}", store)
                train(
                    directory / job["name"],
                    own,
                    rank,
                    "again" if job["reads"] else half,
                    **{name: job[name] for name in ("spoilt", "idle", "prompts")},
                )
            gc.collect()


def train(place: Path, store: dist.Store, rank: int, half: str, **kind: bool) -> None:
    topology = decode_topology((place / "topology.json").read_bytes())
    engine = build_rank(topology, place, store, rank)
    if rank or isinstance(engine, CriticRank):
        engine.follow()
        return
    if half == "again":
        assert engine.resume() == 1
        save(engine, step=1, incarnation=2)
        engine.close()
        return
    assert engine.resume() == STEPS[half][0]
    same: list[str] = []
    metrics: list[dict[str, float]] = []
    for step in STEPS[half]:
        begun = engine.begin_publish(2) if step == LAST else None
        batch = with_precomputed(engine, topology, batch_of(step, **kind))
        metrics.append(engine.train(batch).metrics)  # the last one beside the second export of the same weights
        if begun is not None:
            same.append(engine.finish_publish(begun, confirmed=0).checksum)
        elif half == "second":
            same.append(engine.publish(1, confirmed=0).checksum)
    assert len(set(same)) <= 1, "training went on, and a copy of the weights changed"
    path, _ = save(engine, step=STEPS[half][-1] + 1, incarnation=1)
    if topology.trainer.lora.rank:
        saved = tensors_of(path)
        for name, tensor in engine._whole_adapters().items():  # which versions for engines have
            assert torch.equal(tensor, saved[name]), f"{name} was gathered otherwise than it is in the checkpoint"
    result: dict[str, Any] = {"metrics": metrics}
    if half == "second":
        published = engine.publish(3, confirmed=0)
        assert published.probe is not None
        result |= {"weights": str(published.path), "probe": list(published.probe.log_probs)}
    engine.close()
    (place / f"{half}.json").write_text(json.dumps(result))


def with_precomputed(engine: TrainerRank, topology: Topology, batch: TrainBatch) -> TrainBatch:
    """The batch; where that is asked for, every second group's log-probs are computed before."""
    precomputed, batch = PrecomputedLogProbs(), with_kept(with_told(batch, topology), topology)
    batch = with_ages(batch, topology)
    if not topology.trainer.log_probs_ahead:
        return batch
    together = engine.log_probs(batch)
    for group, alone in groups_of(batch):
        columns = engine.log_probs(alone)
        where_N = np.repeat(batch.groups_B == group, batch.lengths_B)
        for one, other in zip(columns, together, strict=True):
            assert (one is None) == (other is None)
            assert one is None or np.array_equal(one, other[where_N]), "a group's log-probs depend on other groups"
        if group % 2 == 0:
            precomputed.add(group, columns)
    return precomputed.put_into(batch, {group: group for group in batch.groups_B.tolist()})[0]


if __name__ == "__main__":
    fork_ranks(main, Path(sys.argv[2]), sys.argv[3])
