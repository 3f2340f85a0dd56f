"""Slots for samples in flight: one for each sample that an engine generates. Groups get them in order of arrival."""

from collections import deque
from types import TracebackType

import anyio


class Slots:
    """Slots for samples. A slot that becomes free goes to the earliest group that lacks one."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0  # granted to groups
        self._queue: deque[GroupSlots] = deque()  # groups that lack slots, earliest first
        self._is_granting = False

    @property
    def free(self) -> int:
        """Slots that no group has. None while more are taken than there are, as after `resize`."""
        return max(0, self.total - self.taken)

    def reserve(self, wanted: int) -> "GroupSlots":
        """Reserve slots for the samples of a group. They are granted as they become free."""
        group = GroupSlots(self, wanted)
        self._queue.append(group)
        self.grant()
        return group

    def resize(self, total: int) -> None:
        """Change the number of slots. Running samples keep theirs."""
        self.total = total
        self.grant()
        for group in self._queue:
            group.look()

    def grant(self) -> None:
        """Grant the free slots."""
        if self._is_granting:  # a group that receives slots lends them, and wants others: the loop below grants these
            return
        self._is_granting = True
        while self._queue and (self.free or not self._queue[0].num_wanted):
            group = self._queue.popleft()
            number = min(group.num_wanted, self.free)
            self.taken += number
            group.receive(number)
            if group.num_wanted and group not in self._queue:
                self._queue.appendleft(group)
        self._is_granting = False

    def want_more(self, group: "GroupSlots") -> None:
        """Grant more slots to a group, before all others."""
        if group not in self._queue:
            self._queue.appendleft(group)
        self.grant()


class GroupSlots:
    """The slots of one group. At the end of the context all of them are returned."""

    def __init__(self, slots: Slots, wanted: int) -> None:
        self.num_wanted = wanted  # reserved and not granted yet
        self._slots = slots
        self._num_idle = 0  # granted, and not taken by a sample
        self._num_running = 0  # taken by samples
        self._is_stopped = False
        self._waiting: deque[_Waiter] = deque()
        self._changed = anyio.Event()
        self._partners: list[GroupSlots] = []  # groups of the same call of a rollout function, this one among them

    async def __aenter__(self) -> "GroupSlots":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        number, self._num_running = self._num_running, 0
        self._return(number)

    async def granted(self, number: int) -> None:
        """Wait until so many slots are granted, or if there are fewer in total, all of them; at least one."""
        while self._num_idle < min(number, max(1, self._slots.total)) and not self._is_stopped:
            await self._changed.wait()

    def need(self, number: int) -> None:
        """Set the number of samples that need a slot from now on, and return the others."""
        more = (0 if self._is_stopped else number) - self.num_wanted - self._num_idle
        if more > 0:
            self.num_wanted += more
            self._slots.want_more(self)
            return
        unwanted = min(-more, self.num_wanted)
        self.num_wanted -= unwanted
        returned = -more - unwanted
        self._num_idle -= returned
        self._return(returned)

    def want_one_less(self) -> None:
        """Return the slot of a sample that will not take it."""
        self.need(max(0, self.num_wanted + self._num_idle - 1))

    async def take(self) -> bool:
        """Wait for a slot for a sample. Return False if the group was stopped first."""
        if self._num_idle:
            self._num_idle -= 1
            self._num_running += 1
            return True
        if self._is_stopped:
            return False
        waiter = _Waiter()
        self._waiting.append(waiter)
        for partner in self._partners:
            partner.lend()
        try:
            await waiter.ended.wait()
        except anyio.get_cancelled_exc_class():
            if waiter.has_slot:
                self.give_back()
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            raise
        return waiter.has_slot

    async def take_batch(self, number: int) -> bool:
        """Wait for the slots of samples with one common request: all slots in total, if these are fewer.

        Return False if the group was stopped first.
        """
        await self.granted(number)
        if self._is_stopped:
            return False
        taken = min(number, self._num_idle)
        self._num_idle -= taken
        self._num_running += taken
        self.num_wanted -= min(number - taken, self.num_wanted)
        return True

    def give_back(self) -> None:
        """Return the slot of a sample."""
        if self._num_running:  # otherwise the group has returned all
            self._num_running -= 1
            self._return(1)

    def rest(self) -> None:
        """Keep the slot of a sample that does not generate for a while. Others of the same call may use it until then.

        It leaves the call only at the end of its sample. Otherwise calls that wait for this one could hold all slots.
        """
        if self._num_running and not self._is_stopped:
            self._num_running -= 1
            self.num_wanted += 1
            self.receive(1)

    def regain(self) -> None:
        """Take the slot of a resting sample, which ends now and gives it back: also if another sample uses it."""
        if self._num_idle:
            self._num_idle -= 1
        else:
            self.num_wanted = max(0, self.num_wanted - 1)
            self._slots.taken += 1
        self._num_running += 1

    def stop(self) -> None:
        """Return the slots that no sample has taken. Samples that wait for a slot get none."""
        self._is_stopped = True
        if self in self._partners:
            self._partners.remove(self)
            self._partners = []
        self.need(0)
        while self._waiting:
            self._waiting.popleft().ended.set()
        self.look()

    def receive(self, number: int) -> None:
        """Receive granted slots."""
        self.num_wanted -= number
        self._num_idle += number
        while self._num_idle and self._waiting:
            waiter = self._waiting.popleft()
            self._num_idle -= 1
            self._num_running += 1
            waiter.has_slot = True
            waiter.ended.set()
        self.lend()
        self.look()

    def share(self, partners: "list[GroupSlots]") -> None:
        """Share idle slots with groups whose samples one function generates, so that none waits for itself.

        There may be fewer slots than they have wanted, if engines have taken some away.

        Args:
            partners: the groups of that function so far; this one is added.
        """
        self._partners = partners
        partners.append(self)

    def lend(self) -> None:
        """Give idle slots to waiting samples of partners, and want others instead."""
        for partner in self._partners:
            while self._num_idle and partner.num_wanted and partner._waiting and partner is not self:
                self._num_idle -= 1
                self.num_wanted += 1
                partner.receive(1)
                self._slots.want_more(self)

    def look(self) -> None:
        """Let `granted` check the number of slots again."""
        self._changed.set()
        self._changed = anyio.Event()

    def _return(self, number: int) -> None:
        self._slots.taken -= number
        if number:
            self._slots.grant()


class _Waiter:
    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.has_slot = False
