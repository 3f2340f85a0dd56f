"""Builds prompts from rows: renders and tokenizes them, and selects their grader."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from actors.buffer.prompts.rendering import END_OF_THOUGHT, Rendered, Rendering
from actors.buffer.prompts.tokenizing import Messages, Tokenizing
from messages import MAX_PROBE_TOKENS, Int32Array, Prompt, PromptsLoaded
from runtime.data.chat import ANSWERS, calls_of
from runtime.data.data_files import DataError
from runtime.data.rows import Row
from runtime.settings.tables.prompts import DataConfig
from runtime.util.formatting import show


class LoadedData(msgspec.Struct, frozen=True, kw_only=True):
    """Usable prompts of one data source, in file order."""

    name: str
    prompts: tuple[Prompt, ...]
    num_too_long: int  # rows skipped because they exceed the prompt limit
    took_s: float

    @property
    def event(self) -> PromptsLoaded:
        """The event that reports this data."""
        return PromptsLoaded(
            data=self.name,
            num_prompts=len(self.prompts),
            num_too_long=self.num_too_long,
            took_s=self.took_s,
            fingerprint=fingerprint_of(self.prompts),
            first_ids=first_ids_of(self.prompts),
        )


class Reader(Protocol):
    """Builds prompts from rows."""

    def read(self, rows: Sequence[Row], data: DataConfig) -> list[Prompt]:
        """Render and tokenize rows of a data source, in their order.

        Raises:
            DataError: a row cannot be used.
        """
        ...

    def too_long(self, prompt: Prompt) -> str | None:
        """Describe the limit that a prompt exceeds; None if it fits."""
        ...

    def take_note(self) -> str | None:
        """Describe what the chat template left out of the rows since the last call; None: nothing."""
        ...


class PromptReader:
    """Builds prompts for generation and grading."""

    def __init__(self, tokenizing: Tokenizing, limit: int | None, *, is_graded: bool = True) -> None:
        """Build prompts.

        Args:
            tokenizing: the tokenizer.
            limit: maximum length of a prompt in tokens; None: no limit.
            is_graded: each row needs a grader.
        """
        self._tokenizing = tokenizing
        self._rendering = Rendering(tokenizing)
        self._limit = limit
        self._is_graded = is_graded

    def read(self, rows: Sequence[Row], data: DataConfig) -> list[Prompt]:
        """Render and tokenize rows, in their order.

        Raises:
            DataError: the chat template or the tokenizer refuses a row, or a row has no grader.
        """
        texts = [self._render(row, data) for row in rows]
        unread = ["" if row.prompt_ids else text for row, text in zip(rows, texts, strict=True)]  # others have ids
        all_ids = encode([row.place for row in rows], unread, self._tokenizing)
        graders = [_rm_type(row, data, is_needed=self._is_graded) for row in rows]
        return [_prompt(*row, data) for row in zip(rows, texts, all_ids, graders, strict=True)]

    def too_long(self, prompt: Prompt) -> str | None:
        """Describe the prompt limit that a prompt exceeds; None if it fits."""
        length = len(prompt.prompt_ids)
        if self._limit is None or length <= self._limit:
            return None
        return (
            f"the prompt has {length} tokens, over the limit of {self._limit} tokens "
            "(rollout.max_prompt_len, or rollout.max_context_len - 1)"
        )

    def take_note(self) -> str | None:
        """Describe what the chat template left out of the rows since the last call; None: nothing."""
        return self._rendering.take_note()

    def _render(self, row: Row, data: DataConfig) -> str:
        """Return the text that the response continues."""
        if not data.apply_chat_template or not row.prompt:
            return str(row.prompt)
        turns: Messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        tools, options = row.metadata.get("tools"), data.apply_chat_template_kwargs
        try:
            self._rendering.check_roles(turns, tools)
            if continues := turns[-1]["role"] == ANSWERS:
                _check_continued(turns, data)
                options = {**options, "add_generation_prompt": False}
            text = self._tokenizing.render(turns, tools=tools, **options)
            self._rendering.verify(Rendered(turns, text, tools, options), data.name)
            return _behind(text, turns[-1]["content"]) if continues else text
        except ValueError as error:
            raise DataError(f"{row.place}: {data.input_key}: {error}") from None


def _prompt(row: Row, text: str, ids: Int32Array, rm_type: str | None, data: DataConfig) -> Prompt:
    if row.prompt_ids is not None:
        ids = Int32Array(np.asarray(row.prompt_ids, dtype=np.int32))
    if not len(ids):
        raise DataError(f"{row.place}: the prompt has no tokens")
    return Prompt(
        data=data.name,
        row=row.number,
        text=text,
        prompt_ids=ids,
        label=row.label,
        metadata=row.metadata,
        rm_type=rm_type,
    )


def first_ids_of(prompts: Iterable[Prompt]) -> tuple[int, ...]:
    """Token ids of the first prompts, one after another, as many as a weight probe has at most."""
    found: list[int] = []
    for prompt in prompts:
        if len(found) >= MAX_PROBE_TOKENS:
            break
        found += prompt.prompt_ids[:MAX_PROBE_TOKENS].tolist()
    return tuple(found[:MAX_PROBE_TOKENS])


def fingerprint_of(prompts: Iterable[Prompt]) -> str:
    """Fingerprint of prompts and their order: 16 hex digits of a SHA-256."""
    digest = hashlib.sha256()
    for prompt in prompts:
        rest = (prompt.data, prompt.row, prompt.text, prompt.label, prompt.metadata, prompt.rm_type)
        digest.update(msgspec.msgpack.encode(rest))
        digest.update(prompt.prompt_ids.tobytes())
        if prompt.response_ids is not None and prompt.loss_mask is not None:
            digest.update(prompt.response_ids.tobytes() + prompt.loss_mask.tobytes())
        if prompt.rejected is not None:
            digest.update(prompt.rejected.response_ids.tobytes() + prompt.rejected.loss_mask.tobytes())
    return digest.hexdigest()[:16]


def fingerprint_with(fingerprint: str, weight: float) -> str:
    """Fingerprint of prompts that are mixed by a weight."""
    return hashlib.sha256(f"{fingerprint} {weight!r}".encode()).hexdigest()[:16]


def _check_continued(turns: Messages, data: DataConfig) -> None:
    """Check a prompt whose last message is one of the assistant."""
    where = f"message {len(turns) - 1}, the last one, is of the {ANSWERS}"
    if not data.continue_final_message:
        raise ValueError(
            f"{where}; leave it out, or set continue_final_message = true for {data.name} if the response continues it"
        )
    if calls_of(turns[-1]):
        raise ValueError(f"{where} and has tool calls, which no response can continue")


def _behind(text: str, content: str) -> str:
    """Cut a rendered conversation behind the last message, as transformers' continue_final_message does."""
    core = content.strip()
    place = text.rfind(core)
    if place < 0 and END_OF_THOUGHT in core:  # some templates write another form of the thought before it
        core = core.rsplit(END_OF_THOUGHT, 1)[1].strip()
        place = text.rfind(core) if core else -1
    if place < 0:
        raise ValueError(f"the chat template changes the last message {show(content)}, so no response can continue it")
    spaces = content[len(content.rstrip()) :]
    end = place + len(core)
    return text[: end + len(spaces)] if text.startswith(spaces, end) else text[:end]


def encode(places: Sequence[str], texts: Sequence[str], tokenizing: Tokenizing) -> list[Int32Array]:
    """Tokenize texts.

    Args:
        places: file and line, or call, of each text, for errors.
        texts: the texts.
        tokenizing: the tokenizer.

    Raises:
        DataError: a text has no tokens in this vocabulary; names its place.
    """
    try:
        return tokenizing.encode(texts)
    except ValueError as refused:
        reason = str(refused)
    for place, text in zip(places, texts, strict=True):  # find the text that failed
        try:
            tokenizing.encode([text])
        except ValueError as error:
            message = f"{place}: cannot be tokenised: {error}: {text[:80]!r}"
            raise DataError(message) from None
    raise DataError(f"cannot be tokenised: {reason}")


def _rm_type(row: Row, data: DataConfig, *, is_needed: bool) -> str | None:
    """The row's own grader, or the source's. A row may only give a name: data must not choose code."""
    own = row.metadata.get("rm_type")
    rm_type = own or data.rm_type
    if rm_type is None and not is_needed:
        return None
    if not isinstance(rm_type, str):
        raise DataError(f"{row.place}: no grader: set rm_type for {data.name}, or in the row's metadata")
    if own and ":" in rm_type:
        raise DataError(
            f"{row.place}: rm_type = {own!r}: a row may name only a built-in grader, "
            "or a name in reward.graders, reward.judges, reward.sums or reward.external"
        )
    return rm_type
