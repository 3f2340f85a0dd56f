"""Where servers listen, and the key that they ask for: KV entries of node agents and rollout actors."""

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from runtime.bus.errors import SequenceMismatch
from runtime.secrets import Secret

if TYPE_CHECKING:
    from runtime.bus.kv import KeyValues

BUS_URL_VARIABLE = "PHYSARUM_BUS_URL"  # in the environment of every actor
ENGINE_KEY_VARIABLE = "PHYSARUM_ENGINE_KEY"  # in that of every engine and router
ENGINE_KEY = "engine_key"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A server's URL. It is written each time the server has started, so a new revision means a new server."""

    url: str
    agent: str = ""  # instance that may be asked to kill it (messages/calls.py); empty: nobody
    pid: int = 0  # of its process, there


def address_filter(role: str, pool: str) -> str:
    """Keys of all servers of a role ("engine", "router") in a pool."""
    return f"address.{role}.{pool}.*"


def address_key(role: str, pool: str, index: int) -> str:
    """Key of one server."""
    return f"address.{role}.{pool}.{index}"


def server_name(key: str) -> str:
    """What people call the server with that key, and its process: "engine.policy.0"."""
    return key.removeprefix("address.")


async def engine_key(kv: "KeyValues") -> Secret:
    """The key that the run's engines and routers ask for; whoever comes first makes it.

    Raises:
        BusError: the bucket cannot be read or written.
    """
    entry = await kv.get(ENGINE_KEY, str)
    while entry is None or entry.value is None:
        with suppress(SequenceMismatch):  # somebody else was quicker
            await kv.create(ENGINE_KEY, Secret.random().reveal())
        entry = await kv.get(ENGINE_KEY, str)
    return Secret(entry.value)
