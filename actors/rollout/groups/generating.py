"""Generates the samples of a group: as a batch, one by one, or turn by turn in a user-defined function."""

import hashlib
import time
from collections.abc import Callable, Sequence

import anyio
import msgspec

from actors.rollout.groups.open_samples import FINISHED, OpenSample, tokens_left
from actors.rollout.groups.spilling import SegmentStore
from actors.rollout.groups.tasks import GroupTask
from actors.rollout.groups.tools import GroupDependencies
from actors.rollout.requests.request import Generated, GenerateRequest
from actors.rollout.sessions.conversation import Conversation
from actors.rollout.sglang.answers import Answer, numbers_of, status_of
from actors.rollout.sglang.streams import Stream
from messages import EngineNumbers, SampleStatus, SamplingParams


class Generation:
    """The requests and conversations of one group."""

    def __init__(
        self,
        task: GroupTask,
        tools: GroupDependencies,
        store: SegmentStore,
        on_ended: Callable[[Sequence[OpenSample]], None],
        on_answer: Callable[[], None],
    ) -> None:
        """Generate for a task.

        Args:
            task: the task.
            tools: dependencies of the group.
            store: where the tokens go.
            on_ended: gets samples that may have all their tokens, possibly more than once.
            on_answer: called after each answer, before it is stored.
        """
        self.took_s = 0.0
        self.over = False
        self.engine = EngineNumbers()
        self.streams: dict[int, Stream] = {}  # newest stream by sample index
        self._task = task
        self._tools = tools
        self._store = store
        self._on_ended = on_ended
        self._on_answer = on_answer
        self._conversations: list[Conversation] = []
        self._num_requests = 0
        self._halted = False

    def unfinished(self, samples: Sequence[OpenSample]) -> list[OpenSample]:
        """Return the samples that need tokens. A sample without room for another token is truncated instead."""
        return [sample for sample in samples if self._reopened(sample) or self._is_open(sample)]

    async def run(self, samples: Sequence[OpenSample]) -> None:
        """Generate all samples to their end, or until the round is halted."""
        started = time.monotonic()
        batched, one_by_one = self._tools.batch_requests, self._generate_alone
        if self._tools.custom_generate is not None:
            batched, one_by_one = False, self._converse
        together = [sample for sample in samples if batched and not sample.prefix and not sample.is_baseline]
        alone = [sample for sample in samples if sample.prefix or sample.is_baseline or not batched]
        async with anyio.create_task_group() as group:
            for sample in alone:
                group.start_soon(one_by_one, sample)
            if together and await self._generate(together):
                for sample in together:
                    group.start_soon(self._generate_alone, sample)
        self.took_s = time.monotonic() - started
        self.over = True

    def halt(self) -> None:
        """Halt user-defined functions at their next wait. Running requests end by themselves and keep their tokens."""
        self._halted = True
        for conversation in self._conversations:
            conversation.halt()

    def _is_open(self, sample: OpenSample) -> bool:
        if not sample.finished and tokens_left(sample, self._task.sampling.max_new_tokens) <= 0:
            sample.status = SampleStatus.TRUNCATED
        return not sample.finished

    def _reopened(self, sample: OpenSample) -> bool:
        """Reopen an unscored sample with all its turns, so that its user-defined function runs again.

        The function's text between the turns is stored nowhere, but is needed for the score.
        """
        if self._tools.custom_generate is None or not sample.unscored:
            return False
        sample.status = SampleStatus.ABORTED
        return True

    async def _generate_alone(self, sample: OpenSample) -> None:
        """Generate a sample to its end, over as many requests as needed."""
        while self._is_open(sample) and await self._generate([sample]):
            pass
        self._on_ended([sample])  # no-op if already called when its tokens arrived

    async def _converse(self, sample: OpenSample) -> None:
        """Generate a sample turn by turn with the user-defined function."""
        assert self._tools.custom_generate is not None
        max_tokens = self._task.sampling.max_new_tokens
        conversation = Conversation(
            self._task.prompt, sample, max_tokens=max_tokens, ask=self._ask_for_turn, model=self._tools.model
        )
        if self._halted:
            return
        self._conversations.append(conversation)
        self._tools.conversations.add(conversation)
        try:
            sample.status = await conversation.run(self._tools.custom_generate)
        finally:
            self._tools.conversations.discard(conversation)
        self._on_ended([sample])

    async def _ask_for_turn(self, sample: OpenSample, stop: Sequence[str] | None, limit: int) -> bool:
        sample.turn_status = SampleStatus.ABORTED
        params = self._params(sample)
        if stop is not None:
            params = msgspec.structs.replace(params, stop=tuple(stop))
        return await self._generate([sample], params, limit)

    async def _generate(
        self, samples: Sequence[OpenSample], params: SamplingParams | None = None, limit: int | None = None
    ) -> bool:
        """Send one request; return whether the answer was cut short and may be continued."""
        request = self._request(samples, params or self._params(samples[0]), limit)
        generated = await self._tools.generator.generate(request, self._show(samples))
        if generated is None:
            return False
        self.engine = self.engine.plus(numbers_of(generated.answers))
        in_turns = self._tools.custom_generate is not None
        for sample, answer in zip(samples, generated.answers, strict=True):
            self.streams.pop(sample.index, None)
            sample.turn_status = status = _status(generated, answer)
            self._store.receive(sample, answer, SampleStatus.ABORTED if in_turns else status)
            if in_turns and status in FINISHED:
                sample.end_turn()  # before the spill event reports it
        self._on_answer()
        await self._store.flush()
        self._on_ended(samples)  # includes samples that ended without tokens
        return generated.cut_short

    def _params(self, sample: OpenSample) -> SamplingParams:
        """Return the sampling parameters of a sample: the task's, or greedy ones for the baseline."""
        params = self._task.sampling
        if not sample.is_baseline:
            return params
        return msgspec.structs.replace(params, temperature=0.0, top_p=1.0, top_k=-1, return_sampling_mask=False)

    def _request(self, samples: Sequence[OpenSample], params: SamplingParams, limit: int | None) -> GenerateRequest:
        task, prompt = self._task, self._task.prompt.prompt_ids.tolist()
        self._num_requests += 1
        return GenerateRequest(
            rid=f"{task.lease}-{samples[0].index}-{self._num_requests}",
            input_ids=[prompt + sample.prefix + sample.pending for sample in samples],
            params=params,
            seeds=[sampling_seed(self._tools.seed, task.source, sample.index) for sample in samples],
            max_new_tokens=limit or tokens_left(samples[0], params.max_new_tokens),
            min_version=task.min_version,
            round=task.round,
        )

    def _show(self, samples: Sequence[OpenSample]) -> Callable[[Stream], None] | None:
        """Return the callback for a request's stream; None if it is not streamed.

        Batches are not streamed, nor are samples that are not stored.
        """
        if len(samples) > 1 or not self._task.store:
            return None
        (sample,) = samples

        def show(stream: Stream) -> None:
            self.streams[sample.index] = stream

        return show


def _status(generated: Generated, answer: Answer) -> SampleStatus:
    if generated.cut_short and not (answer.meta_info.finish_reason or {}):
        return SampleStatus.ABORTED
    return status_of(answer)


def sampling_seed(run_seed: int, source: tuple[object, ...], index: int) -> int:
    """Return a 63-bit seed, the range that engines accept. It is equal in every run of a recipe.

    The attempt is not part of the seed. Engines sample by seed and position, so a sample that continues elsewhere
    continues its random sequence.

    Args:
        run_seed: run.seed.
        source: identifies a prompt group, or an item of an evaluation set.
        index: of the sample in that source.
    """
    digest = hashlib.blake2b(repr((run_seed, source, index)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
