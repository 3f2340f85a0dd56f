"""Names that are too long, pipes, devices and links as files of commands."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import pytest

from bin import credentials, export_hf, halt, ledger, replay, report, start_topology, try_function, watch
from runtime.bus.credential import read_credential
from runtime.util import secrets
from runtime.util.secrets import read_private
from tests.bin.test_ledger import RUN, make
from tests.support.commands import called

ROOT = Path(__file__).parents[2]
LONG = "n" * 5_000


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return anyio.run(make, tmp_path_factory.mktemp("odd") / RUN)


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (ledger.main, (LONG,)),
        (halt.main, (LONG,)),
        (watch.main, (LONG,)),
        (report.main, (LONG,)),
        (credentials.main, (LONG, "--list")),
        (export_hf.main, (LONG, "--out", "x")),
        (start_topology.main, (LONG, "--check")),
        (start_topology.main, (f"{LONG}.toml", "--check")),
        (replay.main, (LONG, "--to", "filter")),
        (try_function.main, ("grader", "math", "--on", LONG)),
    ],
)
def test_a_name_that_is_too_long_is_wrong_input(main: object, arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = called(main, *arguments, cwd=tmp_path)  # pyright: ignore[reportArgumentType]
    assert (done.returncode, done.stdout) == (2, "")
    assert "this name is too long for a file" in done.stderr
    assert len(done.stderr) < 500


@pytest.mark.parametrize("name", ["/", ".", "..", "./", "/.", ""])
def test_a_directory_is_no_topology(name: str) -> None:
    done = called(start_topology.main, name, "--check")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not a regular file" in done.stderr


def test_a_report_is_written_through_links_and_into_pipes_and_devices(ended: Path, tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target.html", tmp_path / "link.html", tmp_path / "pipe"
    target.write_text("before")
    link.symlink_to(target)
    os.mkfifo(pipe)
    got: list[bytes] = []
    reading = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reading.start()
    done = called(report.main, ended, "--out", link, "--trace", pipe, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reading.join(timeout=10)
    assert link.is_symlink()
    assert target.read_text().startswith("<!doctype html>")
    assert json.loads(got[0])["traceEvents"]
    assert pipe.is_fifo()
    assert called(report.main, ended, "--out", "/dev/null", cwd=tmp_path).returncode == 0
    assert Path("/dev/null").is_char_device()
    (tmp_path / "dangling").symlink_to(tmp_path / "new.html")
    assert called(report.main, ended, "--out", "dangling", cwd=tmp_path).returncode == 0
    assert (tmp_path / "new.html").read_text().startswith("<!doctype html>")
    assert called(report.main, ended, "--out", tmp_path, cwd=tmp_path).returncode == 1  # a directory


def test_a_report_on_standard_output_is_the_file_alone(ended: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bin" / "physarum.py"), "report", str(ended)]
    done = subprocess.run([*command, "--out", "-"], cwd=tmp_path, capture_output=True, timeout=60, check=True)
    assert done.stdout.startswith(b"<!doctype html>")
    assert done.stdout.rstrip().endswith(b"</html>")
    assert b"report    -, " in done.stderr
    assert not (tmp_path / "-").exists()
    both = called(report.main, ended, "--out", "-", "--trace", "-", cwd=tmp_path)
    assert (both.returncode, both.stdout) == (2, "")


def test_a_credential_comes_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "alice.toml"
    os.mkfifo(pipe, 0o600)

    def write() -> None:
        with pipe.open("w") as file:
            file.write('user = "a"\n')
            file.flush()
            time.sleep(0.1)
            file.write('password = "b"\n')

    writing = threading.Thread(target=write)
    writing.start()
    assert read_private(pipe) == 'user = "a"\npassword = "b"\n'
    writing.join(timeout=10)


@pytest.mark.parametrize("holds", [False, True])
def test_a_pipe_that_brings_nothing_is_named_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord], holds: bool
) -> None:
    monkeypatch.setattr(secrets, "SAY_AFTER_S", 0.05)
    monkeypatch.setattr(secrets, "PIPE_S", 0.2)
    pipe = tmp_path / "join.toml"
    os.mkfifo(pipe, 0o600)
    held = os.open(pipe, os.O_RDWR) if holds else -1  # a writer that never closes
    with pytest.raises(ValueError, match=f"{pipe} is a pipe: no program wrote"):
        read_private(pipe)
    assert [record.getMessage() for record in logged] == [f"{pipe} is a pipe: waiting up to 0.2 s for its content"]
    if holds:
        os.close(held)


def test_the_wait_for_a_pipe_is_said_on_the_terminal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c", 0o600)
    program = (
        "import sys; from pathlib import Path; from runtime.util import secrets; "
        "secrets.SAY_AFTER_S, secrets.PIPE_S = 0.05, 0.2; from bin.reward_worker import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "c"), "math:f"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"{tmp_path / 'c'} is a pipe: waiting up to 0.2 s for its content"
    assert "no program wrote" in done.stderr.splitlines()[1]


@pytest.mark.parametrize(
    "certificate", ["", "no PEM", "ä", "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----"]
)
def test_a_certificate_that_is_no_pem_is_wrong_input(tmp_path: Path, certificate: str) -> None:
    file = tmp_path / "alice.toml"
    keys = ("kind", "run", "name", "url", "tls_name", "user", "password", "inbox", "stream")
    lines = [*(f'{key} = "x"' for key in keys), 'expires = "2100-01-01T00:00:00Z"']
    file.write_text("\n".join([*lines, f"certificate = {json.dumps(certificate, ensure_ascii=False)}"]), "utf-8")
    file.chmod(0o600)
    with pytest.raises(ValueError, match="its certificate is not one in PEM"):
        read_credential(file)
