"""The tree of a session: paths are found again, forks have a cause, and each turn belongs to one branch alone."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollout.sessions.tree import MAX_BRANCHES, Asked, Node, SampledTurn, TooManyBranches, Tree
from messages import Float32Array, Int32Array
from runtime.sessions.turns import ChatMessage, Tool, ToolCall, TurnRequest

SYSTEM, TASK = ChatMessage("system", "Be brief."), ChatMessage("user", "What is 1+1?")
BASH = (Tool("bash"),)


def start(tree: Tree, request: TurnRequest) -> Asked:
    return tree.start(request, tree.find(request))


def tail_of(asked: Asked, request: TurnRequest) -> list[ChatMessage]:
    return list(request.messages[asked.above.depth if asked.above else 0 :])


def turn_of(*ids: int, inputs: tuple[int, ...] = (1, 2)) -> SampledTurn:
    return SampledTurn(Int32Array(inputs), Int32Array(ids), Float32Array([-0.5] * len(ids)), (), "stop")


def answer(
    tree: Tree, messages: list[ChatMessage], message: ChatMessage, *ids: int, tools: tuple[Tool, ...] = BASH
) -> Asked:
    asked = start(tree, TurnRequest(tuple(messages), tools))
    tree.end(asked, message, turn_of(*ids))
    return asked


def calls(number: int, arguments: str = '{"command": "ls"}', text: str = "") -> ChatMessage:
    return ChatMessage("assistant", text, f"thought {number}", (ToolCall(f"call_{number}", "bash", arguments),))


def result(number: int, text: str = "ok") -> ChatMessage:
    return ChatMessage("tool", text, tool_call_id=f"call_{number}")


def conversation(tree: Tree, num_turns: int) -> list[ChatMessage]:
    messages = [SYSTEM, TASK]
    for number in range(num_turns):
        answer(tree, messages, calls(number), 10 + number)
        messages += [calls(number), result(number)]
    return messages


def test_a_client_that_keeps_its_history_extends_one_branch() -> None:
    tree = Tree()
    conversation(tree, 5)
    assert len(tree.branches) == 1
    assert tree.num_extended == 4
    assert tree.branches[0].tip is not None
    assert tree.branches[0].tip.ids.tolist() == [1, 2, 10, 1, 2, 11, 1, 2, 12, 1, 2, 13, 1, 2, 14]


def test_the_tail_is_what_came_after_the_newest_turn() -> None:
    tree = Tree()
    messages = [*conversation(tree, 2), ChatMessage("user", "Go on.")]
    request = TurnRequest(tuple(messages), BASH)
    asked = start(tree, request)
    assert tail_of(asked, request) == messages[-2:]
    assert asked.above is not None
    assert asked.above.turn is not None
    assert asked.above.turn.ids.tolist() == [11]


CHANGED = ChatMessage("user", "Summary: one call was made.")


@pytest.mark.parametrize(
    ("change", "tools", "cause"),
    [
        (lambda m: [*m[:2], calls(0, '{"command": "rm"}'), *m[3:]], BASH, "arguments"),
        (lambda m: [*m[:2], ChatMessage("assistant", "", "Another.", m[2].tool_calls), *m[3:]], BASH, "thoughts"),
        (lambda m: [*m[:2], calls(0, text="Other words."), *m[3:]], BASH, "text"),
        (lambda m: [*m[:3], result(0, "changed"), *m[4:]], BASH, "text"),
        (lambda m: [m[0], CHANGED], BASH, "compaction"),
        (lambda m: [*m, TASK], (Tool("python"),), "tools"),
        (lambda m: [ChatMessage("system", "You make titles."), *m[1:]], BASH, "system"),
        (lambda m: [ChatMessage("system", "You make titles.")], (), "system"),
        (lambda m: m[:2], BASH, "repeat"),
    ],
)
def test_a_fork_has_the_name_of_its_cause(change, tools: tuple[Tool, ...], cause: str) -> None:
    tree = Tree()
    messages = conversation(tree, 3)
    answer(tree, change(messages), ChatMessage("assistant", "Done."), 99, tools=tools)
    assert tree.forks == Counter([cause])
    assert [node.branch for node in sorted(tree.sampled, key=lambda node: node.turn.ids[0])] == [0, 0, 0, 1]
    answer(tree, messages, ChatMessage("assistant", "Done."), 100)  # the old branch goes on all the same
    assert len(tree.branches) == 2


def test_a_fork_goes_on_from_the_tokens_of_the_turn_before_it() -> None:
    tree = Tree()
    messages = conversation(tree, 3)
    request = TurnRequest((*messages[:5], result(1, "changed")), BASH)
    asked = start(tree, request)
    assert asked.is_new
    assert asked.above is not None
    assert asked.above.ids.tolist() == [1, 2, 10, 1, 2, 11]
    assert tail_of(asked, request) == [result(1, "changed")]


def test_two_requests_at_once_after_the_same_turn_get_branches_of_their_own() -> None:
    tree = Tree()
    messages = conversation(tree, 1)
    first = start(tree, TurnRequest(tuple(messages), BASH))
    second = start(tree, TurnRequest((*messages, TASK), BASH))
    assert (first.branch, second.branch) == (0, 1)
    tree.end(second, ChatMessage("assistant", "b"), turn_of(8))
    tree.end(first, ChatMessage("assistant", "a"), turn_of(7))
    assert {(node.branch, *node.turn.ids.tolist()) for node in tree.sampled if node.turn} == {(0, 10), (0, 7), (1, 8)}


def test_a_turn_that_is_given_up_is_no_part_of_the_tree() -> None:
    tree = Tree()
    messages = conversation(tree, 1)
    request = TurnRequest(tuple(messages), BASH)
    tree.give_up(start(tree, request))
    assert [node.turn.ids.tolist() for node in tree.sampled if node.turn] == [[10]]
    again = start(tree, request)
    assert again.is_new
    assert again.above is not None
    assert again.above.ids.tolist() == [1, 2, 10]


def test_a_turn_that_is_refused_leaves_the_tree_as_it_was() -> None:
    tree = Tree()
    messages = conversation(tree, 2)
    for number in range(MAX_BRANCHES + 1):
        tree.refuse(start(tree, TurnRequest((*messages, TASK), BASH)))
        tree.refuse(start(tree, TurnRequest((ChatMessage("user", f"{number}"),), BASH)))
        tree.refuse(start(tree, TurnRequest((TASK,), (Tool(f"{number}"),))))
    assert tree.forks == Counter()
    assert tree.num_extended == 1
    assert [tools for tools, _ in tree._roots] == [BASH]
    assert tree.find(TurnRequest((*messages, TASK), BASH)).rest == (messages[-1], TASK)
    assert start(tree, TurnRequest((*messages, TASK), BASH)).branch == 0


def test_of_two_equal_answers_the_one_that_was_used_is_found() -> None:
    tree = Tree()
    said = ChatMessage("assistant", "Hello.")
    for number in range(2):
        answer(tree, [TASK], said, 10 + number)
    answer(tree, [TASK, said, SYSTEM], ChatMessage("assistant", "b"), 20)
    longest = tree.find(TurnRequest((TASK, said, SYSTEM, ChatMessage("assistant", "b"), TASK), BASH))
    assert longest.node.turn is not None
    assert longest.node.turn.ids.tolist() == [20]


def test_ids_of_a_client_are_ours_by_their_place() -> None:
    tree = Tree()
    conversation(tree, 1)
    call = ToolCall("call_0_of_the_client", "bash", '{"command": "ls"}')
    sent = (SYSTEM, TASK, ChatMessage("assistant", "", None, (call,)), ChatMessage("tool", "ok", tool_call_id=call.id))
    tree.end(start(tree, TurnRequest(sent, BASH)), calls(1), turn_of(11))
    place = tree.find(TurnRequest((*sent, calls(1), TASK), BASH))
    assert place.rest == (TASK,)


def test_prompts_in_tokens_are_matched_by_them() -> None:
    tree = Tree()

    def ask(*ids: int) -> Asked:
        return start(tree, TurnRequest((), prompt_ids=ids))

    said = ChatMessage("assistant", "a")
    tree.end(ask(1, 2), said, turn_of(3, 4))
    further = ask(1, 2, 3, 4, 5)
    assert (further.branch, further.is_new) == (0, False)
    assert further.node.prompt_ids is not None
    assert further.node.prompt_ids.tolist() == [5]
    tree.end(further, said, turn_of(6))
    other = ask(1, 2, 3, 9)
    assert (other.branch, other.is_new) == (1, True)
    tree.end(other, said, turn_of(7))
    assert ask(1, 2, 3, 4, 5, 6).is_new  # without input between two turns
    assert tree.find(TurnRequest((), prompt_ids=(1, 2, 3, 9))).node is other.node


def test_a_session_has_so_many_branches_and_no_more() -> None:
    tree = Tree()
    for number in range(MAX_BRANCHES):
        answer(tree, [ChatMessage("user", f"{number}")], ChatMessage("assistant", "a"), number)
    with pytest.raises(TooManyBranches, match="64 branches"):
        start(tree, TurnRequest((TASK,), BASH))
    assert len(list(tree.sampled)) == len(tree.branches) == MAX_BRANCHES


def rewritten(message: ChatMessage, how: int) -> ChatMessage:
    """A message as a client sends it back: unchanged, without thoughts, with other white space, or changed."""
    if message.role != "assistant":
        return message if how < 3 else ChatMessage(message.role, message.text + "!", tool_call_id=message.tool_call_id)
    if how == 0:
        return message
    if how == 1:
        return ChatMessage("assistant", message.text, None, message.tool_calls)
    if how == 2:
        return ChatMessage("assistant", f"\n{message.text} ", message.reasoning, message.tool_calls)
    return ChatMessage("assistant", message.text + " edited", message.reasoning, message.tool_calls)


ACTION = st.tuples(
    st.integers(0, 30),  # which earlier history the client goes on from
    st.integers(0, 12),  # how much of it is cut off
    st.lists(st.integers(0, 30), max_size=3),  # which messages are written anew
    st.integers(1, 3),  # how
    st.sampled_from(["ends", "is given up", "is refused", "stays open"]),
)


@given(st.lists(ACTION, min_size=1, max_size=25))
@settings(deadline=None, max_examples=60)
def test_no_turn_trains_twice_and_none_is_lost(actions: list[tuple[int, int, list[int], int, str]]) -> None:
    tree, histories = Tree(), [[SYSTEM, TASK]]
    recorded: dict[int, tuple[int, list[int]]] = {}  # by sampled token: its branch, and all tokens to its end
    of_branch: dict[int, list[int]] = {}
    for number, (which, cut, changed, how, then) in enumerate(actions):
        messages = [*histories[which % len(histories)]]
        messages = messages[: max(1, len(messages) - cut)]
        for place in changed:
            messages[place % len(messages)] = rewritten(messages[place % len(messages)], how)
        try:
            asked = start(tree, TurnRequest(tuple(messages), BASH))
        except TooManyBranches:
            break
        before = [] if asked.above is None else asked.above.ids.tolist()
        if not asked.is_new:
            assert of_branch[asked.branch] == before  # the engine's prefix is what the branch recorded
        if then == "ends":
            node = tree.end(asked, calls(number), turn_of(1000 + number, inputs=(number,)))
            histories.append([*messages, calls(number), result(number)])
            recorded[1000 + number] = asked.branch, node.ids.tolist()
            of_branch[asked.branch] = node.ids.tolist()
            assert node.ids.tolist() == [*before, number, 1000 + number]
        elif then == "is given up":
            tree.give_up(asked)
        elif then == "is refused":
            tree.refuse(asked)
    sampled: list[Node] = list(tree.sampled)
    assert Counter(int(node.turn.ids[0]) for node in sampled if node.turn) == Counter(recorded.keys())
    for node in sampled:
        assert node.turn is not None
        assert recorded[int(node.turn.ids[0])] == (node.branch, node.ids.tolist())
    of_turns = {branch: [node for node in sampled if node.branch == branch] for branch in range(len(tree.branches))}
    for turns in of_turns.values():  # a branch is one line: each turn goes on from the one before
        ordered = sorted(turns, key=lambda node: node.depth)
        for earlier, later in itertools.pairwise(ordered):
            assert later.parent is not None
            assert later.parent.sampled_above is earlier
