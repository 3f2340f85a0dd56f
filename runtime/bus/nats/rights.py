"""What a run does on a NATS server, and which of it a login may not do.

Each right is tried on the server with a request that changes nothing: the API calls have an invalid body, the consumer
does not exist, and the messages expect another stream than the one that takes their subject.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from messages import Plane
from messages.subjects import (
    INBOX,
    ROOT,
    STORED_PLANES,
    bucket_of,
    call_subject,
    plane_filter,
    prompt_filter,
    scores_subject,
    stream_of,
)
from runtime.bus.nats.connection import Connection, Headers
from runtime.bus.nats.store import API

INVALID: Final = b"{"  # no JSON: the server refuses every API call with such a body before it looks at anything else
EXPECTED_STREAM: Final = {"Nats-Expected-Stream": "none"}
ONCE: Final = "physarum-check"  # token of subjects, keys and consumers that no run uses
DENIED: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')  # in lower case
STREAM_CALLS: Final = ("INFO", "CREATE", "UPDATE", "DELETE", "PURGE", "MSG.GET", "MSG.DELETE")


class Right(NamedTuple):
    """A right that a run needs."""

    verb: str  # publish or subscribe
    subjects: str  # pattern, as in the server's configuration
    tried: str  # a subject of the pattern that is harmless
    body: bytes = INVALID
    headers: Headers | None = None

    def __str__(self) -> str:
        return f"{self.verb} {self.subjects}"


def rights_of_run(run: str) -> Iterator[Right]:
    """Yield all rights that the login of a run needs."""
    bucket, inboxes = bucket_of(run), f"{INBOX}.{run}"
    for stream in (f"KV_{bucket}", *(stream_of(run, plane) for plane in STORED_PLANES)):
        for call in STREAM_CALLS:
            yield _publish(f"{API}.STREAM.{call}.{stream}")
        yield _publish(f"{API}.DIRECT.GET.{stream}")
        yield _publish(f"{API}.CONSUMER.CREATE.{stream}")
        yield _publish(f"{API}.CONSUMER.CREATE.{stream}.>", f"{API}.CONSUMER.CREATE.{stream}.{ONCE}")
        yield _publish(f"{API}.CONSUMER.NAMES.{stream}")
        yield _publish(f"{API}.CONSUMER.DELETE.{stream}.*", f"{API}.CONSUMER.DELETE.{stream}.{ONCE}")
        yield _publish(f"{API}.CONSUMER.MSG.NEXT.{stream}.*", f"{API}.CONSUMER.MSG.NEXT.{stream}.{ONCE}")
        yield _publish(f"$JS.ACK.{stream}.>", f"$JS.ACK.{stream}.{ONCE}.1.1.1.1.1", body=b"")
    prompts = f"{API}.DIRECT.GET.{stream_of(run, Plane.DATA)}.{prompt_filter(run)}"
    yield _publish(prompts, prompts.replace(">", ONCE), body=b"")
    for plane in STORED_PLANES:
        subjects = plane_filter(run, plane)
        yield Right("publish", subjects, subjects.replace(">", ONCE), b"", EXPECTED_STREAM)
    yield Right("publish", f"$KV.{bucket}.>", f"$KV.{bucket}.{ONCE}", b"", EXPECTED_STREAM)
    calls, scores = f"{ROOT}.{run}.{Plane.CALL}.>", f"{ROOT}.{run}.scores.>"
    yield _publish(calls, call_subject(run, ONCE, ONCE), body=b"")
    yield _publish(scores, scores_subject(run, ONCE, ONCE), body=b"")
    yield _publish(f"{inboxes}.>", f"{inboxes}.{ONCE}.{ONCE}", body=b"")
    yield Right("subscribe", calls, call_subject(run, ONCE, ONCE))
    yield Right("subscribe", scores, scores_subject(run, "*", ONCE))
    yield Right("subscribe", f"$KV.{bucket}.>", f"$KV.{bucket}.{ONCE}")
    yield Right("subscribe", f"{inboxes}.>", f"{inboxes}.{ONCE}.*")


def _publish(subjects: str, tried: str = "", *, body: bytes = INVALID) -> Right:
    return Right("publish", subjects, tried or subjects, body)


async def missing_rights(connection: Connection, run: str) -> list[Right]:
    """Try each right of a run; return those that the login lacks. Changes nothing on the server.

    Raises:
        BusUnavailable: the server does not answer.
    """
    inbox, rights = connection.new_inbox(), list(rights_of_run(run))
    errors = connection.errors = []
    for right in rights:
        if right.verb == "subscribe":
            listener = await connection.subscribe(right.tried, lambda _: None)
            await listener.stop()
        else:
            await connection.send(right.tried, right.body, right.headers, reply=inbox)
    await connection.flush()
    connection.errors = None
    denied = {found.groups() for error in errors if (found := DENIED.search(error.lower())) is not None}
    nouns = {"publish": "publish", "subscribe": "subscription"}
    return [right for right in rights if (nouns[right.verb], right.tried.lower()) in denied]
