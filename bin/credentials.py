"""Give, list and revoke the credentials of a run's external clients: reward workers, viewers and auditors."""

import argparse
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bin.entry import Screen, add_run, ended, found_run, parser_of
from runtime.util.exit_codes import EXIT_FAILED, EXIT_OK
from runtime.util.files import PRIVATE_FILE

if TYPE_CHECKING:
    from runtime.bus.nats.accounts import ExternalClient
    from runtime.node.join import Join
    from runtime.node.reopen import FoundRun

MAX_DAYS = 3650.0
TAKEN_WITHIN_S = 30.0
EPILOG = """A grader credential answers the score requests of one grader, and can read all stored prompts of the run.
A viewer credential reads all events, an auditor credential all stored prompts and samples. The credential is printed:
redirect it to a file, which then only you can read.

While no node daemon runs the run, a change applies from its next start on.

exit codes: 0 done; 1 the running server did not take the change; 2 wrong input"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    what = [args.kind is not None, args.list, args.revoke is not None]
    if what.count(True) != 1:
        parser.error("one of grader, viewer, auditor, --list and --revoke is needed")
    if (args.name is not None) != (args.kind is not None) or (args.grader is not None) != (args.kind == "grader"):
        parser.error("a grader needs --name and --grader, the others need --name, and nothing else takes them")
    from runtime.node.external_clients import ClientsUnreadable, NameTaken, NotListening

    return ended(lambda: _change(args), ClientsUnreadable, NameTaken, NotListening, OSError, ValueError)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("credentials", __doc__, EPILOG)
    add_run(parser)
    parser.add_argument("kind", nargs="?", choices=("grader", "viewer", "auditor"), help="Kind of the new credential.")
    parser.add_argument("--name", help="Name of the new external client.")
    parser.add_argument("--grader", help="Grader whose score requests it answers, as the topology names it.")
    parser.add_argument(
        "--days", type=_days, default=7.0, metavar="N", help="Days after which the credential expires. By default 7."
    )
    parser.add_argument("--list", action="store_true", help="List the external clients of the run.")
    parser.add_argument("--revoke", metavar="NAME", help="Revoke the credential of an external client.")
    return parser


def _days(text: str) -> float:
    with suppress(ValueError):
        if 0 < (days := float(text)) <= MAX_DAYS:
            return days
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to {MAX_DAYS:g}")


def _change(args: argparse.Namespace) -> int:
    from runtime.node.reopen import BUS_DIRECTORY

    found = found_run(args.run, trust=args.trust, needs_trust=True)
    directory = found.directory / BUS_DIRECTORY
    if args.list:
        return _list(directory)
    return _revoke(found, directory, args.revoke) if args.revoke is not None else _give(found, directory, args)


def _list(directory: Path) -> int:
    from datetime import UTC, datetime

    from runtime.node.external_clients import read_clients

    now, found = datetime.now(UTC), read_clients(directory)
    screen = Screen(sys.stdout)
    for client in found.clients:
        kind = f"{client.kind} {client.grader}".rstrip()
        screen.show(f"{client.name}: {kind}, {found.status_of(client, now)}, until {client.expires:%Y-%m-%d %H:%M} UTC")
    return EXIT_OK


def _give(found: "FoundRun", directory: Path, args: argparse.Namespace) -> int:
    from datetime import UTC, datetime, timedelta

    from runtime.bus.credential import credential_text
    from runtime.bus.nats.accounts import ClientKind, credential_of
    from runtime.node.external_clients import add_client, join_of

    join = join_of(found)
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=args.days)
    client = add_client(directory, args.name, ClientKind(args.kind), grader=args.grader or "", expires=expires)
    if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
        os.fchmod(sys.stdout.fileno(), PRIVATE_FILE)
    credential = credential_of(found.name, client, url=join.url, certificate=join.certificate)
    Screen(sys.stdout).show_all(credential_text(credential).splitlines())
    return _until_taken(found, join, client, wanted=True)


def _revoke(found: "FoundRun", directory: Path, name: str) -> int:
    from runtime.node.external_clients import NotListening, join_of, revoke_client

    client = revoke_client(directory, name)
    try:
        join = join_of(found)
    except NotListening:
        Screen(sys.stderr).show(f"{name} is revoked; its run does not listen for external clients now")
        return EXIT_OK
    return _until_taken(found, join, client, wanted=False)


def _until_taken(found: "FoundRun", join: "Join", client: "ExternalClient", *, wanted: bool) -> int:
    """Wait until the run's server has taken the change, and say so."""
    import anyio

    from runtime.bus.errors import BusUnavailable
    from runtime.node.external_clients import wait_until_taken
    from runtime.process.logs import silenced

    async def wait() -> None:
        with anyio.fail_after(TAKEN_WITHIN_S):
            await wait_until_taken(join.url, found.name, join.certificate, [(client, wanted)])

    screen, done = Screen(sys.stderr), "accepted" if wanted else "revoked and cut off"
    try:
        with silenced():
            anyio.run(wait)
    except BusUnavailable:
        screen.show(f"{client.name}: no node daemon runs {found.name} now; this applies from its next start on")
    except TimeoutError:
        logs = found.directory / "logs"
        screen.show(f"{client.name}: the server of the run has not taken the change; see daemon.jsonl in {logs}")
        return EXIT_FAILED
    else:
        screen.show(f"{client.name}: {done}")
    return EXIT_OK
