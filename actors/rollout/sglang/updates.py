"""Bucket-wise weight updates in SGLang's HTTP API: update groups, begin and end of an update, buckets.

Each call may block (other ranks of a group, a broadcast, running requests if the engine is not paused), so each takes a
timeout.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from actors.rollout.sglang.client import SglangClient

FLATTENED: Final = "flattened_bucket"


class GroupAddress(NamedTuple):
    """The rendezvous of a torch process group. The sender is rank 0 and hosts the store at this address."""

    name: str
    host: str
    port: int
    world_size: int
    backend: str  # "nccl", "gloo"


class BucketLayout(NamedTuple):
    """The tensors of a bucket in sending order, by Hugging Face names."""

    names: Sequence[str]
    dtypes: Sequence[str]  # torch names, e.g. "float32"
    shapes: Sequence[Sequence[int]]


class WeightUpdates:
    """The calls of a weight sync to engines. A refusal raises RequestRefused with the engine's message."""

    def __init__(self, client: SglangClient) -> None:
        self._client = client

    async def init_group(self, engine: str, group: GroupAddress, *, rank_offset: int, timeout_s: float) -> None:
        """Make all ranks of an engine join a group, from rank_offset on; returns once the group is complete.

        An engine waits up to half an hour for the other ranks and does nothing else: kill it if the call times out.
        """
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._client.order(engine + "/init_weights_update_group", body, timeout_s)

    async def destroy_group(self, engine: str, name: str, *, timeout_s: float) -> None:
        """Make an engine leave a group."""
        await self._client.order(engine + "/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def begin_update(self, engine: str, *, timeout_s: float) -> None:
        """Begin an update; refused while one is open, even an abandoned one."""
        await self._client.order(engine + "/begin_weight_update", {"selector": "all"}, timeout_s)

    async def update_from_distributed(
        self,
        engine: str,
        group: str,
        layout: BucketLayout,
        *,
        flattened: bool = True,
        flush_cache: bool = False,
        label: str | None = None,
        timeout_s: float,
    ) -> None:
        """Make an engine receive a bucket by broadcast and load it.

        Args:
            engine: its URL.
            group: name of the torch process group.
            layout: the tensors that the sender broadcasts.
            flattened: as a single tensor of all bytes; otherwise tensor by tensor.
            flush_cache: afterwards; refused while paused requests are in the cache, although the weights are loaded
                then.
            label: new weight label; None: unchanged.
            timeout_s: of the whole call; as for `init_group`.
        """
        body: dict[str, Any] = {
            "names": layout.names,
            "dtypes": layout.dtypes,
            "shapes": layout.shapes,
            "group_name": group,
            "flush_cache": flush_cache,
        }
        body |= {"load_format": FLATTENED} if flattened else {}
        body |= {} if label is None else {"weight_version": label}
        await self._client.order(engine + "/update_weights_from_distributed", body, timeout_s)

    async def update_from_tensor(
        self,
        engine: str,
        payloads: Sequence[str],
        *,
        flattened: bool = True,
        label: str | None = None,
        timeout_s: float,
    ) -> None:
        """Make an engine load a bucket from payloads, one per rank, which describe or contain it.

        SGLang's server crashes if a payload is unreadable or contains a tensor that does not fit.

        Args:
            engine: its URL.
            payloads: base64-encoded pickles.
            flattened: each holds a single tensor of all bytes and the offsets of its tensors; otherwise a list of
                tensors.
            label: as for `update_from_distributed`.
            timeout_s: of the whole call.
        """
        body: dict[str, Any] = {"serialized_named_tensors": payloads, "flush_cache": False}
        body |= {"load_format": FLATTENED} if flattened else {}
        body |= {} if label is None else {"weight_version": label}
        await self._client.order(engine + "/update_weights_from_tensor", body, timeout_s)

    async def end_update(self, engine: str, *, timeout_s: float) -> None:
        """End the update; refused if none is open."""
        await self._client.order(engine + "/end_weight_update", {}, timeout_s)
