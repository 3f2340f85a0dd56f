"""A copy of the weights: what is sent of it while the model moves on."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from actors.trainer.commands import TrainerRank
from actors.trainer.weights.calls import Ask
from actors.trainer.weights.members import Membership
from actors.trainer.weights.shared_memory import HEADER_BYTES, SEGMENTS
from messages import BucketSent, Message, WeightSyncAnswered, WeightSyncMember
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

ENGINE: Final = WeightSyncMember(engine="e", key="e.1", num_ranks=1)
MEMBERS: Final = Membership.of({"rollout": WeightSyncAnswered(members=(ENGINE,))})
LIMIT_S: Final = 30.0


class Reader:
    """Stands for the engine: what it finds in the shared memory that it is told of."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.num_buckets = 0
        self.was_asked, self.may_answer = Event(), Event()
        self.may_answer.set()

    def ask_of(self, instances: Sequence[str]) -> Ask:
        assert tuple(instances) == ("rollout",)
        return self._ask

    def _ask(self, step: Message, _: float) -> "Future[dict[str, str]]":
        assert isinstance(step, BucketSent)
        data = bytearray((SEGMENTS / step.segments[0]).read_bytes()[HEADER_BYTES:])
        start = 0
        for name, dtype, shape in zip(step.names, step.dtypes, step.shapes, strict=True):
            of: Any = getattr(torch, dtype)
            tensor = torch.frombuffer(data, dtype=of, count=torch.Size(shape).numel(), offset=start).reshape(shape)
            self.tensors[name], start = tensor, start + tensor.nbytes
        self.num_buckets += 1
        self.was_asked.set()
        assert self.may_answer.wait(LIMIT_S)
        answer: Future[dict[str, str]] = Future()
        answer.set_result({})
        return answer


def taken(
    rank: TrainerRank, reader: Reader, session: str, *, version: int, in_background: bool = True
) -> dict[str, Tensor]:
    """What an engine gets of the copy that is kept."""
    reader.tensors, reader.num_buckets = {}, 0
    sending = rank.sending.send_copy(session, MEMBERS, LIMIT_S, version=version, in_background=in_background)
    sending.result(LIMIT_S)
    assert (reader.num_buckets > 0) == in_background  # otherwise `finish_send` sends
    (sent,) = rank.sending.finish_send()
    assert sent.failed == {}
    assert sent.num_buckets == reader.num_buckets > 2
    return reader.tensors


@pytest.mark.parametrize("in_background", [True, False])
def test_what_is_sent_is_the_copy_though_the_model_has_moved_on(
    make_topology: MakeTopology, tmp_path: Path, in_background: bool
) -> None:
    reader = Reader()
    rank = TrainerRank(make_topology(trainer={"export_bucket_bytes": 4096}), tmp_path / "run", ask_of=reader.ask_of)
    rank.export(tmp_path / "before")
    before = load_file(tmp_path / "before" / "model.safetensors")
    copied = rank.copy_unwritten(1)
    assert copied.probe is not None
    assert copied.size_bytes == sum(tensor.nbytes for tensor in before.values())
    rank.sending.advance_copy()
    rank.train(random_batch())  # which gathers some of it, too
    rank.sending.finish_copy()
    rank.train(random_batch(1))
    rank.export(tmp_path / "after")
    after = load_file(tmp_path / "after" / "model.safetensors")
    assert not all(torch.equal(after[name], tensor) for name, tensor in before.items())
    found = taken(rank, reader, "1.1", version=1, in_background=in_background)
    assert sorted(found) == sorted(before)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_training_goes_on_while_a_copy_is_sent(make_topology: MakeTopology, tmp_path: Path) -> None:
    reader = Reader()
    rank = TrainerRank(make_topology(), tmp_path / "run", ask_of=reader.ask_of)
    rank.copy_unwritten(1)
    rank.sending.finish_copy()
    reader.may_answer.clear()
    sending = rank.sending.send_copy("1.1", MEMBERS, LIMIT_S, version=1, in_background=True)
    assert reader.was_asked.wait(LIMIT_S)
    assert rank.train(random_batch()).metrics["train/grad_norm"] > 0
    assert not sending.done()
    reader.may_answer.set()
    (sent,) = rank.sending.finish_send()
    assert (sent.failed, sent.num_buckets) == ({}, 1)


def test_a_copy_is_sent_until_the_next_one_is_gathered_and_never_as_another_version(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    reader = Reader()
    rank = TrainerRank(make_topology(trainer={"export_bucket_bytes": 4096}), tmp_path / "run", ask_of=reader.ask_of)
    rank.copy_unwritten(1)
    rank.sending.finish_copy()
    first = taken(rank, reader, "1.1", version=1)
    rank.train(random_batch())
    rank.copy_unwritten(2)
    again = taken(rank, reader, "1.2", version=1)  # to an engine that comes late
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    rank.sending.finish_copy()
    with pytest.raises(AssertionError, match="the host copy has version 2, not 1"):
        taken(rank, reader, "1.3", version=1)
    second = taken(rank, reader, "1.4", version=2)
    assert not all(torch.equal(second[name], tensor) for name, tensor in first.items())
