"""A weight version from home to several nodes over HTTP, against as many plain curls at once. Prints JSON.

Home and each node are a process with a room, as their node daemons have it: TLS, a sum for each piece, files on the
disk. The nodes know each other's rooms and begin together. The curls fetch the same file from Python's file server,
without TLS and sums, or from home's room ("tls"). All on one machine: with --mbit in a network of its own, where what
leaves home passes at that rate (needs root, and the kernel's htb). The runs take turns.

- seconds: from the start until the last node has all. ratio: nodes over plain curls, median of the pairs.
- versions_sent: bytes that home sent, in sizes of the version.

Run: python -m tests.bench.bench_rooms [--mbit N]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec
import structlog

from runtime.http.fetching import Fetcher, Published
from runtime.http.room import Room, RoomAddress, open_room
from runtime.models.delta import Version
from runtime.models.manifest import read_manifest, write_manifest
from runtime.models.versions import OnDisk, name_of, write_note
from tests.bench.rig import ROOT, rounded

MEGABYTES: Final = 520
FILE: Final = "model.safetensors"
HOME_AT: Final = "127.0.0.9"  # tc finds what home sends by this address
NODE_AT: Final = "127.0.0.1"
SHAPED: Final = "PHYSARUM_BENCH_NETWORK"  # set inside of the network that --mbit makes
LIMIT_S: Final = 900.0
Role = subprocess.Popen[str]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="size of the version")
    parser.add_argument("--pairs", type=int, default=3, help="times that each is measured")
    parser.add_argument("--mbit", type=int, default=0, help="rate of what leaves home; 0: no limit")
    parser.add_argument("--role", nargs=2, metavar=("NAME", "DIR"), help="one process of the benchmark")
    args = parser.parse_args(argv)
    if args.role:
        anyio.run(run_role, args.role[0], Path(args.role[1]))
        return 0
    if args.mbit and SHAPED not in os.environ:
        command = ["unshare", "--net", sys.executable, "-m", "tests.bench.bench_rooms", *(argv or sys.argv[1:])]
        return subprocess.run(command, env={**os.environ, SHAPED: "1"}, check=False).returncode
    if args.mbit:
        shape(args.mbit)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(rounded(measured(Path(folder), args)), indent=2))
    return 0


def shape(mbit: int) -> None:
    """Limit the rate of what home sends, in this process's own network."""
    for command in (
        "ip link set lo up",
        "tc qdisc add dev lo root handle 1: htb default 20",
        f"tc class add dev lo parent 1: classid 1:10 htb rate {mbit}mbit burst 1mb",
        "tc class add dev lo parent 1: classid 1:20 htb rate 100gbit burst 10mb cburst 10mb",
        f"tc filter add dev lo parent 1: protocol ip u32 match ip src {HOME_AT}/32 flowid 1:10",
    ):
        subprocess.run(command.split(), check=True, stderr=subprocess.DEVNULL)


def measured(place: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    root, size = place / "weights", args.megabytes * 1_000_000
    (version := root / name_of(1)).mkdir(parents=True)
    with (version / FILE).open("wb") as file:
        for number in range(0, size, 1_000_000):
            file.write(Random(number).randbytes(1_000_000))
    write_note(version, OnDisk(Version(1, "1"), whole_bytes=size))
    write_manifest(version, Version(1, "1"))
    seconds: dict[str, list[float]] = {"nodes": [], "curls": [], "tls": []}
    sent, loads = list[float](), list[float]()
    for pair in range(args.pairs):
        loads.append(os.getloadavg()[0])
        took_s, sent_bytes = fetched(root, place / f"nodes{pair}", args.nodes)
        seconds["nodes"].append(took_s)
        sent.append(sent_bytes / size)
        seconds["curls"].append(curled(version, place / "curls", args.nodes))
        seconds["tls"].append(curled(version, place / "curls", args.nodes, root))
    ratios = [nodes / curls for nodes, curls in zip(seconds["nodes"], seconds["curls"], strict=True)]
    of_tls = [nodes / curls for nodes, curls in zip(seconds["nodes"], seconds["tls"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratio_of_tls": statistics.median(of_tls),
        "versions_sent": statistics.median(sent),
        "of_the_pairs": {**seconds, "versions_sent": sent, "load": loads},
        "mbit": args.mbit,
        "nodes": args.nodes,
        "megabytes": args.megabytes,
    }


def fetched(root: Path, place: Path, num_nodes: int) -> tuple[float, int]:
    """Have nodes fetch the version; return the seconds, and the bytes that home sent."""
    with ExitStack() as stack:
        home = stack.enter_context(role("home", root))
        nodes = [stack.enter_context(role(f"n{number}", place / f"n{number}")) for number in range(num_nodes)]
        rooms = [line(each) for each in (home, *nodes)]
        digest, _ = read_manifest(root / name_of(1))
        begin = time.monotonic()
        for each in nodes:
            say(each, *rooms, digest)
        for each in nodes:
            assert line(each) == "done"
        took_s = time.monotonic() - begin
        say(home, "")
        sent_bytes = int(line(home))
    subprocess.run(["rm", "-r", str(place)], check=True)
    return took_s, sent_bytes


def curled(version: Path, place: Path, num: int, root: Path | None = None) -> float:
    """Fetch the file with plain curls at once, from home's room if `root` is given; return the seconds."""
    with ExitStack() as stack:
        if root is None:
            server = [sys.executable, "-u", "-m", "http.server", "0", "--bind", HOME_AT, "--directory", str(version)]
            started = stack.enter_context(process(server, stderr=subprocess.DEVNULL))
            url, options = f"http://{HOME_AT}:{line(started).split()[5]}/{FILE}", list[str]()
        else:
            room = msgspec.json.decode(line(stack.enter_context(role("home", root))), type=RoomAddress)
            _, manifest = read_manifest(version)
            digest = next(file.digest for file in manifest.files if file.name == FILE)
            url = f"https://{room.host}:{room.port}/{digest}"
            options = ["--insecure", "-H", f"Authorization: Bearer {room.secret}"]
        place.mkdir()
        begin = time.monotonic()
        curls = [
            stack.enter_context(process(["curl", "-sSf", *options, "-o", str(place / f"{number}"), url]))
            for number in range(num)
        ]
        assert [curl.wait(LIMIT_S) for curl in curls] == [0] * num
        took_s = time.monotonic() - begin
    assert {(place / f"{number}").stat().st_size for number in range(num)} == {(version / FILE).stat().st_size}
    subprocess.run(["rm", "-r", str(place)], check=True)
    return took_s


def role(name: str, place: Path) -> AbstractContextManager[Role]:
    """Start a process of the benchmark."""
    return process([sys.executable, "-m", "tests.bench.bench_rooms", "--role", name, str(place)])


@contextmanager
def process(command: Sequence[str], stderr: int | None = None) -> Generator[Role]:
    """Run a program during a block."""
    pipe = subprocess.PIPE
    started = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, cwd=ROOT)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def say(to: Role, *lines: str) -> None:
    """Write lines to a process."""
    assert to.stdin is not None
    to.stdin.write("".join(f"{each}\n" for each in lines))
    to.stdin.flush()


def line(of: Role) -> str:
    """Read a line of a process."""
    assert of.stdout is not None
    found = of.stdout.readline()
    assert found, f"{of.args} ended"
    return found.strip()


async def run_role(name: str, place: Path) -> None:
    """Be home, or a node: print the address, fetch what the lines name, serve until killed."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    is_home = name == "home"
    room = Room(Published([place]).look) if is_home else Room()
    known: list[RoomAddress] = []
    node = Fetcher(place, name, room, lambda: known, lambda text: print(text, file=sys.stderr))
    host = HOME_AT if is_home else NODE_AT
    async with open_room(room, name, host, host, is_home=is_home) as own:
        print(msgspec.json.encode(own).decode(), flush=True)
        while (text := (await anyio.to_thread.run_sync(sys.stdin.readline)).strip()).startswith("{"):
            known.append(msgspec.json.decode(text, type=RoomAddress))
        known[:] = [each for each in known if each.node != name]
        if is_home:
            print(room.sent_bytes, flush=True)
        else:
            await anyio.to_thread.run_sync(node.fetch, text)
            print("done", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    sys.exit(main())
