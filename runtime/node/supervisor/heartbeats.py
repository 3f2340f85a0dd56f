"""Heartbeats of a process's event loop: whether it stands still, for how long a call blocked it, and which one."""

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import msgspec

from runtime.process.heartbeat import ASKS, BEAT, EVERY_S
from runtime.util.proc import STATE, stat_of
from runtime.util.stacks import newest_dump, of_thread

LOOK_EVERY_S: Final = 1.0
JUDGE_EVERY_S: Final = 5.0
LOOKS_PER_LIMIT: Final = 4  # at least, before a process counts as unresponsive
LATE: Final = 2.0  # times the planned wait: this process, and maybe the whole machine, was suspended
FIRST_WITHIN_S: Final = 1800.0  # from the start to the first heartbeat: imports may come from a slow disk
CHUNK: Final = 1 << 16  # bytes: the capacity of a pipe
LAG_S: Final = 1.0  # a shorter block is not reported
ASK_AFTER_S: Final = 3.0  # without stacks, a thread gets the signal to write its own one look later
BUSY_S: Final = 0.02  # CPU seconds between two looks: more than a thread that waits for the interpreter's lock uses
SAID_AFTER_S: Final = 5.0  # a block is reported before its end
SAID_ANYWAY_S: Final = 8.0  # also without the stacks, which a busy machine delays
MANY_WAITS: Final = 5  # between two looks: an event loop that waits so often sends its heartbeats
STOPPED: Final = "Tt"  # states of a process that was stopped, as in /proc/<pid>/stat
MAX_TEXT: Final = 1 << 17  # characters of stacks

_waits = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_beat = re.compile(rf"^{BEAT} (\d+\.\d+|inf) ([0-9a-f]+)$")


class Beat(NamedTuple):
    """A heartbeat."""

    at: float  # monotonic time, which all processes of a machine share; infinite: it is the last one
    loop_thread: int  # id of the thread with the event loop


class Heartbeats:
    """The heartbeat pipe of a process, across its restarts."""

    def __init__(self) -> None:
        self._signs, self.given = os.pipe()  # the process writes to `given`
        os.set_blocking(self._signs, False)
        self._rest = ""

    def read(self) -> tuple[list[Beat], str]:
        """Return the heartbeats since the last call, and the stacks that were written after the newest of them."""
        try:
            text = self._rest + os.read(self._signs, CHUNK).decode(errors="replace")
        except BlockingIOError:
            return [], ""
        lines, self._rest = text.rpartition("\n")[0].splitlines(), text.rpartition("\n")[2][-MAX_TEXT:]
        beats: list[Beat] = []
        others: list[str] = []
        for line in lines:
            if (found := _beat.match(line)) is not None:
                beats.append(Beat(float(found[1]), int(found[2], 16)))
                others.clear()
            else:
                others.append(f"{line}\n")
        return beats, "".join(others)

    async def wait(self) -> None:
        """Return when the process has written something."""
        await anyio.wait_readable(self._signs)

    def forget(self) -> None:
        """Discard what an earlier process has written."""
        self.read()
        self._rest = ""

    def close(self) -> None:
        os.close(self._signs)
        os.close(self.given)


class ThreadTimes(NamedTuple):
    """What the kernel counts of a process's first thread."""

    state: str  # one letter, as in /proc/<pid>/stat
    cpu_s: float  # that it ran
    queued_s: float  # that it waited for a core, up to the last time that it got one
    num_waits: int = 0  # times that it gave up its core to wait for something


def thread_times(pid: int) -> ThreadTimes | None:
    """Return the times of a process's first thread; None: it has ended."""
    process = Path(f"/proc/{pid}")
    try:
        state = stat_of(pid)[STATE]
        waits = _waits.search((process / "status").read_text(errors="replace"))
    except OSError:
        return None
    num_waits = int(waits[1]) if waits else 0
    try:
        cpu_ns, queued_ns, _ = (process / "schedstat").read_text().split()
    except (OSError, ValueError):  # a kernel without these numbers
        return ThreadTimes(state, 0.0, 0.0, num_waits)
    return ThreadTimes(state, int(cpu_ns) / 1e9, int(queued_ns) / 1e9, num_waits)


def threads_cpu(pid: int) -> dict[int, float]:
    """Return the CPU seconds of a process's threads by their id; without those that end meanwhile."""
    found: dict[int, float] = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError, ValueError):
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def thread_to_ask(pid: int, before: Mapping[int, float], after: Mapping[int, float], turn: int) -> int:
    """Return the thread that may hold the interpreter's lock: of those that computed, the one that did so most.

    A thread that waits for the lock wakes 200 times a second, so whether it runs just now says nothing.

    Args:
        pid: of the process.
        before: CPU seconds by thread, about a second ago.
        after: the same now.
        turn: how many were asked before. Not every thread that computes is Python's.
    """
    ran = {thread: cpu_s - before.get(thread, cpu_s) for thread, cpu_s in after.items()}
    busy = sorted((thread for thread in ran if ran[thread] >= BUSY_S), key=lambda thread: (-ran[thread], thread))
    return busy[turn % len(busy)] if busy else pid  # it sleeps, and keeps the lock


class Block(NamedTuple):
    """A time in which a call blocked the event loop."""

    blocked_s: float  # so far
    ended: bool
    stacks: str  # empty: unknown
    loop_thread: int
    ended_process: bool = False


class LoopWatch(msgspec.Struct):
    """Finds the times in which a call blocked an event loop, from looks at a process.

    A time does not count if the process was stopped, or got no core, or if this process looked too late to know.
    """

    beat: Beat | None = None  # the newest
    since: float = 0.0  # from then on silence counts
    excused_s: float = 0.0  # since then, without a core
    stacks: str = ""
    was_said: bool = False
    times: ThreadTimes | None = None

    def look(
        self,
        now: float,
        *,
        waited_s: float,
        planned_s: float,
        beats: list[Beat],
        stacks: str,
        times: ThreadTimes | None,
    ) -> list[Block]:
        """Note one look; return the blocks that it shows: those that ended, and one that has become long.

        Args:
            now: monotonic time.
            waited_s: time since the look before.
            planned_s: planned time between looks.
            beats: heartbeats since the look before.
            stacks: text that the process wrote after the newest of them.
            times: of the process.
        """
        before, self.times = self.times, times
        if before is None or times is None or times.state in STOPPED or waited_s > LATE * planned_s:
            newest = beats[-1] if beats else self.beat
            newest = None if newest is not None and newest.at == math.inf else newest
            self.beat, self.since, self.excused_s = newest, now, 0.0
            self.stacks, self.was_said = "", self.was_said and not beats
            return []
        excused_s = without_core(before, times, waited_s)
        self.excused_s += excused_s
        found: list[Block] = []
        for beat in beats:
            if beat.at == math.inf:  # the event loop has ended
                self.beat = None
                break
            if (blocked := self._ended(beat.at)) is not None:
                found.append(blocked)
            self.beat, self.since, self.excused_s = beat, beat.at + EVERY_S, excused_s
            self.stacks, self.was_said = "", False
        self.stacks = (self.stacks + stacks)[-MAX_TEXT:]
        silent_s = 0.0 if self.beat is None else now - self.since - self.excused_s
        if not self.was_said and silent_s >= (SAID_AFTER_S if newest_dump(self.stacks) else SAID_ANYWAY_S):
            self.was_said = True
            found.append(self._block(now, ended=False))
        return found

    def is_mute(self, now: float) -> bool:
        """Whether the event loop has been silent for some seconds and the process has written no stacks."""
        silent_s = 0.0 if self.beat is None else now - self.since - self.excused_s
        return silent_s >= ASK_AFTER_S and not self.was_said and not newest_dump(self.stacks)

    def end(self, now: float) -> list[Block]:
        """Return the block in which the process ended."""
        blocked = self._ended(now)
        return [] if blocked is None else [blocked._replace(ended_process=True)]

    def _ended(self, now: float) -> Block | None:
        if self.beat is None or not (self.was_said or now - self.since - self.excused_s >= LAG_S):
            return None
        return self._block(now, ended=True)

    def _block(self, now: float, *, ended: bool) -> Block:
        assert self.beat is not None
        blocked_s = max(0.0, now - self.since - self.excused_s)
        return Block(blocked_s, ended, newest_dump(self.stacks), self.beat.loop_thread)


def without_core(before: ThreadTimes, after: ThreadTimes, waited_s: float) -> float:
    """Return the seconds between two looks in which a thread could have run and got no core.

    A thread that gives up its core again and again, as one that waits for the interpreter's lock, lacks no core.
    """
    if after.num_waits - before.num_waits >= MANY_WAITS:
        return 0.0
    queued_s = after.queued_s - before.queued_s
    if after.state == "R" and after.cpu_s:  # its present wait is not counted yet
        queued_s = max(queued_s, waited_s - (after.cpu_s - before.cpu_s))
    return min(waited_s, max(0.0, queued_s))


def stillness(still_s: float, *, waited_s: float, planned_s: float, sign: bool) -> float:
    """Return the seconds without a heartbeat after one more check.

    Args:
        still_s: the same before this check.
        waited_s: time since the previous check.
        planned_s: planned time between checks. A much longer wait resets the count: the process may not have run.
        sign: there was a heartbeat.
    """
    return 0.0 if sign or waited_s > LATE * planned_s else still_s + waited_s


async def wait_until_still(
    heartbeats: Heartbeats,
    limit_s: float,
    pid: int,
    blocked: Callable[[Block], None],
    note: Callable[[float], None] = lambda _: None,
) -> None:
    """Return when a new process has sent no heartbeat for `limit_s`, or no first one within FIRST_WITHIN_S.

    Args:
        heartbeats: the pipe of its heartbeats, from its start on: the first ones may be there already.
        limit_s: seconds without a heartbeat, counted over checks that were on time.
        pid: of the process.
        blocked: called with each time in which a call blocked its event loop.
        note: called with the seconds of silence, at each check from the first heartbeat on.
    """
    look_s, judge_s = (min(every_s, limit_s / LOOKS_PER_LIMIT) for every_s in (LOOK_EVERY_S, JUDGE_EVERY_S))
    watch, asked, turn, cpu_before = LoopWatch(), pid, 0, dict[int, float]()
    still_s, patience_s, sign = 0.0, max(limit_s, FIRST_WITHIN_S), False
    looked = judged = time.monotonic()
    try:
        while still_s < patience_s:
            with anyio.move_on_after(look_s):
                await heartbeats.wait()
            now, (beats, stacks) = time.monotonic(), heartbeats.read()
            if watch.beat is not None:
                stacks = of_thread(stacks, watch.beat.loop_thread if asked == pid else 0)
            times = thread_times(pid)
            for block in watch.look(
                now, waited_s=now - looked, planned_s=look_s, beats=beats, stacks=stacks, times=times
            ):
                blocked(block)
            cpu_now = threads_cpu(pid) if watch.is_mute(now) else {}
            if cpu_before and cpu_now:
                asked, turn = thread_to_ask(pid, cpu_before, cpu_now, turn), turn + 1
                with suppress(ProcessLookupError):
                    os.kill(asked, ASKS)  # Linux gives the signal to the thread that is named
            cpu_before = cpu_now
            looked, sign = now, sign or bool(beats)
            if now - judged >= judge_s:
                patience_s = limit_s if sign else patience_s
                still_s = stillness(still_s, waited_s=now - judged, planned_s=judge_s + look_s, sign=sign)
                judged, sign = now, False
                if patience_s == limit_s:
                    note(still_s)
    finally:
        for block in watch.end(time.monotonic()):
            blocked(block)
