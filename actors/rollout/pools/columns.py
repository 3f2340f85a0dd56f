"""Columns of a group's samples that engine pools compute, such as a teacher's log-probs of their tokens."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from anyio.abc import TaskGroup

from actors.rollout.pools.frozen import FrozenPool
from actors.rollout.samples.sample import OpenSample
from actors.rollout.samples.tasks import GroupTask
from messages import ColumnPublished, SampleKey
from runtime.bus.bus import Bus


class ColumnSource(NamedTuple):
    """The pool that computes a column, and how many of its likeliest tokens come with each log-prob."""

    pool: FrozenPool
    topk: int = 0


Pools = Mapping[str, ColumnSource]  # by column
PoolsOf = Callable[[str], Pools]  # by the name of a data source


def no_pools(_data: str) -> Pools:
    """Return no pools: the samples get no columns."""
    return {}


class SampleColumns:
    """Requests the columns of one group's samples as they end, while other samples generate.

    A column is stored before the event that completes the group, which names its data message. A redelivered task
    computes a lost column again: the tokens and the model are the same.
    """

    def __init__(self, task: GroupTask, bus: Bus, pools: Pools) -> None:
        self._task = task
        self._bus = bus
        self._pools: Pools = pools if task.store else {}  # evaluations are not trained
        self._tasks: TaskGroup | None = None
        self._asked: set[tuple[int, int, str]] = set()  # index, part and column
        self._halted = False

    def begin(self, tasks: TaskGroup) -> None:
        """Set the task group for the requests."""
        self._tasks = tasks

    def halt(self) -> None:
        """Start no more requests."""
        self._halted = True

    def missing(self, sample: OpenSample) -> list[str]:
        """Return the columns that a finished sample lacks. The greedy sample is not trained and needs none."""
        if not sample.finished or sample.is_baseline or not sample.buffer.num_tokens:
            return []
        return [column for column in self._pools if column not in sample.columns]

    def start(self, samples: Sequence[OpenSample]) -> None:
        """Request the missing columns of samples whose tokens are all stored."""
        for sample in samples:
            for column in self.missing(sample) if sample.stored and not self._halted else ():
                key = sample.index, sample.part, column
                if key not in self._asked:
                    assert self._tasks is not None
                    self._asked.add(key)
                    self._tasks.start_soon(partial(self._compute, sample, column))

    async def _compute(self, sample: OpenSample, column: str) -> None:
        task, prompt = self._task, sample.prompt_of(self._task.prompt.prompt_ids)
        rid = f"{task.lease}-{sample.index}.{sample.part}-{column}"
        token_ids = np.concatenate([prompt, sample.buffer.ids]).tolist()  # for JSON, which has no arrays
        pool, topk = self._pools[column]
        found = await pool.log_probs(rid, token_ids, len(prompt), topk)
        key = SampleKey(group_id=task.group_id, attempt=task.attempt, index=sample.index, part=sample.part)
        seq = await self._bus.publish(ColumnPublished(sample=key, column=column, **found._asdict()))
        sample.columns = {**sample.columns, column: seq}
