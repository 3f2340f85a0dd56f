"""URLs of the pages of a run. Each holds the secret of its page, and is in a file that only its owner can read."""

import hashlib
import os
import re
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import psutil

from runtime.node.reopen import RUNS, FoundRun
from runtime.settings.tables.observe import PAGE_FILE
from runtime.util.files import user_cache, write_atomically
from runtime.util.import_path import command_name
from runtime.util.secrets import Secret, make_private, read_private

PAGES: Final = "pages"  # in the user's cache: the URLs of pages that bin/watch serves
LOOK_EVERY_S: Final = 1.0  # for the URL of a run's page, which its process writes
_URL: Final = re.compile(r"(http://[^#/\s]+/)#token=([0-9a-f]{16,128})\s*")  # a browser sends no fragment to a server


class PageUrl:
    """The URL of one page. `renew` may replace the secret in its file, from any process of the owner.

    Args:
        path: of the file. A page that was killed finds its place and its secret in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = ""  # of the page that wrote the file, such as "http://127.0.0.1:8765"
        self._seen: tuple[int, int] | None = None  # of the file: which one it is, and when it was changed
        self._secret = Secret.random().reveal()
        self.secret()

    def secret(self) -> str:
        """Return the secret that the file has now, or had last."""
        try:
            status = self.path.stat()
            if (seen := (status.st_ino, status.st_mtime_ns)) != self._seen:
                found = _URL.fullmatch(read_private(self.path))
                self._seen = seen
                if found is not None:
                    self.place, self._secret = found[1].rstrip("/"), found[2]
        except (OSError, ValueError):
            pass
        return self._secret

    def write(self, place: str) -> str:
        """Write the URL of a page at a place, and return it.

        Another place has another secret: an open tab sends the old one to any process that listens at the old place.

        Raises:
            OSError: the file cannot be written.
        """
        if self.place not in ("", place):
            self._secret = Secret.random().reveal()
            self.path.unlink(missing_ok=True)
        self.place = place
        url = f"{place}/#token={self.secret()}"
        write_atomically(self.path, f"{url}\n".encode())
        return url

    def remove(self) -> None:
        """Remove the file: the page ends."""
        self.path.unlink(missing_ok=True)


def url_of_watch(run: FoundRun) -> PageUrl:
    """Return the URL, not written yet, of a page that this process serves.

    Raises:
        OSError: the user's cache cannot be written.
    """
    directory = user_cache(PAGES)
    make_private(directory)
    return PageUrl(directory / f"{_key_of(run)}-{os.getpid()}.url")


def urls_of(run: FoundRun) -> list[Path]:
    """Return the files of the pages that show a run now: that of the run, then those of bin/watch."""
    found = [] if run.foreign else [run.directory / PAGE_FILE]
    for path in sorted(user_cache(PAGES).glob(f"{_key_of(run)}-*.url")):
        if psutil.pid_exists(int(path.stem.rpartition("-")[2])):
            found.append(path)
        else:  # it was killed
            path.unlink(missing_ok=True)
    return [path for path in found if path.is_file()]


def url_in(path: Path) -> str:
    """Return the URL in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no URL, or other users may read it.
    """
    found = _URL.fullmatch(read_private(path))
    if found is None:
        raise ValueError(f"{path} has no URL of a page")
    return found[0].strip()


def renew(path: Path) -> str:
    """Replace the secret in a file. The page refuses the old one from its next request on. Return the new URL.

    Raises:
        OSError, ValueError: as `url_in` does, or the file cannot be written.
    """
    url = f"{url_in(path).partition('#')[0]}#token={Secret.random().reveal()}"
    write_atomically(path, f"{url}\n".encode())
    return url


def page_lines(url: str, name: str, directory: Path, *, shows_secret: bool) -> list[str]:
    """Return the lines about a page of this machine.

    Args:
        url: of the page, with its secret.
        name: of the run.
        directory: of the run.
        shows_secret: whether only the user sees the lines, as in a terminal. A log may be read by others.
    """
    place = url.partition("//")[2].partition("/")[0]
    port = place.rpartition(":")[2]
    first = url if shows_secret else f"http://{place}; for its URL with the secret: {url_command(name, directory)}"
    return [f"page      {first}", f"from another machine, first: ssh -L {port}:{place} {socket.gethostname()}"]


async def show_page(directory: Path, name: str, show: Callable[[str], None], *, shows_secret: bool) -> None:
    """Show the lines of `page_lines` whenever the page's process has written another URL, until cancelled."""
    shown = ""
    while True:
        try:
            url = await anyio.to_thread.run_sync(read_private, directory / PAGE_FILE)
        except (OSError, ValueError):
            url = ""  # it starts or ends
        if url and url != shown:
            shown = url
            for line in page_lines(url.strip(), name, directory, shows_secret=shows_secret):
                show(line)
        await anyio.sleep(LOOK_EVERY_S)


def url_command(name: str, directory: Path) -> str:
    """Return the command that prints the URLs of the pages of a run."""
    is_found = (RUNS / name).resolve() == directory.resolve()
    return f"{command_name('watch')} {shlex.quote(name if is_found else str(directory))} --url"


def _key_of(run: FoundRun) -> str:
    return hashlib.sha256(str(run.directory.resolve()).encode()).hexdigest()[:16]
