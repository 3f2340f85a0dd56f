"""Stores prompts that are too large for tasks and events, before issue, so that tasks can cite them."""

from collections.abc import Mapping
from typing import Final

import msgspec
import structlog

from actors.buffer.deciding.tasks import Prompts, Task
from messages import (
    EvalIssued,
    EvalRequested,
    EvalSetRequested,
    GroupsIssued,
    IssuedGroup,
    Message,
    Plane,
    Prompt,
)
from messages.codec import pack
from runtime.bus.bus import Bus
from runtime.bus.errors import MessageRefused
from runtime.data.stored_prompts import cited, is_large, store_prompt, stored_set
from runtime.ledger.state import LedgerState

log = structlog.get_logger()

NOWHERE: Final = 2**63  # a sequence that no stream reaches


class AvailablePrompts:
    """Prompts by number: those of the current decision from memory, all others from their source."""

    def __init__(self, current: Mapping[int, Prompt], prompts: Prompts) -> None:
        self._current = current
        self._prompts = prompts

    def prompt(self, number: int) -> Prompt:
        """The prompt with this number."""
        return self._current.get(number) or self._prompts.prompt(number)


class PromptStore:
    """Stores large prompts, and protects them from purging until a folded event cites them."""

    def __init__(self, bus: Bus) -> None:
        self.needed_from = NOWHERE  # data messages from this sequence on must not be purged
        self._to_store: frozenset[int] = frozenset()  # prompts of the newest decision, by number
        self._bus = bus

    async def citing(self, decision: Message, state: LedgerState, prompts: Mapping[int, Prompt]) -> Message:
        """Store the large prompts of a decision and return the decision citing them; call `settled` once it is folded.

        `bytes_to_store` was called for the decision before.

        A prompt that the bus refuses to store stays in its task; the bus then refuses the task.

        Args:
            decision: the decision.
            state: the ledger.
            prompts: prompts of the decision's groups, by number.

        Raises:
            StreamFull: the data stream has no room for them.
        """
        if isinstance(decision, EvalIssued):
            return msgspec.structs.replace(decision, payload_seq=await self._hold())
        if not isinstance(decision, GroupsIssued):
            return decision
        if not self._to_store:
            return decision
        groups = [await self._cite(issued, state, prompts[issued.prompt]) for issued in decision.groups]
        return msgspec.structs.replace(decision, groups=tuple(groups))

    async def _cite(self, issued: IssuedGroup, state: LedgerState, prompt: Prompt) -> IssuedGroup:
        if issued.prompt not in self._to_store or not _needs_storing(issued, state, prompt):
            return issued
        await self._hold()
        try:
            return msgspec.structs.replace(issued, prompt_parts=await store_prompt(self._bus, prompt))
        except MessageRefused as error:
            log.warning("prompt_not_stored", prompt=issued.prompt, reason=str(error))
            return issued

    def bytes_to_store(self, decision: GroupsIssued, state: LedgerState, prompts: Mapping[int, Prompt]) -> int:
        """Number of bytes that `citing` will add to the data stream. Encodes all prompts: for a thread."""
        groups = decision.groups
        large = [issued.prompt for issued in groups if _needs_storing(issued, state, prompts[issued.prompt])]
        self._to_store = frozenset(large)
        return sum(len(pack(prompts[number])) for number in large)

    async def _hold(self) -> int:
        """Protect data messages stored from now on; return the first sequence among them."""
        first = (await self._bus.state(Plane.DATA)).last_seq + 1
        self.needed_from = min(self.needed_from, first)
        return first

    def settled(self) -> None:
        """End the protection: the decision is folded, so the ledger protects what it cites."""
        self.needed_from = NOWHERE

    async def task(self, task: Task) -> Task:
        """A task ready to publish. Large prompts of an evaluation task are stored here and cited."""
        if isinstance(task, EvalSetRequested):
            return await stored_set(self._bus, task)
        if not isinstance(task, EvalRequested) or not is_large(task.prompt):
            return task
        return msgspec.structs.replace(task, prompt=cited(task.prompt, await store_prompt(self._bus, task.prompt)))


def _needs_storing(issued: IssuedGroup, state: LedgerState, prompt: Prompt) -> bool:
    group = state.groups.get(issued.group_id)
    return (group is None or not group.prompt_parts) and is_large(prompt)
