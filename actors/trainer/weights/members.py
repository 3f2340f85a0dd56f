"""A weight sync in the trainer: its members, their ranks in the process groups, and its outcome. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from messages import WeightSyncAnswered, WeightSyncMember


@dataclass(frozen=True)
class Membership:
    """Engines of a weight sync, by rollout actor. Equal sets of engines are in equal order."""

    members: tuple[tuple[str, WeightSyncMember], ...]  # with the rollout actor's instance name
    part: int = 0  # index of the update group

    @classmethod
    def of(cls, given: Mapping[str, WeightSyncAnswered], part: int = 0) -> "Membership":
        """Collect the members from the rollout actors' answers, by instance."""
        members = ((instance, member) for instance in sorted(given) for member in given[instance].members)
        return cls(tuple(members), part)

    @property
    def instances(self) -> tuple[str, ...]:
        """Rollout actors that have members."""
        return tuple(dict.fromkeys(instance for instance, _ in self.members))

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the members."""
        return tuple(member.engine for _, member in self.members)

    @property
    def readers(self) -> dict[str, int]:
        """Number of ranks of each engine."""
        return {member.engine: member.num_ranks for _, member in self.members}

    @property
    def epoch(self) -> tuple[str, ...]:
        """Key of the process groups of exactly these members. It changes when a member restarts."""
        return tuple(f"{member.key}:{member.num_ranks}" for _, member in self.members)

    @property
    def is_compared(self) -> bool:
        """Whether a member needs the combined fingerprint of the sent weights."""
        return any(member.is_compared for _, member in self.members)

    @property
    def world_size(self) -> int:
        """Ranks of a process group: one of the trainer, and all of the engines."""
        return 1 + sum(member.num_ranks for _, member in self.members)

    @property
    def offsets(self) -> dict[str, int]:
        """Each engine's first rank in a process group."""
        offsets: dict[str, int] = {}
        rank = 1
        for _, member in self.members:
            offsets[member.engine] = rank
            rank += member.num_ranks
        return offsets


@dataclass
class Outcome:
    """Outcome of a weight sync."""

    membership: Membership
    failed: dict[str, str] = field(default_factory=dict[str, str])  # by engine, by rollout actor, or "" for the trainer
    is_cut_off: bool = False  # the bus failed while engines were prepared; they request another weight sync
    is_finished: bool = False  # all was sent, and the engines were called to verify it
    num_buckets: int = 0
    sent_bytes: int = 0

    @property
    def out(self) -> dict[str, str]:
        """Reasons why members do not hold the version, by engine."""
        unfinished = "; ".join(self.failed.values()) or "it was not finished"
        everybody = self.failed.get("") or ("" if self.is_finished else unfinished)
        found = {
            member.engine: self.failed.get(member.engine) or self.failed.get(instance) or everybody
            for instance, member in self.membership.members
        }
        return {engine: reason for engine, reason in found.items() if reason}

    @property
    def holds(self) -> tuple[str, ...]:
        """Members that are verified to hold the version."""
        out = self.out
        return tuple(engine for engine in self.membership.engines if engine not in out)


def joined(failures: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Merge the failures of several ranks. The first reason of each engine counts."""
    found: dict[str, str] = {}
    for each in failures:
        for name, reason in each.items():
            found.setdefault(name, reason)
    return found
