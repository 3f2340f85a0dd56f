"""What a weight session is to the trainer: its members, their places in the groups, and how it ended. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from messages import EngineLayout, MembersGiven, SessionMember


@dataclass(frozen=True)
class Membership:
    """The engines of a session, by rollout actor, in an order that is the same for the same engines."""

    members: tuple[tuple[str, SessionMember], ...]  # with the instance that has it
    part: int = 0  # of the engines, where they are updated in groups

    @classmethod
    def of(cls, given: Mapping[str, MembersGiven], part: int = 0) -> "Membership":
        """Of what rollout actors said, by instance."""
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
        """Ranks of each engine."""
        return {member.engine: member.num_ranks for _, member in self.members}

    @property
    def epoch(self) -> tuple[str, ...]:
        """What groups of these very members are known by: another after a restart of any of them."""
        return tuple(f"{member.key}:{member.num_ranks}" for _, member in self.members)

    @property
    def layouts(self) -> tuple[EngineLayout, ...]:
        """Those of which members want checksums."""
        return tuple(dict.fromkeys(member.wants for _, member in self.members if member.wants is not None))

    @property
    def is_compared(self) -> bool:
        """Whether some member wants the identity of what is sent."""
        return any(member.is_compared for _, member in self.members)

    @property
    def world_size(self) -> int:
        """Ranks of a group: the trainer's one, and all of the engines."""
        return 1 + sum(member.num_ranks for _, member in self.members)

    @property
    def offsets(self) -> dict[str, int]:
        """Each engine's first rank in a group."""
        offsets: dict[str, int] = {}
        rank = 1
        for _, member in self.members:
            offsets[member.engine] = rank
            rank += member.num_ranks
        return offsets


@dataclass
class Outcome:
    """How a session ended."""

    membership: Membership
    failed: dict[str, str] = field(default_factory=dict[str, str])  # by engine, by rollout actor, or "": the trainer's
    is_finished: bool = False  # all was sent, and the engines were asked what they hold
    num_buckets: int = 0
    sent_bytes: int = 0

    @property
    def out(self) -> dict[str, str]:
        """Why members do not hold the version, by engine."""
        unfinished = "; ".join(self.failed.values()) or "it was not finished"
        everybody = self.failed.get("") or ("" if self.is_finished else unfinished)
        found = {
            member.engine: self.failed.get(member.engine) or self.failed.get(instance) or everybody
            for instance, member in self.membership.members
        }
        return {engine: reason for engine, reason in found.items() if reason}

    @property
    def holds(self) -> tuple[str, ...]:
        """Members that proved to hold the version."""
        out = self.out
        return tuple(engine for engine in self.membership.engines if engine not in out)


def joined(failures: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Failures of several ranks; the first reason of each engine counts."""
    found: dict[str, str] = {}
    for each in failures:
        for name, reason in each.items():
            found.setdefault(name, reason)
    return found


def of_all_stages(stages: Sequence[Mapping[str, list[dict[str, str]]]]) -> dict[str, list[dict[str, str]]]:
    """What engines will say of the tensors of all stages; no tensor is of two."""
    whole: dict[str, list[dict[str, str]]] = {}
    for stage in stages:
        for key, ranks in stage.items():
            known = whole.setdefault(key, [{} for _ in ranks])
            for all_of_rank, of_rank in zip(known, ranks, strict=True):
                all_of_rank.update(of_rank)
    return whole
