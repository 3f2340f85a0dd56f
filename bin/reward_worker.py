"""Grade the samples of a run on a machine that is not a node of it, with a credential of the run."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bin.entry import Screen, WrongInput, ended, parser_of
from runtime.util.exit_codes import EXIT_FAILED, EXIT_OK
from runtime.util.import_path import command_name

if TYPE_CHECKING:
    from actors.reward.external import ExternalWorker
    from actors.reward.pool import PoolSettings

EPILOG = """The function takes a sample, or the list of samples of a group, and returns what graders of a run return.
On Ctrl-C or SIGTERM the worker finishes what it grades within 5 s, and gives the rest back to the run.

exit codes: 0 stopped, 1 grader processes do not start, 2 wrong input, or the run refuses the credential"""
PROCESSES: Final = 2
TIMEOUT_S: Final = 60.0
WAIT_S: Final = 0.05
MAX_BATCH: Final = 4096


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return ended(lambda: _work(args))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("reward-worker", __doc__, EPILOG)
    add = parser.add_argument
    add("credential", metavar="CREDENTIAL", type=Path, help=f"File that {command_name('credentials')} printed.")
    add("grader", metavar="GRADER", help='Grading function, as "my.py:function" or "module:function".')
    add("--processes", type=int, default=PROCESSES, metavar="N", help=f"Grader processes. Default: {PROCESSES}.")
    timeout = f"Seconds for one call of the function, which is then killed. Default: {TIMEOUT_S:g}."
    add("--timeout-s", type=float, default=TIMEOUT_S, metavar="S", help=timeout)
    batch = "Samples of many requests that one call gets as a list, at most. Default: a call gets one sample."
    add("--batch", type=int, metavar="N", help=batch)
    wait = f"Seconds that a sample waits for others of its batch. Default: {WAIT_S:g}."
    add("--wait-s", type=float, default=WAIT_S, metavar="S", help=wait)
    add("--reward-key", metavar="KEY", help="Key of the reward, if the function returns a dict.")
    add("--env", action="append", default=[], metavar="NAME", help="Environment variable to pass on. Repeatable.")
    sandbox = 'Sandbox of the function, as the setting reward.sandbox. Default: "process".'
    add("--sandbox", choices=("none", "process", "isolated"), default="process", help=sandbox)
    return parser


def _work(args: argparse.Namespace) -> int:
    import anyio  # this and the imports below bring in the bus, which --help does not need

    from actors.reward.external import CredentialRefused, ExternalWorker
    from actors.reward.process import GraderProcessError, GraderUnusableError
    from runtime.bus.credential import read_credential
    from runtime.process.logs import silenced
    from runtime.util.errors import flatten

    if args.processes < 1 or args.timeout_s <= 0:
        raise WrongInput("--processes and --timeout-s must be positive")
    if args.wait_s < 0 or not (args.batch is None or 1 <= args.batch <= MAX_BATCH):
        raise WrongInput(f"--batch is 1 to {MAX_BATCH}, and --wait-s at least 0")
    try:
        credential = read_credential(args.credential)
    except (OSError, ValueError) as error:
        raise WrongInput(str(error)) from error
    if credential.kind != "grader":
        raise WrongInput(f"{args.credential} is the credential of a {credential.kind}; a worker needs that of a grader")
    screen = Screen(sys.stderr)
    worker = ExternalWorker(
        credential,
        args.grader,
        _settings(args),
        lambda text: screen.show_all(text.split("\n")),
        batch=args.batch,
        wait_s=args.wait_s,
    )
    problems: list[BaseException] = []
    try:
        with silenced():
            anyio.run(_until_stopped, worker)
    except* (CredentialRefused, GraderProcessError) as errors:
        problems = flatten(errors)
    if not problems:
        return EXIT_OK
    if isinstance(problems[0], (CredentialRefused, GraderUnusableError)):
        raise WrongInput(str(problems[0]))
    screen.show(str(problems[0]))
    return EXIT_FAILED


def _settings(args: argparse.Namespace) -> "PoolSettings":
    from actors.reward.grades import GraderSpec, Hello
    from actors.reward.pool import PoolSettings
    from runtime.functions.sandbox import Sandbox

    grader = GraderSpec(name=args.grader, group=args.batch is not None)
    hello = Hello(graders=(grader,), reward_key=args.reward_key, cpu_s=2 * args.timeout_s)
    hidden = (os.path.realpath(args.credential),)
    sandbox = Sandbox(kind=args.sandbox, env=tuple(args.env), hidden=hidden)
    return PoolSettings(hello=hello, sandbox=sandbox, num_processes=args.processes, timeout_s=args.timeout_s)


async def _until_stopped(worker: "ExternalWorker") -> None:
    """Run the worker; the first signal stops it in order, the second at once."""
    import signal

    import anyio

    async def obey_signals(task_group: anyio.abc.TaskGroup) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as received:
            num_received = 0
            async for _ in received:
                num_received += 1
                worker.stop()
                if num_received > 1:
                    task_group.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(obey_signals, tasks)
        await worker.run()
        tasks.cancel_scope.cancel()
