"""An agent that asks the model once, tries what it may not do, and ends with an error that says what went well."""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

row = json.loads(Path(os.environ["PHYSARUM_ROW"]).read_text())
tried = row["metadata"]


def ask() -> None:
    """Ask the model."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": row["prompt"]}]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        response.read()


def finds_another_key() -> None:
    """Look for keys in the environments of other processes."""
    own = os.environ["OPENAI_API_KEY"].encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"=physarum-" in word and own not in word for word in words):
            return
    raise OSError


def reads(path: str) -> None:
    """Read a file that is not empty. One that is hidden appears empty, or is missing."""
    if not Path(path).read_text():
        raise OSError


def leaves_a_daemon() -> None:
    """Start a process that outlives this one, in a session of its own."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", tried["daemon"]], start_new_session=True)


def connects(family: int, address: object) -> None:
    """Connect to an address."""
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.connect(address)


def is_done(attempt: Callable[[], object]) -> bool:
    """Whether an attempt went well."""
    try:
        attempt()
    except OSError:
        return False
    return True


attempts: dict[str, Callable[[], object]] = {
    "asks": ask,
    "password": lambda: reads(tried["password"]),
    "label": lambda: reads(tried["label"]),
    "key": finds_another_key,
    "copy": lambda: Path("notes.txt").write_text(Path("notes.txt").read_text() + "more"),
    "original": lambda: Path(tried["directory"], "notes.txt").write_text("spoilt"),
    "home": lambda: Path(os.environ["HOME"], ".config-of-agent").write_text("x"),
    "temporary": lambda: Path(os.environ["TMPDIR"], "x").write_text("x"),
    "port": lambda: connects(socket.AF_INET, ("127.0.0.1", tried["port"])),
    "socket": lambda: connects(socket.AF_UNIX, tried["socket"]),
    "daemon": leaves_a_daemon,
}
sys.exit(" ".join(name for name, attempt in attempts.items() if is_done(attempt)))
