"""Addresses of servers and their API key: KV entries of node daemons and rollout actors."""

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from runtime.bus.errors import SequenceMismatch
from runtime.util.secrets import Secret

if TYPE_CHECKING:
    from runtime.bus.kv import KeyValues

BUS_URL_VARIABLE = "PHYSARUM_BUS_URL"  # environment variable of every actor
INSTANCE_VARIABLE = "PHYSARUM_INSTANCE"  # number of an actor process, if its role has several
START_VARIABLE = "PHYSARUM_START"  # unique to one start of a restart group, and the same in all of its processes
NODE_VARIABLE = "PHYSARUM_NODE"  # node of every process
ADDRESS_VARIABLE = "PHYSARUM_ADDRESS"  # address of that node, for servers of its processes
BUS_CERTIFICATE_VARIABLE = "PHYSARUM_BUS_CERTIFICATE"  # PEM certificate of the bus, if it uses TLS with its own one
ENGINE_KEY_VARIABLE = "PHYSARUM_ENGINE_KEY"  # environment variable of every engine and router
ENGINE_KEY = "engine_key"
LIFETIME_S = 60  # of an address without renewal, in whole seconds as the bucket needs
RENEW_EVERY_S = 10.0


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A server's URL. It is renewed while the server runs; another `start` means a new server."""

    url: str
    agent: str = ""  # instance that accepts KillRequested for it (messages/calls.py); empty: none
    pid: int = 0  # of its process, on that instance's node
    start: str = ""  # unique to one start of the server


def host_port(host: str, port: int) -> str:
    """Join a host and a port as in a URL: an IPv6 address gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """Split what `host_port` joined; a scheme before it is allowed.

    Raises:
        ValueError: there is no port.
    """
    host, _, port = text.rpartition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)


def address_filter(role: str, pool: str) -> str:
    """Keys of all servers of a role ("engine", "router") in a pool."""
    return f"address.{role}.{pool}.*"


def address_key(role: str, pool: str, index: int) -> str:
    """Key of one server."""
    return f"address.{role}.{pool}.{index}"


def server_name(key: str) -> str:
    """Display name of a server and its process, from its key: "engine.policy.0"."""
    return key.removeprefix("address.")


async def engine_key(kv: "KeyValues") -> Secret:
    """The API key of the run's engines and routers. The first caller creates it.

    Raises:
        BusError: the bucket cannot be read or written.
    """
    entry = await kv.get(ENGINE_KEY, str)
    while entry is None or entry.value is None:
        with suppress(SequenceMismatch):  # another process was first
            await kv.create(ENGINE_KEY, Secret.random().reveal())
        entry = await kv.get(ENGINE_KEY, str)
    return Secret(entry.value)
