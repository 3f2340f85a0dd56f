"""Where servers listen: the KV entries that node agents write and rollout actors watch."""

import msgspec

BUS_URL_VARIABLE = "PHYSARUM_BUS_URL"  # in the environment of every process of a run


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A server's URL. It is written each time the server has started, so a new revision means a new server."""

    url: str


def address_filter(role: str, pool: str) -> str:
    """Keys of all servers of a role ("engine", "router") in a pool."""
    return f"address.{role}.{pool}.*"


def address_key(role: str, pool: str, index: int) -> str:
    """Key of one server."""
    return f"address.{role}.{pool}.{index}"
