"""One rank of a critic that has ranks of its own: a process group and a parallel layout apart from the actor's.

Rank 0 of the actor sends the orders (critic_link.py). All of the critic's ranks carry out every order together, and the
first one answers.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - documented as public

from actors.trainer.channel import Channel
from actors.trainer.checkpoints import CHECKPOINTS
from actors.trainer.commands import TrainerRank
from actors.trainer.critic_link import CriticEnd
from actors.trainer.data.batch import Floats32, TrainBatch
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.checkpoint import begin_save_of_critic, load_critic
from actors.trainer.megatron.groups import Ranks
from actors.trainer.megatron.saving import Saving
from actors.trainer.orders import (
    ComputeValues,
    Export,
    FinishSave,
    Learned,
    LearnedStep,
    LearnReturns,
    Load,
    LoadCheckpoint,
    Order,
    Returns,
    Save,
    Stop,
    decode_batch,
)
from actors.trainer.plugins.functions import hook
from actors.trainer.step.critic import Critic, Estimates
from actors.trainer.step.estimator import response_mask
from actors.trainer.step.planning import Planner
from actors.trainer.weights.calls import AskOf
from actors.trainer.weights.export import weight_thread
from actors.trainer.weights.files import export_to_files
from actors.trainer.weights.gathering import own_parts
from runtime.settings.placement import num_critic_ranks, num_ranks
from runtime.settings.topology import Topology, critic_topology


def build_rank(
    topology: Topology,
    run_directory: Path,
    store: Any,
    number: int,
    *,
    local_rank: int = 0,
    ask_of: AskOf | None = None,
) -> "TrainerRank | CriticRank":
    """Build one process of the trainer: a rank of the actor, or a rank of the critic alone.

    Args:
        topology: Topology of the run.
        run_directory: Directory of the run.
        store: Store that all processes share; None: there is only one.
        number: Number of the process: the actor's ranks come first.
        local_rank: GPU of this process on its node.
        ask_of: As for `TrainerRank`.

    Raises:
        ValueError, OSError, InputError: As in `TrainerRank` and `CriticRank`.
    """
    actors, critics = num_ranks(topology.trainer), num_critic_ranks(topology)
    if not critics:
        rank = Ranks(rank=number, world_size=actors, local_rank=local_rank, store=store)
        return TrainerRank(topology, run_directory, rank, ask_of)
    link = PrefixStore("link", store)
    if number < actors:
        own = PrefixStore("actor", store)
        rank = Ranks(rank=number, world_size=actors, local_rank=local_rank, store=own)
        return TrainerRank(topology, run_directory, rank, ask_of, link)
    own = PrefixStore("critic", store)
    rank = Ranks(rank=number - actors, world_size=critics, local_rank=local_rank, store=own)
    return CriticRank(topology, run_directory, rank, link, number=number)


class CriticRank:
    """One rank of the critic. All calls come from one thread."""

    def __init__(self, topology: Topology, run_directory: Path, rank: Ranks, link_store: Any, *, number: int) -> None:
        """Join the critic's other ranks and build the critic with its initial weights.

        Args:
            topology: Topology of the run.
            run_directory: Directory of checkpoints and exports; all ranks see it.
            rank: Identity of this rank among those of the critic.
            link_store: Store of the link to rank 0 of the actor.
            number: Number of this process among those of the trainer.

        Raises:
            ValueError, OSError: The model or the parallel layout cannot be used. The message says why.
        """
        own = critic_topology(topology)
        self._name = f"rank {rank.rank} of the critic (process trainer.{number})"
        device = ranks.device_of(own.trainer.device, rank)
        orders = Channel(replace(rank, store=link_store), device)
        self._orders = orders
        self._link = CriticEnd(link_store, orders, is_first=rank.rank == 0)
        try:
            ranks.join(rank, own.trainer.megatron, device, seed=topology.run.seed)
            hook(topology, "custom_megatron_init")()
            self.critic = Critic(topology, device)
        except Exception as error:
            self._link.fail(error, self._name)
            raise
        self._replica = self.critic.replica
        self._planner = Planner(own, self._replica, self.critic.learner)
        self._topology = own
        self._checkpoints = run_directory / CHECKPOINTS
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Saving | None = None
        self._valued: tuple[TrainBatch, Floats32] | None = None  # batch whose returns are learned next, with its values
        if own.trainer.optimizer.optimizer_cpu_offload:
            self._replica.rest(run_directory)

    def follow(self) -> None:
        """Carry out orders until a `Stop` order or a call of `stop_following`. An error is reported to rank 0."""
        command: Order = Load("")
        try:
            while not isinstance(command, Stop):
                command = self._orders.next()
                self._carry_out(command)
        except Exception as error:
            self._link.fail(error, self._name)
            raise
        self._executor.shutdown(cancel_futures=True)
        ranks.leave()

    def stop_following(self) -> None:
        """End `follow` at its next poll for an order. Called from another thread."""
        self._orders.stop()

    def _carry_out(self, command: Order) -> None:
        match command:
            case Load():
                with self._replica.optimizer_at_hand():
                    self._link.answer(load_critic(self._replica, Path(command.path)))
            case LoadCheckpoint():
                with self._replica.optimizer_at_hand():
                    self.critic.begin_from(Path(command.path), of_megatron_lm=command.of_megatron_lm)
                self._link.answer(None)
            case ComputeValues():
                batch = decode_batch(self._link.payload(command.size_bytes))
                values_N = self.critic.values(batch, response_mask(batch))
                self._valued = batch, values_N
                self._link.answer(values_N.tobytes())
            case LearnReturns():
                returns = msgspec.msgpack.decode(self._link.payload(command.size_bytes), type=Returns)
                self._link.answer(self._learn(returns))
            case Save():
                with self._replica.optimizer_at_hand():
                    self._saving = begin_save_of_critic(
                        self._replica,
                        self._checkpoints,
                        self._executor,
                        step=command.step,
                        incarnation=command.incarnation,
                    )
            case FinishSave():
                assert self._saving is not None
                files, self._saving = self._saving.finish_part(), None
                self._link.answer(files)
            case Export():
                self._export(Path(command.directory))
                self._link.answer(None)
            case _:
                assert isinstance(command, Stop), command

    def _learn(self, given: Returns) -> Learned:
        """Train on the returns of the batch whose values were computed last."""
        assert self._valued is not None
        begin = time.perf_counter()
        batch, values_N = self._valued
        self._valued = None
        batch = replace(batch, loss_mask_N=np.frombuffer(given.loss_mask, dtype=np.uint8))
        estimates = Estimates(values_N, np.frombuffer(given.returns, dtype=np.float64))
        steps = self._planner.steps(batch)
        weights_B = np.concatenate([step.reduction.token_weights for step in steps])
        weights_N = torch.tensor(batch.spread(weights_B), device=self._replica.device)
        done, metrics = self.critic.train(batch, steps, estimates, weights_N)
        metrics["perf/critic_train_time"] = time.perf_counter() - begin
        return Learned([LearnedStep(one.masked_B.tobytes(), one.norm, one.is_taken) for one in done], metrics)

    def _export(self, directory: Path) -> None:
        """Write the critic's weights. A collective of the critic's ranks."""
        hf, bucket_bytes = self._replica.hf, self._topology.trainer.export_bucket_bytes
        parts = own_parts(self._replica.complete_chunks(), hf)
        with weight_thread() as thread:
            device = self._replica.device
            export_to_files(parts, hf, directory, thread, device=device, bucket_bytes=bucket_bytes).finish()
