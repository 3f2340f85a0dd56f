"""Each transport gets every tensor of a version, also those of a last bucket that is not full."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch
from torch import Tensor

from actors.trainer.models.shards import bytes_of, cut_into_shards, entry_of, named, write_weights
from actors.trainer.weights.broadcast import Broadcast, StageGroup
from actors.trainer.weights.engines import BucketTransport, EngineSink
from actors.trainer.weights.export import HostCopy, Sink, WeightExport, kept, weight_thread
from actors.trainer.weights.files import DeltaBase, DeltaSink, FilesSink
from actors.trainer.weights.gathering import Bucket, buckets
from actors.trainer.weights.shared_memory import HEADER_BYTES, SEGMENTS, Segments
from messages import BucketSent, Message, UpdateGroup
from runtime.models import delta
from runtime.models.checksums import checksums_of
from runtime.models.safetensors import read_tensors

CPU: Final = torch.device("cpu")
BUCKET_BYTES: Final = 64
WEIGHTS: Final = {f"w{index}": torch.arange(8, dtype=torch.float32) + index for index in range(5)}
SIZES: Final = [2, 2, 1]  # tensors of each bucket: the last one is not full
Found = dict[str, bytes]
FOUND: Final = {name: bytes(bytes_of(tensor)) for name, tensor in WEIGHTS.items()}


def source() -> Iterator[Bucket]:
    return buckets(((entry_of(name, tensor), tensor) for name, tensor in WEIGHTS.items()), BUCKET_BYTES)


def answered(failed: dict[str, str]) -> "Future[dict[str, str]]":
    answer = Future[dict[str, str]]()
    answer.set_result(failed)
    return answer


def split(step: BucketSent, flat: bytes) -> Found:
    """The tensors of a bucket, of 32 bytes each."""
    return {name: flat[32 * place : 32 * (place + 1)] for place, name in enumerate(step.names)}


class Receiver:
    """Stands for the engines: what arrives by a transport."""

    spec = UpdateGroup(name="g", address="127.0.0.1", port=1, world_size=2, backend="gloo")
    is_joined = True

    def __init__(self) -> None:
        self.found: Found = {}
        self.sizes: list[int] = []
        self._step: BucketSent | None = None

    def broadcast(self, flat: Tensor) -> "Future[None]":
        assert self._step is not None
        self.found |= split(self._step, flat.numpy().tobytes())
        sent = Future[None]()
        sent.set_result(None)
        return sent

    def ask(self, step: Message, _timeout_s: float) -> "Future[dict[str, str]]":
        assert isinstance(step, BucketSent)
        self._step = step
        self.sizes.append(len(step.names))
        if step.segments:
            self.found |= split(step, (SEGMENTS / step.segments[0]).read_bytes()[HEADER_BYTES:])
        return answered({})


def to_engines(transport: BucketTransport, receiver: Receiver) -> tuple[list[Sink], Callable[[], Found]]:
    sink = EngineSink("1.1", 0, transport, receiver.ask, fingerprints=True, timeout_s=5.0)

    def found() -> Found:
        sent = sink.close()
        assert (sent.num_buckets, sent.size_bytes, sent.failed) == (3, 5 * 32, {})
        assert set(sent.fingerprints) == set(WEIGHTS)
        assert receiver.sizes == SIZES
        return receiver.found

    return [sink], found


def broadcast(_: Path) -> tuple[list[Sink], Callable[[], Found]]:
    receiver = Receiver()
    return to_engines(Broadcast(cast(StageGroup, receiver), [receiver.spec], {}), receiver)


def shared_memory(directory: Path) -> tuple[list[Sink], Callable[[], Found]]:
    return to_engines(Segments(f"physarum-test-{id(directory)}", {"e": 1}), Receiver())


def files_sink(directory: Path) -> FilesSink:
    directory.mkdir()
    return FilesSink(directory, named(cut_into_shards([entry_of(name, each) for name, each in WEIGHTS.items()])))


def stored(directory: Path) -> Found:
    return {name: bytes(tensor.data()) for name, tensor in read_tensors(directory).items()}


def files(directory: Path) -> tuple[list[Sink], Callable[[], Found]]:
    return [files_sink(directory / "out")], lambda: stored(directory / "out")


def changes(directory: Path) -> tuple[list[Sink], Callable[[], Found]]:
    """A delta to zeros, applied again."""
    base, target = directory / "base", directory / "delta"
    base.mkdir()
    target.mkdir()
    write_weights({name: torch.zeros(8) for name in WEIGHTS}, base)
    sums = checksums_of(base)
    whole = files_sink(directory / "whole")
    sink = DeltaSink(DeltaBase(target, base, sums.tensors), whole, number=1, total=1)

    def found() -> Found:
        share = sink.close()
        assert share.error == ""
        delta.write_index(target, delta.Version(1, sums.total), 2, share.tensors)
        delta.apply_deltas(base, [target], directory / "copy")
        return stored(directory / "copy")

    return [whole, sink], found


def host_copy(_: Path) -> tuple[list[Sink], Callable[[], Found]]:
    sink = HostCopy()
    return [sink], lambda: {
        name: bytes(bytes_of(tensor)) for bucket in kept(sink.buckets, CPU) for name, tensor in bucket
    }


def finish(export: WeightExport[Any]) -> None:
    export.finish()


def advance(export: WeightExport[Any]) -> None:
    """As training does: a bucket now and then, and all but the last one before the end."""
    for _ in range(len(SIZES) - 1):
        export.advance()
        if export.pending is not None:
            export.pending.result(40)
    export.finish()


def all_advances(export: WeightExport[Any]) -> None:
    while export.advance():
        if export.pending is not None:
            export.pending.result(40)
    export.finish()


def in_background(export: WeightExport[Any]) -> None:
    export.continue_in_background().result(40)
    export.finish()


@pytest.mark.parametrize("way", [finish, advance, all_advances, in_background])
@pytest.mark.parametrize("transport", [files, changes, broadcast, shared_memory, host_copy])
def test_a_last_bucket_that_is_not_full_arrives(
    transport: Callable[[Path], tuple[list[Sink], Callable[[], Found]]],
    way: Callable[[WeightExport[Any]], None],
    tmp_path: Path,
) -> None:
    assert [len(bucket) for bucket in source()] == SIZES
    sinks, found = transport(tmp_path)
    with weight_thread() as thread:
        way(WeightExport(source(), sinks, lambda _: None, thread, device=CPU, bucket_bytes=BUCKET_BYTES))
    assert found() == FOUND


def test_a_bucket_that_an_engine_did_not_take_ends_what_is_sent(tmp_path: Path) -> None:
    asked: list[int] = []

    def ask(step: Message, _: float) -> "Future[dict[str, str]]":
        assert isinstance(step, BucketSent)
        asked.append(step.index)
        return answered({"e": "it is tired"} if step.index == 1 else {})

    sink = EngineSink(
        "1.1", 0, Segments(f"physarum-test-{id(tmp_path)}", {"e": 1}), ask, fingerprints=False, timeout_s=5.0
    )
    with weight_thread() as thread:
        WeightExport(source(), [sink], lambda _: None, thread, device=CPU).finish()
    assert asked == [0, 1]
    assert sink.close().failed == {"e": "bucket 1: it is tired"}
