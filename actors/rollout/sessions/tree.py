"""The messages of one session as a tree: which turns were sampled, and what a request of a client goes on from. Pure.

A node is a message. A sampled node also has the tokens of its turn and those of the rendered messages before it, so the
tokens of a path are recorded, whatever the messages look like when a client sends them back. A request is matched to
the longest recorded path that says the same; what does not match becomes a fork.

Each path that is generated into is a branch, one conversation of the sample. A turn belongs to the branch that sampled
it, and trains there alone: in the branches that fork behind it, its tokens are part of the prompt.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from actors.rollout.sessions.matching import NO_IDS, Ids, Meaning, difference, exactness, paired
from messages import Float32Array, Int32Array, WeightSpan
from runtime.sessions.turns import ChatMessage, Finish, Tool, TurnRequest, TurnSampling

MAX_BRANCHES: Final = 64  # of one session

Cause = Literal[
    "arguments",  # the client sent other arguments of a tool call than were sampled
    "thoughts",  # other thoughts than were sampled
    "text",  # other words, or another answer of a tool
    "compaction",  # a shorter history in place of the recorded one
    "tools",  # other tools
    "system",  # another system message
    "repeat",  # the same history once more, after its answer was used
    "template",  # the chat template writes the recorded turns in another way
]


class TooManyBranches(ValueError):
    """A session forked more often than a sample has conversations."""


class Wish(NamedTuple):
    """What a request asks of a turn, besides its prompt. Requests with equal prompts and wishes are repetitions."""

    sampling: TurnSampling
    model: str
    choice: int


class SampledTurn(NamedTuple):
    """The tokens of a turn of the model."""

    input_ids: Int32Array  # [P], rendered messages between the sampled node above and this one
    ids: Int32Array  # [T], sampled
    log_probs: Float32Array  # [T], of the sampled ones, in nats
    weight_spans: tuple[WeightSpan, ...]  # which version sampled which tokens, half-open, covering [0, T)
    finish: Finish
    is_whole: bool = False  # whether `input_ids` has all tokens before, instead of those after the sampled node above


@dataclass(eq=False, slots=True)
class Node:
    """A message of the tree.

    Attributes:
        meaning: the message; None: tokens that a client rendered itself, or the root of a set of tools.
        parent: the message before; None: a root.
        turn: tokens, if the model sampled the message.
        wish: what its request asked for, if it was sampled.
        branch: that sampled it; -1: it was not sampled.
        prompt_ids: tokens that a client rendered itself, [P].
        ended_at: when the turn ended, in seconds of the caller's clock.
        is_undelivered: whether the connection broke before the client had the whole answer.
        depth: number of messages from the root to this one.
        deepest: depth of the deepest node below, or its own.
    """

    meaning: Meaning | None
    parent: "Node | None"
    turn: SampledTurn | None = None
    wish: Wish | None = None
    branch: int = -1
    prompt_ids: Int32Array | None = None
    ended_at: float = 0.0
    is_undelivered: bool = False
    children: tuple["Node", ...] = ()
    depth: int = 0
    deepest: int = 0

    def add(self, child: "Node") -> "Node":
        """Add a message after this one."""
        self.children += (child,)
        child.depth = child.deepest = self.depth + 1
        above: Node | None = self
        while above is not None and above.deepest < child.depth:
            above.deepest, above = child.depth, above.parent
        return child

    def path(self) -> "list[Node]":
        """Return the nodes from the root to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def sampled_above(self) -> "Node | None":
        """The newest sampled node on its path, itself included."""
        node: Node | None = self
        while node is not None and node.turn is None:
            node = node.parent
        return node

    @property
    def ids(self) -> Int32Array:
        """All tokens from the beginning to the end of this sampled node, [N]."""
        parts = [part for turn in self._turns for part in (turn.ids, turn.input_ids)]
        return Int32Array(np.concatenate(parts[::-1])) if parts else Int32Array()

    @property
    def num_ids(self) -> int:
        """Number of all tokens from the beginning to the end of this sampled node."""
        return sum(len(turn.input_ids) + len(turn.ids) for turn in self._turns)

    @property
    def _turns(self) -> Iterator[SampledTurn]:
        """Its turns, the newest first, back to one whose input has all tokens before."""
        node: Node | None = self
        while node is not None:
            if node.turn is not None:
                yield node.turn
                if node.turn.is_whole:
                    return
            node = node.parent


@dataclass(eq=False, slots=True)
class Branch:
    """A path that is generated into: one conversation of the sample."""

    cause: Cause | None  # why it forked; None: the first one
    tip: Node | None = None  # its newest turn
    running: Node | None = None  # the prompt whose answer is being sampled


class Place(NamedTuple):
    """Where a request stands in the tree: the end of the longest path that says the same."""

    node: Node
    rest: tuple[ChatMessage, ...]  # messages after it
    rest_ids: Int32Array | None  # tokens after it, of a client that renders itself

    @property
    def is_recorded(self) -> bool:
        """Whether the tree has all of the request."""
        return not self.rest and (self.rest_ids is None or not len(self.rest_ids))


class Asked(NamedTuple):
    """A turn that is to be sampled."""

    node: Node  # its last prompt message
    above: Node | None  # the newest sampled node before it; None: the prompt is rendered from its beginning
    branch: int
    is_new: bool  # whether the branch begins with it
    wish: Wish


class RestoredPlace(NamedTuple):
    """Where a turn of an earlier process stands: a path of messages, or of tokens, after the turn before."""

    above: Node | None  # the newest sampled node before it
    path: tuple[ChatMessage, ...]
    path_ids: tuple[int, ...] | None  # of a client that renders itself
    tools: tuple[Tool, ...]  # of its root
    branch: int
    cause: Cause | None
    ended_at: float


class Tree:
    """The tree of one session. Changes only by `start`, and by `end`, `give_up` or `refuse` of what was started.

    `restore` builds the tree of an earlier process again.
    """

    def __init__(self) -> None:
        self.branches: list[Branch] = []
        self.num_extended = 0  # turns that went on from a recorded path
        self._roots: list[tuple[tuple[Tool, ...], Node]] = []
        self._of_ids = Node(None, None)  # root of clients that render themselves
        self._unused: list[int] = []  # branches whose first turn was refused

    @property
    def forks(self) -> Counter[Cause]:
        """Number of forks by their cause."""
        return Counter(branch.cause for branch in self.branches if branch.cause is not None)

    @property
    def sampled(self) -> Iterator[Node]:
        """All sampled nodes, in no special order."""
        waiting = [self._of_ids, *(root for _, root in self._roots)]
        while waiting:
            node = waiting.pop()
            waiting += node.children
            if node.turn is not None:
                yield node

    def find(self, request: TurnRequest) -> Place:
        """Return the longest recorded path that says the same as a request. Changes nothing."""
        if request.prompt_ids is not None:
            return self._find_ids(Int32Array(request.prompt_ids))
        root = next((root for tools, root in self._roots if tools == request.tools), None)
        return _longest(root or Node(None, None), [Meaning(message) for message in request.messages])

    def start(self, request: TurnRequest, place: Place) -> Asked:
        """Add what a request has beyond its place, and choose the branch of its turn.

        Args:
            request: of a client, whose turn is to be sampled.
            place: of the request, from `find`, since when nothing changed.

        Raises:
            TooManyBranches: it would be one more than a session may have; nothing was added.
        """
        above = place.node.sampled_above
        branch = -1 if above is None or not self._goes_on(above.branch, place) else above.branch
        if is_new := branch < 0:
            has_turns = len(self.branches) > len(self._unused)
            branch = self._open(self._cause(place, request) if has_turns else None)
        self.num_extended += not is_new
        node = self.branches[branch].running = self._extended(place, request)
        wish = Wish(request.sampling, request.model, request.choice)
        if above is not None and above.wish == wish:
            wish = above.wish or wish  # a long session keeps one wish, not one a turn
        return Asked(node, above, branch, is_new, wish)

    def fork_by_template(self, asked: Asked) -> Asked:
        """Move a turn to a branch of its own, since the chat template writes other tokens than were recorded.

        Raises:
            TooManyBranches: it would be one more than a session may have; nothing was changed.
        """
        if asked.is_new:
            self.branches[asked.branch].cause = "template"
            return asked._replace(above=None)
        branch = self._open("template")
        self.branches[branch].running, self.branches[asked.branch].running = asked.node, None
        self.num_extended -= 1
        return asked._replace(above=None, branch=branch, is_new=True)

    def end(self, asked: Asked, message: ChatMessage, turn: SampledTurn, ended_at: float = 0.0) -> Node:
        """Record the turn that was asked for. Its branch goes on from it."""
        branch = self.branches[asked.branch]
        node = Node(Meaning(message), asked.node, turn, asked.wish, asked.branch, ended_at=ended_at)
        branch.tip, branch.running = asked.node.add(node), None
        return node

    def restore(self, place: RestoredPlace, message: ChatMessage, turn: SampledTurn, wish: Wish) -> Node:
        """Record a turn that an earlier process recorded, after those before it. Its branch goes on from it."""
        number = place.branch
        while len(self.branches) <= number:
            self._unused.append(len(self.branches))
            self.branches.append(Branch(None))
        branch = self.branches[number]
        if number in self._unused:
            self._unused.remove(number)
            branch.cause = place.cause
        else:
            self.num_extended += 1
        node = self._restored_path(place)
        branch.tip = node.add(Node(Meaning(message), node, turn, wish, number, ended_at=place.ended_at))
        return branch.tip

    def _restored_path(self, place: RestoredPlace) -> Node:
        """Return the last node of a path, whose nodes without turns are added where they are missing."""
        node = place.above
        if place.path_ids is not None:
            node, ids = node or self._of_ids, Int32Array(place.path_ids)
            found = (
                each for each in node.children if each.prompt_ids is not None and np.array_equal(each.prompt_ids, ids)
            )
            return next(found, None) or node.add(Node(None, node, prompt_ids=ids))
        if node is None:
            node = next((root for tools, root in self._roots if tools == place.tools), None)
        if node is None:
            node = Node(None, None)
            self._roots.append((place.tools, node))
        for message in place.path:
            known = (each for each in node.children if each.turn is None)
            found = (each for each in known if each.meaning is not None and each.meaning.message == message)
            node = next(found, None) or node.add(Node(Meaning(message), node))
        return node

    def give_up(self, asked: Asked) -> None:
        """Leave a turn out that was not sampled to its end. Its branch gets no further turn, and a retry forks."""
        branch = self.branches[asked.branch]
        branch.tip = branch.running = None

    def refuse(self, asked: Asked) -> None:
        """Undo `start` for a turn that no engine was asked for. Its branch goes on as if nothing had happened."""
        branch, node = self.branches[asked.branch], asked.node
        branch.running = None
        if asked.is_new:
            branch.cause = None
            self._unused.append(asked.branch)
        else:
            self.num_extended -= 1
        in_use = {each.running for each in self.branches}
        while node.parent is not None and node.turn is None and not node.children and node not in in_use:
            node.parent.children = tuple(child for child in node.parent.children if child is not node)
            node = node.parent
        self._roots = [(tools, root) for tools, root in self._roots if root is not node or root.children]

    def _open(self, cause: Cause | None) -> int:
        if self._unused:
            branch = self._unused.pop()
        elif len(self.branches) < MAX_BRANCHES:
            branch = len(self.branches)
            self.branches.append(Branch(None))
        else:
            raise TooManyBranches(f"the session has {MAX_BRANCHES} branches, the most that one sample may have")
        self.branches[branch].cause = cause
        return branch

    def _goes_on(self, branch: int, place: Place) -> bool:
        """Whether a branch may go on at a place: after its newest turn, with input for the next one."""
        has_input = place.rest_ids is None or place.node.turn is None or len(place.rest_ids) > 0
        at = self.branches[branch]
        return has_input and at.running is None and at.tip is place.node.sampled_above

    def _extended(self, place: Place, request: TurnRequest) -> Node:
        """Add the messages or the tokens after a place, and return the last node."""
        node = place.node
        if place.rest_ids is not None:
            is_recorded = node.turn is None and not len(place.rest_ids) and node is not self._of_ids
            return node if is_recorded else node.add(Node(None, node, prompt_ids=place.rest_ids))
        if node.parent is None and all(root is not node for _, root in self._roots):
            self._roots.append((request.tools, node))
        for message in place.rest:
            node = node.add(Node(Meaning(message), node))
        return node

    def _find_ids(self, ids: Int32Array) -> Place:
        best, most = self._of_ids, 0
        waiting = [(best, most)]
        while waiting:
            node, at = waiting.pop()
            if at > most:
                best, most = node, at
            waiting += ((child, at + len(_own_ids(child))) for child in node.children if _continues(child, ids, at))
        return Place(best, (), Int32Array(ids[most:]))

    def _cause(self, place: Place, request: TurnRequest) -> Cause:
        """Return why a request does not go on from the newest turn of a branch."""
        if place.rest_ids is not None:
            return "text" if len(place.rest_ids) else "repeat"
        if not place.rest:
            return "repeat"
        first = Meaning(place.rest[0])
        if place.node.parent is None and not place.node.children:
            meanings = [Meaning(message) for message in request.messages[:1]]
            if any(_longest(root, meanings).node is not root for _, root in self._roots):
                return "tools"
            return "system" if first.role == "system" else "text"
        found = {
            difference(child.meaning, first)
            for child in place.node.children
            if child.meaning is not None and child.meaning.role == first.role
        }
        if first.role == "system" and place.node.parent is None:
            return "system"
        for cause in ("arguments", "thoughts"):
            if cause in found:
                return cause
        is_shorter = len(request.messages) < place.node.deepest
        return "compaction" if is_shorter and place.node.sampled_above is None else "text"


class _Candidate(NamedTuple):
    node: Node
    ids: Ids
    exactness: int


def _longest(root: Node, messages: Sequence[Meaning]) -> Place:
    """Follow all paths that say the same; of several ends, take the one that is written most alike, then the newest."""
    candidates = [_Candidate(root, NO_IDS, 0)]
    for number, sent in enumerate(messages):
        further = [found for each in candidates for found in _further(each, sent)]
        if not further:
            return Place(_best(candidates), tuple(each.message for each in messages[number:]), None)
        candidates = further
    return Place(_best(candidates), (), None)


def _further(candidate: _Candidate, sent: Meaning) -> Iterator[_Candidate]:
    node, ids, alike = candidate
    for child in node.children:
        if child.meaning is not None and difference(child.meaning, sent, ids) is None:
            recorded = child.meaning.message
            yield _Candidate(child, _with_ids(ids, recorded, sent.message), alike + exactness(recorded, sent.message))


def _best(candidates: Sequence[_Candidate]) -> Node:
    return max(reversed(candidates), key=lambda each: each.exactness).node


def _with_ids(ids: Ids, recorded: ChatMessage, sent: ChatMessage) -> Ids:
    """Return the client's own ids of tool calls, with those of one more message."""
    if recorded.tool_calls == sent.tool_calls:
        return ids
    new = {theirs.id: ours.id for ours, theirs in paired(recorded, sent) if theirs.id != ours.id}
    return {**ids, **new} if new else ids


def _own_ids(node: Node) -> Int32Array:
    if node.turn is not None:
        return node.turn.ids
    return Int32Array() if node.prompt_ids is None else node.prompt_ids


def _continues(node: Node, ids: Int32Array, at: int) -> bool:
    own = _own_ids(node)
    return len(own) > 0 and np.array_equal(ids[at : at + len(own)], own)
