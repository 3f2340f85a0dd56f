"""All torch work of the trainer behind a few methods.

Rank 0 calls them. Those that `on_all_ranks` decorates are carried out by all ranks together (ranks.py).
"""

import shutil
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from actors.trainer.checkpoints import (
    CRITIC,
    Checkpoint,
    DamagedCheckpoint,
    SavedRun,
    beginning_of,
    prune_checkpoints,
    saved_run,
    set_aside_damaged,
)
from actors.trainer.critic_link import CriticLink
from actors.trainer.data.batch import TrainBatch
from actors.trainer.data.held_out import PairSums
from actors.trainer.data.precomputed import LogProbs
from actors.trainer.lora.published import AdapterVersions, gathered_adapters
from actors.trainer.megatron import groups as ranks
from actors.trainer.megatron.checkpoint import begin_from, begin_save, load_checkpoint
from actors.trainer.megatron.config import DTYPES
from actors.trainer.megatron.groups import Ranks
from actors.trainer.megatron.megatron_lm import begin_from_megatron_lm
from actors.trainer.megatron.memory import give_back, held_bytes
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.megatron.saving import Saving
from actors.trainer.models.config import HfConfig, critic_model
from actors.trainer.models.files import add_copied, copy_small_files, set_dtype, set_value_head
from actors.trainer.models.shapes import hf_shapes, num_weights
from actors.trainer.plugins.functions import hook
from actors.trainer.ranks import RankCalls, on_all_ranks
from actors.trainer.step.critic import Critic
from actors.trainer.step.probe import Prober, probe_tokens
from actors.trainer.step.profile import profiled
from actors.trainer.step.remote_critic import RemoteCritic
from actors.trainer.step.reward_model import RewardModelStep
from actors.trainer.step.train_step import Trained, TrainStep
from actors.trainer.weights.calls import AskOf
from actors.trainer.weights.export import weight_thread
from actors.trainer.weights.publish import NOT_WRITTEN, PendingVersion, Published, Versions
from actors.trainer.weights.rank import RankSender
from actors.trainer.weights.writing import RankWriter
from messages import BaseWeights, CheckpointFile, WeightProbe
from runtime.data.trained_tokens import TokenWriter
from runtime.functions.table import INIT_HOOK
from runtime.models.checkpoint_files import CHECKPOINTS, FileChecksum
from runtime.models.versions import ADAPTER_BASES, ADAPTERS, WEIGHTS
from runtime.settings.derived import has_critic, trains_reward_model
from runtime.settings.placement import num_critic_ranks, rank_places, weight_format
from runtime.settings.tables.engines import WeightFormat
from runtime.settings.topology import (
    Topology,
    answers_are_recorded,
    critic_has_ranks,
    critic_topology,
    fetches_weights,
    serves_adapters,
)
from runtime.util.files import atomic_directory

LARGE: Final = 1 << 24  # weights of a model whose memory is given back after each step


@dataclass(frozen=True)
class Unpublished:
    """A weight version that is not written yet."""

    files: PendingVersion
    probe: WeightProbe
    pause_s: float  # seconds that training stopped for the copy


class TrainerRank:
    """One rank of the trainer. All calls come from one thread."""

    def __init__(
        self,
        topology: Topology,
        run_directory: Path,
        rank: Ranks | None = None,
        ask_of: AskOf | None = None,
        critic_store: Any = None,
    ) -> None:
        """Join the other ranks and build the model with its initial weights.

        Args:
            topology: topology of the run.
            run_directory: directory of checkpoints and weights; all ranks on rank 0's node see it.
            rank: identity of this rank; None: the only rank.
            ask_of: sends weight-sync calls to rollout actors; None: there are no weight syncs.
            critic_store: store of the link to a critic on ranks of its own, on rank 0.

        Raises:
            ValueError, OSError: the model or the parallel layout cannot be used. The message says why.
            InputError: a function of the user cannot be used, or raised.
        """
        self._topology = topology
        self._ranks = rank or Ranks()
        self.run_directory = run_directory
        self._checkpoints = run_directory / CHECKPOINTS
        self._model_directory = Path(topology.model.hf_checkpoint)
        self._weight_format: WeightFormat = weight_format(topology)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._weight_thread = weight_thread()
        self._token_writer = TokenWriter(topology.run.dump_details)
        self._saving: Saving | None = None
        self._parts: dict[str, dict[str, FileChecksum]] = {}  # files that a critic on its own ranks saved; on rank 0
        self._set_aside: list[DamagedCheckpoint] = []  # since the last take_set_aside
        device = ranks.device_of(topology.trainer.device, self._ranks)
        ranks.join(self._ranks, topology.trainer.megatron, device, seed=topology.run.seed)
        hook(topology, INIT_HOOK)()
        self.calls = RankCalls(self._ranks, device)
        self._replica = Replica(topology, device)
        self._link = self._link_to_critic(critic_store, device)
        self._critic: Critic | RemoteCritic | None = None
        if critic_has_ranks(topology):
            self._critic = RemoteCritic(self._link, self.calls)
        elif has_critic(topology):
            self._critic = Critic(topology, device)
        self._train_step = (
            RewardModelStep(topology, self._replica)
            if trains_reward_model(topology)
            else TrainStep(topology, self._replica, self._critic)
        )
        self.sending = RankSender(topology, self._replica, run_directory, ask_of, self._weight_thread, self.calls)
        self._writer = RankWriter(topology, self._replica, self._critic_replica, self._weight_thread, self.calls)
        for served in (self, self.sending, self._writer):
            self.calls.serve(served)
        hf = self._replica.hf
        weights = run_directory / WEIGHTS
        self._versions, self._bases = self._versions_in(weights), self._versions_in(weights / ADAPTER_BASES)
        self._adapters: AdapterVersions | None = None  # engines serve adapters; None: they load full weights
        if serves_adapters(topology):
            lora, fetched = topology.trainer.lora, fetches_weights(topology)
            self._adapters = AdapterVersions(weights / ADAPTERS, hf, lora, self._model_directory, is_fetched=fetched)
        self._base: BaseWeights | None = None  # of adapter versions, as this process wrote it
        self._prober = Prober(self._replica, probe_tokens(topology, hf.vocab_size, hf.max_position_embeddings))
        self.prompt_ids: Callable[[], tuple[int, ...]] = tuple  # returns tokens of prompts for the probe; on rank 0
        if topology.trainer.optimizer.optimizer_cpu_offload:
            for replica in self._replicas:
                replica.rest(run_directory)

    def _versions_in(self, root: Path) -> Versions:
        """Return a directory of versions in full or as deltas."""
        return Versions(
            root,
            self._model_directory,
            every=self._topology.trainer.full_export_interval,
            weight_format=self._weight_format,
            shapes=hf_shapes(self._replica.hf),
            ignored=self._topology.model.ignore_config_keys,
            is_fetched=fetches_weights(self._topology),
        )

    def _link_to_critic(self, store: Any, device: torch.device) -> CriticLink | None:
        """Open the link to the critic's own ranks, if there are some and this is rank 0."""
        if self._ranks.rank or not critic_has_ranks(self._topology):
            return None
        world_size = 1 + num_critic_ranks(self._topology)
        return CriticLink(store, RankCalls(Ranks(world_size=world_size, store=store), device))

    @property
    def _replicas(self) -> list[Replica]:
        """The models that this rank trains: the policy, and the critic if this rank has it."""
        critic = self._critic_replica
        return [self._replica] if critic is None else [self._replica, critic]

    @property
    def _critic_replica(self) -> Replica | None:
        return self._critic.replica if isinstance(self._critic, Critic) else None

    @property
    def _nodes_of_copies(self) -> tuple[str, ...]:
        """The node of each rank, if each node has checkpoints in a directory of its own."""
        places = rank_places(self._topology) if self._topology.train.checkpoint_copies > 1 else ()
        return tuple(place.node for place in places)

    @property
    def _critic_config(self) -> HfConfig | None:
        return None if self._critic is None else critic_model(self._topology)

    # rank 0

    def resume(self) -> int:
        """Load the newest undamaged checkpoint, or else the checkpoint of `trainer.load`, if set.

        Deletes checkpoints that a crash left unfinished, and sets damaged ones aside.

        Returns:
            Train steps of this run in the loaded state.

        Raises:
            ValueError: this model cannot continue from the checkpoint.
        """
        found = self._sound_checkpoints(thorough=True)
        if found:
            path = found[-1].path
            dtype, model, lora = self._topology.model.dtype, self._replica.hf, self._replica.lora
            saved_run(path).check(path, model, lora=lora, dtype=dtype, resumes=True, critic=self._critic_config)
            self._tell_critic("load", path=str(path))
            step = self._load(str(path.relative_to(self._checkpoints)))
            if self._link is not None and (of_critic := self._link.answer(int)) != step:
                raise ValueError(f"{path} has the actor after {step} train steps, and the critic after {of_critic}")
            return step
        beginning = beginning_of(self._topology, self._replica.hf, self._critic_config, thorough=True)
        if beginning is not None:
            path = str(beginning.path)
            self._tell_critic("begin_from", path=path, of_megatron_lm=beginning.of_megatron_lm)
            self._begin_from(path, of_megatron_lm=beginning.of_megatron_lm)
            self._hear_critic()
        return 0

    def _sound_checkpoints(self, *, thorough: bool) -> list[Checkpoint]:
        """Set damaged checkpoints aside, delete old ones, and return the remaining ones, oldest first."""
        self._set_aside += set_aside_damaged(self._checkpoints, thorough=thorough)
        return prune_checkpoints(self._checkpoints, self._topology.train.keep_checkpoints)

    def take_set_aside(self) -> tuple[DamagedCheckpoint, ...]:
        """Return the checkpoints found damaged since the last call."""
        taken, self._set_aside = tuple(self._set_aside), []
        return taken

    def train(self, batch: TrainBatch) -> Trained:
        """Train one batch.

        Raises:
            FloatingPointError: gradients were NaN or infinite more often than train.max_skipped allows.
        """
        if isinstance(self._critic, RemoteCritic):
            self._critic.begin(batch)
        trained = self._train(batch)
        if trained.tokens is not None:
            self._token_writer.begin(batch.step, trained.tokens)
        return trained

    @on_all_ranks
    def _train(self, batch: TrainBatch) -> Trained:
        config, rank, device = self._topology.trainer.profile, self._ranks.rank, self._replica.device
        with profiled(config, self.run_directory, step=batch.step, rank=rank, device=device):
            trained = self._train_step(batch)
        if device.type == "cpu" and num_weights(self._replica.hf) >= LARGE:
            give_back()  # else memory that was freed in pieces stays with the process, a little more each step
        return trained

    @on_all_ranks
    def log_probs(self, batch: TrainBatch) -> LogProbs:
        """Precompute the log-probs that a later train step needs.

        Args:
            batch: groups that are in no batch yet.
        """
        assert isinstance(self._train_step, TrainStep)
        return self._train_step.precompute(replace(batch, routed_experts_N=None))

    @on_all_ranks
    def evaluate(self, batch: TrainBatch) -> PairSums:
        """Sum the metrics of held-out preference pairs under the current weights, without training."""
        return self._train_step.evaluate(batch)

    def begin_save(self, *, step: int, incarnation: int, frontier: int = 0) -> Future[None]:
        """Copy the training state and write it in the background.

        Args:
            step: train steps in the state.
            incarnation: incarnation of the trainer.
            frontier: train steps in the log, if higher than `step`.

        Returns:
            Future that completes when this rank has written its part. Call `finish_save` then, before the next save.
        """
        frontier = max(step, frontier)
        self._tell_critic("save", step=step, incarnation=incarnation, frontier=frontier)
        return self._save(step, incarnation, frontier).written

    def finish_files(self) -> dict[str, CheckpointFile]:
        """Wait until all ranks have written, each into the directory of its node, and return all files.

        Empty: the checkpoint was there already. Otherwise it has no name yet, and node daemons copy it and name it.
        """
        return self._finish_files()

    def finish_save(self) -> tuple[Path, list[Checkpoint]]:
        """Wait until all ranks have written, give the checkpoint its name, and delete old ones.

        Returns:
            The checkpoint's directory, and the remaining checkpoints, oldest first.
        """
        if self._link is not None:
            self._link.tell("finish_save")
            self._parts = {CRITIC: self._link.answer(dict[str, FileChecksum])}
        path = self._name_saved()
        return path, self._sound_checkpoints(thorough=False)

    def publish(self, version: int, *, confirmed: int, whole: bool = False) -> Published:
        """Write a weight version for engines, and delete versions that no engine needs.

        Writes nothing if rollout is offline. Also computes the probe: an engine that holds this version returns the
        same values.

        Args:
            version: a number that was never announced.
            confirmed: newest version that an engine holds; 0: none.
            whole: write full weights, not a delta.
        """
        if answers_are_recorded(self._topology):
            return NOT_WRITTEN
        begin = time.perf_counter()
        if self._adapters is not None:
            return self._publish_adapter(self._adapters, version, confirmed, begin, whole=whole)
        return self._published(self._begin_version(version, whole=whole), confirmed, begin)

    def _publish_adapter(
        self, adapters: AdapterVersions, version: int, confirmed: int, begin: float, *, whole: bool
    ) -> Published:
        """Write an adapter as a version, and the base model too if this process has not, or `whole` wants it again."""
        if self._base is None or whole:
            begun = self._bases.begin(version, whole=True)
            self._writer.begin_export(
                str(begun.whole), weight_format=self._weight_format, for_engines=True, merged=False
            )
            self._base = self._bases.complete(begun, self._writer.finish_export()).as_base
            self._bases.prune(confirmed=version)
        published = adapters.publish(version, self._whole_adapters(), self._base)
        adapters.prune(confirmed=confirmed)
        return replace(published, probe=self._probe(self.prompt_ids()), took_s=time.perf_counter() - begin)

    @on_all_ranks
    def _whole_adapters(self) -> dict[str, torch.Tensor]:
        return gathered_adapters(self._replica.complete_chunks())

    def begin_publish(self, version: int, *, whole: bool = False) -> Unpublished:
        """Copy the weights. `finish_publish` writes the copy while training continues. One copy at a time."""
        begin = time.perf_counter()
        begun = self._begin_version(version, whole=whole, copy=True)
        return replace(begun, pause_s=time.perf_counter() - begin)

    def _begin_version(self, version: int, *, whole: bool, copy: bool = False) -> Unpublished:
        begun = self._versions.begin(version, whole=whole)
        delta, base = str(begun.delta or ""), str(begun.base or "")
        self._writer.begin_export(
            str(begun.whole), copy=copy, weight_format=self._weight_format, delta=delta, base=base, for_engines=True
        )
        if not copy:  # otherwise the buckets are gathered between micro-batches
            self._writer.advance_export()  # the first bucket is written during the probe
        return Unpublished(begun, self._probe(self.prompt_ids()), 0.0)

    def advance_publish(self) -> tuple[bool, Future[None] | None]:
        """Gather the next bucket, unless one is still being written.

        Returns:
            Whether more buckets may remain, and the pending write of this rank; None: it writes nothing now.
        """
        has_more = self._writer.advance_export()
        return has_more, self._writer.pending

    def finish_publish(self, begun: Unpublished, *, confirmed: int) -> Published:
        """Gather and write the remaining buckets, as `publish` does. `took_s` includes the time of the copy."""
        return self._published(begun, confirmed, time.perf_counter() - begun.pause_s)

    def _published(self, begun: Unpublished, confirmed: int, begin: float) -> Published:
        written = self._writer.finish_export()
        published = self._versions.complete(begun.files, written)
        self._versions.prune(confirmed=confirmed)
        return replace(published, took_s=time.perf_counter() - begin, probe=begun.probe)

    def export(self, directory: Path) -> None:
        """Write a self-contained Hugging Face model directory. Replaces an existing directory.

        A critic gets the directory `critic` in it.
        """
        with atomic_directory(directory) as unfinished:
            self._writer.begin_export(str(unfinished))
            self._writer.finish_export()
            self._copy_files(self._model_directory, unfinished, self._replica.hf)
            if self._critic is not None:
                self._export_critic(unfinished / CRITIC)
            shutil.rmtree(directory, ignore_errors=True)

    def _export_critic(self, directory: Path) -> None:
        directory.mkdir()
        if self._link is None:
            self._writer.begin_export(str(directory), of_critic=True)
            self._writer.finish_export()
        self._tell_critic("export", directory=str(directory))
        self._hear_critic()
        self._copy_files(
            Path(critic_topology(self._topology).model.hf_checkpoint), directory, critic_model(self._topology)
        )

    def _copy_files(self, model_directory: Path, directory: Path, model: HfConfig) -> None:
        """Copy the files of a model that has been exported, except its weights."""
        ignored = self._topology.model.ignore_config_keys
        if not self._topology.model.random_init:
            add_copied(model_directory, directory, model)
        copy_small_files(model_directory, directory, tokenizer=True, ignored=ignored)
        set_dtype(directory / "config.json", self._topology.model.dtype)
        set_value_head(directory / "config.json", model)

    def unwritten(self) -> Published:
        """Probe the weights, for engines that receive them without files."""
        begin = time.perf_counter()
        probed = self._probe(self.prompt_ids())
        itemsize = {"bfloat16": 2, "fp8": 1}.get(self._weight_format, DTYPES[self._topology.model.dtype].itemsize)
        size_bytes = num_weights(self._replica.hf) * itemsize
        return Published(None, "", size_bytes, time.perf_counter() - begin, probed)

    def copy_unwritten(self, version: int) -> Published:
        """Probe and copy the weights. `sending` gathers the copy while training continues. One copy at a time."""
        begin = time.perf_counter()
        self.sending.copy(version)
        return replace(self.unwritten(), took_s=time.perf_counter() - begin)

    @on_all_ranks
    def offload(self) -> int:
        """Free memory that only training needs, until `onload`: gradient buffers, main parameters, optimizer state.

        Returns:
            Bytes that this rank moved to the host.
        """
        freed = self._replica.offload(self.run_directory)
        if (critic := self._critic_replica) is not None:  # engines do not need its weights
            freed += critic.offload(self.run_directory, weights=True)
        return freed

    @on_all_ranks
    def onload(self) -> None:
        """Move back what `offload` freed. Required before the next train step or checkpoint."""
        for replica in self._replicas:
            replica.onload()

    def held_bytes(self) -> int:
        """Memory in use by this rank, in bytes, which is unavailable to other processes."""
        return held_bytes(self._replica.device)

    def close(self) -> None:
        """Stop the other ranks and leave the process group."""
        if self._link is not None:
            self._link.stop()
        self.calls.stop_others()
        self._leave()

    def _leave(self) -> None:
        """Leave the process group. An unfinished checkpoint is lost; a restart loads the previous one."""
        for executor in (self._executor, self._weight_thread):
            executor.shutdown(cancel_futures=True)
        self._token_writer.close()
        ranks.leave()

    def _tell_critic(self, name: str, **arguments: Any) -> None:
        """Call a method of a critic on ranks of its own, which carries it out meanwhile."""
        if self._link is not None:
            self._link.tell(name, **arguments)

    def _hear_critic(self) -> None:
        """Wait until a critic on ranks of its own has carried out a call whose answer is empty."""
        if self._link is not None:
            self._link.answer(type(None))

    # other ranks

    def follow(self) -> None:
        """Carry out rank 0's calls until it stops this rank, or until a call of `stop_following`."""
        self.calls.follow()
        self._leave()

    def stop_following(self) -> None:
        """End `follow` at its next poll for a call. Called from another thread."""
        self.calls.stop()

    # all ranks

    @on_all_ranks
    def _load(self, name: str) -> int:
        """Load a checkpoint of this run, by its name in the directory of checkpoints."""
        with self._optimizers_at_hand():
            return load_checkpoint(self._replica, self._checkpoints / name, self._critic_replica)

    @on_all_ranks
    def _save(self, step: int, incarnation: int, frontier: int) -> Saving:
        """Start a checkpoint."""
        with self._optimizers_at_hand():
            self._saving = begin_save(
                self._replica,
                self._checkpoints,
                self._executor,
                step=step,
                incarnation=incarnation,
                run_file=self._saved_run(step, incarnation, frontier),
                critic=self._critic_replica,
                nodes=self._nodes_of_copies,
            )
        return self._saving

    @on_all_ranks
    def _finish_files(self) -> dict[str, CheckpointFile]:
        """Wait until the files of all ranks are written, each on its node."""
        assert self._saving is not None
        return self._saving.finish_files()

    @on_all_ranks
    def _name_saved(self) -> Path:
        """Wait until the checkpoint is written, and give it its name."""
        assert self._saving is not None
        path, self._saving = self._saving.finish(self._parts), None
        return path

    @on_all_ranks
    def _probe(self, prompt_ids: tuple[int, ...]) -> WeightProbe:
        """Compute the log-probs of the probe."""
        return self._prober.probe(prompt_ids)

    @contextmanager
    def _optimizers_at_hand(self) -> Generator[None]:
        """Keep the optimizer states of all models on the device inside the block."""
        with ExitStack() as stack:
            for replica in self._replicas:
                stack.enter_context(replica.optimizer_at_hand())
            yield

    @on_all_ranks
    def _begin_from(self, path: str, *, of_megatron_lm: bool) -> None:
        """Start from the checkpoint of another run."""
        weights_only, directory = self._topology.trainer.load_weights_only, Path(path)
        begin = begin_from_megatron_lm if of_megatron_lm else begin_from
        with self._optimizers_at_hand():
            begin(self._replica, directory, weights_only=weights_only)
            if isinstance(self._critic, Critic):
                self._critic.begin_from(directory, of_megatron_lm=of_megatron_lm)
        if isinstance(self._train_step, TrainStep):
            self._train_step.begin_reference()

    def _saved_run(self, step: int, incarnation: int, frontier: int) -> SavedRun:
        topology = self._topology
        return SavedRun(
            run=topology.run.name,
            step=step,
            frontier=frontier,
            steps_before=self._replica.steps_before,
            incarnation=incarnation,
            dtype=topology.model.dtype,
            model=self._replica.hf,
            critic=self._critic_config,
            lora=self._replica.lora,
            num_processes=self._ranks.world_size,
            megatron=topology.trainer.megatron,
            use_distributed_optimizer=self._replica.is_distributed,
            has_checksums=True,
        )
