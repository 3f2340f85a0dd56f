"""Choosing ports."""

import socket
from pathlib import Path

import pytest

from runtime.node.supervisor import ports
from runtime.node.supervisor.ports import LOWEST, PortInUse, choose_port, free_port, is_free


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


def test_a_free_port_is_none_that_connections_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("32768\t60999\n")
    monkeypatch.setattr(ports, "CONNECTIONS", tmp_path / "range")
    assert all(LOWEST <= free_port() < 32768 for _ in range(100))


def test_without_such_ports_any_free_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("1024\t65535\n", "nonsense", None):
        if known is not None:
            (tmp_path / "range").write_text(known)
        monkeypatch.setattr(ports, "CONNECTIONS", tmp_path / ("range" if known else "missing"))
        assert is_free("127.0.0.1", free_port())
