"""The conversation API of user-defined generate functions: model turns, and input between them.

A function runs again if its sample was halted or its actor crashed. The conversation is then replayed: finished turns
are returned as they were, without an engine, and the input between them is kept.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import index
from typing import Any

import anyio
import msgspec

from actors.rollout.samples.generate_function import KEY
from actors.rollout.samples.sample import NUM_TURNS, OpenSample, Turn, tokens_left
from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.served_model import ServedModel
from messages import Int32Array, Prompt, SampleStatus
from runtime.bus.errors import BusError

BETWEEN_TURNS_S = 300.0  # time limit of a function outside of `generate`

GenerateFunction = Callable[["Conversation"], Awaitable[None]]
Ask = Callable[[OpenSample, Sequence[str] | None, int], Awaitable[bool]]


class Conversation:
    """One sample in progress. `generate` gets the next model turn; `append` and `append_ids` add input for it.

    Attributes:
        prompt: as text.
        label: of the prompt.
        metadata: of the prompt.
        sample_metadata: of this sample; visible to the dynamic filter and in dumps.
        text: the response so far: model turns and the input between them.
    """

    def __init__(self, prompt: Prompt, sample: OpenSample, *, max_tokens: int, ask: Ask, model: ServedModel) -> None:
        self.prompt = prompt.text
        self.label = prompt.label
        self.metadata: Mapping[str, Any] = prompt.metadata
        self.sample_metadata: dict[str, Any] = {}
        self.text = ""
        self.asking = False
        self.over: SampleStatus | None = None  # final status, if the sample ended before its function
        self._sample = sample
        self._max_tokens = max_tokens
        self._ask = ask
        self._model = model
        self._scope = anyio.CancelScope()
        self._inputs: list[int] = []
        self._num_turns = 0
        self._num_replayed = sample.num_turns
        self._halted = False

    async def run(self, function: GenerateFunction) -> SampleStatus:
        """Run the function; return the sample's final status, ABORTED if it was halted.

        Raises:
            ValueError: the function raised, took too long, requested no turn, or set metadata that no event can carry.
        """
        self._scope.deadline = anyio.current_time() + BETWEEN_TURNS_S
        failed: Exception | None = None
        with self._scope:
            try:
                await function(self)
            except (BusError, EngineError):  # errors of this project, raised through the function
                raise
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the group fails
                failed = error
        try:
            self._note_metadata()
        except ValueError as error:
            failed = failed or error
        if failed is not None:
            raise ValueError(f"{KEY}: {failed!r}") from failed
        if self.asking and not self._scope.cancelled_caught:
            raise ValueError(f"{KEY}: ended in the middle of a turn")
        if self._scope.cancelled_caught and self._halted:
            self.over = self.over or SampleStatus.ABORTED
        if self._scope.cancelled_caught and self.over is None:
            raise ValueError(f"{KEY}: took more than {BETWEEN_TURNS_S:.0f} s outside of generate")
        if self.over is None and not self._num_turns:
            raise ValueError(f"{KEY}: ended without a turn of the model: it never called generate")
        self._sample.dialogue = self.text
        return self.over or SampleStatus.COMPLETED

    def halt(self) -> None:
        """Halt the sample at its next wait. A running request ends first and keeps its tokens."""
        self._halted = True
        if not self.asking:
            self._scope.cancel()

    async def generate(self, *, stop: Sequence[str] | None = None, max_new_tokens: int | None = None) -> str:
        """Return the model's next turn as text. Never returns if the sample is halted or has no room for more tokens.

        Args:
            stop: stop strings of the turn; None: those of the recipe.
            max_new_tokens: limit of this turn; None: the room left in the sample.

        Raises:
            ValueError: the previous turn is still running, no input was added after it, or an argument is invalid.
        """
        if self.asking:
            raise ValueError("two turns at the same time: each begins after the one before has ended")
        if isinstance(stop, str):  # otherwise each letter would be a stop string
            raise ValueError(f"stop = {stop!r}: write a list of texts")
        self._model.check_stop(stop or ())
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {max_new_tokens}: a turn has at least 1 token")
        if self._num_turns and not self._inputs:
            raise ValueError("two turns in a row: append text or token ids between them")
        turn = self._turn()
        if self._num_turns >= self._num_replayed:
            await self._go_on(turn, stop, self._max_tokens if max_new_tokens is None else max_new_tokens)
        self._num_turns += 1
        self._inputs = []
        self.text += turn.text
        self._note_metadata()
        if self._halted:
            # takes effect at the function's next wait; if it returns first, the sample is complete
            self._scope.cancel()
        return turn.text

    def append(self, text: str) -> None:
        """Append text after the last turn; it is excluded from the loss."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - a user's
            raise TypeError(f"append({text!r}): expected a str")
        self.append_ids(self._model.encode(text))
        self.text += text

    def append_ids(self, ids: Sequence[int]) -> None:
        """Append tokens after the last turn; they are excluded from the loss.

        Raises:
            ValueError: a token is outside of the vocabulary, or there was no turn yet.
        """
        if not self._num_turns:
            raise ValueError("the first turn must be the model's: put earlier text into the prompt")
        given = [index(token) for token in ids]  # raises TypeError for values that are no integers
        self._model.check_ids(given)
        self._inputs.extend(given)

    def _note_metadata(self) -> None:
        """Copy the function's metadata to the sample. During a replay it keeps the count of all finished turns."""
        try:
            noted = msgspec.json.decode(msgspec.json.encode(self.sample_metadata), type=dict[str, Any])
            msgspec.msgpack.encode(noted)  # a later task carries it as msgpack
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"sample_metadata cannot be sent: {error}") from error
        self._sample.metadata = {**noted, NUM_TURNS: max(self._num_turns, self._sample.num_turns)}

    def _turn(self) -> Turn:
        """Return the next turn: the recorded one during a replay, otherwise a new one."""
        sample = self._sample
        if self._num_turns == len(sample.turns):
            sample.pending = Int32Array(self._inputs)
            sample.turns.append(Turn())
        return sample.turns[self._num_turns]

    async def _go_on(self, turn: Turn, stop: Sequence[str] | None, max_new_tokens: int) -> None:
        """Send requests until the turn has ended."""
        sample = self._sample
        self.asking, self._scope.deadline = True, math.inf
        cut_short = True
        while cut_short and turn.num_tokens < max_new_tokens:
            room = tokens_left(sample, self._max_tokens) - len(sample.pending)
            if room <= 0:
                await self._leave(SampleStatus.TRUNCATED)
            cut_short = await self._ask(sample, stop, min(room, max_new_tokens - turn.num_tokens))
            if not cut_short and sample.turn_status is SampleStatus.ABORTED:
                await self._leave(SampleStatus.ABORTED)
        self.asking, self._scope.deadline = False, anyio.current_time() + BETWEEN_TURNS_S

    async def _leave(self, status: SampleStatus) -> None:
        """End the function, which is waiting in this call."""
        self._end(status)
        await anyio.sleep_forever()

    def _end(self, status: SampleStatus) -> None:
        self.over = self.over or status
        self._scope.cancel()
