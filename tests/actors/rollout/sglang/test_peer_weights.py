"""What a starting server is told of a peer, and what the relay between them lets pass.

The seed is a stand-in that shows what we send; what SGLang's own server asks of it, tests/sglang/test_peer_weights.py.
"""

import http.client
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.rollout.sglang import peer_weights
from actors.rollout.sglang.labels import label_of
from actors.rollout.sglang.peer_weights import (
    GROUP,
    PEERS_VARIABLE,
    SEND,
    Relay,
    choose_seed,
    first_weights,
    free_ports,
    label_at,
)
from actors.rollout.sglang.server_arguments import LAUNCH
from runtime.bus.addresses import ENGINE_KEY_VARIABLE
from runtime.node.supervisor.ports import free_port, is_free
from tests.support.fake_sglang import write_fake_sglang
from tests.support.stand_in_seed import Seed, served, standing_in

KEY = "sw0rdf1sh"
PORTS = [20_001, 20_002]
CALL = {"master_address": "127.0.0.1", "ports": "20001,20002", "group_name": "send_weights_10.0.0.1"}


@pytest.mark.parametrize(
    ("labels", "seed"),
    [
        ({}, None),
        ({"h:1": None}, None),  # paused, or gone
        ({"h:1": "default"}, None),  # no weights of the run yet
        ({"h:1": "0@load"}, None),
        ({"h:1": label_of(3, "engine.policy.0.ab.1")}, "h:1"),
        ({"h:1": "3@a", "h:2": "11@b", "h:3": "4@c"}, "h:2"),  # numbers, not texts
        ({"h:1": "3@a", "h:2": None}, "h:1"),
    ],
)
def test_the_seed_is_the_peer_with_the_newest_weights(labels: dict[str, str | None], seed: str | None) -> None:
    assert choose_seed(labels) == seed


@pytest.fixture
def seed() -> Iterator[Seed]:
    with standing_in(Seed()) as state:
        yield state


class Ended:
    """Why a start ended."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)


def post(port: int, path: str, body: dict[str, Any]) -> int:
    """As SGLang does it: without a key."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_both_calls_reach_the_seed_with_the_key_and_nothing_after_them(seed: Seed) -> None:
    ended = Ended()
    relay = Relay(seed.address, KEY, PORTS, ended)
    listening = threading.Thread(target=relay.run)
    listening.start()
    assert post(relay.server_port, GROUP, CALL) == 200
    assert post(relay.server_port, SEND, CALL) == 200
    listening.join(10)
    assert seed.calls == [(GROUP, f"Bearer {KEY}", CALL), (SEND, f"Bearer {KEY}", CALL)]
    assert ended.reasons == []
    assert is_free("127.0.0.1", relay.server_port)


def test_other_calls_do_not_pass(seed: Seed) -> None:
    ended = Ended()
    with served(Relay(seed.address, KEY, PORTS, ended)) as relay:
        assert post(relay.server_port, "/update_weights_from_disk", CALL) == 404
        assert post(relay.server_port, GROUP, {**CALL, "ports": "20003"}) == 404
        assert post(relay.server_port, GROUP, CALL) == 200
        assert post(relay.server_port, GROUP, CALL) == 404
    assert seed.posts == [GROUP]
    assert ended.reasons == []


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"ports": 3}', b"\xff", b""])
def test_bytes_that_are_no_call_do_not_pass_and_the_next_call_does(seed: Seed, body: bytes) -> None:
    ended = Ended()
    with served(Relay(seed.address, KEY, PORTS, ended)) as relay:
        connection = http.client.HTTPConnection("127.0.0.1", relay.server_port, timeout=10)
        connection.request("POST", GROUP, body)
        assert connection.getresponse().status == 404
        connection.close()
        with socket.create_connection(("127.0.0.1", relay.server_port), timeout=10) as raw:
            raw.sendall(f"POST {GROUP} HTTP/1.1\r\nContent-Length: -1\r\n\r\n".encode())
            assert b" 404 " in raw.recv(100)
        assert post(relay.server_port, GROUP, CALL) == 200
    assert ended.reasons == []


def test_a_seed_that_makes_no_group_is_asked_to_send_nothing_and_the_start_ends(
    seed: Seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's scheduler dies when it is to send to a group that it has not."""
    monkeypatch.setitem(peer_weights.LIMITS_S, GROUP, 0.2)
    seed.refuses = GROUP
    ended = Ended()
    with served(Relay(seed.address, KEY, PORTS, ended)) as relay:
        assert post(relay.server_port, GROUP, CALL) == 502
        assert post(relay.server_port, SEND, CALL) == 502
    assert seed.posts == [GROUP]
    assert ended.reasons == [
        f"{seed.address}{GROUP}: HTTP Error 503: Service Unavailable",
        f"{seed.address}{SEND}: it has no group to send to",
    ]


def test_a_seed_that_has_died_ends_the_start() -> None:
    ended, port = Ended(), free_port()
    with served(Relay(f"127.0.0.1:{port}", KEY, PORTS, ended)) as relay:
        assert post(relay.server_port, GROUP, CALL) == 502
    (reason,) = ended.reasons
    assert "Connection refused" in reason


def test_a_peer_says_its_label_where_it_is_ready(seed: Seed) -> None:
    assert label_at(seed.address, KEY) == seed.label
    assert all(key == f"Bearer {KEY}" for path, key, _ in seed.calls if path == "/model_info")
    seed.is_ready = False
    assert label_at(seed.address, KEY) is None
    assert label_at(f"127.0.0.1:{free_port()}", KEY) is None


def test_without_a_peer_that_serves_it_reads_files(seed: Seed) -> None:
    seed.is_ready = False
    assert first_weights([seed.address], KEY, 1) == []


def test_seed_and_server_meet_at_a_free_port_for_each_rank() -> None:
    ports = free_ports("127.0.0.1", 8)
    assert len(set(ports)) == 8
    assert all(is_free("127.0.0.1", port) for port in ports)


def launched(fake: Path, **environment: str) -> dict[str, Any]:
    """What a server got that was started as a run starts it."""
    words = [sys.executable, LAUNCH, "sglang.launch_server", "--model-path", "m", "--tp-size", "2"]
    env = {"PYTHONPATH": str(fake), ENGINE_KEY_VARIABLE: KEY, **environment}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    arguments: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["args"]
    return arguments


def test_a_server_is_started_with_its_seed_where_a_peer_serves(seed: Seed, tmp_path: Path) -> None:
    fake = write_fake_sglang(tmp_path)
    got = launched(fake, **{PEERS_VARIABLE: f"127.0.0.1:{free_port()},{seed.address}"})
    assert (got["load_format"], got["remote_instance_weight_loader_backend"]) == ("remote_instance", "nccl")
    assert got["remote_instance_weight_loader_seed_instance_ip"] == "127.0.0.1"
    assert got["remote_instance_weight_loader_seed_instance_service_port"] not in (seed.port, 0)
    assert len(got["remote_instance_weight_loader_send_weights_group_ports"]) == 2
    assert "load_format" not in launched(fake, **{PEERS_VARIABLE: ""})
    assert "load_format" not in launched(fake)
