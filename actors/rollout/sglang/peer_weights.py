"""First weights of a starting SGLang server from a peer engine: selects the seed and relays the calls to it.

SGLang (0.5.23) has two HTTP calls for that, which the starting server sends to its seed. The first creates a process
group per TP rank, right before loading; the second makes the seed send. SGLang sends no API key, waits without a
timeout and ignores the responses. A seed that has to send to a group that it failed to create crashes.

So the starting server gets the address of a local relay as its seed. The relay adds the key and blocks the send until
the group exists. If the seed refuses or does not respond, the relay aborts the start.

Needs only the standard library: it runs in the SGLang interpreter (launch.py).
"""

import json
import os
import random
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import cast

PEERS_VARIABLE = "PHYSARUM_ENGINE_PEERS"  # HOST:PORT,... of the pool's ready servers on this node
GROUP = "/init_weights_send_group_for_remote_instance"
SEND = "/send_weights_to_remote_instance"
LIMITS_S = {GROUP: 120.0, SEND: 600.0}  # for the seed's response; meanwhile the seed generates nothing
ASK_S = 5.0
MAX_BODY_BYTES = 1 << 16
PORTS = range(20_000, 32_000)  # above well-known ports, below the ephemeral range

Say = Callable[[str], None]


def first_weights(peers: Sequence[str], key: str, num_ranks: int) -> list[str]:
    """Return the server arguments for taking first weights from a peer; empty to read files.

    Args:
        peers: addresses of the peer engines, HOST:PORT, all on this node.
        key: the API key of the peers.
        num_ranks: TP ranks of the server, and of each peer.
    """
    seed = choose_seed({peer: label_at(peer, key) for peer in peers})
    if seed is None:
        return []
    host = seed.rpartition(":")[0]
    ports = free_ports(host, num_ranks)
    relay = Relay(seed, key, ports)
    threading.Thread(target=relay.run, name="relay to the seed", daemon=True).start()
    return arguments_for(host, relay.server_port, ports)


def choose_seed(labels: Mapping[str, str | None]) -> str | None:
    """Select the peer with the newest weights published by the run; None if there is none. Pure.

    Args:
        labels: weight label of each peer, VERSION@UPDATE (labels.py); None: the peer does not serve.
    """
    versions = {peer: (label or "").partition("@")[0] for peer, label in labels.items()}
    known = {peer: int(version) for peer, version in versions.items() if version.isdecimal() and int(version) > 0}
    return max(known, key=lambda peer: (known[peer], peer), default=None)


def arguments_for(host: str, port: int, ports: Sequence[int]) -> list[str]:
    """Return the server arguments for loading from a remote instance.

    Args:
        host: of the seed.
        port: of the relay on that host, for the two calls.
        ports: on that host, one per TP rank, where seed and server create their process groups.
    """
    return [
        "--load-format=remote_instance",
        "--remote-instance-weight-loader-backend=nccl",
        f"--remote-instance-weight-loader-seed-instance-ip={host}",
        f"--remote-instance-weight-loader-seed-instance-service-port={port}",
        f"--remote-instance-weight-loader-send-weights-group-ports={json.dumps(list(ports))}",
    ]


def label_at(peer: str, key: str) -> str | None:
    """Return a peer's weight label; None if it reports none or is not ready, e.g. paused for an update."""
    try:
        response_of(f"http://{peer}/ready", key, None, ASK_S)
        answer = json.loads(response_of(f"http://{peer}/model_info", key, None, ASK_S))
    except (OSError, HTTPException, ValueError):
        return None
    label = answer.get("weight_version")
    return label if isinstance(label, str) else None


def response_of(url: str, key: str, body: bytes | None, limit_s: float) -> bytes:
    """Send a request without a proxy and return the response body.

    Raises:
        OSError, HTTPException: the server refuses or does not respond.
    """
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, body, headers), timeout=limit_s) as answer:
        return cast(bytes, answer.read())


def free_ports(host: str, number: int) -> list[int]:
    """Return ports that are free now."""
    return list(islice((port for port in random.sample(PORTS, len(PORTS)) if is_free(host, port)), number))


def is_free(host: str, port: int) -> bool:
    """Whether a server can bind to a port now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def end_start(reason: str) -> None:
    """Exit this server process, which would wait ten minutes for its weights.

    Its node daemon restarts it, and it then reads its weights from files.
    """
    sys.stderr.write(f"RuntimeError: no first weights from a peer: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


class Relay(ThreadingHTTPServer):
    """Relays the two calls of a starting server to its seed, once each."""

    daemon_threads = True

    def __init__(self, seed: str, key: str, ports: Sequence[int], fail: Say = end_start) -> None:
        """Listen on the seed's host for calls that name these ports; `fail` receives the reason of a failure."""
        self._seed = seed
        self._key = key
        self._ports = ",".join(map(str, ports))
        self._fail = fail
        self._expected = {GROUP, SEND}
        self._has_group = threading.Event()
        super().__init__((seed.rpartition(":")[0], 0), _Handler)

    def run(self) -> None:
        """Serve until both calls were made."""
        with self:
            self.serve_forever()

    def pass_on(self, path: str, body: bytes) -> int:
        """Relay a call to the seed; return the HTTP status of the response."""
        if path not in self._expected or _ports_in(body) != self._ports:
            return 404
        self._expected.discard(path)
        try:
            if path == SEND and not self._has_group.wait(LIMITS_S[GROUP]):
                raise TimeoutError("it has no group to send to")
            response_of(f"http://{self._seed}{path}", self._key, body, LIMITS_S[path])
        except (OSError, HTTPException) as error:
            self._fail(f"{self._seed}{path}: {error}")
            return 502
        if path == GROUP:
            self._has_group.set()
        return 200


def _ports_in(body: bytes) -> str | None:
    """Return the ports in the body of a call; None if the body has another form."""
    try:
        answer = json.loads(body)
    except ValueError:
        return None
    ports = cast(dict[str, object], answer).get("ports") if isinstance(answer, dict) else None
    return ports if isinstance(ports, str) else None


class _Handler(BaseHTTPRequestHandler):
    timeout = ASK_S  # for the caller to send its request

    def do_POST(self) -> None:
        relay = cast(Relay, self.server)
        length = self.headers.get("Content-Length", "")
        size = min(int(length), MAX_BODY_BYTES) if length.isascii() and length.isdecimal() else 0
        status = relay.pass_on(self.path, self.rfile.read(size))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
        if self.path == SEND and status == 200:  # the second of the two calls
            relay.shutdown()

    def log_message(self, format: str, *args: object) -> None:
        sys.stderr.write(f"relay to the seed: {format % args}\n")
