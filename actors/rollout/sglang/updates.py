"""Weights that come bucket by bucket, as SGLang's HTTP API has it: groups, sessions, buckets.

Each call may wait for others (the other ranks of a group, a broadcast, running requests where the engine is not
paused), so each is told how long.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from actors.rollout.sglang.client import SglangClient

FLATTENED: Final = "flattened_bucket"


class GroupAddress(NamedTuple):
    """Where the ranks of a group meet. The sender is rank 0 and serves the store at this address."""

    name: str
    host: str
    port: int
    world_size: int
    backend: str  # "nccl", "gloo"


class BucketLayout(NamedTuple):
    """The tensors of a bucket in the order in which they are sent, by Hugging Face's names."""

    names: Sequence[str]
    dtypes: Sequence[str]  # torch's names: "float32"
    shapes: Sequence[Sequence[int]]


class WeightUpdates:
    """The calls of a weight session to engines. A refusal is a RequestRefused, with the engine's words."""

    def __init__(self, client: SglangClient) -> None:
        self._client = client

    async def init_group(self, engine: str, group: GroupAddress, *, rank_offset: int, timeout_s: float) -> None:
        """Have an engine join a group with all its ranks, the first as rank_offset; answered once all ranks are there.

        An engine waits half an hour for them and does nothing else meanwhile: kill it when its call times out.
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
        """Have an engine leave a group."""
        await self._client.order(engine + "/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def begin_update(self, engine: str, *, selector: str = "all", timeout_s: float) -> None:
        """Open a session; refused while one is open, also one that nobody will end."""
        await self._client.order(engine + "/begin_weight_update", {"selector": selector}, timeout_s)

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
        """Have an engine receive a bucket in a group and load it.

        Args:
            engine: its URL.
            group: name.
            layout: what the sender broadcasts.
            flattened: as one tensor of all bytes, else one after the other.
            flush_cache: after it; refused where requests are frozen in the cache, though the weights are loaded then.
            label: the weights' from here on; none: as it was.
            timeout_s: for all of it; as for `init_group`.
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
        flush_cache: bool = False,
        label: str | None = None,
        timeout_s: float,
    ) -> None:
        """Have an engine load the bucket that the payloads, one for each of its ranks, describe or hold.

        SGLang's server ends when it cannot read one, or finds a tensor in it that does not fit.

        Args:
            engine: its URL.
            payloads: base64 of pickles.
            flattened: they are of one tensor of all bytes and where each tensor lies in it, else of a list of them.
            flush_cache: as `update_from_distributed`.
            label: likewise.
            timeout_s: for all of it.
        """
        body: dict[str, Any] = {"serialized_named_tensors": payloads, "flush_cache": flush_cache}
        body |= {"load_format": FLATTENED} if flattened else {}
        body |= {} if label is None else {"weight_version": label}
        await self._client.order(engine + "/update_weights_from_tensor", body, timeout_s)

    async def end_update(self, engine: str, *, timeout_s: float) -> None:
        """Close the session; refused where none is open."""
        await self._client.order(engine + "/end_weight_update", {}, timeout_s)
