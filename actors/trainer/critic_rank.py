"""One rank of a critic that has ranks of its own: a process group and a parallel layout apart from the actor's.

Rank 0 of the actor calls its methods (critic_link.py). All of the critic's ranks carry out every call together, and the
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

from actors.trainer.commands import TrainerRank
from actors.trainer.critic_link import CriticEnd, Learned, LearnedStep, Returns
from actors.trainer.data.batch import Floats32, TrainBatch
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.checkpoint import begin_save_of_critic, load_critic
from actors.trainer.megatron.groups import Ranks
from actors.trainer.megatron.saving import Saving
from actors.trainer.plugins.functions import hook
from actors.trainer.ranks import RankCalls, decode_batch, on_all_ranks
from actors.trainer.step.critic import Critic, Estimates
from actors.trainer.step.estimator import response_mask
from actors.trainer.step.planning import Planner
from actors.trainer.weights.calls import AskOf
from actors.trainer.weights.export import weight_thread
from actors.trainer.weights.files import export_to_files
from actors.trainer.weights.gathering import own_parts
from runtime.functions.table import INIT_HOOK
from runtime.models.checkpoint_files import CHECKPOINTS
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
        self.calls = RankCalls(replace(rank, store=link_store), device)
        self.calls.serve(self)
        self._link = CriticEnd(link_store, self.calls, is_first=rank.rank == 0)
        try:
            ranks.join(rank, own.trainer.megatron, device, seed=topology.run.seed)
            hook(topology, INIT_HOOK)()
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
        """Carry out calls until rank 0 stops this rank, or until `stop_following`. Errors are reported to rank 0."""
        try:
            self.calls.follow()
        except Exception as error:
            self._link.fail(error, self._name)
            raise
        self._executor.shutdown(cancel_futures=True)
        ranks.leave()

    def stop_following(self) -> None:
        """End `follow` at its next poll for a call. Called from another thread."""
        self.calls.stop()

    @on_all_ranks
    def _load(self, path: str) -> None:
        """Load a checkpoint of this run. Answers the train steps in it."""
        with self._replica.optimizer_at_hand():
            self._link.answer(load_critic(self._replica, Path(path)))

    @on_all_ranks
    def _begin_from(self, path: str, *, of_megatron_lm: bool) -> None:
        """Start from the checkpoint of another run. Answers nothing, once it is loaded."""
        with self._replica.optimizer_at_hand():
            self.critic.begin_from(Path(path), of_megatron_lm=of_megatron_lm)
        self._link.answer(None)

    @on_all_ranks
    def _compute_values(self, size_bytes: int) -> None:
        """Compute the values of the batch in the payload, and answer them."""
        batch = decode_batch(self._link.payload(size_bytes))
        values_N = self.critic.values(batch, response_mask(batch))
        self._valued = batch, values_N
        self._link.answer(values_N.tobytes())

    @on_all_ranks
    def _learn_returns(self, size_bytes: int) -> None:
        """Train on the returns in the payload, of the batch whose values were computed last. Answers `Learned`."""
        self._link.answer(self._learn(msgspec.msgpack.decode(self._link.payload(size_bytes), type=Returns)))

    @on_all_ranks
    def _save(self, step: int, incarnation: int, frontier: int) -> None:
        """Start this model's part of a checkpoint."""
        del frontier  # in the actor's part
        with self._replica.optimizer_at_hand():
            self._saving = begin_save_of_critic(
                self._replica, self._checkpoints, self._executor, step=step, incarnation=incarnation
            )

    @on_all_ranks
    def _finish_save(self) -> None:
        """Wait until the part is written. Answers the checksums of its files."""
        assert self._saving is not None
        files, self._saving = self._saving.finish_part(), None
        self._link.answer(files)

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

    @on_all_ranks
    def _export(self, directory: str) -> None:
        """Write the critic's weights. Answers nothing, once they are written."""
        hf, bucket_bytes = self._replica.hf, self._topology.trainer.export_bucket_bytes
        parts, device = own_parts(self._replica.complete_chunks(), hf), self._replica.device
        with weight_thread() as thread:
            export_to_files(parts, hf, Path(directory), thread, device=device, bucket_bytes=bucket_bytes).finish()
        self._link.answer(None)
