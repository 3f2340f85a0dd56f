"""Program for tests of the network: a server that echoes datagrams and sums streams up, and its clients.

talk.py serve ADDRESS PORT | round-trips ADDRESS PORT COUNT | send ADDRESS PORT COUNT | datagrams ADDRESS PORT COUNT
| stream ADDRESS PORT BYTES | lines ADDRESS PORT COUNT
"""

import hashlib
import json
import random
import socket
import sys
import threading
import time

DATAGRAM = 8000  # bytes: six fragments
WINDOW = 16  # datagrams on their way
SO_RCVBUFFORCE = 33  # beyond the limit of users that are not root
ANSWER_S = 30.0
NUM_TRIES = 120


class Server:
    """Echoes datagrams; echoes lines of a stream, or answers with the hash of a long one."""

    def __init__(self, address: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.num_datagrams = 0
        self.udp = roomy_socket(family)
        self.udp.bind((address, port))
        self.tcp = socket.create_server((address, port), family=family)

    def serve(self) -> None:
        threading.Thread(target=self.echo, daemon=True).start()
        print("ready", flush=True)
        while True:
            connection, _ = self.tcp.accept()
            threading.Thread(target=self.answer, args=[connection], daemon=True).start()

    def echo(self) -> None:
        while True:
            data, sender = self.udp.recvfrom(1 << 16)
            if data == b"count":
                self.num_datagrams += 1
            else:
                self.udp.sendto(data, sender)

    def answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as file:
            kind = file.readline().strip()
            if kind == b"lines":
                for line in file:
                    file.write(line)
                    file.flush()
            else:
                digest = hashlib.sha256(file.read()).hexdigest()
                file.write(json.dumps({"sha256": digest, "datagrams": str(self.num_datagrams)}).encode())


def roomy_socket(family: int) -> socket.socket:
    """A UDP socket whose receive buffer holds all datagrams of a test, on a busy computer too."""
    udp = socket.socket(family, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
    return udp


def udp_to(address: str, port: int) -> socket.socket:
    udp = roomy_socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    udp.settimeout(ANSWER_S)
    udp.connect((address, port))
    return udp


def round_trips(address: str, port: int, count: int) -> None:
    """Print "sent" after the first datagram, and at the end the milliseconds of each round trip, as JSON."""
    udp, took_ms = udp_to(address, port), list[float]()
    for number in range(count + 1):
        started = time.perf_counter()
        udp.send(b"%d" % number)
        if not number:
            print("sent", flush=True)
        while udp.recv(100) != b"%d" % number:
            pass
        took_ms.append((time.perf_counter() - started) * 1000)
    print(json.dumps(took_ms[1:]))  # the first one waits for the neighbour's MAC address, too


def send(address: str, port: int, count: int) -> None:
    """Send datagrams without answers; print how many the server has received."""
    udp = udp_to(address, port)
    before = asked(address, port, b"")["datagrams"]
    for _ in range(count):
        udp.send(b"count")
    wait_until_read(udp)
    print(int(asked(address, port, b"")["datagrams"]) - int(before))


def wait_until_read(udp: socket.socket) -> None:
    """Wait until the server has read all datagrams so far: it reads them in order, and echoes this one."""
    udp.settimeout(ANSWER_S / NUM_TRIES)
    for _ in range(NUM_TRIES):  # it may be lost
        udp.send(b"read")
        try:
            udp.recv(100)
        except TimeoutError:
            continue
        return
    raise TimeoutError(f"no echo of {NUM_TRIES} datagrams")


def datagrams(address: str, port: int, count: int) -> None:
    """Exchange datagrams of 8,000 bytes; print how many came back as they were sent."""
    udp, source, waiting, intact = udp_to(address, port), random.Random(1), dict[bytes, bytes](), 0
    for number in range(count):
        data = b"%08d" % number + source.randbytes(DATAGRAM - 8)
        waiting[data[:8]] = data
        udp.send(data)
        while len(waiting) >= (WINDOW if number < count - 1 else 1):
            received = udp.recv(1 << 16)
            intact += waiting.pop(received[:8]) == received
    print(intact)


def stream(address: str, port: int, size: int) -> None:
    """Send a stream; print whether it arrived unchanged."""
    data = random.Random(2).randbytes(size)
    print(asked(address, port, data)["sha256"] == hashlib.sha256(data).hexdigest())


def asked(address: str, port: int, data: bytes) -> dict[str, str]:
    with socket.create_connection((address, port), timeout=200) as tcp:
        tcp.sendall(b"stream\n" + data)
        tcp.shutdown(socket.SHUT_WR)
        return json.loads(tcp.makefile("rb").read())


def lines(address: str, port: int, count: int) -> None:
    """Exchange lines on one connection, and print each that came back."""
    with socket.create_connection((address, port), timeout=200) as tcp, tcp.makefile("rwb") as file:
        file.write(b"lines\n")
        for number in range(count):
            file.write(b"%d\n" % number)
            file.flush()
            print("line", file.readline().decode().strip(), flush=True)
            time.sleep(0.02)


if __name__ == "__main__":
    name, place, at, *rest = sys.argv[1:]
    if name == "serve":
        Server(place, int(at)).serve()
    else:
        clients = {
            "round-trips": round_trips,
            "send": send,
            "datagrams": datagrams,
            "stream": stream,
            "lines": lines,
        }
        clients[name](place, int(at), int(rest[0]))
