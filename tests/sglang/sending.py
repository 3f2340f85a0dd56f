"""Minimal trainer side of a weight sync: buckets of a file, broadcast by rank 0 of an update group."""

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

from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import RequestRefused
from actors.rollout.sglang.updates import BucketLayout, GroupAddress, WeightUpdates
from actors.tiny_engine.engine.updating import SENDER, join
from runtime.node.supervisor.ports import free_port
from tests.sglang.server import TWO_PROCESSES, Server

LIMIT_S: Final = 120.0  # timeout of each wait for the other side
SEGMENTS: Final = Path("/dev/shm")
HEADER_BYTES: Final = 64  # torch's alignment
ENDLESS: Final = 1 << 20  # reference count that never reaches 0
HOST: Final = "127.0.0.1"

Named = Sequence[tuple[str, Tensor]]


def buckets_of(directory: Path, number: int) -> list[Named]:
    """Split the tensors of published weights into a number of buckets."""
    named = list(load_file(directory / "model.safetensors").items())
    size = -(-len(named) // number)
    return [named[start : start + size] for start in range(0, len(named), size)]


def layout_of(bucket: Named) -> BucketLayout:
    """Describe a bucket to the engine."""
    return BucketLayout(
        names=[name for name, _ in bucket],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        shapes=[list(tensor.shape) for _, tensor in bucket],
    )


def flat(bucket: Named) -> Tensor:
    """Concatenate the bytes of all tensors."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in bucket])


def payload_of(bucket: Named, *, flattened: bool) -> str:
    """Encode a bucket for a request body. Plain pickles name no class of SGLang's, so that any client can make them."""
    value = {"flattened_tensor": flat(bucket), "metadata": metadata_of(bucket)} if flattened else bucket
    return base64.b64encode(pickle.dumps(value)).decode()


def metadata_of(bucket: Named) -> list[SimpleNamespace]:
    """Describe where each tensor lies in the bytes."""
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
    """Pickled as a call that constructs an object."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._made = (function, arguments)

    def __reduce__(self) -> Any:
        return self._made


@contextmanager
def segments_of(bucket: Named, num_readers: int) -> Generator[list[str]]:
    """Payloads for a number of readers, each with its own name of one shared-memory segment that holds a bucket.

    Torch counts the users of a segment in its first bytes. A reader that finds itself the last user crashes if the name
    is gone already, so the count starts too high to end. A reader has no manager and starts one, which removes the name
    given to that reader. Each reader therefore has its own name.
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
    """Rank 0 of an update group with one engine."""

    def __init__(self, updates: WeightUpdates, server: Server, name: str, group: Any) -> None:
        self.name = name
        self._updates = updates
        self._engine = server.url
        self._group: Any = group

    async def send(self, bucket: Named, *, flattened: bool = True, **options: Any) -> None:
        """Make the engine receive a bucket, and broadcast it.

        Raises:
            RequestRefused: The engine does not accept the bucket.
        """
        tensors = [flat(bucket)] if flattened else [tensor.contiguous() for _, tensor in bucket]
        refused: RequestRefused | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, self._broadcast, tensors)
            try:
                await self.tell(bucket, flattened=flattened, **options)
            except RequestRefused as error:  # raised after the engine has received the bucket
                refused = error
        if refused is not None:
            raise refused

    async def tell(self, bucket: Named, *, flattened: bool = True, **options: Any) -> None:
        """Make the engine receive a bucket, without sending it."""
        await self._updates.update_from_distributed(
            self._engine, self.name, layout_of(bucket), flattened=flattened, timeout_s=LIMIT_S, **options
        )

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._group.broadcast(tensor, SENDER).wait()

    def die(self) -> None:
        """Close the connections, like a process that ends."""
        self._group = None

    async def leave(self) -> None:
        """Make the engine leave the group."""
        await self._updates.destroy_group(self._engine, self.name, timeout_s=LIMIT_S)


@asynccontextmanager
async def sender(client: SglangClient, server: Server, name: str = "") -> AsyncGenerator[Sender]:
    """Join an update group with a server. The caller calls `leave` at the end."""
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
