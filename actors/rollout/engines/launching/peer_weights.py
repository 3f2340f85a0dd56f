"""A starting server of SGLang takes its first weights from a peer that serves: which one, and what both are told.

SGLang (0.5.23) has two calls for that, which the starting server makes at its seed: to make a process group for each TP
rank, right before it loads, and to send. It gives no key, waits for ever and looks at no answer; and a seed that is to
send to a group that it could not make dies of it. So the starting server is told that its seed listens here: the relay
adds the key, lets no send pass before there is a group, and ends the start where the seed refuses or is silent.

Needs nothing but the standard library: it runs in the interpreter that has SGLang (launch.py).
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

PEERS_VARIABLE = "PHYSARUM_ENGINE_PEERS"  # addresses of the pool's servers that are ready on this node: HOST:PORT,...
GROUP = "/init_weights_send_group_for_remote_instance"
SEND = "/send_weights_to_remote_instance"
LIMITS_S = {GROUP: 120.0, SEND: 600.0}  # for the seed's answer; it generates nothing meanwhile
ASK_S = 5.0
MAX_BODY_BYTES = 1 << 16
PORTS = range(20_000, 32_000)  # above known services, below what kernels give to connections

Say = Callable[[str], None]


def first_weights(peers: Sequence[str], key: str, num_ranks: int) -> list[str]:
    """Arguments by which a server takes its first weights from one of its peers; none: it reads files.

    Args:
        peers: their addresses, HOST:PORT, all on this node.
        key: that they ask for.
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
    """The peer with the newest weights that the run gave it; none: nobody says that it has such. Pure.

    Args:
        labels: what each peer calls its weights, VERSION@LOAD (labels.py); none: it does not serve.
    """
    versions = {peer: (label or "").partition("@")[0] for peer, label in labels.items()}
    known = {peer: int(version) for peer, version in versions.items() if version.isdecimal() and int(version) > 0}
    return max(known, key=lambda peer: (known[peer], peer), default=None)


def arguments_for(host: str, port: int, ports: Sequence[int]) -> list[str]:
    """Words for a server.

    Args:
        host: of its seed.
        port: there, for the two calls.
        ports: there, at which the seed and it meet, one for each TP rank.
    """
    return [
        "--load-format=remote_instance",
        "--remote-instance-weight-loader-backend=nccl",
        f"--remote-instance-weight-loader-seed-instance-ip={host}",
        f"--remote-instance-weight-loader-seed-instance-service-port={port}",
        f"--remote-instance-weight-loader-send-weights-group-ports={json.dumps(list(ports))}",
    ]


def label_at(peer: str, key: str) -> str | None:
    """What a peer calls its weights; none: it is not ready, as one that is paused for an update, or does not say."""
    try:
        asked(f"http://{peer}/ready", key, None, ASK_S)
        said = json.loads(asked(f"http://{peer}/model_info", key, None, ASK_S))
    except (OSError, HTTPException, ValueError):
        return None
    label = said.get("weight_version")
    return label if isinstance(label, str) else None


def asked(url: str, key: str, body: bytes | None, limit_s: float) -> bytes:
    """The answer of a server, by no proxy.

    Raises:
        OSError, HTTPException: it refuses, or does not answer.
    """
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, body, headers), timeout=limit_s) as answer:
        return cast(bytes, answer.read())


def free_ports(host: str, number: int) -> list[int]:
    """Ports at which a server could listen now."""
    return list(islice((port for port in random.sample(PORTS, len(PORTS)) if is_free(host, port)), number))


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def end_start(reason: str) -> None:
    """End this server, which would wait for its weights for ten minutes: its agent starts it again, from files."""
    sys.stderr.write(f"RuntimeError: no first weights from a peer: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


class Relay(ThreadingHTTPServer):
    """Takes the two calls of a starting server to its seed, once each."""

    daemon_threads = True

    def __init__(self, seed: str, key: str, ports: Sequence[int], fail: Say = end_start) -> None:
        """Listen at the seed's host, for calls that name these ports; `fail` is told why there will be no weights."""
        self._seed = seed
        self._key = key
        self._ports = ",".join(map(str, ports))
        self._fail = fail
        self._expected = {GROUP, SEND}
        self._has_group = threading.Event()
        super().__init__((seed.rpartition(":")[0], 0), _Handler)

    def run(self) -> None:
        """Listen until both calls were made."""
        with self:
            self.serve_forever()

    def pass_on(self, path: str, body: bytes) -> int:
        """Have the seed do something; the status of its answer."""
        if path not in self._expected or _ports_in(body) != self._ports:
            return 404
        self._expected.discard(path)
        try:
            if path == SEND and not self._has_group.wait(LIMITS_S[GROUP]):
                raise TimeoutError("it has no group to send to")
            asked(f"http://{self._seed}{path}", self._key, body, LIMITS_S[path])
        except (OSError, HTTPException) as error:
            self._fail(f"{self._seed}{path}: {error}")
            return 502
        if path == GROUP:
            self._has_group.set()
        return 200


def _ports_in(body: bytes) -> str | None:
    """The ports that a call names; none: it is not one of a server's."""
    try:
        said = json.loads(body)
    except ValueError:
        return None
    ports = cast(dict[str, object], said).get("ports") if isinstance(said, dict) else None
    return ports if isinstance(ports, str) else None


class _Handler(BaseHTTPRequestHandler):
    timeout = ASK_S  # for a caller to say what it wants

    def do_POST(self) -> None:
        relay = cast(Relay, self.server)
        length = self.headers.get("Content-Length", "")
        size = min(int(length), MAX_BODY_BYTES) if length.isascii() and length.isdecimal() else 0
        status = relay.pass_on(self.path, self.rfile.read(size))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
        if self.path == SEND and status == 200:  # that was all
            relay.shutdown()

    def log_message(self, format: str, *args: object) -> None:
        sys.stderr.write(f"relay to the seed: {format % args}\n")
