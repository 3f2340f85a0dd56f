"""Demonstrations (SFT) and preference pairs: conversations as token ids with a loss mask over the assistant's turns."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np

from actors.buffer.prompts.prompts import encode
from actors.buffer.prompts.rendering import Rendered, Rendering
from actors.buffer.prompts.tokenizing import Messages, Tokenizing
from actors.buffer.prompts.turns import MASKED, TRAINED, Piece, pieces_of
from messages import Demonstration, Int32Array, Prompt, UInt8Array
from runtime.data.data_files import DataError
from runtime.data.rows import Row
from runtime.settings.derived import max_prompt_len
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.tables.rollout import RolloutConfig


class DemonstrationReader:
    """Builds demonstrations or preference pairs from rows. A text and its response form a conversation of two turns."""

    def __init__(self, tokenizing: Tokenizing, rollout: RolloutConfig) -> None:
        self._tokenizing = tokenizing
        self._rendering = Rendering(tokenizing)
        self._prompt_limit = max_prompt_len(rollout)
        self._rollout = rollout

    def read(self, rows: Sequence[Row], data: DataConfig) -> list[Prompt]:
        """Render and tokenize rows, in their order.

        Raises:
            DataError: a row has no turn to train, or the chat template or the tokenizer refuses it.
        """
        if data.chosen_key is None:
            return self._tokenize([(row, self._pieces(row, row.prompt, row.label, data)) for row in rows], data)
        chosen, rejected = (
            self._tokenize([(row, self._continued(row, getattr(row, kind), kind, data)) for row in rows], data)
            for kind in ("chosen", "rejected")
        )
        return [_pair(row, *pair) for row, *pair in zip(rows, chosen, rejected, strict=True)]

    def too_long(self, prompt: Prompt) -> str | None:
        """Describe the limit that a demonstration exceeds: of the prompt, the response or both. None if it fits."""
        num_prompt = len(prompt.prompt_ids)
        num_response = 0 if prompt.response_ids is None else len(prompt.response_ids)
        if prompt.rejected is not None:
            num_response = max(num_response, len(prompt.rejected.response_ids))
        rollout = self._rollout
        for what, length, limit, key in (
            ("prompt", num_prompt, self._prompt_limit, "rollout.max_prompt_len"),
            ("response", num_response, rollout.max_response_len, "rollout.max_response_len"),
            ("whole", num_prompt + num_response, rollout.max_context_len, "rollout.max_context_len"),
        ):
            if limit is not None and length > limit:
                return f"the {what} has {length} tokens, over the limit of {limit} tokens ({key})"
        return None

    def take_note(self) -> str | None:
        """Describe what the chat template left out of the rows since the last call; None: nothing."""
        return self._rendering.take_note()

    def _tokenize(self, conversations: Sequence[tuple[Row, list[Piece]]], data: DataConfig) -> list[Prompt]:
        places = [row.place for row, pieces in conversations for _ in pieces]
        texts = [piece.text for _, pieces in conversations for piece in pieces]
        ids = iter(encode(places, texts, self._tokenizing))
        return [_demonstration(row, data, pieces, [next(ids) for _ in pieces]) for row, pieces in conversations]

    def _continued(self, row: Row, response: str | Messages | None, kind: str, data: DataConfig) -> list[Piece]:
        """Return the pieces of the prompt continued by a response of a preference pair."""
        key = getattr(data, f"{kind}_key")
        if isinstance(response, str):
            if not row.prompt:
                raise DataError(f"{row.place}: {key} is a text, so the row needs the column {data.input_key!r}")
            if not isinstance(row.prompt, str):
                turns = [*_untrained(row.prompt), {"role": TRAINED, "content": response}]
                return self._pieces(row, turns, None, data)
            return self._pieces(row, row.prompt, response, data)
        if response is None or not data.apply_chat_template:
            raise DataError(f"{row.place}: {key} is a list of chat messages: set apply_chat_template = true")
        if not row.prompt:
            last = response[-1:] if response[-1].get("role") == TRAINED else []
            return self._pieces(row, [*_untrained(response[: len(response) - len(last)]), *last], None, data)
        turns = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        return self._pieces(row, [*_untrained(turns), *response], None, data)

    def _pieces(self, row: Row, turns: str | Messages, answer: Any, data: DataConfig) -> list[Piece]:
        if isinstance(turns, str):
            if not isinstance(answer, str) or not (answer.strip() if data.apply_chat_template else answer):
                raise DataError(
                    f"{row.place}: no response to train on: set data.label_key to a column with the response text, "
                    f"or let {data.input_key} hold chat messages with turns of the {TRAINED}"
                )
            if not data.apply_chat_template:
                return [Piece(turns, False), Piece(answer, True)]
            turns = [{"role": "user", "content": turns}, {"role": TRAINED, "content": answer}]
        try:
            return self._verified_pieces(turns, row.metadata.get("tools"), data)
        except ValueError as error:
            raise DataError(f"{row.place}: {error}") from None

    def _verified_pieces(self, turns: Messages, tools: Any, data: DataConfig) -> list[Piece]:
        self._rendering.check_roles(turns, tools)
        options = data.apply_chat_template_kwargs
        pieces = pieces_of(turns, self._tokenizing, tools=tools, **options)
        text = "".join(piece.text for piece in pieces)
        self._rendering.verify(Rendered(turns, text, tools, {**options, "add_generation_prompt": False}), data.name)
        return pieces


def _untrained(turns: Messages) -> list[dict[str, Any]]:
    return [{**turn, MASKED[0]: 0} if turn.get("role") == TRAINED else dict(turn) for turn in turns]


def _pair(row: Row, chosen: Prompt, rejected: Prompt) -> Prompt:
    """Join two demonstrations of a row to a preference pair."""
    if not np.array_equal(chosen.prompt_ids, rejected.prompt_ids):
        raise DataError(f"{row.place}: the chosen and the rejected response follow different prompts")
    assert rejected.response_ids is not None
    assert rejected.loss_mask is not None
    worse = Demonstration(response_ids=rejected.response_ids, loss_mask=rejected.loss_mask, text=rejected.response)
    if chosen.response == worse.text:
        raise DataError(f"{row.place}: the chosen and the rejected response are the same")
    return msgspec.structs.replace(chosen, rejected=worse)


def _demonstration(row: Row, data: DataConfig, pieces: Sequence[Piece], ids: Sequence[Int32Array]) -> Prompt:
    mask = np.concatenate([np.full(len(own), piece.trains, np.uint8) for piece, own in zip(pieces, ids, strict=True)])
    tokens = cast("Any", np.concatenate([np.asarray(own) for own in ids]))
    trained = np.flatnonzero(mask[1:]) + 1  # the first token has no prediction
    if not len(trained):
        raise DataError(f"{row.place}: none of its {len(tokens)} tokens after the first is trained")
    start = int(trained[0])
    first = next(number for number, piece in enumerate(pieces) if piece.trains)
    return Prompt(
        data=data.name,
        row=row.number,
        text="".join(piece.text for piece in pieces[:first]),
        prompt_ids=Int32Array(tokens[:start]),
        label=row.label,
        metadata=row.metadata,
        response_ids=Int32Array(tokens[start:]),
        loss_mask=UInt8Array(mask[start:]),
        response="".join(piece.text for piece in pieces[first:]),
    )
