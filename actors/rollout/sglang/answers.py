"""Decodes responses of /generate. The lists with an entry per token stay JSON until the new entries are known. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from messages import EngineNumbers, SampleStatus

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
EMPTY_LIST: Final = msgspec.Raw(b"[]")
PART_BYTES: Final = 1 << 16  # of JSON that are decoded at a time, in about a millisecond


class VersionSpan(msgspec.Struct, frozen=True):
    """Half-open span of output tokens and the label of the weights that sampled them, as SGLang reports it."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, frozen=True):
    """The used part of meta_info. A request aborted in the waiting queue lacks most keys."""

    id: str | None = None  # request id
    finish_reason: dict[str, Any] | None = None
    weight_version: str | None = None
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: msgspec.Raw = EMPTY_LIST  # triples of log-prob, token id and text; null log-prob: NaN
    # With return_sampling_mask: per token the ids that top-p and top-k kept, and the log-prob among them.
    output_token_sampling_mask: msgspec.Raw = EMPTY_LIST
    output_token_sampling_logprobs: msgspec.Raw = EMPTY_LIST
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count = 0
    num_retractions: Count = 0
    queue_time: float | None = None  # in seconds; only with --enable-metrics
    spec_num_proposed_drafts: Count = 0
    spec_num_correct_drafts: Count = 0
    spec_verify_ct: Count = 0


class Answer(msgspec.Struct, frozen=True):
    """The response to one request, or a chunk of it."""

    meta_info: MetaInfo
    text: str = ""
    output_ids: msgspec.Raw = EMPTY_LIST


class Refusal(NamedTuple):
    """Why an engine ended a request that it had started to answer: HTTP status and message."""

    code: int
    message: str


decode_answer = msgspec.json.Decoder(Answer).decode
decode_answers = msgspec.json.Decoder(list[Answer]).decode

# made once, since that costs more than to decode the list of a short response
Triple = tuple[float | None, int, str | None]  # log-prob, token id and text; None: SGLang encodes NaN as null
decode_ids = msgspec.json.Decoder(list[int]).decode
decode_id_lists = msgspec.json.Decoder(list[list[int]]).decode
decode_numbers = msgspec.json.Decoder(list[float | None]).decode
decode_triples = msgspec.json.Decoder(list[Triple]).decode

_STATUS = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}


class TokenList(Generic[T]):
    """A JSON list with an entry per token, which each chunk continues, or repeats with new entries at its end.

    Decodes only the new entries of a repeated list: the earlier ones end at the byte at which they ended before.
    """

    __slots__ = ("_decode_part", "_end", "_length")

    def __init__(self, decode: Callable[[bytes | msgspec.Raw], list[T]], end: bytes) -> None:
        """Start without entries.

        Args:
            decode: decodes a list.
            end: bytes at which an entry ends and another one follows, unless they are part of a text.
        """
        self._decode_part, self._end = decode, end
        self._length = 0  # bytes of the last list that repeated entries, without its bracket; 0: it repeated none

    def read(self, data: msgspec.Raw, num_before: int, total: int | None) -> tuple[list[T], int]:
        """Return the entries of a chunk's list, without those that it repeats, and their number with those.

        Args:
            data: the list.
            num_before: number of entries before this chunk.
            total: number of entries with this chunk; None: unknown, so none count as repeated.

        Raises:
            ValueError: it is not such a list.
        """
        given, length = memoryview(data), self._length
        self._length = 0
        if total is None or not num_before:
            entries = self._decode(data)
            return entries, len(entries)
        if length and len(given) > length and given[length] == ord(","):
            with suppress(ValueError):  # the earlier entries were written in another way
                entries = self._decode(b"[" + given[length + 1 :].tobytes())
                if num_before + len(entries) == total:
                    self._length = len(given) - 1
                    return entries, total
        entries = self._decode(data)
        if not num_before <= len(entries) == total:
            return entries, len(entries)
        self._length = len(given) - 1
        return entries[num_before:], total

    def _decode(self, data: bytes | msgspec.Raw) -> list[T]:
        """Decode a list, a long one in parts: a decoder holds the interpreter's lock, and stops the event loop."""
        if len(memoryview(data)) > PART_BYTES:
            with suppress(ValueError):  # `end` is part of a text, or it is not a list
                return [entry for part in in_parts(data, self._end, self._decode_part) for entry in part]
        return self._decode_part(data)


def in_parts(
    data: bytes | msgspec.Raw, end: bytes, decode: Callable[[bytes], list[T]], part_bytes: int = PART_BYTES
) -> Iterator[list[T]]:
    """Decode a JSON list in parts of about so many bytes. Pure.

    Args:
        data: the list.
        end: bytes at which an entry ends and another one follows. A list without them is one part.
        decode: decodes a list.
        part_bytes: least size of a part but the last.

    Raises:
        ValueError: it is not such a list.
    """
    whole, start = bytes(data), 0
    while (found := whole.find(end, start + part_bytes)) >= 0:
        stop = found + len(end) - 1  # at the comma
        yield decode((b"[" if start else b"") + whole[start:stop] + b"]")
        start = stop + 1
    yield decode((b"[" if start else b"") + whole[start:])


def status_of(finish_reason: dict[str, Any] | None) -> SampleStatus:
    """Return how a request ended.

    Raises:
        ValueError: the finish reason is not stop, length or abort.
    """
    reason = (finish_reason or {}).get("type")
    if not isinstance(reason, str) or reason not in _STATUS:
        raise ValueError(f"finish reason {reason!r}: expected stop, length or abort")
    return _STATUS[reason]


def refusal_in(meta: MetaInfo) -> Refusal | None:
    """Return why an engine refused a request that it had started to answer; None if it ended normally."""
    reason = meta.finish_reason or {}
    code = reason.get("status_code")
    return Refusal(code, str(reason.get("message", ""))) if isinstance(code, int) else None


def numbers_of(metas: Iterable[MetaInfo]) -> EngineNumbers:
    """Sum the engine's statistics over finished requests."""
    finished: Sequence[MetaInfo] = [meta for meta in metas if meta.finish_reason is not None]
    waits = [meta.queue_time for meta in finished if meta.queue_time is not None]
    return EngineNumbers(
        num_requests=len(finished),
        prompt_tokens=sum(meta.prompt_tokens or 0 for meta in finished),
        cached_tokens=sum(meta.cached_tokens for meta in finished),
        num_retractions=sum(meta.num_retractions for meta in finished),
        num_timed=len(waits),
        queue_time_s=sum(waits),
        max_queue_time_s=max(waits, default=0.0),
        draft_tokens=sum(meta.spec_num_proposed_drafts for meta in finished),
        accepted_draft_tokens=sum(meta.spec_num_correct_drafts for meta in finished),
        verify_steps=sum(meta.spec_verify_ct for meta in finished),
        verified_tokens=sum(meta.completion_tokens or 0 for meta in finished if meta.spec_verify_ct),
    )
