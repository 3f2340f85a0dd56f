"""Reads the answer to one request into the buffer of its sample, whole or chunk by chunk. Pure.

Each token is decoded, checked and stored once. Chunks may be incremental or cumulative.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from actors.rollout.samples.buffer import NOTHING, LabelSpan, Mark, SampleBuffer
from actors.rollout.sglang.answers import (
    Answer,
    MetaInfo,
    Refusal,
    TokenList,
    Triple,
    decode_answer,
    decode_id_lists,
    decode_ids,
    decode_numbers,
    decode_triples,
    refusal_in,
    status_of,
)
from actors.rollout.sglang.checks import (
    ANYTHING,
    ExpectedAnswer,
    NewTokens,
    count_problem,
    end_problem,
    meta_problem,
    tokens_problem,
)
from actors.rollout.sglang.errors import PrefixOutdated
from actors.rollout.sglang.labels import label_of, version_of
from messages import SampleStatus


class _LabelStart(NamedTuple):
    """Where the chunks with a new label begin."""

    label: str
    mark: Mark


class AdapterLabels(NamedTuple):
    """Weight labels of a request that names a LoRA adapter."""

    base: str  # that the engine reports
    adapter: str  # of the adapter on that base


class AnswerReader:
    """The answer to one request, in the buffer of its sample.

    Only the last chunk has to report which weights sampled which tokens. Without such a report, tokens that arrive
    during a weight update count as sampled by the old weights. Their true version may be newer, never older. Whether
    they may be used is then checked for both versions.
    """

    def __init__(
        self,
        buffer: SampleBuffer,
        expected: ExpectedAnswer = ANYTHING,
        *,
        new_input: NDArray[Any] = NOTHING,
        sent_under: int = 0,
        prefix_of: int = 0,
        trusts: Callable[[str], bool] = lambda _: True,
        adapter: AdapterLabels | None = None,
    ) -> None:
        """Start without tokens.

        Args:
            buffer: of the sample; all its tokens are part of the request.
            expected: the request's properties that the answer must match.
            new_input: input after the buffer's tokens in the request; it enters the buffer with the first token.
            sent_under: weight version of the engines that may answer; 0: unknown.
            prefix_of: weight version of the cached prefixes that the engine may have used. It has to sample the first
                token. 0: any version may.
            trusts: whether tokens under a label may be used; applies until the last chunk arrives.
            adapter: labels, if the request names a LoRA adapter.
        """
        self._buffer = buffer
        self._expected = expected
        self._new_input = new_input
        self._trusts = trusts
        self._adapter = adapter
        self._begin = buffer.mark  # before the new input
        self._first = buffer.num_tokens + len(new_input)  # position of the first token of the answer
        self._ids: TokenList[int] = TokenList(decode_ids, b",")
        self._triples: TokenList[Triple] = TokenList(decode_triples, b"],")
        self._masks: TokenList[list[int]] = TokenList(decode_id_lists, b"],")
        self._kept_log_probs: TokenList[float | None] = TokenList(decode_numbers, b",")
        self._num_characters = 0
        self._labels: list[_LabelStart] = []
        self._exact: list[LabelSpan] = []  # of all tokens, as the last chunk reports them; positions in the buffer
        self._label = label_of(sent_under, "") if sent_under else None
        self._prefix_of = prefix_of
        self.num_tokens = 0
        self.meta = MetaInfo()  # of the newest chunk
        self.ended = False  # the last chunk has arrived
        self.is_busy = False  # a thread adds a long answer: it and its buffer are not read meanwhile
        self.refused: Refusal | None = None  # the last chunk reports that the request is invalid or cannot be served

    @property
    def status(self) -> SampleStatus:
        """How the answer ended; aborted if its end never came."""
        ended = self.ended and self.refused is None
        return status_of(self.meta.finish_reason) if ended else SampleStatus.ABORTED

    @property
    def ids(self) -> NDArray[np.int32]:
        """[T], all tokens of the answer so far, without a copy."""
        return self._buffer.ids[self._first :]

    @property
    def num_new(self) -> int:
        """Tokens of the answer that were not taken from the buffer."""
        return self._buffer.num_tokens - max(self._first, self._buffer.num_taken) if self.num_tokens else 0

    @property
    def num_taken(self) -> int:
        """Tokens of the answer that were taken from the buffer."""
        return self.num_tokens - self.num_new

    @property
    def is_trusted(self) -> bool:
        """Whether all tokens so far may be used."""
        return all(self._trusts(start.label) for start in self._labels)

    @property
    def labels(self) -> list[str]:
        """Labels of the weights that may have sampled the tokens."""
        return [each.label for each in self._exact or self._labels]

    @property
    def last_label(self) -> str:
        """The engine's weight label in the last chunk; before the first chunk, the label of `sent_under` or empty."""
        return self._label or ""

    def is_recent(self, min_version: int) -> bool:
        """Whether all tokens that were not taken were sampled by at least this weight version."""
        oldest = self._buffer.oldest_new_version if self.num_new else None
        return oldest is None or oldest >= min_version

    def add_chunk(self, data: bytes) -> None:
        """Add a chunk of a stream.

        Raises:
            ValueError: it is invalid, or does not follow the earlier chunks; it is not added.
        """
        self.add(decode_answer(data))

    def add(self, chunk: Answer) -> None:
        """Add a chunk, or a whole answer.

        Raises:
            ValueError: it is invalid, or does not follow the earlier chunks; it is not added.
            PrefixOutdated: it has the first token, of another version than the cached prefix; it is not added.
        """
        meta, before = self._with_label_of_adapter(chunk.meta_info), self.num_tokens
        ids, length = self._ids.read(chunk.output_ids, before, meta.completion_tokens)
        total = meta.completion_tokens
        if total is None:
            total = length if length >= before else before + length
            ids = ids[before:] if total == length else ids
        ended = meta.finish_reason is not None
        repeats = ended and total == before > length  # the end repeats some of the earlier tokens
        if not repeats and total not in (length, before + length):
            raise ValueError(f"a chunk of {length} tokens after {before} tokens reports {total} in total")
        if total < before:
            raise ValueError(f"a chunk reports {total} tokens in total after {before} were received")
        refused = refusal_in(meta) if ended else None
        tokens = NewTokens([], [], []) if repeats else self._new_tokens(ids, meta, total)
        tokens_wrong = tokens_problem(tokens, self._expected)
        if refused is not None and tokens_wrong is not None:
            # SGLang ends the stream of a refused prompt with a token without a log-prob.
            self.ended, self.refused, self.meta = True, refused, meta
            return
        problem = meta_problem(meta, self._expected) or tokens_wrong or count_problem(total, self._expected)
        if problem is None and ended and refused is None:
            problem = end_problem(meta, total, tokens.ids[-1] if tokens.ids else None)
        if problem is not None:
            raise ValueError(problem)
        if tokens.ids and not before:
            self._check_prefix(meta)
        text = "" if repeats else chunk.text[self._num_characters :] if total == length else chunk.text
        self._append(tokens, text, meta.weight_version)
        self.meta, self.ended, self.refused = meta, ended, refused
        exact = self._exact_spans(meta)
        if exact:
            self._buffer.relabel(exact)
        if ended:
            self._exact = exact

    def _with_label_of_adapter(self, meta: MetaInfo) -> MetaInfo:
        """Replace the label of the base model: an engine does not say which adapter sampled a token.

        A request keeps the adapter that it names to its end. Tokens on another base keep that one's label.
        """
        if self._adapter is None:
            return meta
        base, own = self._adapter
        spans = [replace(each, version=own) if each.version == base else each for each in meta.weight_versions or ()]
        named = own if meta.weight_version == base else meta.weight_version
        return replace(meta, weight_version=named, weight_versions=spans or meta.weight_versions)

    def add_whole(self, answer: Answer) -> None:
        """Add a whole answer; raises ValueError like `add`, and if it has no end."""
        self.add(answer)
        status_of(answer.meta_info.finish_reason)

    def discard(self) -> None:
        """Drop all tokens of the answer that were not taken."""
        self._cut(self._begin)

    def drop_untrusted(self, is_verified: Callable[[str], bool]) -> None:
        """Drop the tokens from the first one of unverified weights on, rounded down to the end of a chunk.

        Args:
            is_verified: whether a label is verified; used for the exact labels of a finished answer.
        """
        if self._exact:
            wrong = [span.start for span in self._exact if not is_verified(span.label)]
        else:
            wrong = [start.mark.num_tokens for start in self._labels if not self._trusts(start.label)]
        if not wrong:
            return
        first = min(wrong)
        self._cut(max(start.mark for start in self._labels if start.mark.num_tokens <= first))

    def end_at(self, matched: int | str) -> None:
        """Turn an aborted answer that had reached its end into a complete one.

        Args:
            matched: the stop token or the stop text at its end.
        """
        if isinstance(matched, str):
            self._buffer.end_text_after(matched)
        self.meta = replace(self.meta, finish_reason={"type": "stop", "matched": matched})

    def _check_prefix(self, meta: MetaInfo) -> None:
        """Check the version of the first token. A chunk that names one label alone may name one newer than that.

        Weights that the run did not publish have no version: their tokens are found unverified later.
        """
        exact = self._exact_spans(meta)
        label = exact[0].label if exact else meta.weight_version or ""
        if self._prefix_of and version_of(label) not in (0, self._prefix_of):
            message = f"the first token is of weights {label}, its cached prefix may be of weights {self._prefix_of}"
            raise PrefixOutdated(message, label=label)

    def _new_tokens(self, ids: list[int], meta: MetaInfo, total: int) -> NewTokens:
        before = self.num_tokens
        triples, _ = self._triples.read(meta.output_token_logprobs, before, total)
        tokens = NewTokens(ids, [token for _, token, _ in triples], [log_prob for log_prob, _, _ in triples])
        if self._expected.max_kept is None:
            return tokens
        masks, _ = self._masks.read(meta.output_token_sampling_mask, before, total)
        kept_log_probs, _ = self._kept_log_probs.read(meta.output_token_sampling_logprobs, before, total)
        return tokens._replace(masks=masks, kept_log_probs=kept_log_probs)

    def _append(self, tokens: NewTokens, text: str, named: str | None) -> None:
        """Store new tokens under the label before: the label may have changed after they were sampled."""
        label = named if self._label is None else self._label
        self._label = named
        self._num_characters += len(text)
        if not tokens.ids:
            self._buffer.append(NOTHING, NOTHING, text, "")
            return
        mark = self._buffer.mark
        if not self.num_tokens:
            self._buffer.append_input(self._new_input)
        if not self._labels or self._labels[-1].label != (named or ""):  # an engine without a label is unverified
            self._labels.append(_LabelStart(named or "", mark))
        kept, log_probs = None, tokens.log_probs
        if tokens.masks:
            counts = np.array([len(mask) for mask in tokens.masks], np.int32)
            kept = counts, np.fromiter(chain.from_iterable(tokens.masks), np.int32, int(counts.sum()))
            log_probs = tokens.kept_log_probs
        self._buffer.append(np.array(tokens.ids, np.int32), np.array(log_probs, np.float32), text, label or "", kept)
        self.num_tokens += len(tokens.ids)

    def _exact_spans(self, meta: MetaInfo) -> list[LabelSpan]:
        """Return the labels that a chunk reports for all tokens so far, at positions in the buffer; empty: none."""
        return [
            LabelSpan(span.version, self._first + span.start, self._first + span.end)
            for span in meta.weight_versions or []
            if span.end > span.start
        ]

    def _cut(self, mark: Mark) -> None:
        self._buffer.truncate(mark)
        self.num_tokens = max(0, self._buffer.num_tokens - self._first)
        self._labels = [start for start in self._labels if start.mark < mark]
        self._exact, self.ended = [], False
        self.meta = replace(self.meta, finish_reason=None)
