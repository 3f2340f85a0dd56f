"""Choosing ports."""

import socket

import pytest

from runtime.agent.supervision.ports import PortInUse, choose_port, free_port, is_free


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
