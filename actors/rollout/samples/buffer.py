"""The response of one sample as it grows: token ids, log-probs, weight labels and text. Pure."""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.rollout.sglang.labels import version_of
from messages import Float32Array, Int32Array, SampleKey, Segment, UInt8Array, WeightSpan

FIRST_CAPACITY: Final = 64  # entries of an array that holds any
NOTHING: Final = Int32Array()
EMPTY: Final = {dtype: np.empty(0, dtype) for dtype in ("<i4", "<f4")}  # memory of arrays without entries


class Mark(NamedTuple):
    """A position in a buffer: all before it stays when the buffer is truncated there."""

    num_tokens: int
    num_bytes: int  # of the text


class LabelSpan(NamedTuple):
    """The weight label of the response tokens [start, end)."""

    label: str
    start: int
    end: int


class GrowingArray:
    """One-dimensional array that doubles its memory when it is full. A view stays valid while the array grows."""

    __slots__ = ("_data", "size")

    def __init__(self, dtype: str) -> None:
        self._data: NDArray[Any] = EMPTY[dtype]
        self.size = 0

    def extend(self, values: NDArray[Any]) -> None:
        """Append values in time proportional to their number, on average."""
        size = self.size + len(values)
        if size > len(self._data):
            grown = np.empty(max(FIRST_CAPACITY, size, 2 * len(self._data)), self._data.dtype)
            grown[: self.size] = self._data[: self.size]
            self._data = grown
        self._data[self.size : size] = values
        self.size = size

    def view(self, start: int = 0) -> NDArray[Any]:
        """Return the entries from `start` on, without a copy."""
        return self._data[start : self.size]


class SampleBuffer:
    """The response of one sample: every token decoded once, appended as it comes, and taken as segments.

    Tokens that were taken never change. The others may be truncated, e.g. if their weights were not verified.
    """

    __slots__ = ("_ids", "_input_end", "_kept_counts", "_kept_ids", "_log_probs", "_spans", "_taken", "_text")

    def __init__(self) -> None:
        self._ids = GrowingArray("<i4")
        self._log_probs = GrowingArray("<f4")  # 0 for input between turns
        self._kept_counts: GrowingArray | None = None  # with return_sampling_mask: kept tokens per token, and their ids
        self._kept_ids: GrowingArray | None = None
        self._spans: list[LabelSpan] = []  # of the response tokens that were not taken
        self._text = bytearray()  # UTF-8, of the response tokens alone
        self._input_end = 0  # end of the newest input between turns
        self._taken = Mark(0, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, input between turns included."""
        return self._ids.size

    @property
    def num_taken(self) -> int:
        """Tokens in the segments so far."""
        return self._taken.num_tokens

    @property
    def input_end(self) -> int:
        """End of the newest input between turns; 0 without one."""
        return self._input_end

    @property
    def ids(self) -> NDArray[np.int32]:
        """[T], all tokens so far, without a copy."""
        return self._ids.view()

    @property
    def log_probs(self) -> NDArray[np.float32]:
        """[T], natural log, without a copy; 0 for input between turns."""
        return self._log_probs.view()

    @property
    def text(self) -> str:
        """The response tokens as text."""
        return self._text.decode(errors="surrogatepass")

    @property
    def new_text(self) -> str:
        """The response tokens that were not taken, as text."""
        return self._text[self._taken.num_bytes :].decode(errors="surrogatepass")

    @property
    def mark(self) -> Mark:
        """The current end."""
        return Mark(self._ids.size, len(self._text))

    @property
    def new_labels(self) -> list[str]:
        """Weight labels of the tokens that were not taken, in order."""
        return [span.label for span in self._spans]

    @property
    def oldest_new_version(self) -> int | None:
        """Oldest weight version of the tokens that were not taken; 0: one has no published version. None: no tokens."""
        return min((version_of(span.label) for span in self._spans), default=None)

    def append(
        self,
        ids: NDArray[Any],
        log_probs: NDArray[Any],
        text: str,
        label: str,
        kept: tuple[NDArray[Any], NDArray[Any]] | None = None,
    ) -> None:
        """Append sampled tokens.

        Args:
            ids: [T], tokens of the model.
            log_probs: [T], natural log; those among the kept tokens, if there are any.
            text: of the tokens.
            label: of the weights that sampled them, as far as it is known.
            kept: ids that top-p and top-k kept: their number for each token [T], and all of them. None: not recorded.
        """
        start = self._ids.size
        self._ids.extend(ids)
        self._log_probs.extend(log_probs)
        if kept is not None:
            self._append_kept(start, *kept)
        self._text += text.encode(errors="surrogatepass")
        if len(ids):
            if self._spans and self._spans[-1].label == label and self._spans[-1].end == start:
                start = self._spans.pop().start
            self._spans.append(LabelSpan(label, start, self._ids.size))

    def append_input(self, ids: NDArray[Any]) -> None:
        """Append input after a turn. The buffer has no response tokens that were not taken."""
        if not len(ids):
            return
        self._ids.extend(ids)
        self._log_probs.extend(np.zeros(len(ids), np.float32))
        self._input_end = self._ids.size

    def append_taken(self, segment: Segment) -> None:
        """Append a stored segment. The first segment's input is the prompt, which is not part of the response."""
        if self.num_tokens:
            self.append_input(segment.prompt_ids)
        self.append(segment.response_ids, segment.rollout_log_probs, segment.text, "")
        self._note_taken()

    def relabel(self, spans: Iterable[LabelSpan]) -> None:
        """Replace the labels of the tokens that were not taken."""
        first = max(self._taken.num_tokens, self._input_end)
        self._spans = [
            LabelSpan(label, max(first, start), end) for label, start, end in spans if end > max(first, start)
        ]

    def truncate(self, mark: Mark) -> None:
        """Drop the tokens after a mark, except those that were taken."""
        num_tokens, num_bytes = max(mark, self._taken)
        if num_tokens >= self._ids.size:
            return
        self._drop_kept(num_tokens)
        self._ids.size = self._log_probs.size = num_tokens
        del self._text[num_bytes:]
        self._input_end = min(self._input_end, num_tokens)
        self._spans = [
            LabelSpan(label, start, min(end, num_tokens)) for label, start, end in self._spans if start < num_tokens
        ]

    def end_text_after(self, text: str) -> None:
        """Drop the text after the first occurrence of a stop text in the text that was not taken."""
        found = self._text.find(text.encode(errors="surrogatepass"), self._taken.num_bytes)
        if found >= 0:
            del self._text[found + len(text.encode(errors="surrogatepass")) :]

    def take(self, sample: SampleKey, prompt_ids: Int32Array, temperature: float | None = None) -> Segment:
        """Return the tokens since the last segment as a segment, with views instead of copies.

        Args:
            sample: key of the sample.
            prompt_ids: [P], input of the first segment.
            temperature: of their turn; None: the recipe's.
        """
        taken, first = self._taken.num_tokens, max(self._taken.num_tokens, self._input_end)
        kept_counts, kept_ids = self._kept_since(first)
        segment = Segment(
            sample=sample,
            prompt_ids=Int32Array(self._ids.view(taken)[: first - taken]) if taken else prompt_ids,
            response_ids=Int32Array(self._ids.view(first)),
            loss_mask=UInt8Array(np.ones(self._ids.size - first, np.uint8)),
            rollout_log_probs=Float32Array(self._log_probs.view(first)),
            weight_spans=_versions(self._spans, first),
            text=self.new_text,
            kept_counts=kept_counts,
            kept_ids=kept_ids,
            temperature=temperature,
        )
        self._note_taken()
        return segment

    def _note_taken(self) -> None:
        self._taken, self._spans = self.mark, []

    def _append_kept(self, start: int, counts: NDArray[Any], ids: NDArray[Any]) -> None:
        if self._kept_counts is None or self._kept_ids is None:
            self._kept_counts, self._kept_ids = GrowingArray("<i4"), GrowingArray("<i4")
        missing = start - self._kept_counts.size  # input between turns, and segments of an earlier attempt
        self._kept_counts.extend(np.zeros(missing, np.int32))
        self._kept_counts.extend(counts)
        self._kept_ids.extend(ids)

    def _drop_kept(self, num_tokens: int) -> None:
        if self._kept_counts is not None and self._kept_ids is not None and self._kept_counts.size > num_tokens:
            self._kept_ids.size -= int(self._kept_counts.view(num_tokens).sum(dtype=np.int64))
            self._kept_counts.size = num_tokens

    def _kept_since(self, first: int) -> tuple[Int32Array | None, Int32Array | None]:
        if self._kept_counts is None or self._kept_ids is None or self._kept_counts.size <= first:
            return None, None
        counts = self._kept_counts.view(first)
        num_before = self._kept_ids.size - int(counts.sum(dtype=np.int64))
        return Int32Array(counts), Int32Array(self._kept_ids.view(num_before))


def _versions(spans: Iterable[LabelSpan], first: int) -> tuple[WeightSpan, ...]:
    """Return the versions of labelled tokens, counted from `first`; adjacent spans of a version are joined."""
    joined: list[tuple[int, int, int]] = []
    for label, start, end in spans:
        version = version_of(label)
        if joined and joined[-1][0] == version and joined[-1][2] == start - first:
            joined[-1] = (version, joined[-1][1], end - first)
        else:
            joined.append((version, start - first, end - first))
    return tuple(WeightSpan(version=version, start=start, end=end) for version, start, end in joined)
