"""What has come of a streamed request, chunk by chunk; taken from it in pieces while it still grows. Pure.

Chunks hold what is new or all so far: both are understood. Log-probs are decoded only when a piece is taken.
"""

import msgspec

from actors.rollout.sglang.answers import Answer, MetaInfo, VersionSpan, cut


class _ChunkMeta(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None  # all so far; an answer to an abort in the queue may lack it
    finish_reason: msgspec.Raw = msgspec.Raw(b"null")
    weight_version: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    """The part of a chunk that is looked at when it comes."""

    meta_info: _ChunkMeta
    output_ids: list[int] = []


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_answer = msgspec.json.Decoder(Answer).decode


class Stream:
    """One streamed request.

    Only the last chunk need say which weights sampled which tokens. Without that, tokens that came while an engine took
    new weights count as sampled by the old ones: theirs may be newer, never older than what is said.
    """

    def __init__(self, sent_under: int = 0) -> None:
        """Begin without tokens, sent to engines that hold this weight version; 0: unknown."""
        self._chunks: list[bytes] = []  # that are needed to put the answer together
        self._spans: list[VersionSpan] = []
        self._version = str(sent_under) if sent_under else None
        self._taken_tokens = 0
        self._taken_characters = 0
        self.num_tokens = 0
        self.ended = False  # the last chunk has come

    @property
    def num_new(self) -> int:
        """Tokens that came and were not taken."""
        return self.num_tokens - self._taken_tokens

    @property
    def oldest_version(self) -> int:
        """Oldest weights that are known to have sampled a token; 0: of some tokens they are not known."""
        versions = [span.version for span in self._spans]
        return min((int(version) if version.isdecimal() else 0 for version in versions), default=0)

    def add(self, data: bytes) -> None:
        """Take a chunk.

        Raises:
            ValueError: it is none, or does not follow those before.
        """
        chunk = _decode_chunk(data)
        length, before = len(chunk.output_ids), self.num_tokens
        total = chunk.meta_info.completion_tokens
        if total is None:
            total = length if length >= before else before + length
        if total == length:
            self._chunks = [data]
        elif total == before + length:
            self._chunks.append(data)
        else:
            raise ValueError(f"a chunk of {length} tokens after {before}, {total} in all")
        if total < before:
            raise ValueError(f"a chunk that ends after {total} tokens, when {before} had come")
        self._note_version(chunk.meta_info.weight_version, before, total)
        self.num_tokens = total
        self.ended = bytes(chunk.meta_info.finish_reason) != b"null"

    @property
    def num_taken(self) -> int:
        """Tokens of the pieces that were taken."""
        return self._taken_tokens

    def take(self) -> Answer:
        """What came since the last piece; without a finish reason while there is more to come."""
        piece = self.rest()
        self._taken_tokens = self.num_tokens
        self._taken_characters += len(piece.text)
        return piece

    def rest(self) -> Answer:
        """What `take` would return."""
        return cut(self._so_far(), self._taken_tokens, self._taken_characters)

    def _so_far(self) -> Answer:
        parts = [_decode_answer(chunk) for chunk in self._chunks]
        ids = [token for part in parts for token in part.output_ids]
        meta = parts[-1].meta_info if parts else MetaInfo()
        log_probs = meta.output_token_logprobs
        if len(log_probs) != len(ids):
            log_probs = [triple for part in parts for triple in part.meta_info.output_token_logprobs]
        spans = meta.weight_versions if meta.weight_versions else list(self._spans)
        meta = msgspec.structs.replace(meta, weight_versions=spans, output_token_logprobs=log_probs)
        return Answer(meta_info=meta, text="".join(part.text for part in parts), output_ids=ids)

    def _note_version(self, version: str | None, start: int, end: int) -> None:
        """Label new tokens with the version before them: the label may have changed after they were sampled."""
        label = version if self._version is None else self._version
        self._version = version
        if label is None or end == start:
            return
        if self._spans and self._spans[-1].version == label:
            start = self._spans.pop().start
        self._spans.append(VersionSpan(label, start, end))
