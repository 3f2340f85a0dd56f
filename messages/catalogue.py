"""The message catalogue as JSON Schema, AsyncAPI and tables, from the structs and the actors' declarations."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from messages.arrays import array_schema
from messages.base import Message, Plane, message_types, tag_of
from messages.calls import ScoresGiven
from messages.codec import CONTENT_TYPE_HEADER, TYPE_HEADER, content_type_of
from messages.subjects import INBOX, call_subject, filter_of, scores_filter

RUN = "{run}"
INSTANCE = "{instance}"
GRADER = "{grader}"
SCHEMA_PATH = "#/$defs/"
SCHEMA_FILE = "schema.json"  # beside the AsyncAPI document


class Surface(NamedTuple):
    """The messages that one actor declares to read and write."""

    reads: Sequence[type[Message]]
    writes: Sequence[type[Message]]


def json_schemas() -> dict[str, Any]:
    """JSON Schema of every message and every nested struct: a document with their definitions by name."""
    _, components = msgspec.json.schema_components(
        message_types().values(), schema_hook=array_schema, ref_template=SCHEMA_PATH + "{name}"
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": components}


def asyncapi(surfaces: Mapping[str, Surface]) -> dict[str, Any]:
    """An AsyncAPI 3.0 document: channels are subjects, operations are the actors' reads and writes.

    Payloads are references to the JSON Schema document.

    Args:
        surfaces: declared messages by actor.
    """
    types = message_types()
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Physarum",
            "version": "1",
            "description": "Messages of a run. {run} is the run's name. '>' stands for one or more further tokens.",
        },
        "channels": {tag: _channel(tag, message_type) for tag, message_type in types.items()},
        "operations": dict(_operations(surfaces)),
        "components": {"messages": {tag: _message(message_type) for tag, message_type in types.items()}},
    }


def table(surfaces: Mapping[str, Surface]) -> list[tuple[str, str, str, str, str]]:
    """One row per message: tag, subject, writers, readers, first line of its docstring."""
    rows: list[tuple[str, str, str, str, str]] = []
    for tag, message_type in message_types().items():
        writers = [actor for actor, surface in surfaces.items() if message_type in surface.writes]
        readers = [actor for actor, surface in surfaces.items() if message_type in surface.reads]
        first_line = (message_type.__doc__ or "").strip().splitlines()[0]
        rows.append((tag, _subject(message_type), ", ".join(writers), ", ".join(readers), first_line))
    return rows


def _subject(message_type: type[Message]) -> str:
    if message_type is ScoresGiven:
        return scores_filter(RUN, GRADER)
    if message_type.answers:
        return f"{INBOX}.{RUN}.>"
    if message_type.plane is Plane.CALL:
        return call_subject(RUN, INSTANCE, message_type.topic)
    return filter_of(RUN, message_type)


def _channel(tag: str, message_type: type[Message]) -> dict[str, Any]:
    return {"address": _subject(message_type), "messages": {tag: {"$ref": f"#/components/messages/{tag}"}}}


def _message(message_type: type[Message]) -> dict[str, Any]:
    headers = {
        TYPE_HEADER: {"type": "string", "const": tag_of(message_type)},
        CONTENT_TYPE_HEADER: {"type": "string", "enum": ["application/json", "application/msgpack"]},
    }
    return {
        "name": tag_of(message_type),
        "title": message_type.__name__,
        "summary": (message_type.__doc__ or "").strip().splitlines()[0],
        "contentType": content_type_of(message_type),
        "headers": {"type": "object", "required": [TYPE_HEADER], "properties": headers},
        "payload": {"$ref": SCHEMA_FILE + SCHEMA_PATH + message_type.__name__},
    }


def _operations(surfaces: Mapping[str, Surface]) -> Iterable[tuple[str, dict[str, Any]]]:
    for actor, surface in surfaces.items():
        for action, types in (("send", surface.writes), ("receive", surface.reads)):
            for message_type in types:
                tag = tag_of(message_type)
                yield f"{actor}.{action}.{tag}", {"action": action, "channel": {"$ref": f"#/channels/{tag}"}}
