"""What all commands share: where modules are found, one parser style, one way to print and to end."""

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from runtime.exit_codes import EXIT_INPUT_ERROR, EXIT_INTERRUPTED
from runtime.import_path import user_folder_last
from runtime.wording import printable

TAKE_BACK = "\r\x1b[K"  # to the beginning of the line, and empty it
COLUMNS = 80


class WrongInput(Exception):
    """The command cannot do what was asked; the text says why and what to do."""


class Screen:
    """Prints for people until nobody reads any more (`| head`) or it cannot be written; the command goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._rewritten = False
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may lack letters that a model has

    @property
    def is_read(self) -> bool:
        """Whether anybody may still read what is shown."""
        return self._stream is not None

    @property
    def can_rewrite(self) -> bool:
        """Whether it is a terminal on which a line can be taken back."""
        return self._stream is not None and self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def show(self, text: str) -> None:
        """Print a line; what would steer the terminal is escaped."""
        self._write(printable(text) + "\n")
        self._rewritten = False

    def rewrite(self, text: str) -> None:
        """Print a line that the next one takes the place of."""
        self._write(printable(text)[: self._columns() - 1])
        self._rewritten = True

    def show_all(self, lines: Iterable[str]) -> None:
        """Print lines, and ask for no more of them once nobody reads."""
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
        except OSError:  # BrokenPipeError is one; a full disk another
            send_nowhere(self._stream)
            self._stream = None

    def _columns(self) -> int:
        try:
            return (os.get_terminal_size(self._stream.fileno()).columns if self._stream is not None else 0) or COLUMNS
        except OSError:
            return COLUMNS


def open_closed_streams() -> None:
    """Give a process its standard streams where it was started without: else the next files that it opens are these.

    What it would print goes nowhere then, and it goes on.
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
    """Have nobody read a stream, or the interpreter complains when it flushes it at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def parser_of(command: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser in the style of all commands: texts as they are written, options by their whole names."""
    return argparse.ArgumentParser(
        prog=f"bin/{command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def ended(work: Callable[[], int], *wrong_input: type[Exception]) -> int:
    """The exit code of a command's work.

    Args:
        wrong_input: errors that are the user's to mend; their text is all that is said.
    """
    try:
        return work()
    except (WrongInput, *wrong_input) as error:
        Screen(sys.stderr).show_all(str(error).split("\n"))
        return EXIT_INPUT_ERROR
    except KeyboardInterrupt:
        Screen(sys.stderr).show("interrupted")
        return EXIT_INTERRUPTED


def run(main: Callable[[], int]) -> None:
    """Run a command as this process."""
    open_closed_streams()
    user_folder_last()
    try:
        sys.exit(main())
    finally:
        try:
            sys.stdout.flush()  # what argparse printed
        except OSError:
            send_nowhere(sys.stdout)
