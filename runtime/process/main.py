"""The main function of an actor process: signals, exit codes, garbage collector settings."""

import atexit
import gc
import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

import anyio
import structlog
from anyio.abc import TaskStatus

from runtime.bus.bus import DEFAULT_LIMITS, Bus
from runtime.bus.errors import Fenced
from runtime.bus.limits import BusLimits
from runtime.process.actor import InputError
from runtime.process.heartbeat import give_pulse
from runtime.process.hosting import Hosted, host
from runtime.settings.reading.config import TopologyError
from runtime.util.disk import NoSpace, is_full, no_space_of
from runtime.util.errors import flatten, follows
from runtime.util.exit_codes import EXIT_FAILED, EXIT_FENCED, EXIT_INPUT_ERROR, EXIT_NO_SPACE, EXIT_OK

log = structlog.get_logger()

RUN_DIR: Final = "PHYSARUM_RUN_DIR"
STOP_TIMEOUT_S: Final = 8.0  # from the signal to the forced end of the process
COLLECT_AFTER: Final = 20_000  # new objects between collections: a few megabytes


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error. Fenced, wrong input and a full disk are permanent; else a restart may help."""
    found = flatten(error)
    if any(isinstance(leaf, Fenced) for leaf in found):
        return EXIT_FENCED
    if any(isinstance(leaf, (InputError, TopologyError)) for leaf in found):
        return EXIT_INPUT_ERROR
    if any(is_full(leaf) for leaf in found):
        return EXIT_NO_SPACE
    return EXIT_FAILED


def run_process(
    url: str,
    run: str,
    actors: Sequence[Hosted],
    *,
    node: str = "local",
    certificate: str | None = None,
    limits: BusLimits = DEFAULT_LIMITS,
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> int:
    """Host actors until they end; return the exit code of the process.

    SIGTERM and SIGINT stop it in order: the actors are cancelled, the bus is drained, the code is 0. After
    stop_timeout_s the process is terminated.
    """
    name = "+".join(hosted.name for hosted in actors)
    stopping = False

    def on_stop() -> None:
        nonlocal stopping
        stopping = True
        signal.signal(signal.SIGALRM, _end_now)
        signal.setitimer(signal.ITIMER_REAL, stop_timeout_s)
        # covers threads that are joined at exit; later the handler is removed and the alarm would kill
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            await group.start(_stop_on_signal, group.cancel_scope, on_stop)
            group.start_soon(give_pulse)
            async with Bus.connect(url, run, name=name, limits=limits, certificate=certificate) as bus:
                await host(bus, actors, node=node)
            group.cancel_scope.cancel()

    structlog.contextvars.bind_contextvars(run=run, actor=name)
    spare_the_collector()
    try:
        anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True})
    except Exception as error:  # every error becomes an exit code
        code = EXIT_OK if stopping else exit_code_of(error)
        for leaf in sorted(flatten(error), key=lambda leaf: _explains(leaf, code)):
            shown = no_space_of(leaf, os.environ.get(RUN_DIR, os.curdir)) if is_full(leaf) else leaf
            log.error("actor_failed", error=_text_of(shown), exit_code=code, exc_info=leaf)
        return code
    return EXIT_OK


def _text_of(error: BaseException) -> str:
    """Return what people read of an error: its message, if that was written for them, else its type and values."""
    return (str(error) if isinstance(error, InputError | TopologyError | NoSpace) else "") or repr(error)


def _explains(error: BaseException, code: int) -> int:
    """Rank an error by how well it explains the exit code. The last one that is logged counts as the cause.

    When one task fails, others find their streams closed.
    """
    if follows(error):
        return 0
    return 2 if exit_code_of(error) == code else 1


def spare_the_collector() -> None:
    """Exclude all loaded objects from garbage collection, and collect the rest less often.

    Reference counting frees messages. With default settings the collector takes a sixth of a busy actor's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 20)


async def _stop_on_signal(
    scope: anyio.CancelScope, on_stop: Callable[[], None], *, task_status: TaskStatus[None]
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for received in signals:
            log.info("stopping", signal=received.name)
            on_stop()
            scope.cancel()
            return


def _end_now(_signal: int, _frame: FrameType | None) -> None:
    log.error("stop_took_too_long")
    os._exit(EXIT_OK)
