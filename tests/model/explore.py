"""Explores the states of a setup breadth first, and checks the laws in each. The first broken one has the shortest way.

Laws of a state are checked by `act`: books close, no group in two steps or dropped after it was trained, one batch a
step, payloads kept. Here: a restarted buffer decides what the other one decided, and the run ends once no more faults
come.
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from messages import Message
from tests.model.world import NO_FAULT, Action, Broken, Setup, act, actions, decoded, encoded, first, next_decision

MAX_STEPS_TO_END = 500


Parents = dict[bytes, tuple[bytes, Action] | None]  # of each state the one it was reached from first, and by what


class Explored(NamedTuple):
    """What was explored."""

    states: int
    transitions: int
    finished: int  # states in which the run is over
    whole: bool  # whether no state is left


class Counterexample(AssertionError):
    """A law is broken. The text has the shortest way there, as actions and as a log."""


def explore(setup: Setup, max_states: int, *, end_every: int = 1) -> Explored:
    """Explore up to a number of states.

    Args:
        setup: what is explored.
        max_states: beyond which new states are left out.
        end_every: of how many states one is followed to the end of its run.

    Raises:
        Counterexample: a law is broken.
    """
    world, _ = first(setup)
    root = encoded(world)
    parents: Parents = {_digest(root): None}
    queue = deque([(root, next_decision(world, setup))])
    followed: list[bytes] = []
    transitions = finished = num_looked_at = 0
    whole = True
    while queue:
        key, decision = queue.popleft()
        here, world = _digest(key), decoded(key)
        if next_decision(world, setup) != decision:
            raise Counterexample(_told(setup, parents, here, "a restarted buffer decides otherwise"))
        if world.state.finished is not None or world.state.gave_up is not None:
            finished += 1
            continue
        num_looked_at += 1
        if num_looked_at % end_every == 0:
            followed.append(key)
        for action in tuple(actions(world, decides=decision is not None)):
            transitions += 1
            after = decoded(key)
            try:
                act(after, setup, action)
            except Broken as broken:
                raise Counterexample(_told(setup, parents, here, str(broken), action)) from broken
            reached = encoded(after)
            digest = _digest(reached)
            if digest in parents:
                continue
            if len(parents) >= max_states:
                whole = False
                continue
            parents[digest] = here, action
            queue.append((reached, next_decision(after, setup)))
    ends: set[bytes] = set()  # states from which the run is known to end
    for key in followed:
        if why := _never_ends(setup, key, ends):
            raise Counterexample(_told(setup, parents, _digest(key), why))
    return Explored(len(parents), transitions, finished, whole)


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()


def _never_ends(setup: Setup, key: bytes, ends: set[bytes]) -> str:
    """Follow a state without further faults, the first possible action each time; say why it does not end."""
    passed: list[bytes] = []
    while key not in ends:
        world = decoded(key)
        if world.state.finished is not None or world.state.gave_up is not None:
            break
        passed.append(key)
        possible = list(actions(world, decides=next_decision(world, setup) is not None))
        possible = [(what, which) for what, which in possible if what in NO_FAULT and (what, which) != ("trainer", 1)]
        if not possible:
            return "the run stands still"
        if len(passed) > MAX_STEPS_TO_END:
            return "the run goes on without end"
        try:
            act(world, setup, possible[0])
        except Broken as broken:
            return f"then, without further faults: {broken}"
        key = encoded(world)
    ends.update(passed)
    return ""


def _way(parents: Parents, state: bytes) -> list[Action]:
    """Return the shortest way to a state."""
    found: list[Action] = []
    while (before := parents[state]) is not None:
        state, action = before
        found.append(action)
    return found[::-1]


def _log_of(setup: Setup, way_there: list[Action]) -> Iterator[tuple[Action | None, Message]]:
    """Yield the events of a way, each with its action; the last one may break a law."""
    world, events = first(setup)
    yield from ((None, event) for event in events)
    for action in way_there:
        world = decoded(encoded(world))
        try:
            for event in act(world, setup, action):
                yield action, event
        except Broken:
            return


def _told(setup: Setup, parents: Parents, state: bytes, why: str, last: Action | None = None) -> str:
    there = [*_way(parents, state), *([last] if last is not None else [])]
    lines = [f"{setup.name}: {why}", f"after {len(there)} actions: {there}"]
    for number, (action, event) in enumerate(_log_of(setup, there), start=1):
        by = "" if action is None else " ".join(map(str, action))
        lines.append(f"{number:>4} {by:<12} {msgspec.json.encode(event).decode()}")
    return "\n".join(lines)
