"""Checks the bus: the port of our own server, or access to an existing server."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import msgspec

from runtime.bus.errors import BusError, BusRefused
from runtime.bus.limits import BusLimits
from runtime.bus.nats.greeting import greeting_of
from runtime.node.checks.context import ASKING_LIMIT_S, CheckContext
from runtime.node.network import NoAddress, address_here, interfaces_here, resolve_name
from runtime.node.supervisor.ports import holder_of, is_free
from runtime.settings.placement import AUTO, LOOPBACK, address_setting, bus_port, is_networked
from runtime.settings.reading.config import Problem
from runtime.settings.sizes import needed_sizes, show_bytes
from runtime.settings.topology import Topology
from runtime.util.secrets import read_login, with_login

GREETING_TIMEOUT_S: Final = 3.0
LACKS_RIGHTS: Final = "this login lacks rights on the server (docs/run/nats/accounts.conf has the lines):"
ASKING: Final = BusLimits(connect_timeout_s=3.0, publish_timeout_s=3.0, attempt_timeout_s=2.0, drain_timeout_s=1.0)
ASKING_CLUSTER: Final = msgspec.structs.replace(ASKING, publish_timeout_s=15.0)  # its servers may be electing a leader


def check_bus(context: CheckContext) -> Iterator[Problem]:
    """Try to listen on the port of our server, or connect to an existing server as a start would."""
    bus = context.topology.bus
    context.doing("bus.url", bus.url, "connecting to the server", limit_s=ASKING_LIMIT_S)
    address = yield from _check_address(context)
    port = bus_port(context.topology)
    if port is not None and address is not None and bus.url is None and context.roles.is_home:
        yield from _check_port(address, port)
    if bus.url is None:
        return
    has_login = context.loaded.bus_login is not None or bus.credentials is not None
    refusals = [_refused_by(url, has_login=has_login, topology=context.topology) for url in bus.url.split(",")]
    if all(refusals):
        yield Problem.of("bus.url", bus.url, refusals[0] or "")
    elif not context.has("bus.credentials"):
        yield from _ask(context, bus.url)


def _check_address(context: CheckContext) -> Generator[Problem, None, str | None]:
    """Return the address of this node. None: it depends on the route to the bus, or cannot be used."""
    topology, node = context.topology, context.node
    if not is_networked(topology) or node not in topology.nodes:
        return LOOPBACK
    setting = address_setting(topology, node)
    if setting == AUTO and not context.roles.is_home:
        return None
    try:
        return address_here(setting, interfaces_here(), resolve_name).ip
    except (NoAddress, OSError) as error:
        yield Problem.of(f"nodes.{node}.address", setting, str(error))
        return None


def _check_port(address: str, port: int) -> Iterator[Problem]:
    try:
        if is_free(address, port):
            return
        why = f"in use on {address} by {holder_of(port) or 'another program'}"
    except OSError as error:
        why = error.strerror or str(error)
    yield Problem.of("bus.port", port, f"the port cannot be opened: {why}")


def _refused_by(url: str, *, has_login: bool, topology: Topology) -> str | None:
    """Return why a run cannot use the server at a URL, by its greeting; None if it can."""
    try:
        greeting = greeting_of(url, GREETING_TIMEOUT_S)
    except (OSError, ValueError) as error:
        return f"no server answers there: {error}"
    needed = needed_sizes(topology).max_payload_bytes
    if greeting is None:
        return None
    if not greeting.jetstream:
        return "this server runs without JetStream, which stores the log"
    if greeting.max_payload < needed:
        carried = show_bytes(greeting.max_payload)
        return (
            f"this server accepts messages of at most {carried} (max_payload); this run can need {show_bytes(needed)}"
        )
    if topology.bus.replicas > 1 and not greeting.cluster:
        return f"this server is in no cluster, which bus.replicas = {topology.bus.replicas} needs"
    if greeting.auth_required and not has_login:
        return "this server requires a login: put it into a file, and name the file with bus.credentials"
    return None


def _ask(context: CheckContext, url: str) -> Iterator[Problem]:
    import anyio  # imported late, like nats-py below: few topologies need it

    from runtime.process.logs import silenced

    credentials = context.topology.bus.credentials
    login = context.loaded.bus_login if credentials is None else read_login(Path(credentials))
    key, value = ("bus.url", url) if credentials is None else ("bus.credentials", credentials)
    try:
        with silenced():
            missing, refusal = anyio.run(_look_at, context, with_login(url, login))
    except BusRefused as error:
        yield Problem.of(key, value, f"the server refused this login: {error}")
    except BusError as error:
        yield Problem.of("bus.url", url, str(error))
    else:
        if missing:
            yield Problem.of(key, value, f"{LACKS_RIGHTS} {', '.join(missing)}")
        if refusal is not None:
            yield Problem.of("bus.url", url, refusal)


async def _look_at(context: CheckContext, url: str) -> tuple[list[str], str | None]:
    """Connect as a start does; return missing rights, and why the streams do not match the run directory, or None.

    Raises:
        BusRefused: the server refuses the login.
        BusError: the server cannot be reached, or offers no streams to this login.
    """
    from runtime.bus.bus import Bus
    from runtime.node.claims.run_id import RunMismatch, check_run_id  # imports nats-py, which few topologies need here

    run = context.topology.run
    limits = ASKING_CLUSTER if "," in url else ASKING
    async with Bus.connect(url, run.name, name="check", limits=limits) as bus:
        if missing := await bus.missing_rights():
            return missing, None
        await bus.holdings()
        if not context.fresh:
            try:
                await check_run_id(bus, Path(run.dir) / run.name, owns=context.roles.is_home)
            except RunMismatch as error:
                return [], str(error)
    return [], None
