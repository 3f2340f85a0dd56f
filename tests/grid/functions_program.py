"""The ranks that train with all functions in turn, in one layout after the other: `WORLD DIRECTORY`.

The learning rate is 0: every case starts from the same weights, and takes whole train steps.
"""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron import groups
from actors.trainer.megatron.groups import Ranks
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step.critic import Critic
from actors.trainer.step.reward_model import RewardModelStep
from actors.trainer.step.train_step import TrainStep
from runtime.settings.derived import has_critic, topk_divergence, trains_pairs, trains_reward_model
from runtime.settings.topology import Topology, decode_topology
from tests.actors.trainer.tiny import pairs, random_batch, with_topk
from tests.grid import faults
from tests.grid.forked import begin_job, fork_ranks, meet
from tests.grid.functions import algorithm

STUCK_S = 120.0
DEVIATIONS = {"old": 0.3, "rollout": 0.4, "ref": 0.4, "teacher": 0.5}  # nats, from the policy


def batch_of(step: TrainStep) -> TrainBatch:
    """Samples whose log-probs are near those of the policy. Two rollouts train no token."""
    batch = random_batch(num_groups=4, group_size=4)
    masked_B = np.isin(batch.rollouts_B, (2, 9))
    mask_N = np.where(np.repeat(masked_B, batch.lengths_B), 0, batch.loss_mask_N).astype(np.uint8)
    rewards_B = np.random.default_rng(3).integers(0, 11, 16)[batch.rollouts_B] / 10
    named_B = np.stack([rewards_B, rewards_B[::-1]], axis=1)  # of two names
    batch = replace(batch, rewards_B=rewards_B, raw_rewards_B=rewards_B, named_rewards_B=named_B)
    batch = replace(batch, baseline_rewards_B=np.full_like(rewards_B, 0.4), baseline_lens_B=np.full(len(named_B), 5))
    batch = replace(batch, loss_mask_N=mask_N, staleness_N=np.where(mask_N, 0, -1).astype(np.int32))
    policy_N = step.precompute(batch).old_N
    assert policy_N is not None
    draw, columns = np.random.default_rng(5), {}
    for name, deviation in DEVIATIONS.items():
        near_N = np.minimum(policy_N + draw.normal(0, deviation, len(policy_N)), -1e-3)
        columns[f"{name}_log_probs_N"] = np.where(mask_N, near_N, 0).astype(np.float32)
    return replace(batch, **columns)


def trained_pairs(topology: Topology, policy: Replica) -> dict[str, float]:
    """Metrics of an evaluation and a train step on preference pairs. A reward model has a replica of its own."""
    replica = Replica(topology, policy.device) if trains_reward_model(topology) else policy
    step = (RewardModelStep if trains_reward_model(topology) else TrainStep)(topology, replica)
    batch = pairs(0)
    ref_N = np.random.default_rng(7).normal(-3.5, 0.5, len(batch.tokens_N))
    batch = replace(batch, ref_log_probs_N=(ref_N * batch.loss_mask_N).astype(np.float32))
    evaluated = {f"evaluated {name}": value for name, value in step.evaluate(batch).sums.items()}
    return step(batch).metrics | evaluated


def train(topology: Topology, cases: dict[str, Any], ranks: Ranks) -> dict[str, dict[str, float]]:
    """Train one step with each case, and return its metrics."""
    device = torch.device("cpu")
    groups.join(ranks, topology.trainer.megatron, device, seed=topology.run.seed)
    replica = Replica(topology, device)
    with_critic = msgspec.structs.replace(topology, algorithm=algorithm({"estimator": {"type": "ppo"}}))
    critic = Critic(with_critic, device)
    before = [copy for trained in (replica, critic.replica) for copy in trained.weights_copy()]
    batch = batch_of(TrainStep(topology, replica))
    found: dict[str, dict[str, float]] = {}
    for name, settings in cases.items():
        own = msgspec.structs.replace(topology, algorithm=algorithm(settings))
        step = None if trains_pairs(own) else TrainStep(own, replica, critic if has_critic(own) else None)
        own_batch = batch if topk_divergence(own.algorithm) is None else with_topk(batch)
        metrics = trained_pairs(own, replica) if step is None else step(own_batch).metrics
        found[name] = {key: float(value) for key, value in metrics.items() if not key.startswith("perf/")}
    after = [copy for trained in (replica, critic.replica) for copy in trained.weights_copy()]
    assert all(map(torch.equal, before, after)), "a step with learning rate 0 moved weights"
    groups.leave()
    return found


def main(rank: int, world: int, listener: socket, directory: Path) -> None:
    torch.set_num_threads(1)
    jobs: list[dict[str, Any]] = json.loads((directory / "jobs.json").read_text())
    store = meet(rank, world, listener)
    for number, job in enumerate(jobs):
        begin_job(directory, rank, job["name"], stuck_s=STUCK_S)
        if rank < job["world"]:
            topology = decode_topology(json.dumps(job["topology"]).encode())
            ranks = Ranks(rank=rank, world_size=job["world"], store=dist.PrefixStore(str(number), store))
            with faults.planted(job["fault"]):
                found = train(topology, job["cases"], ranks)
            if rank == 0:
                (directory / f"{job['name']}.json").write_text(json.dumps(found))
        gc.collect()


if __name__ == "__main__":
    fork_ranks(main, Path(sys.argv[2]))
