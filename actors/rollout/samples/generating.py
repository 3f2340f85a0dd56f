"""Generates the tokens of a group's samples: as a batch, one by one, or turn by turn in a user-defined function."""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import anyio
import msgspec
import structlog

from actors.rollout.pools.answering import AnsweringPool, PoolTurn
from actors.rollout.requests.request import GenerateRequest, SampleInput
from actors.rollout.requests.verdict import Outcome
from actors.rollout.samples.conversation import Conversation, FunctionFailed, FunctionUnusable, GenerateFunction
from actors.rollout.samples.generate_function import KEY, KeyedFunction, is_deterministic
from actors.rollout.samples.held import Delivery, Episode, HeldGroup
from actors.rollout.samples.partial import SegmentStore
from actors.rollout.samples.rollout_function import KEY as ROLLOUT_KEY
from actors.rollout.samples.rollout_function import one_turn
from actors.rollout.samples.sample import FINISHED, OpenSample, tokens_left
from actors.rollout.samples.scoring import grade_text
from actors.rollout.samples.tasks import GroupTask
from actors.rollout.samples.tools import GroupDependencies
from actors.rollout.sglang.answers import numbers_of
from messages import EngineLoad, EngineNumbers, SampleStatus, SamplingParams
from runtime.util.formatting import count_of

log = structlog.get_logger()

STORE_S: Final = 5.0  # seconds for which a halted function waits for a store; the end of its sample then repeats it


class Generation:
    """The requests and conversations of one group."""

    def __init__(
        self, task: GroupTask, tools: GroupDependencies, store: SegmentStore, held: HeldGroup | None = None
    ) -> None:
        """Generate for a task; segments go to the store, which the caller flushes after the last one of a sample.

        Args:
            task: of the group.
            tools: what all groups use.
            store: takes the segments.
            held: samples and functions of an earlier delivery, which go on.
        """
        self.engine = EngineNumbers()
        self.last_engine = ""  # that answered the newest request; empty: unknown
        self._task = task
        self._tools = tools
        self._function = tools.generate_function(task.eval_set)
        rollout = tools.rollout_function(task.eval_set)
        if self._function is None and rollout is not None:
            self._function = KeyedFunction(KEY, one_turn)
        self._reopens_all = getattr(rollout, "reopens_samples", False)
        self._is_recipes = rollout is None  # no rollout function, which runs again, decides what the functions do
        self._store = store
        self._kept = frozenset[int]() if held is None else frozenset(held.samples)
        self.episodes: dict[int, Episode] = {} if held is None else held.episodes  # that have not ended, by sample
        self._conversations: list[Conversation] = []  # of functions that end at a halt
        self._num_requests = 0
        self._begun: dict[int, Callable[[], None]] = {}  # by sample
        self._halted = False

    @property
    def last_load(self) -> EngineLoad | None:
        """Load of the engine that answered the newest request; None: unknown."""
        return self._tools.generator.load_of(self.last_engine)

    def unfinished(self, samples: Sequence[OpenSample]) -> list[OpenSample]:
        """Return the samples that need tokens. A sample without room for another token is truncated instead."""
        all_again = self._reopens_all and not all(sample.finished and not sample.unscored for sample in samples)
        return [sample for sample in samples if self._reopened(sample, again=all_again) or self._is_open(sample)]

    def batch(self, samples: Sequence[OpenSample]) -> list[OpenSample]:
        """Return the samples that begin with one common request."""
        if not self._tools.batch_requests or self._function is not None:
            return []
        return [sample for sample in samples if not sample.buffer.num_tokens and not sample.is_baseline]

    def goes_ahead(self, samples: Sequence[OpenSample]) -> bool:
        """Whether the first of these samples goes ahead, so that the others find the prompt in the engine's cache."""
        if not self._tools.prompt_first or self._function is not None or not self._task.store:
            return False
        return len(samples) > 1 and not any(sample.buffer.num_tokens for sample in samples)

    def note_begun(self, sample: OpenSample, begun: Callable[[], None]) -> None:
        """Have a function called once a sample has its first token; an end without one does not call it."""
        self._begun[sample.index] = begun

    async def begin(self, samples: Sequence[OpenSample]) -> None:
        """Send the common request of a batch. `run` completes each of its samples."""
        await self._send(samples, self._params(samples[0]))

    async def run(self, sample: OpenSample, function: GenerateFunction | None = None) -> None:
        """Generate a sample to its end, over as many requests as needed, or until the round is halted.

        Args:
            sample: of the group.
            function: that the rollout function chose for it; None: the one of the recipe, or none.
        """
        own = self._function if function is None else KeyedFunction(ROLLOUT_KEY, function)
        if own is not None:
            await self._converse(sample, own)
            return
        while self._is_open(sample) and await self._send([sample], self._params(sample)):
            await self._store.flush()

    def halt(self) -> None:
        """Halt user-defined functions at their next wait. Running requests end by themselves and keep their tokens."""
        self._halted = True
        for conversation in self._conversations:
            conversation.halt()
        for episode in self.episodes.values():
            episode.halt()

    def _is_open(self, sample: OpenSample) -> bool:
        if sample.index in self.episodes:  # it ends as its function does
            return True
        if not sample.finished and tokens_left(sample, self._task.sampling.max_new_tokens) <= 0:
            sample.status = SampleStatus.TRUNCATED
        return not sample.finished

    def _reopened(self, sample: OpenSample, *, again: bool) -> bool:
        """Reopen an unscored sample with all its turns, so that its user-defined function runs again.

        The function's text between the turns is stored nowhere, but is needed for the score. Siblings may come from
        different deliveries of a task; a replay shows whether they belong together. A sample that this process still
        has needs none.

        Args:
            sample: of the group.
            again: whether the rollout function goes through ended samples too.
        """
        if sample.index in self._kept:
            return False
        if self._function is None or not (sample.unscored or (sample.finished and (again or sample.siblings))):
            return False
        for part in sample.parts:
            part.status, part.reward, part.own_score = SampleStatus.ABORTED, None, None
        return True

    async def _converse(self, sample: OpenSample, own: KeyedFunction) -> None:
        """Generate a sample turn by turn with the user-defined function, which may begin again from the prompt."""
        for num_starts in range(1, own.max_starts + 1):
            conversation = await self._run_function(own, sample)
            if conversation is None or not conversation.starts_again:
                return
            reason = conversation.mismatch or conversation.reason or "the function aborted it"
            if conversation.mismatch is not None and is_deterministic(own.function):
                did = "it is marked deterministic, and did something else when it ran again"
                sample.give_up(f"{own.key}: {did}: {reason}")
                return
            if num_starts == own.max_starts and conversation.mismatch is None:
                sample.give_up(f"{own.key}: aborted {count_of(num_starts, 'time')}, last: {reason}")
                return
            log.warning("sample_starts_again", index=sample.index, reason=reason)
            await self._store.start_again(sample)
        sample.give_up(f"{own.key}: it did something else each time it ran again")

    async def _run_function(self, own: KeyedFunction, sample: OpenSample) -> Conversation | None:
        """Run the function, or let it go on; return its conversation, None if it failed or was halted."""
        if self._halted:
            return None
        episodes = self._tools.episodes
        is_held = episodes is not None and self._task.round is not None and self._is_recipes
        try:
            if episodes is not None and is_held:
                episode = self.episodes.get(sample.index)
                if episode is None:
                    episode = self.episodes[sample.index] = Episode()
                    episodes.start(episode, self._conversation(own, sample, episode), own.function)
                conversation = episode.conversation
                assert conversation is not None
                if not await episode.carried_by(Delivery(self._ask_for_turn, self._keep, self._task.give_up)):
                    conversation.pause()
                    return None
                del self.episodes[sample.index]
                status = episode.status()
            else:
                conversation = self._conversation(own, sample)
                self._conversations.append(conversation)
                try:
                    status = await conversation.run(own.function)
                finally:
                    self._conversations.remove(conversation)
        except FunctionFailed as error:
            await self._tools.outcomes.failed(self._task, error)
            action = self._tools.on_exception if self._task.round is not None else "drop_sample"
            if action == "drop_group" or isinstance(error, FunctionUnusable):
                raise
            sample.fail_function(str(error), action, self._tools.reward_keys)
            return None
        if not self._halted:
            await self._tools.outcomes.worked(self._task)
        if status is SampleStatus.FAILED:
            sample.give_up(f"{conversation.key}: {conversation.reason}")
        else:
            sample.status = status
        return conversation

    def _conversation(self, own: KeyedFunction, sample: OpenSample, episode: Episode | None = None) -> Conversation:
        """Return the conversation of a function that begins. With an episode it is not bound to this delivery."""
        return Conversation(
            self._task.prompt,
            sample,
            params=self._params(sample),
            ask=self._ask_for_turn if episode is None else episode.ask,
            model=self._tools.model,
            keep=self._keep if episode is None else episode.keep,
            trains_temperatures=not self._tools.pools_of(self._task.prompt.data),  # they compute log-probs at 1
            limit_s=self._tools.function_limit_s if own.own_s is None else own.own_s,
            is_limit_of_all=own.own_s is not None,
            evaluation=self._task.round is None,
            grade=partial(grade_text, self._tools.scorer, self._task, sample.index),
            pools={name: partial(self._ask_pool, pool) for name, pool in self._tools.function_pools.items()},
            give_up=self._task.give_up if episode is None else episode.give_up,
            key=own.key,
            running=self._tools.conversations,
            group_id=None if self._task.round is None else self._task.group_id,
        )

    async def _keep(self, sample: OpenSample) -> None:
        """Store the tokens that a service gave as a turn. A halt or a timeout of the function comes afterwards."""
        self._store.take(sample)
        sample.end_turn()  # with its tokens: a turn that is stored as unfinished would get the service's tokens twice
        with anyio.move_on_after(STORE_S, shield=True):
            await self._store.flush()

    async def _ask_pool(
        self, pool: AnsweringPool, sample: OpenSample, ids: list[int], params: SamplingParams, limit: int
    ) -> PoolTurn:
        self._num_requests += 1
        rid = f"{self._task.lease}-{sample.index}-{self._num_requests}"
        seed = sampling_seed(self._tools.seed, self._task.source, sample.index, sample.part)
        return await pool.turn(rid, ids, params, limit, seed)

    async def _ask_for_turn(self, sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        sample.turn_status = SampleStatus.ABORTED
        goes_on = await self._send([sample], params, limit)
        await self._store.flush()
        return goes_on

    async def _send(self, samples: Sequence[OpenSample], params: SamplingParams, limit: int | None = None) -> bool:
        """Send one request and take its tokens; return whether the samples may go on with another one."""
        request = self._request(samples, params, limit)
        for sample in samples:
            sample.request = request
        try:
            outcome = await self._tools.generator.generate(request)
        except BaseException:  # e.g. a timeout of a generate function: tokens that no segment has are dropped
            for sample in samples:
                sample.request = None
            for reader in request.readers:
                reader.discard()
            raise
        self.last_engine = request.engine
        self.engine = self.engine.plus(numbers_of(reader.meta for reader in request.readers))
        in_turns = self._function is not None
        for sample, reader in zip(samples, request.readers, strict=False):  # no readers: it was never sent
            sample.turn_status = reader.status
            sample.status = SampleStatus.ABORTED if in_turns else reader.status
            self._store.take(sample)
            if in_turns and reader.status in FINISHED:
                sample.end_turn()  # before the spill event reports it
        for sample in samples:
            sample.request = None
        return outcome is Outcome.RESEND

    def _params(self, sample: OpenSample) -> SamplingParams:
        """Return the sampling parameters of a sample: the task's, or greedy ones for the baseline."""
        params = self._task.sampling
        if not sample.is_baseline:
            return params
        return msgspec.structs.replace(params, temperature=0.0, top_p=1.0, top_k=-1, return_sampling_mask=False)

    def _request(self, samples: Sequence[OpenSample], params: SamplingParams, limit: int | None) -> GenerateRequest:
        task = self._task
        self._num_requests += 1
        inputs = [
            SampleInput(
                sample.prompt_of(task.prompt.prompt_ids),
                sample.buffer,
                sample.pending,
                sampling_seed(self._tools.seed, task.source, sample.index, sample.part),
            )
            for sample in samples
        ]
        return GenerateRequest(
            rid=f"{task.lease}-{samples[0].index}-{self._num_requests}",
            inputs=inputs,
            params=params,
            max_new_tokens=limit or tokens_left(samples[0], params.max_new_tokens),
            min_version=task.min_version,
            round=task.round,
            may_stream=len(samples) == 1 and task.store,  # a batch cannot, and unstored tokens need not
            begun=self._begun.get(samples[0].index),
        )


def sampling_seed(run_seed: int, source: tuple[object, ...], index: int, part: int = 0) -> int:
    """Return a 63-bit seed, the range that engines accept. It is equal in every run of a recipe.

    The attempt is not part of the seed. Engines sample by seed and position, so a sample that continues elsewhere
    continues its random sequence.

    Args:
        run_seed: run.seed.
        source: identifies a prompt group, or an item of an evaluation set.
        index: of the sample in that source.
        part: of its fan-out siblings.
    """
    place = (run_seed, source, index, part) if part else (run_seed, source, index)
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
