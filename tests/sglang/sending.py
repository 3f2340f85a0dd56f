"""The trainer's half of a weight session, as simple as it can be: buckets of a file, sent by rank 0 of a group."""

import base64
import pickle
import struct
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from uuid import uuid4

import anyio
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing import reductions

from actors.rollout.embedded.engine.groups import SENDER, join
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import RequestRefused
from actors.rollout.sglang.updates import BucketLayout, GroupAddress, WeightUpdates
from runtime.agent.supervision.ports import free_port
from tests.sglang.server import TWO_PROCESSES, Server

LIMIT_S: Final = 120.0  # of what may wait for others
SEGMENTS: Final = Path("/dev/shm")
HEADER_BYTES: Final = 64  # torch's alignment
ENDLESS: Final = 1 << 20
HOST: Final = "127.0.0.1"

Named = Sequence[tuple[str, Tensor]]


def buckets_of(directory: Path, number: int) -> list[Named]:
    """The tensors of published weights in so many parts."""
    named = list(load_file(directory / "model.safetensors").items())
    size = -(-len(named) // number)
    return [named[start : start + size] for start in range(0, len(named), size)]


def layout_of(bucket: Named) -> BucketLayout:
    """What the engine is told of a bucket."""
    return BucketLayout(
        names=[name for name, _ in bucket],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        shapes=[list(tensor.shape) for _, tensor in bucket],
    )


def flat(bucket: Named) -> Tensor:
    """The bytes of all tensors, one behind the other."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in bucket])


def payload_of(bucket: Named, *, flattened: bool) -> str:
    """A bucket as a body holds it. Plain pickles name nothing of SGLang's, so that anybody may make them."""
    value = {"flattened_tensor": flat(bucket), "metadata": metadata_of(bucket)} if flattened else bucket
    return base64.b64encode(pickle.dumps(value)).decode()


def metadata_of(bucket: Named) -> list[SimpleNamespace]:
    """Where each tensor lies in the bytes."""
    ends = accumulate(tensor.nbytes for _, tensor in bucket)
    return [
        SimpleNamespace(
            name=name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            start_idx=end - tensor.nbytes,
            end_idx=end,
            numel=tensor.nbytes,
        )
        for (name, tensor), end in zip(bucket, ends, strict=True)
    ]


class Made:
    """Pickled as the call that makes something."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._made = (function, arguments)

    def __reduce__(self) -> Any:
        return self._made


@contextmanager
def segments_of(bucket: Named, num_readers: int) -> Generator[list[str]]:
    """Payloads for so many readers, each with a name of one segment of shared memory that holds a bucket.

    torch counts in the first bytes who has the segment. A reader that finds that it is the last one ends when the name
    is gone already, so the count is one that never ends. A reader's manager, which it starts since it is told of none,
    removes the name that the reader was given, so each reader has one of its own.
    """
    data = flat(bucket).numpy().tobytes()
    paths = [SEGMENTS / f"physarum-test-{uuid4().hex}" for _ in range(num_readers)]
    paths[0].write_bytes(struct.pack("<i", ENDLESS).ljust(HEADER_BYTES, b"\0") + data)
    try:
        for path in paths[1:]:
            path.hardlink_to(paths[0])
        yield [_naming(path, len(data), bucket) for path in paths]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def _naming(segment: Path, size: int, bucket: Named) -> str:
    held = Made(reductions.rebuild_storage_filename, torch.UntypedStorage, b"", f"/{segment.name}".encode(), size)
    tensor = Made(
        reductions.rebuild_tensor,
        Tensor,
        Made(reductions.rebuild_typed_storage, held, torch.uint8),
        (0, (size,), (1,), False),
    )
    value = {"flattened_tensor": tensor, "metadata": metadata_of(bucket)}
    return base64.b64encode(pickle.dumps(value)).decode()


class Sender:
    """Rank 0 of a group with one engine in it."""

    def __init__(self, updates: WeightUpdates, server: Server, name: str, group: Any) -> None:
        self.name = name
        self._updates = updates
        self._engine = server.url
        self._group: Any = group

    async def send(self, bucket: Named, *, flattened: bool = True, **options: Any) -> None:
        """Have the engine receive a bucket, and broadcast it.

        Raises:
            RequestRefused: it does not load it.
        """
        tensors = [flat(bucket)] if flattened else [tensor.contiguous() for _, tensor in bucket]
        refused: RequestRefused | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, self._broadcast, tensors)
            try:
                await self.tell(bucket, flattened=flattened, **options)
            except RequestRefused as error:  # it has received it before
                refused = error
        if refused is not None:
            raise refused

    async def tell(self, bucket: Named, *, flattened: bool = True, **options: Any) -> None:
        """Have the engine receive a bucket, and send nothing."""
        await self._updates.update_from_distributed(
            self._engine, self.name, layout_of(bucket), flattened=flattened, timeout_s=LIMIT_S, **options
        )

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._group.broadcast(tensor, SENDER).wait()

    def die(self) -> None:
        """Close the connections, as the end of a process does."""
        self._group = None

    async def leave(self) -> None:
        """Have the engine leave."""
        await self._updates.destroy_group(self._engine, self.name, timeout_s=LIMIT_S)


@asynccontextmanager
async def sender(client: SglangClient, server: Server, name: str = "") -> AsyncGenerator[Sender]:
    """A group with a server; `leave` is the caller's, at its end."""
    updates = WeightUpdates(client)
    name = name or uuid4().hex
    world = 1 + (2 if server.layout == TWO_PROCESSES else 1)
    address = GroupAddress(name, HOST, free_port(), world, "gloo")
    found: list[Any] = []

    def meet() -> None:
        found.append(join(HOST, address.port, rank=SENDER, world_size=world, name=name, timeout_s=LIMIT_S))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, meet)
        await updates.init_group(server.url, address, rank_offset=1, timeout_s=LIMIT_S)
    yield Sender(updates, server, name, found.pop())
