"""Makes a node's local copies of weights, once per version, on background threads."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import structlog

from messages import LocalCopyGiven, LocalCopyRequested
from messages.plain import clipped
from runtime.models.copies import CopyFailed, damage_of, make_copy
from runtime.models.delta import Version, held_in
from runtime.models.file_sums import SharedLooks
from runtime.models.manifest import FetchFailed
from runtime.models.versions import name_of, versions_in

if TYPE_CHECKING:
    from runtime.node.node_room import NodeRoom
    from runtime.node.sharing import Sharing

log = structlog.get_logger()

COPIES: Final = "copies"  # directory of local copies in the run directory
MAX_JOBS: Final = 4  # one runs, the others wait
REASON_CHARS: Final = 500


@dataclass
class _Job:
    """A copy in progress."""

    done: anyio.Event = field(default_factory=anyio.Event)
    answer: LocalCopyGiven = field(default_factory=LocalCopyGiven)


class LocalCopies:
    """A node's local copies of weights. Complete copies survive the daemon's death; the next daemon uses them.

    A copy in progress cannot be interrupted. It runs on a daemon thread, so that stopping does not wait for it.
    """

    def __init__(self, directory: Path, sharing: "NodeRoom | Sharing | None" = None) -> None:
        """Use a directory that belongs to this node only. With `sharing`, versions are fetched by their manifest."""
        self._sharing = sharing
        self._directory = directory.resolve()
        self._jobs: dict[Version, _Job] = {}
        self._making = threading.Lock()
        self._looks = SharedLooks()

    async def answer(self, request: LocalCopyRequested) -> LocalCopyGiven:
        """Make a copy, or wait for the one in progress, up to the request's timeout."""
        version = Version(request.version, request.checksum)
        if request.was_read:
            return await self._compare(version, request)
        job = self._jobs.get(version)
        if job is None:
            if len(self._jobs) >= MAX_JOBS:
                return LocalCopyGiven(reason=f"busy: {MAX_JOBS} other versions are being copied")
            job = self._start(version, request)
        with anyio.move_on_after(request.timeout_s):
            await job.done.wait()
            return job.answer
        return LocalCopyGiven(reason=f"not copied within {request.timeout_s:g} s; the copy continues in the background")

    async def _compare(self, version: Version, request: LocalCopyRequested) -> LocalCopyGiven:
        """Verify the files of a copy that an engine has read, without changing it."""
        place = self._directory / request.series / name_of(version.number)
        with anyio.move_on_after(request.timeout_s):
            damage = await self._looks.look(version, partial(damage_of, place, version, request.files))
            return LocalCopyGiven(reason=clipped(damage, REASON_CHARS)) if damage else LocalCopyGiven(path=str(place))
        return LocalCopyGiven(reason=f"files not verified within {request.timeout_s:g} s")

    def _start(self, version: Version, request: LocalCopyRequested) -> _Job:
        job = self._jobs[version] = _Job()
        loop = asyncio.get_running_loop()

        def report(answer: LocalCopyGiven) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self._end, version, job, answer)

        work = threading.Thread(target=self._make, args=(version, request, report), name="copy", daemon=True)
        work.start()
        return job

    def _end(self, version: Version, job: _Job, answer: LocalCopyGiven) -> None:
        del self._jobs[version]
        job.answer = answer
        job.done.set()

    def _make(self, version: Version, request: LocalCopyRequested, report: Callable[[LocalCopyGiven], None]) -> None:
        answer = LocalCopyGiven(reason="the node daemon failed to copy it; see logs/daemon.jsonl")
        try:
            with self._making:
                begin = time.perf_counter()
                path = self._made(version, request)
                log.info("weights_copied", weight_version=version.number, took_s=time.perf_counter() - begin)
            answer = LocalCopyGiven(path=str(path))
        except CopyFailed as error:
            log.warning("weights_not_copied", weight_version=version.number, reason=str(error))
            answer = LocalCopyGiven(reason=clipped(str(error), REASON_CHARS), unusable=error.unusable)
        finally:
            report(answer)

    def _made(self, version: Version, request: LocalCopyRequested) -> Path:
        """Return a copy, of fetched files if this node does not see the published ones."""

        directory = self._directory / request.series

        def copied(published: Path, *, links: bool = False) -> Path:
            files = request.files
            return make_copy(version, published, directory, doubted=request.doubted, files=files, links=links)

        if self._sharing is None or not self._sharing.fetches(request.manifest):
            return copied(Path(request.path))
        held = {found for _, path in versions_in(directory) if (found := held_in(path)) is not None}
        fetch = partial(self._sharing.fetch, request.series, request.manifest)
        try:
            with suppress(CopyFailed):
                return copied(fetch(held), links=True)
            return copied(fetch((), verifies=True), links=True)
        except FetchFailed as error:
            raise CopyFailed(str(error), unusable=error.unusable) from error
        except OSError as error:
            raise CopyFailed(f"it cannot be stored: {error}") from error
