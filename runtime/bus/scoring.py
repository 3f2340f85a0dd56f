"""Score requests on the bus: a queue per grader with bounds for its pulls, and an inbox for the answers."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from messages import DecodeError, Plane, ScoresGiven
from messages.subjects import (
    OWN_GRADERS,
    filter_of,
    grader_token,
    score_durable,
    score_filter,
    scores_subject,
    scores_token,
    stream_of,
)
from messages.work import ScoreRequested
from runtime.bus.calls import Inbox
from runtime.bus.consumer import MAX_PREFETCH
from runtime.bus.dead import DeadLetters
from runtime.bus.nats import streams
from runtime.bus.nats.connection import Connection, RawMessage
from runtime.bus.nats.consumers import ConsumerSettings, delete_durable, durable_names, make_durable

log = structlog.get_logger()

ACK_WAIT_S: Final = 5.0  # redelivery delay of the requests that a killed or sleeping worker held
MAX_ACK_PENDING: Final = 4096  # requests of one grader that all of its workers hold
MAX_BATCH: Final = MAX_PREFETCH  # requests of one pull
MAX_EXPIRES_S: Final = 30.0  # lifetime of one pull: for as long, a sleeping worker also gets redeliveries
OLD_DURABLE: Final = "reward"  # that of all graders, before each had its own
REFUSALS_KEPT: Final = 16  # refused answers of one inbox that are dead-lettered within REFUSALS_WINDOW_S
REFUSALS_WINDOW_S: Final = 60.0


def queue_settings(run: str, token: str, *, ack_wait_s: float = ACK_WAIT_S) -> ConsumerSettings:
    """Settings of the durable consumer that delivers the score requests of one grader."""
    return ConsumerSettings(
        durable=score_durable(token),
        filters=(score_filter(run, token),),
        ack_wait_s=ack_wait_s,
        max_ack_pending=MAX_ACK_PENDING,
        max_batch=MAX_BATCH,
        max_expires_s=MAX_EXPIRES_S,
    )


async def ensure_queues(connection: Connection, run: str, graders: Iterable[str]) -> None:
    """Create the queues of these graders and of the run's own reward actors, and delete all others.

    Also deletes the queued requests: their callers ended with the start before, and request the scores again.

    Raises:
        BusError: the server refuses or does not answer.
    """
    stream = stream_of(run, Plane.WORK)
    await streams.purge_subjects(connection, stream, filter_of(run, ScoreRequested))
    wanted = [queue_settings(run, token) for token in (*map(grader_token, graders), OWN_GRADERS)]
    kept = {settings.durable for settings in wanted}
    for name in await durable_names(connection, stream):
        if name == OLD_DURABLE or (name.startswith(score_durable("")) and name not in kept):
            await delete_durable(connection, stream, name)
    for settings in wanted:
        await make_durable(connection, stream, settings)


class ScoreInbox(Inbox[ScoresGiven]):
    """Answers to the score requests of one process, on one subject per grader.

    An answer counts only on the subject of the grader that the request went to, because a worker's credential allows
    no other. Only a few of the refused ones are dead-lettered: a worker may send any number.
    """

    def __init__(
        self,
        connection: Connection,
        dead_letters: DeadLetters,
        run: str,
        token_of: Callable[[str], str | None],
    ) -> None:
        """Start empty.

        Args:
            connection: the connection.
            dead_letters: the dead letters.
            run: name of the run.
            token_of: returns the grader's token of a request by its id; None for a request that has ended.
        """
        self._run = run
        self._id = connection.unique()
        self._token_of = token_of
        self._window_end = 0.0  # loop time
        self._num_kept = 0  # refused answers that were dead-lettered in this window
        subject = scores_subject(run, "*", self._id)
        super().__init__(connection, dead_letters, ScoresGiven, subject=subject)

    def reply_to(self, token: str) -> str:
        """Subject for the answers of one grader."""
        return scores_subject(self._run, token, self._id)

    def _check(self, message: ScoresGiven, subject: str) -> None:
        wanted = self._token_of(message.request_id)
        if wanted is not None and scores_token(self._run, subject) != wanted:
            raise DecodeError(f"answers a score request that went to the grader {wanted}")

    async def _refuse(self, raw: RawMessage, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._window_end:
            self._window_end, self._num_kept = now + REFUSALS_WINDOW_S, 0
        self._connection.counters.answers_refused += 1
        self._num_kept += 1
        if self._num_kept <= REFUSALS_KEPT:
            await super()._refuse(raw, reason)
        else:
            log.debug("answer_refused", subject=raw.subject, reason=reason)
