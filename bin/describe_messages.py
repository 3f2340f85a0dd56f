"""Write the message catalogue under docs/reference/, or check that it is current."""

import sys
from pathlib import Path

import msgspec

from actors.registry import ROLES, Role, hosted
from bin.entry import docs_folder, parser_of
from messages.catalogue import Surface, asyncapi, json_schemas, table
from runtime.settings.load import load_topology
from runtime.settings.reading.toml import find_topology

INTRODUCTION = """# Messages

Written by `bin/describe-messages` from the structs in `messages/` and from what each actor declares that it reads and
writes; do not edit. `<run>` is the run's name. The same as JSON Schema: [schema.json](messages/schema.json), and as
AsyncAPI 3.0: [asyncapi.json](messages/asyncapi.json). How the planes deliver is in [the bus](../understand/bus.md).

Every message has two headers: `Physarum-Type` names the message, `Content-Type` is `application/json` or
`application/msgpack`. Events are JSON. `work` and `data` are msgpack, and JSON is accepted there too. Numbers have at
most 64 bits, lists and objects are at most 128 deep, an event has at most 8 MiB. Unusable messages go to the stream of
dead letters.

Answers to calls go to subjects under `_INBOX.<run>.`, which the clients of a run subscribe to, and nowhere else. A
client in another language subscribes to a subject of its own there, such as `_INBOX.<run>.my-worker.1`; the nats
command line takes `--inbox-prefix _INBOX.<run>.me`. Scores go to subjects of their grader. A call or score request
that names another subject for its answer is a dead letter.

Score requests are `phy.<run>.work.score.<grader>.<id>`. `<grader>` is the grader's name where that is 1 to 64 letters,
digits, `-` and `_`; otherwise a readable form of it and eight hex digits of its SHA-256. `_own` stands for the run's
own reward actors. The durable consumer of one grader is `score-<grader>`, on the stream `phy-<run>-work`.
`tests/support/reward_worker.js` is a reward worker in a hundred lines of JavaScript; [protocol](protocol.md) has
shorter ones.

Events under subjects that are not in this table are yours: no actor reads them. The exception is
`phy.<run>.event.ledger.>`, which the buffer alone writes, with a `Physarum-Version` header. An unknown type there ends
its reader.

| message | subject | written by | read by | means |
|---|---|---|---|---|
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0, or 1 if --check finds a stale file."""
    parser = parser_of("describe-messages", __doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing, and exit with 1 if a file is not current.")
    parser.add_argument("--docs", type=Path, default=docs_folder(), help="Directory to write to.")
    args = parser.parse_args(argv)
    stale = [path for path, text in catalogue(args.docs).items() if not path.exists() or path.read_text() != text]
    if args.check:
        for path in stale:
            print(f"{path}: not current: run bin/describe-messages", file=sys.stderr)
        return 1 if stale else 0
    for path, text in catalogue(args.docs).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


def catalogue(docs: Path) -> dict[Path, str]:
    """All files of the catalogue with their text."""
    surfaces = {role: _surface(role) for role in ROLES}
    return {
        docs / "messages.md": INTRODUCTION + "\n".join(_row(row) for row in table(surfaces)) + "\n",
        docs / "messages" / "schema.json": _json(json_schemas()),
        docs / "messages" / "asyncapi.json": _json(asyncapi(surfaces)),
    }


def _surface(role: Role) -> Surface:
    actor = hosted(role, load_topology(find_topology(Path("laptop"))).topology, Path()).actor_type
    return Surface(reads=actor.reads, writes=actor.writes)


def _row(row: tuple[str, str, str, str, str]) -> str:
    tag, subject, writers, readers, text = row
    return f"| `{tag}` | `{subject.replace('{', '<').replace('}', '>')}` | {writers} | {readers} | {text} |"


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"
