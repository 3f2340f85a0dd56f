"""Reads the groups of a whole dump, ordered by step and group id, pair by pair."""

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec

from runtime.data.columns import DumpError
from runtime.data.dump_files import check_columns, read_lines, read_pair, steps_in
from runtime.data.dumps import DumpedGroup
from runtime.settings.reading.config import Problem, TopologyError
from runtime.settings.topology import Topology
from runtime.util.formatting import show

PAIRS_KEPT: Final = 2  # pairs kept in memory


class DumpedGroups:
    """The groups of a dump, by position."""

    def __init__(self, directory: Path, vocab_size: int | None = None) -> None:
        """Scan the lines of all steps, without their tokens.

        Args:
            directory: directory of the dump.
            vocab_size: vocabulary size of the model; none: unchecked.

        Raises:
            DumpError: there is no dump, a line cannot be read, or the tokens of a step are missing.
        """
        self.directory = directory
        self.steps = steps_in(directory)
        counts: list[int] = []
        self.sizes: set[int] = set()  # numbers of samples per group
        self.num_kept = 0  # groups that the filter kept in the dumped run
        for step in self.steps:
            groups: dict[tuple[int, int], set[int]] = {}
            kept = set[int]()
            samples = read_lines(directory, step)
            check_columns(directory, step, len(samples))
            for sample in samples:
                groups.setdefault((sample.group_id, sample.attempt), set()).add(sample.index)
                if sample.verdict in ("keep", "spare", None):
                    kept.add(sample.group_id)
            counts.append(len(groups))
            self.sizes |= {len(indices) for indices in groups.values()}
            self.num_kept += len(kept)
        self._ends = list(accumulate(counts))
        self._pair = lru_cache(maxsize=PAIRS_KEPT)(partial(read_pair, directory, vocab_size=vocab_size))

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[DumpedGroup]:
        for step in self.steps:
            yield from self._pair(step)

    def group(self, position: int) -> DumpedGroup:
        """Return the group at a position, from 0.

        Raises:
            IndexError: there is none at this position.
            DumpError: its pair cannot be read.
        """
        if not 0 <= position < len(self):
            raise IndexError(f"the dump has {len(self)} groups")
        place = bisect_right(self._ends, position)
        begin = self._ends[place - 1] if place else 0
        return self._pair(self.steps[place])[position - begin]


def fitted(topology: Topology) -> Topology:
    """Limit the train steps to those that the dump has groups for.

    Raises:
        TopologyError: there is no such dump, or its groups have another size than the recipe's.
    """
    if topology.run.load is None:
        return topology
    key, value = "run.load", show(topology.run.load)
    try:
        groups = DumpedGroups(Path(topology.run.load))
    except DumpError as error:
        raise TopologyError([Problem(key=key, value=value, message=str(error))]) from error
    rollout = topology.rollout
    if groups.sizes != {rollout.n_samples_per_prompt}:
        sizes = ", ".join(map(str, sorted(groups.sizes)))
        message = f"differs from the dump, whose groups have {sizes} samples; allowed: the same number"
        raise TopologyError(
            [Problem(key="rollout.n_samples_per_prompt", value=str(rollout.n_samples_per_prompt), message=message)]
        )
    usable = groups.num_kept if rollout.dynamic_filter else len(groups)
    steps = usable // rollout.rollout_batch_size
    if not steps:
        batch = f"rollout.rollout_batch_size = {rollout.rollout_batch_size}"
        message = f"has {usable} groups to train on, fewer than a batch: {batch}"
        raise TopologyError([Problem(key=key, value=value, message=message)])
    if steps >= topology.train.num_steps:
        return topology
    return msgspec.structs.replace(topology, train=msgspec.structs.replace(topology.train, num_steps=steps))
