"""Accumulates a streamed request chunk by chunk; completed pieces can be taken while it still grows. Pure.

Chunks may be incremental or cumulative; both are supported. Each is fully decoded and validated on arrival. So
cumulative chunks take time quadratic in the answer's length.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from actors.rollout.sglang.answers import Answer, MetaInfo, VersionSpan, cut
from actors.rollout.sglang.checks import (
    ANYTHING,
    ExpectedAnswer,
    count_problem,
    end_problem,
    meta_problem,
    tokens_problem,
)
from actors.rollout.sglang.labels import label_of, version_of


class StreamRefusal(NamedTuple):
    """Why an engine ended a request that it had started to answer: HTTP status and message."""

    code: int
    message: str


# lists of an answer with an entry per token, incremental or cumulative
PER_TOKEN: Final = ("output_token_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs")

_decode_answer = msgspec.json.Decoder(Answer).decode


class _Mark(NamedTuple):
    """The state of a stream before the first chunk with a new label."""

    label: str
    num_tokens: int
    chunks: list[bytes]
    spans: list[VersionSpan]


class Stream:
    """One streamed request.

    Only the last chunk has to report which weights sampled which tokens. Without it, tokens that arrive during a weight
    update count as sampled by the old weights. Their true version may be newer, never older. Whether they may be used
    is then checked for both versions.
    """

    def __init__(
        self, sent_under: int = 0, trusts: Callable[[str], bool] = lambda _: True, expected: ExpectedAnswer = ANYTHING
    ) -> None:
        """Start without tokens.

        Args:
            sent_under: weight version of the engines that may answer; 0: unknown.
            trusts: whether tokens under a label may be used; applies until the last chunk arrives.
            expected: the request's properties that the chunks must match.
        """
        self._expected = expected
        self._chunks: list[bytes] = []  # the chunks needed to assemble the answer
        self._end: bytes | None = None  # a last chunk without new tokens, which may repeat earlier ones
        self._spans: list[VersionSpan] = []
        self._marks: list[_Mark] = []
        self._trusts = trusts
        self._label = label_of(sent_under, "") if sent_under else None
        self._taken_tokens = 0
        self._taken_characters = 0
        self.num_tokens = 0
        self.ended = False  # the last chunk has arrived
        # set if the last chunk reports that the request is invalid or cannot be served
        self.refused: StreamRefusal | None = None

    @property
    def num_new(self) -> int:
        """Tokens that arrived and were not taken."""
        return self.num_tokens - self._taken_tokens

    @property
    def oldest_version(self) -> int:
        """Oldest weight version known to have sampled a token; 0 if some token has no known version."""
        return min((version_of(span.version) for span in self._spans), default=0)

    @property
    def is_trusted(self) -> bool:
        """Whether all tokens so far may be used."""
        return all(self._trusts(mark.label) for mark in self._marks)

    @property
    def labels(self) -> list[str]:
        """Labels of the weights that may have sampled the tokens."""
        exact = self._exact_spans()
        return [span.version for span in exact] if exact else [mark.label for mark in self._marks]

    def add(self, data: bytes) -> None:
        """Add a chunk.

        Raises:
            ValueError: it is invalid, or does not follow the earlier chunks; it is not added.
        """
        chunk = _decode_answer(data)
        meta, length, before = chunk.meta_info, len(chunk.output_ids), self.num_tokens
        total, ended = meta.completion_tokens, meta.finish_reason is not None
        if total is None:
            total = length if length >= before else before + length
        repeats = ended and total == before > length
        if not repeats and total not in (length, before + length):
            raise ValueError(f"a chunk of {length} tokens after {before} tokens reports {total} in total")
        if total < before:
            raise ValueError(f"a chunk reports {total} tokens in total after {before} were received")
        refused = refusal_in(meta) if ended else None
        if refused is not None and tokens_problem(chunk, self._expected, total - length) is not None:
            # SGLang ends the stream of a refused prompt with a token without a log-prob.
            self.ended, self.refused = True, refused
            return
        if (problem := self._problem(chunk, total, repeats=repeats, refused=refused is not None)) is not None:
            raise ValueError(problem)
        self._mark(meta.weight_version, new=total > before)
        if repeats:
            self._end = data
        elif total == length:
            self._chunks = [data]
        else:
            self._chunks.append(data)
        self._note_label(meta.weight_version, before, total)
        self.num_tokens = total
        self.ended = ended
        self.refused = refused

    def _problem(self, chunk: Answer, total: int, *, repeats: bool, refused: bool) -> str | None:
        """Return why a chunk cannot be true; the end of a refused request gets fewer checks."""
        num_before = total - len(chunk.output_ids)
        return (
            meta_problem(chunk, self._expected)
            or (None if repeats else tokens_problem(chunk, self._expected, num_before))
            or count_problem(total, self._expected)
            or (end_problem(chunk, total) if chunk.meta_info.finish_reason is not None and not refused else None)
        )

    @property
    def last_label(self) -> str:
        """The engine's weight label in the last chunk; before the first chunk, the label of `sent_under` or empty."""
        return self._label or ""

    @property
    def num_taken(self) -> int:
        """Number of tokens in the pieces taken so far."""
        return self._taken_tokens

    @property
    def output_ids(self) -> list[int]:
        """All tokens so far, including taken ones."""
        return self._so_far().output_ids

    def take(self) -> Answer:
        """Return what arrived since the last piece; without a finish reason while the stream goes on."""
        piece = self.rest()
        self._taken_tokens = self.num_tokens
        self._taken_characters += len(piece.text)
        return piece

    def rest(self) -> Answer:
        """Return what `take` would return, without taking it."""
        return cut(self._so_far(), self._taken_tokens, self._taken_characters)

    def drop_untrusted(self, is_verified: Callable[[str], bool]) -> None:
        """Truncate the stream before the first token from unverified weights, rounded down to the end of a chunk.

        Args:
            is_verified: whether a label is verified; used for the exact labels of a finished stream.
        """
        exact = self._exact_spans()
        if exact:
            starts = [span.start for span in exact if not is_verified(span.version)]
        else:
            starts = [mark.num_tokens for mark in self._marks if not self._trusts(mark.label)]
        if not starts:
            return
        kept = max((mark for mark in self._marks if mark.num_tokens <= min(starts)), key=lambda mark: mark.num_tokens)
        self._chunks, self._spans, self.num_tokens = kept.chunks, kept.spans, kept.num_tokens
        self._end = None
        self._marks = self._marks[: self._marks.index(kept)]
        self.ended = False

    def _exact_spans(self) -> list[VersionSpan]:
        """Return the weight spans in the last chunk; empty before it has arrived."""
        if not self.ended or not self._chunks:
            return []
        last = _decode_answer(self._end or self._chunks[-1])
        return [span for span in last.meta_info.weight_versions or [] if span.end > span.start]

    def _mark(self, label: str | None, *, new: bool) -> None:
        """Save the state before the first tokens of a chunk with a new label."""
        label = label or ""  # an engine without a label is unverified
        if new and (not self._marks or self._marks[-1].label != label):
            self._marks.append(_Mark(label, self.num_tokens, list(self._chunks), list(self._spans)))

    def _so_far(self) -> Answer:
        parts = [_decode_answer(chunk) for chunk in self._chunks]
        ids = [token for part in parts for token in part.output_ids]
        meta = parts[-1].meta_info if parts else MetaInfo()
        whole: dict[str, list[Any]] = {name: getattr(meta, name) for name in PER_TOKEN}
        if self._end is not None:
            meta = _decode_answer(self._end).meta_info
        for name, values in whole.items():
            if len(values) != len(ids):
                whole[name] = [value for part in parts for value in getattr(part.meta_info, name)]
        spans = meta.weight_versions if meta.weight_versions else list(self._spans)
        meta = msgspec.structs.replace(meta, weight_versions=spans, **whole)
        return Answer(meta_info=meta, text="".join(part.text for part in parts), output_ids=ids)

    def _note_label(self, named: str | None, start: int, end: int) -> None:
        """Label new tokens like the previous ones: the label may have changed after they were sampled."""
        label = named if self._label is None else self._label
        self._label = named
        if label is None or end == start:
            return
        if self._spans and self._spans[-1].version == label:
            start = self._spans.pop().start
        self._spans.append(VersionSpan(label, start, end))


def refusal_in(meta: MetaInfo) -> StreamRefusal | None:
    """Return why an engine refused a request that it had started to answer; None if it ended normally."""
    reason = meta.finish_reason or {}
    code = reason.get("status_code")
    return StreamRefusal(code, str(reason.get("message", ""))) if isinstance(code, int) else None
