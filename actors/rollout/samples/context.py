"""One conversation of a sample, as a generate function uses it: turns, input between them, and what is trained."""

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from inspect import isawaitable
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from actors.rollout.samples.arguments import checked_ids, checked_integer, checked_sampling, checked_text, shown_ids
from actors.rollout.samples.buffer import NOTHING
from actors.rollout.samples.function_run import FunctionRun
from actors.rollout.samples.sample import NUM_TURNS, OpenSample, Turn, tokens_left
from messages import Float32Array, Int32Array, SampleStatus, SamplingParams, Score, WeightSpan
from runtime.data.tokens import GREEDY
from runtime.util.rewards import reward_problem

MAX_METADATA_BYTES: Final = 65_536  # of one sample, as JSON: events carry it
MAX_RANGES: Final = 1_024  # ranges of tokens that do not train, of one sample

Service = Callable[[list[int]], Awaitable[Any]]
SET_HERE: Final = frozenset(  # attributes; another name is a user's misspelt one
    "prompt label metadata sample_metadata text reward rewards turn_rewards asking is_cut_off".split()
    + "model index group_id sampling evaluation starts_again reason key".split()  # of the first conversation
)


class TurnTokens(NamedTuple):
    """The tokens of a finished turn, as the engine gave them."""

    ids: list[int]
    log_probs: list[float]  # natural log
    text: str


class Context:
    """One conversation. `generate` gets the next model turn; `append` and `append_ids` add input for it.

    Attributes:
        prompt: of the row, as text.
        label: of the row.
        metadata: of the row.
        sample_metadata: of this conversation; visible to the dynamic filter and in dumps.
        text: the response so far: model turns and the input between them.
        reward: set it, and no grader grades the sample.
        rewards: named rewards beside it, for `algorithm.estimator.reward_keys`.
        turn_rewards: rewards of its turns, with `reward.per`; their sum is the reward. None: that turn has none.
    """

    def __init__(self, run: FunctionRun, sample: OpenSample) -> None:
        self.prompt = run.prompt.text
        # copies: what the function does to them reaches neither graders nor other samples
        self.label = deepcopy(run.prompt.label)
        self.metadata: Mapping[str, Any] = deepcopy(run.prompt.metadata)
        self.sample_metadata: dict[str, Any] = {}
        self.text = ""
        self.reward: float | None = None
        self.rewards: dict[str, float] = {}
        self.turn_rewards: Sequence[float | None] = ()
        self.asking = False
        self.is_cut_off = False  # the newest turn failed after its first tokens, e.g. by a timeout of the function
        self._run = run
        self._sample = sample
        self._inputs: list[int] = []
        self._num_turns = 0
        self._num_replayed = sample.num_turns
        self._untrained: list[tuple[int, int]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SET_HERE and not name.startswith("_"):
            kept = "keep values of your own in variables, or in sample_metadata"
            allowed = "reward, rewards, turn_rewards"
            raise AttributeError(f"a conversation has no {name!r} to set; allowed: {allowed}; {kept}")
        super().__setattr__(name, value)

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the response."""
        return self._prompt_ids.tolist()

    @property
    def ids(self) -> list[int]:
        """The tokens of the response so far: finished turns, and the input between and after them."""
        return [*self._sample.buffer.ids[: self._end_of(self._num_turns)].tolist(), *self._inputs]

    @property
    def part(self) -> int:
        """Number of this conversation of its sample; 0: the first one."""
        return self._sample.part

    @property
    def recorded_input(self) -> list[int]:
        """The tokens before the next turn, of an earlier run of the function; none if it had no further turn."""
        turns = self._sample.turns
        return turns[self._num_turns].inputs.tolist() if self._num_turns < len(turns) else []

    @property
    def turns(self) -> list[TurnTokens]:
        """The finished turns of the model."""
        return [self._tokens_of(number) for number in range(self._num_turns)]

    @property
    def newest_turn(self) -> tuple[TurnTokens, tuple[WeightSpan, ...], bool]:
        """The turn that finished last, which version sampled which of its tokens, and whether it was cut off."""
        number, sample = self._num_turns - 1, self._sample
        is_cut_off = sample.turn_status is not SampleStatus.COMPLETED
        return self._tokens_of(number), tuple(sample.turns[number].weight_spans), is_cut_off

    @property
    def room(self) -> int:
        """Tokens that this conversation may still get; without any, `generate` ends the sample as truncated."""
        return max(0, self._limit - self._end_of(self._num_turns) - len(self._inputs))

    async def generate(
        self,
        *,
        stop: Sequence[str] | None = None,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        stop_token_ids: Sequence[int] = (),
        pool: str | None = None,
        train: bool = True,
    ) -> str:
        """Return the model's next turn as text. Never returns if the sample is halted or has no room for more tokens.

        Args:
            stop: stop strings of the turn; None: those of the recipe.
            max_new_tokens: limit of this turn; None: the room left in the conversation.
            temperature: of this turn; None: the recipe's. The trainer computes its log-probs at it. A greedy turn does
                not train.
            top_p: of this turn; None: the recipe's. A turn with a cut distribution of its own trains only with
                `rollout.return_sampling_mask` and a `top_k` from 2 to the recipe's.
            top_k: as `top_p`; -1: off.
            stop_token_ids: tokens that end this turn, besides those of the recipe and the model.
            pool: an engine pool in `rollout.pools`, whose model makes the turn. It does not train.
            train: whether the turn's tokens train, if the trainer can compute their log-probs.

        Raises:
            ValueError: the previous turn is still running, no input was added after it, or an argument is invalid.
        """
        if isinstance(stop, str):  # otherwise each letter would be a stop string
            raise ValueError(f"stop = {stop!r}: write a list of texts")
        self._run.model.check_stop(stop or ())
        max_new_tokens = checked_integer("max_new_tokens", max_new_tokens)
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {max_new_tokens}: a turn has at least 1 token")
        temperature, top_p, top_k = checked_sampling(temperature, top_p, top_k)
        params = self._params_of(stop, temperature, top_p, top_k)
        if stop_token_ids:
            ends = (*params.stop_token_ids, *checked_ids(self._run.model, stop_token_ids))
            params = msgspec.structs.replace(params, stop_token_ids=ends)
        limit = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        if pool is not None:
            return await self._generate_in(pool, params, limit)
        turn = await self._next_turn(temperature)
        if self._num_turns >= self._num_replayed:
            with self._running(turn):
                await self._go_on(turn, params, limit)
        return self._end_turn(turn, train=train and self._trains(params))

    async def _generate_in(self, pool: str, params: SamplingParams, limit: int) -> str:
        run = self._run
        if pool not in run.pools:
            allowed = ", ".join(run.pools) or "none; name engine pools in rollout.pools"
            raise ValueError(f"pool = {pool!r}; allowed: {allowed}")

        async def service(ids: list[int]) -> Any:
            return await run.in_pool(pool, self._sample, ids, params, min(limit, self.room))

        return await self.generate_by(service, train=False)

    async def generate_by(self, service: Service, *, train: bool = True) -> str:
        """Return the next turn, from a service of yours instead of an engine. A replay does not call it again.

        Args:
            service: async function. Gets all tokens so far; returns (ids, log_probs) or (ids, log_probs, text).
            train: whether the tokens train; then each needs its log-prob. Without: log_probs may be None.

        Raises:
            ValueError: the answer is none of these, or a token or a log-prob is impossible.
        """
        turn = await self._next_turn()
        if self._num_turns >= self._num_replayed:
            if turn.num_tokens:
                await self._run.leave(mismatch=f"turn {self._num_turns + 1}: begun by an engine, now of a service")
            sample = self._sample
            with self._running(turn):
                awaited: Any = service([*self.prompt_ids, *self.ids])
                if not isawaitable(awaited):
                    raise TypeError(f"the service is not async and returned {awaited!r:.200}: write `async def`")
                answer = await awaited
                ids, log_probs, text = self._checked(answer, train=train)
                sample.buffer.append_input(sample.pending)
                sample.buffer.append(ids, log_probs, text, "")
                await self._run.over_bus(self._run.keep(sample))
        self._sample.turn_status = SampleStatus.COMPLETED  # only the function knows whether its service was cut off
        return self._end_turn(turn, train=train)

    def append(self, text: str) -> None:
        """Append text after the last turn; it is excluded from the loss."""
        self.append_ids(self._run.model.encode(checked_text(text, "append")))
        self.text += text

    def append_ids(self, ids: Sequence[int]) -> None:
        """Append tokens after the last turn; they are excluded from the loss.

        Raises:
            ValueError: a token is outside of the vocabulary, or there was no turn yet.
        """
        if not self._num_turns:
            raise ValueError("the first turn must be the model's: put earlier text into the prompt")
        self._inputs.extend(checked_ids(self._run.model, ids))

    @contextmanager
    def input_of_a_turn(self) -> Generator[None]:
        """Take back the input that is appended in this block, if the block's turn fails."""
        text, inputs = self.text, [*self._inputs]
        try:
            yield
        except BaseException:
            self.text, self._inputs = text, inputs
            raise

    def do_not_train(self, turn: int = -1, start: int = 0, end: int | None = None) -> None:
        """Exclude tokens [start, end) of a finished turn from the loss; without a range, all of it.

        Raises:
            ValueError: there is no such turn, or it has no such tokens.
        """
        if not -self._num_turns <= turn < self._num_turns:
            raise ValueError(f"turn = {turn}: there are {self._num_turns} turns")
        number = turn % self._num_turns
        size, last = self._sample.turns[number].num_tokens, self._end_of(number + 1)
        end = size if end is None else end
        if not 0 <= start <= end <= size:
            raise ValueError(f"tokens [{start}, {end}): the turn has {size} tokens")
        self._untrained.append((last - size + start, last - size + end))

    @property
    def _prompt_ids(self) -> Int32Array:
        return self._sample.prompt_of(self._run.prompt.prompt_ids)

    @property
    def _limit(self) -> int:
        """Most response tokens: a conversation with a longer prompt than the row's has less room."""
        prompt_len = len(self._run.prompt.prompt_ids)
        return self._run.params.max_new_tokens - max(0, len(self._prompt_ids) - prompt_len)

    def _params_of(
        self, stop: Sequence[str] | None, temperature: float | None, top_p: float | None, top_k: int | None
    ) -> SamplingParams:
        """Return the sampling parameters of a turn. The greedy sample of a group stays greedy."""
        recipe = self._run.params
        own: dict[str, Any] = {} if stop is None else {"stop": tuple(stop)}
        if not self._sample.is_baseline:
            chosen = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
            own |= {name: value for name, value in chosen.items() if value is not None}
        params = msgspec.structs.replace(recipe, **own)
        if params.temperature < GREEDY:
            return msgspec.structs.replace(params, top_p=1.0, top_k=-1, return_sampling_mask=False)
        is_listed = params.return_sampling_mask and 2 <= params.top_k <= recipe.top_k
        return msgspec.structs.replace(params, return_sampling_mask=is_listed)

    def _trains(self, params: SamplingParams) -> bool:
        """Whether the trainer's log-probs are those of the distribution that a turn's tokens come from.

        What the recipe's top-p and top-k cut off without a list of the kept tokens is the recipe's choice.
        """
        recipe = self._run.params
        if params.temperature != recipe.temperature and (
            params.temperature < GREEDY or not self._run.trains_temperatures
        ):
            return False
        if params.return_sampling_mask or recipe.return_sampling_mask:
            return params.return_sampling_mask
        return (params.top_p, params.top_k) in ((recipe.top_p, recipe.top_k), (1.0, -1))

    def _end_of(self, num_turns: int) -> int:
        """Return the number of response tokens up to the end of that many turns."""
        return sum(len(turn.inputs) + turn.num_tokens for turn in self._sample.turns[:num_turns])

    def _tokens_of(self, number: int) -> TurnTokens:
        turn, end = self._sample.turns[number], self._end_of(number + 1)
        buffer, start = self._sample.buffer, end - turn.num_tokens
        return TurnTokens(buffer.ids[start:end].tolist(), buffer.log_probs[start:end].tolist(), turn.text)

    async def _next_turn(self, temperature: float | None = None) -> Turn:
        """Return the next turn: the recorded one during a replay, otherwise a new one."""
        if self.asking:
            raise ValueError("two turns at the same time: each begins after the one before has ended")
        if self._num_turns and not self._inputs:
            raise ValueError("two turns in a row: append text or token ids between them")
        sample, inputs = self._sample, Int32Array(self._inputs)
        if self._num_turns == len(sample.turns):
            sample.pending = inputs
            sample.turns.append(Turn(inputs=inputs, temperature=temperature))
        turn = sample.turns[self._num_turns]
        if not np.array_equal(turn.inputs, inputs):
            where = f"input before turn {self._num_turns + 1}"
            await self._run.leave(mismatch=f"{where}: {shown_ids(turn.inputs)}, now {shown_ids(inputs)}")
        if turn.temperature != temperature:
            where = f"temperature of turn {self._num_turns + 1}"
            await self._run.leave(mismatch=f"{where}: {turn.temperature}, now {temperature}")
        sample.turn_status = SampleStatus.PENDING
        return turn

    @contextmanager
    def _running(self, turn: Turn) -> Generator[None]:
        """Mark a turn as running. If it fails without a token, it has not begun; otherwise `generate` continues it."""
        self.asking = True
        try:
            yield
        except BaseException:
            self.is_cut_off = turn.num_tokens > 0
            if not self.is_cut_off:
                self._sample.turns = [each for each in self._sample.turns if each is not turn]
                self._sample.pending = NOTHING
            raise
        finally:
            self.asking = False

    async def _go_on(self, turn: Turn, params: SamplingParams, max_new_tokens: int) -> None:
        """Send requests until the turn has ended."""
        run = self._run
        run.num_asking += 1
        run.let_work()
        try:
            async with run.requests:
                await self._ask(turn, params, max_new_tokens)
        finally:
            run.num_asking -= 1
            run.let_work()

    async def _ask(self, turn: Turn, params: SamplingParams, max_new_tokens: int) -> None:
        sample, cut_short = self._sample, True
        while cut_short and turn.num_tokens < max_new_tokens:
            room = tokens_left(sample, self._limit) - len(sample.pending)
            if room <= 0:
                await self._run.leave(SampleStatus.TRUNCATED)
            limit = min(room, max_new_tokens - turn.num_tokens)
            cut_short = await self._run.over_bus(self._run.ask(sample, params, limit))
            if not cut_short and sample.turn_status is SampleStatus.ABORTED:
                await self._run.leave(SampleStatus.ABORTED)

    def _end_turn(self, turn: Turn, *, train: bool) -> str:
        self._num_turns += 1
        self.is_cut_off = False
        self._inputs = []
        self.text += turn.text
        if not train:
            self.do_not_train()
        self.note()
        if self._run.halted:
            # takes effect at the function's next wait; if it returns first, the sample is complete
            self._run.scope.cancel()
        return turn.text

    def _checked(self, answer: Any, *, train: bool) -> tuple[Int32Array, np.ndarray[Any, Any], str]:
        """Check what a service answered."""
        parts: list[Any] = list(cast("tuple[Any, ...]", answer)) if isinstance(answer, tuple) else []
        if len(parts) not in (2, 3):
            raise ValueError(
                f"the service returned {answer!r:.200}; expected (ids, log_probs) or (ids, log_probs, text)"
            )
        given, log_probs = checked_ids(self._run.model, parts[0]), parts[1]
        if not 0 < len(given) <= self.room:
            raise ValueError(f"the service returned {len(given)} tokens; allowed: 1 to {self.room}")
        if log_probs is None and train:
            raise ValueError("the service returned no log-probs, which training needs: give them, or set train=False")
        found = np.zeros(len(given), np.float32) if log_probs is None else np.asarray(log_probs, np.float32)
        if found.shape != (len(given),) or not (np.isfinite(found) & (found <= 0)).all():
            raise ValueError(f"the service returned {len(given)} tokens, but not a log-prob of at most 0 for each")
        text = checked_text(parts[2], "the service's text: ") if len(parts) == 3 else self._run.model.decode(given)
        return Int32Array(given), found, text

    def note(self) -> None:
        """Copy the function's metadata to the sample. During a replay it keeps the count of all finished turns.

        Raises:
            ValueError: no event can carry it.
        """
        try:
            encoded = msgspec.json.encode(self.sample_metadata)
            noted = msgspec.json.decode(encoded, type=dict[str, Any])
            msgspec.msgpack.encode(noted)  # a later task carries it as msgpack
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"sample_metadata cannot be sent: {error}") from error
        if len(encoded) > MAX_METADATA_BYTES:
            raise ValueError(f"sample_metadata has {len(encoded)} bytes as JSON; allowed: at most {MAX_METADATA_BYTES}")
        self._sample.metadata = {**noted, NUM_TURNS: max(self._num_turns, self._sample.num_turns)}

    def settle(self) -> None:
        """Copy text, metadata and what does not train to the sample, after the function has ended.

        Raises:
            TypeError, ValueError: no event can carry the text or the metadata, or too many ranges do not train.
        """
        self.note()
        self._sample.dialogue = checked_text(self.text, "text")
        self._sample.untrained = _merged(self._untrained)

    def settle_reward(self) -> None:
        """Copy the function's reward to the sample, which has all its tokens.

        Raises:
            TypeError, ValueError, OverflowError: it is not a finite number, or there are others without it.
        """
        self._sample.own_score = self._own_score()

    def _own_score(self) -> Score | None:
        of_tokens = self._rewards_of_tokens() if self.turn_rewards else None
        reward = self.reward if self.reward is not None or of_tokens is None else float(of_tokens.sum())
        if reward is None:
            if self.rewards:
                raise ValueError("rewards without a reward: set both")
            return None
        values = {"reward": reward, **self.rewards}
        for name, value in values.items():
            checked_text(name, "the name of a reward: ")
            # numbers of NumPy and torch are not a float, but have __float__; a text has none
            problem = reward_problem(float(value)) if hasattr(value, "__float__") else "not a finite number"
            if problem is not None:
                raise ValueError(f"the reward {name!r} is {value!r:.100}, {problem}")
        named = {name: float(value) for name, value in self.rewards.items()}
        sample = self._sample
        score = Score(index=sample.index, part=sample.part, reward=float(reward), details=named or None)
        return score if of_tokens is None else msgspec.structs.replace(score, token_rewards=Float32Array(of_tokens))

    def _rewards_of_tokens(self) -> np.ndarray[Any, Any]:
        """Return the rewards of the turns, each at the last token of its turn, [T] of the response."""
        if self.part:
            raise ValueError("turn_rewards of a conversation that was opened: set those of the first one")
        if len(self.turn_rewards) > self._num_turns:
            raise ValueError(f"{len(self.turn_rewards)} turn_rewards for {self._num_turns} turns")
        found = np.zeros(self._sample.buffer.num_tokens)
        for number, reward in enumerate(self.turn_rewards, start=1):
            if reward is None:
                continue
            if (problem := reward_problem(float(reward))) is not None:
                raise ValueError(f"the reward of turn {number} is {reward!r:.100}, {problem}")
            found[self._end_of(number) - 1] = reward
        return found

    def left_out(self) -> str | None:
        """Return what this run of the function left out of what it had done before; None: nothing."""
        recorded = sum(turn.num_tokens > 0 for turn in self._sample.turns)
        begun = self._num_turns + self.is_cut_off
        return f"{recorded} turns, now {begun}" if recorded > begun else None

    @property
    def num_turns(self) -> int:
        """Number of finished turns."""
        return self._num_turns


def _merged(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges of tokens in order, without overlap."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    if len(merged) > MAX_RANGES:
        raise ValueError(f"{len(merged)} ranges of tokens do not train; allowed: at most {MAX_RANGES}")
    return tuple(merged)
