"""Shared by all commands: module paths, argument parsers, printing and exit codes."""

import argparse
import errno
import io
import os
import shlex
import signal
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from runtime.util.descendants import continue_in_watched_child
from runtime.util.exit_codes import EXIT_INPUT_ERROR, EXIT_INTERRUPTED
from runtime.util.formatting import printable
from runtime.util.import_path import IS_CHECKOUT, ROOT, command_name, user_folder_last

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from runtime.node.reopen import FoundRun

TAKE_BACK = "\r\x1b[K"  # moves to the start of the line and clears it
COLUMNS = 80


def override_hint(unknown: Iterable[str]) -> list[str]:
    """Say what to write for a key of the topology that stands without --set; empty for other arguments."""
    forms: list[str] = []
    for word in unknown:
        key, equals, _ = word.lstrip("-").partition("=")
        is_key = "." in key if word.startswith("-") else equals  # --lr=1 names an option that no command has
        if is_key and "/" not in key:
            forms += ["--set", word.lstrip("-") if equals else f"{key}=VALUE"]
    return [f"To override a key, write {shlex.join(forms)}"] if forms else []


class WrongInput(Exception):
    """Invalid input of a command; the text says why and what to do."""


class Screen:
    """Prints lines for people. After a write error, such as a closed pipe (`| head`), it prints nothing more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._rewritten = False
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack a model's characters

    @property
    def is_read(self) -> bool:
        """Whether the output still accepts writes."""
        return self._stream is not None

    @property
    def can_rewrite(self) -> bool:
        """Whether the output is a terminal that can overwrite a line."""
        return self._stream is not None and self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def show(self, text: str) -> None:
        """Print a line; terminal control characters are escaped."""
        self._write(printable(text) + "\n")
        self._rewritten = False

    def rewrite(self, text: str) -> None:
        """Print a line that the next one overwrites."""
        self._write(printable(text)[: self.columns - 1])
        self._rewritten = True

    def show_all(self, lines: Iterable[str]) -> None:
        """Print lines; stop consuming them once the output cannot be written."""
        for line in lines:
            self.show(line)
            if not self.is_read:
                return

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write((TAKE_BACK if self._rewritten else "") + text)
            self._stream.flush()
        except OSError:  # such as BrokenPipeError or a full disk
            send_nowhere(self._stream)
            self._stream = None

    @property
    def columns(self) -> int:
        """Width of the terminal; COLUMNS elsewhere."""
        try:
            return (os.get_terminal_size(self._stream.fileno()).columns if self._stream is not None else 0) or COLUMNS
        except OSError:
            return COLUMNS


def open_closed_streams() -> None:
    """Open missing standard streams on /dev/null; otherwise the next opened files would take their descriptors.

    Output to such a stream is discarded, and the process continues.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def send_nowhere(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, since the interpreter reports an error if its final flush fails."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def parser_of(command: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Build a command's argument parser: keeps line breaks of texts, and does not allow abbreviated options."""
    return argparse.ArgumentParser(
        prog=command_name(command),
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a run."""
    parser.add_argument("run", metavar="RUN", help="Name of a run under ./runs, or a run directory.")
    parser.add_argument(
        "--trust", action="store_true", help="Use the addresses and files that a run directory of a stranger names."
    )


def found_run(word: str, *, trust: bool, needs_trust: bool = False) -> "FoundRun":
    """Find a run for a command, and say what a stranger's directory names.

    Args:
        word: name or directory of the run.
        trust: whether the user vouches for a stranger's directory.
        needs_trust: whether the command has no use for a stranger's directory otherwise.

    Raises:
        WrongInput: there is no such run, or it needs trust.
    """
    from runtime.node.reopen import NoSuchRun, find_run  # it brings in the bus, which --help does not need
    from runtime.settings.reading.foreign import TRUST, left_out_line, let_in_line, named_line

    try:
        found = find_run(word, trust=trust)
    except NoSuchRun as error:
        raise WrongInput(str(error)) from error
    if found.foreign and needs_trust:
        raise WrongInput(f"{found.directory} may be a stranger's: {named_line(found.asked)}; {TRUST} lets this in")
    if found.asked:
        line = left_out_line if found.foreign else let_in_line
        Screen(sys.stderr).show(line(str(found.directory), found.asked))
    return found


def command_path(command: str, folder: Path) -> list[str]:
    """Return the words that start a command by its path: absolute, or relative to a checkout's root in `folder`."""
    program, *verb = command_name(command).split()
    scripts = ROOT if program.startswith("bin/") else Path(sysconfig.get_path("scripts"))
    return [program if scripts == folder else str(scripts / program), *verb]


def docs_folder() -> Path:
    """Return the default folder of generated pages: docs/reference/ of the checkout, or of the current folder."""
    return (ROOT if IS_CHECKOUT else Path()) / "docs" / "reference"


def ended(work: Callable[[], int], *wrong_input: type[Exception]) -> int:
    """Run a command's work and return its exit code.

    Args:
        work: returns the exit code.
        wrong_input: errors of user input; only their text is printed.
    """
    try:
        return work()
    except (WrongInput, *wrong_input) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _too_long(error)
        Screen(sys.stderr).show_all(str(error).split("\n"))
        return EXIT_INPUT_ERROR
    except KeyboardInterrupt:
        Screen(sys.stderr).show("interrupted")
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _too_long(error)


def _too_long(error: OSError) -> int:
    Screen(sys.stderr).show(f"{str(error.filename)[:COLUMNS]}...: this name is too long for a file")
    return EXIT_INPUT_ERROR


async def unless_stopped(tell: Callable[[], Awaitable[int]]) -> int:
    """Run `tell` and return its exit code. A signal cancels it cleanly: no server or temporary files remain."""
    import anyio  # not at the top: --help does not need it

    async with anyio.create_task_group() as tasks:

        async def obey_signals(*, task_status: "TaskStatus[None]") -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as received:
                task_status.started()
                async for _ in received:
                    tasks.cancel_scope.cancel()

        await tasks.start(obey_signals)
        exit_code = await tell()
        tasks.cancel_scope.cancel()
        return exit_code
    return EXIT_INTERRUPTED


def run(main: Callable[[], int], *, calls_users: bool = False) -> None:
    """Run a command as the main program of this process.

    Args:
        main: the command; returns its exit code.
        calls_users: whether it calls users' code here. Then it runs in a child, and what it leaves is killed.
    """
    open_closed_streams()
    user_folder_last()
    if calls_users:
        continue_in_watched_child()
    try:
        sys.exit(main())
    finally:
        try:
            sys.stdout.flush()  # for argparse's output
        except OSError:
            send_nowhere(sys.stdout)
