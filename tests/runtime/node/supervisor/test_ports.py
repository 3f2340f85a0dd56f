"""Choosing ports."""

import os
import socket
from pathlib import Path

import pytest

from runtime.bus.addresses import address_key
from runtime.node.supervisor.ports import LOWEST, PortInUse, ReadyServers, choose_port, free_port, holder_of, is_free
from runtime.node.supervisor.state_changes import Exited, Ready
from runtime.settings.processes import PortRequest, ProcessSpec, WhenListening
from tests.runtime.node.supervisor.test_supervisor import python, supervising

pytestmark = pytest.mark.anyio

TELLS = """
    import http.server, sys
    from pathlib import Path
    told = Path(sys.argv[2])
    told.write_text((told.read_text() if told.exists() else "") + f"<{sys.argv[3]}>")
    if sys.argv[3] and "fails" in sys.argv[4]:
        sys.exit(1)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.BaseHTTPRequestHandler).serve_forever()
"""


def test_a_taken_port_is_refused_when_fixed_and_avoided_when_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert not is_free("127.0.0.1", taken)
        with pytest.raises(PortInUse, match=f"port {taken} on 127.0.0.1 is in use"):
            choose_port("127.0.0.1", fixed=taken)
        assert choose_port("127.0.0.1", previous=taken) != taken


def test_a_free_port_is_kept() -> None:
    port = free_port()
    assert choose_port("127.0.0.1", previous=port) == port
    assert choose_port("127.0.0.1", fixed=port) == port


def test_a_free_port_is_none_that_connections_get(tmp_path: Path) -> None:
    (tmp_path / "range").write_text("32768\t60999\n")
    assert all(LOWEST <= free_port(connections=tmp_path / "range") < 32768 for _ in range(100))


def test_without_such_ports_any_free_one_is_taken(tmp_path: Path) -> None:
    for known in ("1024\t65535\n", "nonsense", None):
        if known is not None:
            (tmp_path / "range").write_text(known)
        file = tmp_path / ("range" if known else "missing")
        assert is_free("127.0.0.1", free_port(connections=file))


def test_a_fixed_port_in_use_is_refused_with_its_holder_and_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        holder = Path(f"/proc/{os.getpid()}/comm").read_text().strip()
        with pytest.raises(PortInUse) as caught:
            choose_port("127.0.0.1", fixed=port, key="bus.port")
    assert str(caught.value) == f"port {port} (bus.port) on 127.0.0.1 is in use by process {os.getpid()} ({holder})"
    assert holder_of(port) is None


def server(pool: str, index: int) -> ProcessSpec:
    return ProcessSpec(name=f"engine.{pool}.{index}", command=(), address_key=address_key("engine", pool, index))


def test_others_are_the_ready_ones_of_the_same_pool() -> None:
    servers = ReadyServers()
    one, two, judge = server("policy", 1), server("policy", 2), server("judge", 1)
    actor = ProcessSpec(name="rollout", command=())
    servers.add(one, "10.0.0.1", 21_000)
    servers.add(two, "10.0.0.1", 22_000)
    servers.add(judge, "10.0.0.1", 23_000)
    servers.add(actor, "", 0)
    assert servers.others(one) == "10.0.0.1:22000"
    assert servers.others(server("policy", 3)) == "10.0.0.1:21000,10.0.0.1:22000"
    assert (servers.others(judge), servers.others(actor)) == ("", "")
    servers.remove(two)
    assert servers.others(one) == ""


def telling(index: int, told: Path, how: str) -> ProcessSpec:
    return python(
        f"engine.policy.{index}",
        TELLS,
        "{port}",
        str(told),
        "{others}",
        how,
        port=PortRequest(),
        ready=WhenListening(),
        address_key=address_key("engine", "policy", index),
    )


async def test_one_that_does_not_come_up_is_started_again_without_the_others(tmp_path: Path) -> None:
    told = [tmp_path / "first", tmp_path / "second"]
    async with supervising(tmp_path) as (supervision, changes):
        supervision.start(telling(0, told[0], "comes up"))
        await changes.until(lambda: len(changes.of(Ready)) == 1)
        (first,) = changes.of(Ready)
        assert isinstance(first, Ready)
        address = f"{first.host}:{first.port}"
        supervision.start(telling(1, told[1], "fails"))
        await changes.until(lambda: len(changes.of(Ready)) == 2)
        assert len(changes.of(Exited)) == 1
    assert (told[0].read_text(), told[1].read_text()) == ("<>", f"<{address}><>")
