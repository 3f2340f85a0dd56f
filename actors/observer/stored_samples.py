"""Samples that a run's server still stores, read as an auditor when a person asks. For a run without dumps."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import msgspec
from anyio import from_thread

from actors.observer.shown_samples import spelled_label
from messages import (
    BatchReady,
    GroupCompleted,
    GroupsClosed,
    Message,
    Outcome,
    Prompt,
    Segment,
    SegmentsPublished,
    VerdictGiven,
)
from messages.codec import pack, unpack
from runtime.bus.errors import BusError, PayloadLost, PayloadUnreadable
from runtime.bus.viewing import Auditing
from runtime.data.dump_files import DumpError
from runtime.data.dumps import DumpedGroup, DumpedSample, Fate, group_of
from runtime.data.sample_index import IndexedGroup, SamplesGone, SampleSource, outcome_of
from runtime.data.stored_prompts import fetch_prompt
from runtime.data.trained_tokens import TrainedSample
from runtime.node.external_clients import ClientsUnreadable
from runtime.node.following import audited
from runtime.node.reopen import FoundRun, NoLog

KEPT_GROUPS: Final = 2_000  # newest completed ones
KEPT_BYTES: Final = 16_000_000  # of their events
KEPT_READ: Final = 4  # groups that were read last, with their tokens
KEPT_CHARS: Final = 200  # of the prompt and the label of each
NOT_REACHED: Final = (
    "The run's server does not give its samples. Those of a run that ended are in its dumps alone: run.dump_details."
)


class _Known(msgspec.Struct):
    """A completed group, from its event."""

    event: bytes  # GroupCompleted
    first_seq: int  # oldest data message that it needs
    group: IndexedGroup
    fate: Fate = Fate()
    prompt: tuple[str, str] | None = None  # the begin of prompt and label, once they were read


class StoredSamples(SampleSource):
    """Knows the newest completed groups of a run that goes on, and reads one of them from the data plane when asked.

    Events come by `take`. Each request connects anew, within `opened`. All but the reading is for the event loop.

    Args:
        run: as `find_run` finds it.
    """

    no_such = "The run's server stores no"
    no_trained = "What the trainer computed is in dumps alone: set run.dump_details and observe.tokens = true."
    preposition = "of"

    def __init__(self, run: FoundRun) -> None:
        super().__init__()
        self.live = False  # whether a node daemon runs the run; otherwise there is no server to ask
        self.since = 0  # log sequence of the first event; earlier groups are not known
        self._run = run
        self._known: dict[int, _Known] = {}  # by group id, oldest completion first
        self._num_bytes = 0
        self._stored: list[_Known] = []  # those whose samples are stored, as of the request
        self._read: dict[tuple[int, int], DumpedGroup] = {}  # by group and attempt, last read last
        self._audit: Auditing | None = None

    def place(self, step: int) -> str:
        """Say where the groups of a step are: its round."""
        return f"round {step}"

    @property
    def num_known(self) -> int:
        """Groups that it keeps, stored or not."""
        return len(self._known)

    def take(self, event: Message, seq: int) -> None:
        """Note what an event says about completed groups."""
        self.since = self.since or seq
        match event:
            case GroupCompleted():
                self._complete(event)
            case VerdictGiven():
                known = self._known.get(event.group_id)
                if known is not None and known.group.attempt == event.attempt and known.fate.verdict is None:
                    known.fate = Fate(verdict=event.outcome, verdict_reason=event.reason)
            case GroupsClosed():
                for known in self._of(event.group_ids):
                    if known.fate.verdict not in (Outcome.DROP, Outcome.FAILED):
                        known.fate = msgspec.structs.replace(known.fate, closed=event.reason)
            case BatchReady():
                for known in self._of([ref.group_id for ref in event.groups]):
                    known.fate = msgspec.structs.replace(known.fate, step=event.step)
            case _:
                pass

    def _of(self, group_ids: Sequence[int]) -> Iterator[_Known]:
        return (self._known[group_id] for group_id in group_ids if group_id in self._known)

    def _complete(self, event: GroupCompleted) -> None:
        before = self._known.get(event.group_id)
        seqs = [*_payloads_of(event), *event.prompt_parts]
        if not event.samples or not seqs or (before is not None and before.group.attempt >= event.attempt):
            return  # it has no samples, or is a late result of an earlier attempt
        known = _Known(pack(event), min(seqs), _group_of(event))
        self._forget(event.group_id)
        self._known[event.group_id] = known
        self._num_bytes += len(known.event)
        while len(self._known) > 1 and (len(self._known) > KEPT_GROUPS or self._num_bytes > KEPT_BYTES):
            self._forget(next(iter(self._known)))

    def _forget(self, group_id: int) -> None:
        known = self._known.pop(group_id, None)
        self._num_bytes -= 0 if known is None else len(known.event)

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None, None]:
        """Connect for one request, and forget the groups whose samples the run has removed.

        Raises:
            SamplesGone: no node daemon runs the run, or its server does not answer, or refuses.
        """
        if not self.live:
            raise SamplesGone(NOT_REACHED)
        async with AsyncExitStack() as stack:
            try:
                audit = await stack.enter_async_context(audited(self._run))
                first = await audit.first_seq()
            except (NoLog, BusError, ClientsUnreadable, ValueError, OSError) as error:
                raise SamplesGone(f"{NOT_REACHED} {error}") from error
            for group_id in [number for number, known in self._known.items() if not first or known.first_seq < first]:
                self._forget(group_id)
            self._stored, self._audit = list(self._known.values()), audit
            try:
                yield
            finally:
                self._audit = None

    # for a worker thread

    def advance(self, budget_s: float) -> None:
        """`opened` did it."""

    def groups(self) -> Iterator[IndexedGroup]:
        """Yield the stored groups, newest round first."""
        for known in sorted(self._stored, key=lambda known: known.group.step, reverse=True):
            outcome, reason = outcome_of(known.fate)
            yield msgspec.structs.replace(known.group, outcome=outcome, reason=reason)

    def samples(self, group: IndexedGroup) -> list[DumpedSample]:
        """Read the samples of a group, with what is known by now about what became of it."""
        samples, fate = self._group(group).samples, msgspec.structs.asdict(self._of_group(group).fate)
        return [msgspec.structs.replace(sample, **fate) for sample in samples]

    def tokens(self, group: IndexedGroup, place: int, sample: DumpedSample) -> tuple[Segment, ...]:
        """Read the tokens of a sample."""
        return self._group(group).segments[place]

    def trained(self, sample: DumpedSample, segments: Sequence[Segment]) -> TrainedSample | None:
        """Return None: the trainer adds to dumps alone."""
        return None

    def prompt(self, group: IndexedGroup) -> tuple[str, Any]:
        """Read the begin of the prompt and of the label of a group, once."""
        known = self._of_group(group)
        if known.prompt is None:
            first = self.samples(group)[0]
            known.prompt = first.prompt[:KEPT_CHARS], spelled_label(first.label)[:KEPT_CHARS]
        return known.prompt

    def _of_group(self, group: IndexedGroup) -> _Known:
        key = group.group_id, group.attempt
        known = next((each for each in self._stored if (each.group.group_id, each.group.attempt) == key), None)
        if known is None:
            raise SamplesGone(f"The samples of group {group.group_id} are not stored any more.")
        return known

    def _group(self, group: IndexedGroup) -> DumpedGroup:
        key = group.group_id, group.attempt
        found = self._read.pop(key, None)
        if found is None:
            found = from_thread.run(self._fetch, self._of_group(group))
        self._read[key] = found
        while len(self._read) > KEPT_READ:
            del self._read[next(iter(self._read))]
        return found

    async def _fetch(self, known: _Known) -> DumpedGroup:
        """Read a group from the data plane.

        Raises:
            SamplesGone: it was removed meanwhile, or the server has not answered in this request.
            DumpError: what is stored cannot be used.
        """
        event, audit = unpack(known.event, GroupCompleted), self._audit
        if audit is None:
            raise SamplesGone(NOT_REACHED)
        try:
            payloads = {seq: await audit.fetch(SegmentsPublished, seq) for seq in _payloads_of(event)}
            prompt: Prompt | None = await fetch_prompt(audit, event.prompt_parts) if event.prompt_parts else None
            return group_of(event, payloads, known.fate, prompt)
        except (PayloadUnreadable, ValueError) as error:
            raise DumpError(f"the samples of group {event.group_id} cannot be used: {error}") from error
        except PayloadLost as error:
            raise SamplesGone(f"The samples of group {event.group_id} are not stored any more.") from error
        except BusError as error:
            self._audit = None  # or each further group of a list would wait as long
            raise SamplesGone(f"{NOT_REACHED} {error}") from error


def _payloads_of(event: GroupCompleted) -> list[int]:
    return sorted({ref.seq for sample in event.samples for ref in sample.segments})


def _group_of(event: GroupCompleted) -> IndexedGroup:
    oldest = [sample.first_version for sample in event.samples if sample.first_version is not None]
    newest = [sample.last_version for sample in event.samples if sample.last_version is not None]
    return IndexedGroup(
        step=event.round,
        group_id=event.group_id,
        attempt=event.attempt,
        rewards=tuple(sample.reward for sample in event.samples),
        lengths=tuple(sample.response_len for sample in event.samples),
        versions=(min(oldest), max(newest)) if oldest and newest else None,
    )
