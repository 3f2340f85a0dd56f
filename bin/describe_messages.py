"""Write the message catalogue under docs/reference/, or check that it is current."""

import ast
import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from actors.registry import ROLES, Role, hosted
from bin.entry import docs_folder, parser_of
from messages.base import message_types
from messages.catalogue import Surface, asyncapi, json_schemas, table
from runtime.settings.load import load_topology
from runtime.settings.reading.toml import find_topology
from runtime.settings.topology import Topology
from runtime.util.field_comments import fields_in, members_in

INTRODUCTION = """# Messages

Written by `bin/describe-messages` from the structs in `messages/` and from what each actor declares that it reads and
writes; do not edit. `<run>` is the run's name. The same as JSON Schema: [schema.json](messages/schema.json), and as
AsyncAPI 3.0: [asyncapi.json](messages/asyncapi.json). The [fields](#fields) follow the table. How the planes deliver is
in [the bus](../understand/bus.md).

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
FIELDS = """
# Fields

The messages by their writers. A message is one JSON object: its `type` is the message's name, and all other fields
are in the table. A field without a default is always there. A field with one is left out by older versions, and then
has its default; parts marked "Without defaults." leave out every field that has its default, and "not sent" marks a
field that is left out if it has no value. Bytes are base64 in JSON. Sequence numbers (`..._seq`) count the messages of
one stream from 1: those of the log are given by the bus and are not in the event itself.
"""
FIELD_ROWS = "\n| field | type | default | means |\n|---|---|---|---|\n"
PLAIN_TYPES = {
    "Any": "any",
    "None": "null",
    "Int32Array": "list of int",
    "UInt8Array": "list of int",
    "Float32Array": "list of float",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0, or 1 if --check finds a stale file."""
    parser = parser_of("describe-messages", __doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing, and exit with 1 if a file is not current.")
    parser.add_argument("--docs", type=Path, default=docs_folder(), help="Directory to write to.")
    args = parser.parse_args(argv)
    files = catalogue(args.docs)
    if args.check:
        stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
        for path in stale:
            print(f"{path}: not current: run bin/describe-messages", file=sys.stderr)
        return 1 if stale else 0
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


def catalogue(docs: Path) -> dict[Path, str]:
    """All files of the catalogue with their text."""
    topology = load_topology(find_topology(Path("laptop"))).topology
    surfaces = {role: _surface(role, topology) for role in ROLES}
    rows = table(surfaces)
    return {
        docs / "messages.md": INTRODUCTION + "\n".join(_row(row) for row in rows) + "\n" + _fields_of(rows),
        docs / "messages" / "schema.json": _json(json_schemas()),
        docs / "messages" / "asyncapi.json": _json(asyncapi(surfaces)),
    }


def _surface(role: Role, topology: Topology) -> Surface:
    actor = hosted(role, topology, Path()).actor_type
    return Surface(reads=actor.reads, writes=actor.writes)


def _row(row: tuple[str, str, str, str, str]) -> str:
    tag, subject, writers, readers, text = row
    return f"| `{tag}` | `{subject.replace('{', '<').replace('}', '>')}` | {writers} | {readers} | {text} |"


def _fields_of(rows: list[tuple[str, str, str, str, str]]) -> str:
    """Format every message with its fields, by writers, then the parts of messages."""
    types, by_writers = message_types(), dict[str, list[str]]()
    for tag, _, writers, _, _ in rows:
        by_writers.setdefault(writers, []).append(_section(f"`{tag}`", types[tag]))
    named = [each for message_type in types.values() for each in _parts(message_type)]
    parts = {each.__name__: each for each in named if each not in types.values()}
    sections = [f"\n## Written by {writers or 'others'}\n" + "".join(texts) for writers, texts in by_writers.items()]
    return "".join(
        [FIELDS, *sections, "\n## Parts of messages\n", *(_section(name, parts[name]) for name in sorted(parts))]
    )


def _section(heading: str, described: type) -> str:
    text = inspect.cleandoc(described.__doc__ or "")
    if issubclass(described, Enum):
        texts = members_in(inspect.getsource(described))
        rows = "".join(f"| `{member.value}` | {texts[member.name]} |\n" for member in described)
        return f"\n### {heading}\n\n{text}\n\n| value | means |\n|---|---|\n{rows}"
    assert issubclass(described, msgspec.Struct)
    text += " Without defaults." if described.__struct_config__.omit_defaults else ""
    fields = [
        (f"`{field.name}`", _type(field.type), _default(field.default), field.text.replace("|", r"\|"))
        for field in fields_in(inspect.getsource(described))
    ]
    rows = "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |").replace("|  |", "| |") for cells in fields)
    return f"\n### {heading}\n\n{text}\n{FIELD_ROWS if rows else ''}{rows}"


def _default(default: ast.expr | None) -> str:
    text = "" if default is None else ast.unparse(default)
    known = {"None": "null", "True": "true", "False": "false", "UNSET": "not sent", "()": "[]", "''": '""', "b''": '""'}
    return known.get(text, "all defaults" if text.endswith("()") else text)


def _type(annotation: ast.expr) -> str:
    """Name a field's type as JSON has it."""
    match annotation:
        case ast.BinOp(left=left, right=ast.Name(id="UnsetType")):
            return _type(left)
        case ast.BinOp(left=left, right=right):
            return f"{_type(left)} or {_type(right)}"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[each, ast.Constant(value=value)])):
            return f"list of {_type(each)}" if value is ... else f"[{_type(each)}, {value}]"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=each)):
            return f"[{', '.join(map(_type, each))}]"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, value])):
            return f"object of {_type(value)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return ast.unparse(choices).strip("()").replace("'", '"').replace(", ", " or ")
        case _:
            text = ast.unparse(annotation)
            return PLAIN_TYPES.get(text, text)


def _parts(annotation: Any) -> Iterator[type]:
    """Yield the structs and enums of a type: itself, and those that it names."""
    for inner in get_args(annotation):
        yield from _parts(inner)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct | Enum):
        yield annotation
        hints = get_type_hints(annotation) if issubclass(annotation, msgspec.Struct) else {}
        for name in getattr(annotation, "__struct_fields__", ()):
            yield from _parts(hints[name])


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"
