"""From a score request to the samples that a grader takes, and from grades to the answer."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import structlog
from msgspec import UNSET

from actors.reward.grades import Graded, unpacked
from actors.reward.samples import GradedSample, Turn
from messages import Float32Array, Prompt, Score, ScoreItem, ScoreRequested, ScoresGiven, TurnSpan
from messages.plain import clipped
from runtime.data.stored_prompts import FetchesByKey, fetch_prompt_by_keys

PROMPTS_KEPT: Final = 8  # cached prompts, of those that are stored in the data stream
MAX_ERROR_CHARS: Final = 1000

TOO_LARGE: Final = Graded(error="the answer is larger than a message may be", cause="bad_answer")

log = structlog.get_logger()


class StoredPrompts:
    """Fills stored prompts into the items of score requests. All samples of a group use the same prompt."""

    def __init__(self, bus: FetchesByKey) -> None:
        self._bus = bus
        self._kept: dict[tuple[str, ...], Prompt] = {}  # by the keys of their parts, newest last

    async def items_of(self, request: ScoreRequested) -> Sequence[ScoreItem]:
        """The request's items, with a stored prompt filled in.

        Raises:
            PayloadLost: a part of the prompt is lost.
        """
        keys = request.prompt_keys
        if not keys:
            return request.items
        prompt = self._kept.pop(keys, None) or await fetch_prompt_by_keys(self._bus, keys)
        self._kept[keys] = prompt
        while len(self._kept) > PROMPTS_KEPT:
            self._kept.pop(next(iter(self._kept)))
        added = {"prompt": prompt.text, "label": prompt.label, "metadata": prompt.metadata}
        return [msgspec.structs.replace(item, **added) for item in request.items]


def sample_of(item: ScoreItem, request: ScoreRequested) -> GradedSample:
    """One item of a score request, as graders see it."""
    return GradedSample(
        index=item.index,
        part=item.part,
        prompt=item.prompt,
        response=item.response,
        status=str(item.status),
        response_len=item.response_len,
        label=item.label,
        metadata=item.metadata,
        sample_metadata=item.sample_metadata or {},
        evaluation=request.evaluation,
        packed_prompt_ids=None if item.prompt_ids is UNSET else item.prompt_ids.tobytes(),
        packed_tokens=None if item.tokens is UNSET else item.tokens.tobytes(),
        packed_log_probs=None if item.log_probs is UNSET else item.log_probs.tobytes(),
        per="sample" if request.per is UNSET else request.per,
        turn_spans=None if item.turns is UNSET else tuple(map(_turn, item.turns)),
    )


def _turn(span: TurnSpan) -> Turn:
    return Turn(start=span.start, end=span.end, text=span.text)


def answers_of(request: ScoreRequested, grades: Sequence[Graded]) -> Iterator[ScoresGiven]:
    """Yield the answer, and shorter ones for the case that it exceeds the message size.

    The second has no details of the grades, the third only failures.
    """
    yield _answer_of(request, grades)
    yield _answer_of(request, [msgspec.structs.replace(graded, details=None) for graded in grades])
    yield _answer_of(request, [TOO_LARGE for _ in grades])


def _answer_of(request: ScoreRequested, grades: Sequence[Graded]) -> ScoresGiven:
    scores = tuple(
        Score(
            index=item.index,
            part=item.part,
            reward=graded.reward,
            details=graded.details,
            error=error,
            cause=graded.cause,
            token_rewards=UNSET if graded.token_rewards is None else Float32Array(unpacked(graded.token_rewards)),
        )
        for item, graded in zip(request.items, grades, strict=True)
        for error in [graded.error and clipped(graded.error, MAX_ERROR_CHARS)]
    )
    failed = [score.error for score in scores if score.error is not None]
    if failed:
        log.warning("scores_failed", num_failed=len(failed), num_scores=len(scores), first=failed[0])
    return ScoresGiven(request_id=request.request_id, scores=scores)
