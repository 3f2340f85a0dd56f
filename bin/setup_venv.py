"""Makes .venv or .venv-sglang from the lock files. Started by bin/setup with any Python: standard library only.

The stamp in .venv is written last, so a .venv without one is unfinished and is built anew; what was downloaded before
is in pip's cache. A lock on .venv.lock keeps two calls apart. pip inherits it and dies with us, so that not even a
kill -9 leaves somebody writing into .venv. All this holds for .venv-sglang, with a stamp, a lock and a log of its own.
"""

import ctypes
import errno
import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK  # noqa: E402 - of the standard library alone
from runtime.files import write_atomically  # noqa: E402
from runtime.settings.devices import HIDDEN  # noqa: E402

CUDA_LOCK = ROOT / "requirements" / "cuda.lock"

ELF = b"\x7fELF"  # how a program of the machine begins; the others are texts

QUIET_S = 15.0  # say something at least this often
BIG_DOWNLOAD_MB = 20.0
WAIT_FOR_OTHER_S = 3600
STOP_S = 10.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)  # loaded here, since nothing may be loaded between fork and exec

UNREACHABLE = re.compile(r"NewConnectionError|NameResolutionError|Max retries|[Tt]imed out|Connection (refused|reset)")
NUM_LAST_LINES = 4
YES = 3
NEEDS_CUDA = f"import importlib.metadata as m; exit({YES} * any('nvidia' in r for r in m.requires('torch') or ()))"


class Environment(NamedTuple):
    """One environment of the checkout: its directory's name, and the lock it holds."""

    name: str
    lock_name: str
    imports_us: bool  # the checkout is on its path
    foreign: str | None = None  # a package whose own requirements the lock overrules; its test lists them

    @property
    def directory(self) -> Path:
        return ROOT / self.name

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.directory / "physarum.stamp"

    @property
    def unfinished(self) -> Path:
        """Tells one that setup began from one that somebody made by hand."""
        return self.directory / "physarum.unfinished"

    @property
    def log(self) -> Path:
        return ROOT / f"{self.name}.log"

    @property
    def lock(self) -> Path:
        return ROOT / "requirements" / self.lock_name

    @property
    def has_torch(self) -> bool:
        return "torch" in packages_of(self.lock.read_text())

    def wanted_stamp(self) -> str:
        """What it holds in its stamp when it is finished; bin/setup composes the same text to compare."""
        return "\n".join([f"checkout {ROOT}", self.lock.read_text().rstrip("\n"), CUDA_LOCK.read_text().rstrip("\n")])


ENVIRONMENTS = {
    ".venv": Environment(".venv", "laptop.lock", imports_us=True),
    ".venv-sglang": Environment(".venv-sglang", "sglang.lock", imports_us=False, foreign="sglang"),
}


class SetupError(Exception):
    """The environment could not be made; the message says why and what to do."""


class TimedLines:
    """Short lines with the time since the start on stderr; stdout belongs to the command that needed the set-up."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"setup: {time.monotonic() - self._start:6.1f} s  {text}", file=sys.stderr, flush=True)


def main(name: str) -> int:
    report, environment = TimedLines(), ENVIRONMENTS[name]
    try:
        with only_one(environment, report) as lock_fd, environment.log.open("w") as log:
            Setup(environment, report, log, lock_fd).run()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:  # no space, no permission
        print(f"setup: {error}\nsetup: once this is mended, call again to go on", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("setup: interrupted; the next call goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK


@contextmanager
def only_one(environment: Environment, report: TimedLines) -> Generator[int]:
    """Holds the lock of an environment; waits while another call has it, and says so."""
    with (ROOT / f"{environment.name}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.say("another bin/setup is at work here; waiting for it")
            wait_for_lock(file)
        yield file.fileno()


def wait_for_lock(file: TextIO) -> None:
    def give_up(_signal: int, _frame: object) -> None:
        raise SetupError(f"another bin/setup has been at work here for {WAIT_FOR_OTHER_S} s (it holds {file.name})")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(WAIT_FOR_OTHER_S)
    fcntl.flock(file, fcntl.LOCK_EX)
    signal.alarm(0)


def packages_of(text: str) -> dict[str, str]:
    """Name and version of each line `name==version` of a lock or a stamp."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", text, re.MULTILINE))


class Setup:
    """One making or update of an environment, under its lock."""

    def __init__(self, environment: Environment, report: TimedLines, log: TextIO, lock_fd: int) -> None:
        self._environment = environment
        self._say = report.say
        self._log = log
        self._lock_fd = lock_fd
        self._wanted = environment.wanted_stamp()

    def run(self) -> None:
        environment = self._environment
        found = environment.stamp.read_text() if environment.stamp.exists() else None
        if found == self._wanted and self._works():
            self._say(f"the other call has made {environment.name}")
            return
        if found is not None and (old := self._moved_from(found)) is not None and self._works():
            self._say(f"{environment.name} was moved here from {old}; repairing it")
            self._repair(old)
            return
        if found is not None and found.startswith(f"checkout {ROOT}\n") and self._works():
            self._say(f"the lock has changed; updating {environment.name}")
            environment.unfinished.touch()
            environment.stamp.unlink()
            self._uninstall(packages_of(found).keys() - packages_of(self._wanted).keys())
        else:
            self._make_empty(found)
        self._install(environment.lock)
        if environment.has_torch and self._python("-c", NEEDS_CUDA) == YES:
            self._say(
                "this is the CUDA build of torch: its libraries come too (a CPU build: see requirements/laptop.lock)"
            )
            self._install(CUDA_LOCK)
        self._finish()

    def _moved_from(self, found: str) -> str | None:
        """The checkout whose environment this was, if nothing but its place has changed."""
        first, _, rest = found.partition("\n")
        old = first.removeprefix("checkout ")
        return old if old not in {first, str(ROOT)} and rest == self._wanted.partition("\n")[2] else None

    def _repair(self, old: str) -> None:
        """Put the new place into every text that names the old one. The stamp comes last, so another call goes on."""
        environment = self._environment
        before, now = (os.fsencode(f"{root}/{environment.name}") for root in (old, ROOT))
        for file in (environment.directory / "pyvenv.cfg", *(environment.directory / "bin").iterdir()):
            if file.is_symlink() or not file.is_file():
                continue
            content = file.read_bytes()
            if before in content and not content.startswith(ELF):
                write_atomically(file, content.replace(before, now), file.stat().st_mode & 0o777)
        self._link_us()
        write_atomically(environment.stamp, self._wanted.encode())
        self._say("ready")

    def _link_us(self) -> None:
        packages = next(self._environment.directory.glob("lib/python3*/site-packages"))
        if self._environment.imports_us:
            (packages / "physarum.pth").write_text(f"{ROOT}\n")  # works in place, as an editable install does

    def _works(self) -> bool:
        return self._environment.python.exists() and self._python("-c", "import pip") == 0

    def _make_empty(self, found: str | None) -> None:
        directory, name = self._environment.directory, self._environment.name
        if directory.exists():
            if found is None and not self._environment.unfinished.exists() and any(directory.iterdir()):
                raise SetupError(f"{directory} was not made by bin/setup; move or remove it, then call again")
            self._say(
                f"removing an unfinished {name}" if found is None else f"removing a {name} made elsewhere or broken"
            )
            remove_tree(directory)
        version = ".".join(map(str, sys.version_info[:3]))
        self._say(f"making {name} with Python {version} ({sys.executable}); once, about a minute plus the downloads")
        directory.mkdir()
        self._environment.unfinished.touch()
        venv.EnvBuilder(symlinks=True).create(directory)
        if self._python("-m", "ensurepip", "--default-pip"):
            raise SetupError(
                f"{sys.executable} cannot make environments (log: {self._environment.log}); Debian and Ubuntu have "
                "this in a package of its own, python3-venv"
            )

    def _install(self, lock: Path) -> None:
        name, log = lock.relative_to(ROOT), self._environment.log.name
        self._say(f"installing the {len(packages_of(lock.read_text()))} packages of {name} (log: {log})")
        # No compiling here: in two processes afterwards it takes half the time.
        arguments = ["--no-deps", "--no-compile", "--only-binary", ":all:", "--progress-bar", "off", "-r", str(lock)]
        self._pip("install", *arguments, doing=f"install {name}")

    def _uninstall(self, names: set[str]) -> None:
        if names:
            self._say(f"removing what the lock no longer has: {', '.join(sorted(names))}")
            self._pip("uninstall", "--yes", *sorted(names), doing="remove packages")

    def _finish(self) -> None:
        environment = self._environment
        self._say("compiling")
        self._link_us()
        packages = next(environment.directory.glob("lib/python3*/site-packages"))
        self._python("-m", "compileall", "-q", "-j", "0", str(packages))  # what is no Python 3 at all is left out
        self._say("checking")
        self._pip("check", doing="verify the packages", besides=environment.foreign)
        if environment.has_torch and self._python("-c", "import torch"):
            raise SetupError(
                f"torch is installed but cannot be imported; the reason is at the end of {environment.log}"
            )
        environment.unfinished.unlink()
        write_atomically(environment.stamp, self._wanted.encode(), mode=0o666)
        self._say("ready")

    def _pip(self, command: str, *arguments: str, doing: str, besides: str | None = None) -> None:
        """Run pip; what it says against the package `besides` is no failure."""
        progress = PipProgress(self._say, self._environment.log)
        others: list[str] = []

        def take(line: str) -> None:
            if besides is None or not line.startswith(f"{besides} "):
                others.append(line)
                progress.line(line)

        options = ["--no-input", "--disable-pip-version-check"]
        code = self._python("-m", "pip", command, *options, *arguments, on_line=take, idle=progress.idle)
        if code and (besides is None or others):
            raise SetupError(f"could not {doing} (pip's exit code {code})\n{progress.why()}")

    def _python(
        self,
        *arguments: str,
        on_line: Callable[[str], None] | None = None,
        idle: Callable[[], None] | None = None,
    ) -> int:
        """Runs the environment's Python, output to the log and line by line to `on_line`; returns its exit code."""
        command = [str(self._environment.python), "-P", *arguments]
        self._log.write(f"$ {' '.join(command)}\n")
        self._log.flush()
        with process(command, self._lock_fd) as child:
            for line in lines_of(child, idle):
                self._log.write(line + "\n")
                self._log.flush()
                if on_line is not None:
                    on_line(line)
            return child.wait()


class PipProgress:
    """Turns pip's output into a few lines: big downloads, unpacking, and why it failed."""

    def __init__(self, say: Callable[[str], None], log: Path) -> None:
        self._say = say
        self._log = log
        self._num_collected = 0
        self._doing = "starting"
        self._errors: list[str] = []
        self._last: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._unreachable = False

    def line(self, line: str) -> None:
        self._last.append(line)
        if line.startswith("Collecting"):
            self._num_collected += 1
            self._doing = f"fetching package {self._num_collected}: {line.split()[1]}"
        elif size := re.search(r"Downloading (\S+) \(([\d.]+) (MB|GB)\)", line):
            if size[3] == "GB" or float(size[2]) >= BIG_DOWNLOAD_MB:
                self._doing = f"downloading {size[1].rsplit('/', 1)[-1]} ({size[2]} {size[3]})"
                self._say(self._doing)
        elif line.startswith("Installing collected packages"):
            self._doing = "unpacking"
            self._say(self._doing)
        elif line.startswith("ERROR"):
            self._errors.append(line)
        self._unreachable |= UNREACHABLE.search(line) is not None

    def idle(self) -> None:
        self._say(f"still {self._doing}")

    def why(self) -> str:
        lines = [f"setup:   {error}" for error in self._errors[-NUM_LAST_LINES:] or self._last]
        if self._unreachable:
            lines.append("setup: the package index did not answer: look at the network, a proxy, or PIP_INDEX_URL")
        lines.append(
            f"setup: pip's output is in {self._log}; call again to go on (what pip has cached is not fetched twice)"
        )
        return "\n".join(lines)


@contextmanager
def process(command: Sequence[str], lock_fd: int) -> Generator[subprocess.Popen[bytes]]:
    """Runs a command that inherits the lock and does not outlive us, whatever ends us."""
    kept = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    environment = {**kept, **HIDDEN}  # a GPU that is in use, or broken, is none of the set-up's business
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=[lock_fd],
        preexec_fn=die_with_parent,
    )
    try:
        yield child
    finally:
        stop(child)


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stop(child: "subprocess.Popen[bytes]") -> None:
    try:
        if child.poll() is None:
            child.terminate()
            child.wait(STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait(STOP_S)
    assert child.stdout is not None
    child.stdout.close()


def lines_of(child: "subprocess.Popen[bytes]", idle: Callable[[], None] | None) -> Generator[str]:
    """Yields the lines of a child's output as they come; calls `idle` when QUIET_S pass without any."""
    assert child.stdout is not None
    fd = child.stdout.fileno()
    rest = b""
    while True:
        if not select.select([fd], [], [], QUIET_S)[0]:
            if idle is not None:
                idle()
            continue
        chunk = os.read(fd, 65536)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip()
        if not chunk:
            break
    if rest:
        yield rest.decode(errors="replace").rstrip()


def remove_tree(path: Path) -> None:
    """Removes a tree; tries again while a process that a kill -9 orphaned still writes its last files there."""
    deadline = time.monotonic() + STOP_S
    while True:
        try:
            return shutil.rmtree(path)
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.ENOENT} or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
