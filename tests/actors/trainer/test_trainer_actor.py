"""The trainer on a real bus: what it says, in which order, and what a restarted one does."""

import json
from pathlib import Path
from threading import Event

import msgspec
import pytest

from actors.trainer.checkpoints import checkpoints_in
from actors.trainer.commands import TrainerRank
from actors.trainer.data import feed as feed_module
from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.saving import _DeferredWriter
from actors.trainer.models.shards import ShardWriter
from actors.trainer.republishing import WeightsUnusable
from actors.trainer.step.train_step import Trained
from messages import (
    BatchReady,
    BatchTrained,
    CheckpointSaved,
    CheckpointSetAside,
    GroupRef,
    PairsEvaluated,
    TrainerStarted,
    WeightsAnnounced,
    WeightsApplied,
    WeightsRefused,
)
from messages.subjects import filter_of
from runtime.bus.bus import Bus
from runtime.bus.errors import Fenced
from runtime.models.checksums import checksums_of
from runtime.process.actor import InputError
from runtime.report.lines import line_of
from runtime.settings.tables.prompts import EvalConfig
from runtime.settings.topology import Topology
from tests.actors.trainer.data.test_held_out import pair
from tests.actors.trainer.hosting import errors_of, names, of, running, said_until
from tests.actors.trainer.logs import GROUPS, completed, publish_batch, publish_pairs
from tests.actors.trainer.tiny import TINY
from tests.build.topology import MakeTopology

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("actor_joins")]


@pytest.fixture
def topology(make_topology: MakeTopology) -> Topology:
    return make_topology(train={"num_steps": 4, "save_interval": 2})


async def test_a_run_is_told_from_the_first_weights_to_the_last_checkpoint(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    async with running(topology, bus, tmp_path / "run"):
        for step in range(4):
            await said_until(bus, WeightsAnnounced, step + 1)  # no group of a version comes before its announcement
            await publish_batch(bus, step)
        events = await said_until(bus, CheckpointSaved, 2)
    step_events = ["BatchTrained", "WeightsAnnounced"]
    told = names(events)
    assert [name for name in told if name != "CheckpointSaved"] == [
        "TrainerStarted",
        "WeightsAnnounced",
        *step_events * 4,
    ]
    assert told.index("CheckpointSaved") >= 6  # of step 2, which is told before; training goes on while it is written
    announced = of(events, WeightsAnnounced)
    assert [(event.version, event.step) for event in announced] == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    for event in announced[-2:]:
        assert checksums_of(Path(event.path)).total == event.checksum
    probes = [event.probe for event in announced]
    assert all(probe is not None and len(probe.token_ids) == 32 for probe in probes)  # half of the context
    assert len({probe.token_ids for probe in probes if probe}) == 1
    assert len({probe.log_probs for probe in probes if probe}) == len(probes)
    trained = of(events, BatchTrained)
    assert [(event.step, event.replay, event.num_groups, event.num_samples) for event in trained] == [
        (step, False, GROUPS, 12) for step in range(4)
    ]
    assert {"train/loss", "train/pg_loss", "train/grad_norm", "train/lr-pg_0", "perf/train_time"} <= set(
        trained[0].metrics
    )
    assert trained[0].metrics["train/stale_token_ratio"] == 0.0
    assert {event.metrics["rollout/staleness_max"] for event in trained} == {0.0}  # synchronous
    assert [(event.step, event.oldest_step) for event in of(events, CheckpointSaved)] == [(2, 2), (4, 2)]


async def test_training_goes_on_while_a_checkpoint_is_written_and_it_is_told_when_it_is_complete(
    topology: Topology, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, write = Event(), _DeferredWriter.write

    def write_late(writer: _DeferredWriter) -> None:
        assert held.wait(40)
        write(writer)

    monkeypatch.setattr(_DeferredWriter, "write", write_late)
    async with running(topology, bus, tmp_path / "run"):
        for step in range(4):
            await publish_batch(bus, step)
        before = await said_until(bus, BatchTrained, 4)
        assert not of(before, CheckpointSaved)
        assert checkpoints_in(tmp_path / "run" / "checkpoints") == []
        held.set()
        saved = of(await said_until(bus, CheckpointSaved, 2), CheckpointSaved)
        assert [event.step for event in saved] == [2, 4]  # the second waited for the first
        assert [str(found.path) for found in checkpoints_in(tmp_path / "run" / "checkpoints")] == [
            event.path for event in saved
        ]
        assert all(0 < event.pause_s < event.took_s for event in saved)


async def test_the_parts_of_a_step_sum_to_it(
    make_topology: MakeTopology, model_dir: Path, bus: Bus, tmp_path: Path
) -> None:
    large = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192}
    (model_dir / "config.json").write_text(json.dumps(TINY | large))
    topology = make_topology(train={"num_steps": 4})
    async with running(topology, bus, tmp_path / "run"):
        for step in range(4):
            await publish_batch(bus, step)
        trained = of(await said_until(bus, BatchTrained, 4), BatchTrained)
    parts = ("train_wait", "fetch", "train", "update_weights")
    shares = [
        sum(event.metrics[f"perf/{part}_time"] for part in parts) / event.metrics["perf/step_time"] for event in trained
    ]
    assert 0.98 <= max(shares) <= 1.0, shares  # a busy machine may hold it up between two parts of one step, not of all


async def test_training_goes_on_while_a_copy_of_the_weights_is_written(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, train, write = Event(), TrainerRank.train, ShardWriter.write

    def train_and_say(rank: TrainerRank, batch: TrainBatch) -> Trained:
        trained = train(rank, batch)
        if batch.step == 1:
            second.set()
        return trained

    def write_late(writer: ShardWriter, name: str, data: memoryview) -> None:
        assert "v000002" not in str(writer._directory) or second.wait(40)
        write(writer, name, data)

    monkeypatch.setattr(TrainerRank, "train", train_and_say)
    topology = make_topology(train={"num_steps": 3}, trainer={"weight_export": "async", "export_bucket_bytes": 2000})
    async with running(topology, bus, tmp_path / "run"):
        await said_until(bus, WeightsAnnounced)
        monkeypatch.setattr(ShardWriter, "write", write_late)
        for step in range(3):
            await publish_batch(bus, step)
        events = await said_until(bus, CheckpointSaved)
    announced = of(events, WeightsAnnounced)
    assert [(event.version, event.step) for event in announced] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    for event in announced[-2:]:
        assert checksums_of(Path(event.path)).total == event.checksum
    assert len({event.checksum for event in announced}) == 4
    assert names(events)[-2:] == ["WeightsAnnounced", "CheckpointSaved"]


@pytest.mark.parametrize("export", ["live", "async"])
async def test_changes_that_an_engine_cannot_take_are_followed_by_a_whole_version_while_nothing_is_trained(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path, export: str
) -> None:
    trainer = {"full_export_interval": 10, "weight_export": export}
    async with running(make_topology(train={"num_steps": 4}, trainer=trainer), bus, tmp_path / "run"):
        await said_until(bus, WeightsAnnounced, 1)
        await bus.publish(
            WeightsRefused(version=1, instance="rollout", engine="e", reason="it is whole", num_refusals=1)
        )
        for step in range(2):
            await publish_batch(bus, step)
        await said_until(bus, WeightsAnnounced, 3)
        await bus.publish(WeightsRefused(version=3, instance="rollout", engine="e", reason="damaged", num_refusals=1))
        await said_until(bus, WeightsAnnounced, 4)
        await publish_batch(bus, 2)
        announced = of(await said_until(bus, WeightsAnnounced, 5), WeightsAnnounced)
    assert [(event.version, event.step, event.kind, event.base_version) for event in announced] == [
        (1, 0, "full", 0), (2, 1, "delta", 1), (3, 2, "delta", 2), (4, 2, "full", 0), (5, 3, "delta", 4),
    ]  # fmt: skip
    assert announced[2].checksum == announced[3].checksum == checksums_of(Path(announced[3].path)).total
    assert [event.delta_bytes > 0 for event in announced] == [False, True, True, False, True]
    assert len({event.size_bytes for event in announced}) == 1


async def test_weights_whose_files_are_unusable_are_written_again_and_not_for_ever(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    """Before the first batch, and after the last: then an evaluation may wait for them."""

    async def refuse(version: int) -> None:
        await said_until(bus, WeightsAnnounced, version)
        refused = WeightsRefused(
            version=version, instance="r", engine="e", reason="v: damaged", num_refusals=1, unusable=True
        )
        await bus.publish(refused)

    async def meanwhile() -> None:
        await refuse(1)
        await said_until(bus, WeightsAnnounced, 2)
        for step in range(4):
            await publish_batch(bus, step)
        for version in (6, 7, 8, 9):
            await refuse(version)

    errors = await errors_of(topology, bus, tmp_path / "run", meanwhile)
    announced = of(await said_until(bus, WeightsAnnounced, 9), WeightsAnnounced)
    assert [(event.step, event.again_of) for event in announced] == [
        *((0, 0), (0, 1), (1, 0), (2, 0), (3, 0)),
        *((4, 0), (4, 6), (4, 6), (4, 6)),
    ]
    assert announced[0].checksum == announced[1].checksum
    assert len({event.checksum for event in announced[5:]}) == 1
    assert all(event.kind == "full" and event.files for event in announced)
    (error,) = errors
    assert isinstance(error, WeightsUnusable)
    assert str(error).startswith("the weights of step 4 were published 4 times in ")
    assert str(error).endswith(", but engines could not use any of these versions: e: v: damaged")


async def test_a_trainer_that_starts_again_publishes_a_whole_version_whatever_was_refused(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    topology = make_topology(train={"num_steps": 4, "save_interval": 1}, trainer={"full_export_interval": 10})
    async with running(topology, bus, tmp_path / "run"):
        await publish_batch(bus, 0)
        first = await said_until(bus, WeightsAnnounced, 2)
    await bus.publish(WeightsRefused(version=2, instance="rollout", engine="e", reason="damaged", num_refusals=1))
    last_seq = (await bus.state(BatchTrained.plane)).last_seq
    async with running(topology, bus, tmp_path / "run"):
        await publish_batch(bus, 1)
        second = await said_until(bus, WeightsAnnounced, 2, from_seq=last_seq + 1)
    kinds = [event.kind for event in of([*first, *second], WeightsAnnounced)]
    assert kinds == ["full", "delta", "full", "delta"]


async def test_a_trainer_starts_though_the_end_of_the_log_is_unreadable(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    await bus.publish(completed(0, 1))
    await bus._store.put(filter_of(bus.run, BatchReady), b"{", {})
    async with running(topology, bus, tmp_path / "run"):
        await said_until(bus, TrainerStarted)


async def test_after_a_crash_the_lost_step_is_trained_again_and_announces_once_at_the_frontier(
    topology: Topology, bus: Bus, tmp_path: Path
) -> None:
    async with running(topology, bus, tmp_path / "run"):
        for step in range(3):
            await publish_batch(bus, step)
        first = await said_until(bus, WeightsAnnounced, 4)
        await said_until(bus, CheckpointSaved)
    last_seq = (await bus.state(BatchTrained.plane)).last_seq
    async with running(topology, bus, tmp_path / "run"):
        await said_until(bus, WeightsAnnounced, from_seq=last_seq + 1)
        await publish_batch(bus, 3)
        second = await said_until(bus, CheckpointSaved, from_seq=last_seq + 1)
    assert names(second) == [
        "TrainerStarted", "BatchTrained", "WeightsAnnounced", "BatchTrained", "WeightsAnnounced", "CheckpointSaved",
    ]  # fmt: skip
    assert (of(second, TrainerStarted)[0].incarnation, of(second, TrainerStarted)[0].step) == (2, 2)
    assert [(event.step, event.replay) for event in of(second, BatchTrained)] == [(2, True), (3, False)]
    assert [(event.version, event.step) for event in of(second, WeightsAnnounced)] == [(5, 3), (6, 4)]
    lost = of(first, BatchTrained)[2].metrics
    replayed = of(second, BatchTrained)[0].metrics
    assert replayed["train/loss"] == lost["train/loss"]
    assert of(second, WeightsAnnounced)[0].checksum == of(first, WeightsAnnounced)[3].checksum


async def test_a_damaged_checkpoint_is_told_of_and_the_batches_since_the_older_one_are_trained_again(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    topology = make_topology(train={"num_steps": 5, "save_interval": 2})
    async with running(topology, bus, tmp_path / "run"):
        for step in range(4):
            await publish_batch(bus, step)
        first = await said_until(bus, CheckpointSaved, 2)
    last_seq = (await bus.state(BatchTrained.plane)).last_seq
    damaged = Path(of(first, CheckpointSaved)[1].path)
    file = damaged / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    async with running(topology, bus, tmp_path / "run"):
        await publish_batch(bus, 4)
        second = await said_until(bus, CheckpointSaved, 2, from_seq=last_seq + 1)
    assert of(second, TrainerStarted)[0].step == 2
    (aside,) = of(second, CheckpointSetAside)
    assert (aside.step, aside.incarnation) == (4, 2)
    assert aside.path == str(damaged.with_name("damaged-step-00000004"))
    assert aside.reason == "the sha256 of __0_0.distcp differs from the one recorded when it was written"
    assert line_of(aside) == f"the checkpoint of step 4 is damaged and was set aside as {aside.path}: {aside.reason}"
    replayed = [(event.step, event.replay) for event in of(second, BatchTrained)]
    assert replayed == [(2, True), (3, True), (4, False)]
    losses = [event.metrics["train/loss"] for event in of([*first, *second], BatchTrained)]
    assert losses[4:6] == losses[2:4]
    # the ledger keeps what the older one needs until two others can be loaded
    assert [(event.step, event.oldest_step) for event in of(second, CheckpointSaved)] == [(4, 2), (5, 4)]


async def test_a_damaged_checkpoint_without_an_older_one_ends_the_run_by_name(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    topology = make_topology(train={"num_steps": 4, "save_interval": 2, "keep_checkpoints": 1})
    async with running(topology, bus, tmp_path / "run"):
        for step in range(3):
            await publish_batch(bus, step)
        saved = of(await said_until(bus, CheckpointSaved), CheckpointSaved)
    (Path(saved[0].path) / "common.pt").unlink()
    (error,) = await errors_of(topology, bus, tmp_path / "run")
    assert isinstance(error, InputError)
    assert "no longer has the batch of step 1" in str(error)
    assert "damaged-step-00000002 is damaged: common.pt is missing" in str(error)


async def test_without_a_checkpoint_the_whole_log_is_replayed(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    topology = make_topology(train={"num_steps": 8})
    async with running(topology, bus, tmp_path / "run"):
        for step in range(2):
            await publish_batch(bus, step)
        first = await said_until(bus, WeightsAnnounced, 3)
    last_seq = (await bus.state(BatchTrained.plane)).last_seq
    async with running(topology, bus, tmp_path / "run"):
        second = await said_until(bus, WeightsAnnounced, from_seq=last_seq + 1)
    assert names(second) == ["TrainerStarted", "BatchTrained", "BatchTrained", "WeightsAnnounced"]
    assert of(second, WeightsAnnounced)[0].version == 4
    again, before = of(second, WeightsAnnounced)[0].probe, of(first, WeightsAnnounced)[-1].probe
    assert again is not None
    assert before is not None
    assert (again.token_ids, again.log_probs) == (before.token_ids, before.log_probs)  # the spread is measured anew
    assert of(second, WeightsAnnounced)[0].checksum == of(first, WeightsAnnounced)[-1].checksum


async def test_a_run_that_is_done_is_announced_and_saved_again_and_trains_nothing(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    """Without its checkpoint.saved, which a crash may have cost, the buffer would wait for ever."""
    topology = make_topology(train={"num_steps": 1})
    async with running(topology, bus, tmp_path / "run"):
        await publish_batch(bus, 0)
        await said_until(bus, CheckpointSaved)
    last_seq = (await bus.state(BatchTrained.plane)).last_seq
    async with running(topology, bus, tmp_path / "run"):
        again = await said_until(bus, CheckpointSaved, from_seq=last_seq + 1)
    assert names(again) == ["TrainerStarted", "WeightsAnnounced", "CheckpointSaved"]
    assert (of(again, WeightsAnnounced)[0].version, of(again, WeightsAnnounced)[0].step) == (3, 1)
    assert of(again, CheckpointSaved)[0].step == 1


async def test_the_run_is_told_to_be_saved_after_its_model_is_exported(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    """The last checkpoint.saved lets the run end, and with it this process."""
    async with running(make_topology(train={"num_steps": 1, "save_hf": True}), bus, tmp_path / "run"):
        await publish_batch(bus, 0)
        await said_until(bus, CheckpointSaved)
        assert (tmp_path / "run" / "hf" / "model.safetensors").exists()


async def test_old_weights_go_when_engines_confirm_newer_ones(topology: Topology, bus: Bus, tmp_path: Path) -> None:
    async with running(topology, bus, tmp_path / "run"):
        for step in range(4):
            await said_until(bus, WeightsAnnounced, step + 1)
            await bus.publish(WeightsApplied(version=step + 1, instance="rollout", num_engines=1, took_s=0.0))
            await publish_batch(bus, step)
        await said_until(bus, CheckpointSaved, 2)
    assert sorted(path.name for path in (tmp_path / "run" / "weights").iterdir()) == ["v000004", "v000005"]


@pytest.mark.parametrize("successor", [(2, ""), (1, "started at once")])
async def test_a_trainer_that_was_replaced_ends_as_fenced(
    topology: Topology, bus: Bus, tmp_path: Path, successor: tuple[int, str]
) -> None:
    async def replace_it() -> None:
        await said_until(bus, WeightsAnnounced)
        await bus.publish(TrainerStarted(incarnation=successor[0], step=0, start=successor[1]))

    assert [type(leaf) for leaf in await errors_of(topology, bus, tmp_path / "run", replace_it)] == [Fenced]


async def test_the_start_of_a_trainer_may_be_told_twice(topology: Topology, bus: Bus, tmp_path: Path) -> None:
    """Publishing stores at least once: a trainer may read of itself again, or late of an earlier one."""
    earlier = TrainerStarted(incarnation=1, step=0, start="earlier")
    await bus.publish(earlier)
    async with running(topology, bus, tmp_path / "run"):
        (_, own) = of(await said_until(bus, TrainerStarted, 2), TrainerStarted)
        await bus.publish(own)
        await bus.publish(earlier)
        await publish_batch(bus, 0)
        await said_until(bus, BatchTrained)


async def test_a_batch_without_any_trainable_sample_counts_as_trained(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    async with running(make_topology(train={"num_steps": 1}), bus, tmp_path / "run"):
        failed = completed(0, 1, num_samples=0)
        seq = await bus.publish(failed)
        ref = GroupRef(group_id=0, attempt=0, event_seq=seq)
        await bus.publish(BatchReady(incarnation=1, step=0, groups=(ref,)))
        events = await said_until(bus, CheckpointSaved)
    (trained,) = of(events, BatchTrained)
    assert (trained.num_groups, trained.num_samples) == (1, 0)


async def test_groups_that_were_forgotten_are_read_from_the_log_again(
    topology: Topology, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.trainer.data.history.MAX_WAITING_GROUPS", 1)
    monkeypatch.setattr(feed_module, "NUM_PREFETCHERS", 1)
    async with running(topology, bus, tmp_path / "run"):
        await publish_batch(bus, 0)
        events = await said_until(bus, BatchTrained)
    assert of(events, BatchTrained)[0].num_samples == 12


async def test_a_model_that_cannot_be_built_is_wrong_input(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    (error,) = await errors_of(make_topology(), bus, tmp_path / "run")
    assert isinstance(error, InputError)
    assert "supported: deepseek_v3" in str(error)


async def test_weights_that_no_engine_takes_are_announced_but_not_written(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    rollout = {"n_samples_per_prompt": 1}
    algorithm = {"loss": {"type": "sft"}}
    topology = make_topology(train={"num_steps": 2, "save_hf": True}, rollout=rollout, algorithm=algorithm)
    async with running(topology, bus, tmp_path / "run"):
        for step in range(2):
            await publish_batch(bus, step)
        events = await said_until(bus, CheckpointSaved)
    assert [(event.version, event.step, event.path) for event in of(events, WeightsAnnounced)] == [
        (1, 0, ""), (2, 1, ""), (3, 2, ""),
    ]  # fmt: skip
    assert not (tmp_path / "run" / "weights").exists()
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


async def test_held_out_pairs_are_evaluated_after_their_steps_and_after_a_crash_as_before(
    make_topology: MakeTopology, bus: Bus, tmp_path: Path
) -> None:
    topology = make_topology(
        train={"num_steps": 4, "save_interval": 2},
        rollout={"n_samples_per_prompt": 1},
        algorithm={"num_steps_per_rollout": 1, "loss": {"type": "rm"}},
    )
    item = EvalConfig(name="s", path="none", interval=1)
    topology = msgspec.structs.replace(topology, eval=(item,))
    pairs = {"s": [pair(number, chosen=2 + number) for number in range(5)]}
    async with running(topology, bus, tmp_path / "run", held_out=lambda: pairs):
        for step in range(3):
            await publish_pairs(bus, step)
        first = await said_until(bus, WeightsAnnounced, 4)
        await said_until(bus, CheckpointSaved)
    assert [name for name in names(first) if name != "CheckpointSaved"] == [
        *("TrainerStarted", "WeightsAnnounced", "PairsEvaluated"),
        *("BatchTrained", "PairsEvaluated", "WeightsAnnounced") * 3,
    ]
    last_seq = (await bus.state(BatchTrained.plane)).last_seq
    async with running(topology, bus, tmp_path / "run", held_out=lambda: pairs):
        await publish_pairs(bus, 3)
        second = await said_until(bus, CheckpointSaved, from_seq=last_seq + 1)
    assert of(second, TrainerStarted)[0].step == 2
    before, after = of(first, PairsEvaluated), of(second, PairsEvaluated)
    assert [event.step for event in before] == [0, 1, 2, 3]
    assert [event.step for event in after] == [3, 4]  # not of step 2, which the checkpoint contains
    assert after[0].metrics == before[3].metrics
    assert before[0].metrics.keys() == {
        *("eval/s", "eval/s/preference_loss", "eval/s/rewards_chosen", "eval/s/rewards_rejected"),
        "eval/s/rewards_margins",
    }
    assert len({event.metrics["eval/s/preference_loss"] for event in (*before, *after)}) == 5
