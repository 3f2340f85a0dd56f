"""Where servers listen: the KV entries that node agents write and rollout actors watch."""

import msgspec


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A server process and its URL; a restarted one has a higher incarnation."""

    url: str
    incarnation: int


def address_prefix(role: str, pool: str) -> str:
    """Keys of all servers of a role ("engine", "router") in a pool start with this."""
    return f"address.{role}.{pool}."


def address_key(role: str, pool: str, index: int) -> str:
    """Key of one server."""
    return f"{address_prefix(role, pool)}{index}"
