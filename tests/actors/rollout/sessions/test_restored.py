"""A session that goes on in another process: the tree is the same, no turn is sampled again, what is stored decides."""

from typing import NamedTuple

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollout.sessions.notes import About, ControlNote, LeftSession, State, TurnNote, encoded
from actors.rollout.sessions.rendering import Rendering
from actors.rollout.sessions.tree import Node, Tree
from actors.rollout.sglang.served_model import ServedModel
from messages import SampleStatus, SampleSummary, SegmentRef
from runtime.sessions.keys import KeyPair
from runtime.sessions.programs import Held
from runtime.sessions.turns import ChatMessage, TurnRequest
from tests.actors.rollout.sessions.test_session import numbered
from tests.support.chat_models import write_chat_model
from tests.support.scripted_session import TOOLS, Scripted, rendering_of, scripted_session

ABOUT = About(7, 0, KeyPair.new("s1").digests())
ASKS = tuple(ChatMessage("user", text) for text in ("What is 1+1?", "And 2+2?"))


class Ask(NamedTuple):
    """A request after an earlier answer, or at the beginning (-1)."""

    after: int
    message: ChatMessage
    has_tools: bool
    as_ids: bool


asks = st.lists(
    st.builds(Ask, st.integers(-1, 5), st.sampled_from(ASKS), st.booleans(), st.booleans()), min_size=1, max_size=6
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rendering, ServedModel]:
    return rendering_of(write_chat_model(tmp_path_factory.mktemp("qwen3"), "qwen3"))


def left(notes: list[TurnNote | ControlNote], samples: tuple[SampleSummary, ...] = ()) -> LeftSession:
    """Return what a successor gets."""
    return LeftSession.of(Held("s1", encoded(ABOUT), tuple(map(encoded, notes)), encoded(State(samples))))


def shown(tree: Tree) -> object:
    """Return all that a tree has, in a form that is compared."""

    def of(node: Node) -> object:
        turn = node.turn
        ids = None if turn is None else (turn.input_ids.tolist(), turn.ids.tolist(), turn.log_probs.tolist())
        rest = None if turn is None else (turn.weight_spans, turn.finish, turn.is_whole)
        said = None if node.meaning is None else node.meaning.message
        own = None if node.prompt_ids is None else node.prompt_ids.tolist()
        return (
            said,
            ids,
            rest,
            node.wish,
            node.branch,
            own,
            node.depth,
            node.deepest,
            [of(each) for each in node.children],
        )

    branches = [(branch.cause, branch.tip and branch.tip.ids.tolist()) for branch in tree.branches]
    return [(tools, of(root)) for tools, root in tree._roots], of(tree._of_ids), branches, tree.num_extended


async def play(run: Scripted, requests: list[Ask], model: ServedModel) -> list[TurnRequest]:
    """Send requests one after the other; return them."""
    sent: list[TurnRequest] = []
    histories: list[tuple[ChatMessage, ...]] = []
    prompts: list[tuple[int, ...]] = []
    for ask in requests:
        after = min(ask.after, len(histories) - 1)
        tools = TOOLS if ask.has_tools else ()
        if ask.as_ids:
            ids = tuple(model.encode(ask.message.text))
            request = TurnRequest((), prompt_ids=(*(prompts[after] if after >= 0 else ()), *ids))
        else:
            request = TurnRequest((*(histories[after] if after >= 0 else ()), ask.message), tools)
        answer = await run.session.turn(request)
        sent.append(request)
        histories.append((*request.messages, answer.message))
        prompts.append((*(request.prompt_ids or ()), *answer.token_ids))
    return sent


@settings(max_examples=25, deadline=None)
@given(requests=asks)
def test_the_tree_of_a_successor_is_the_same_and_no_engine_is_asked(
    qwen: tuple[Rendering, ServedModel], requests: list[Ask]
) -> None:
    rendering, model = qwen
    notes: list[TurnNote | ControlNote] = []

    async def keep(note: TurnNote) -> None:
        notes.append(note)

    async def test() -> None:
        with anyio.fail_after(200):
            async with scripted_session(rendering, model, numbered(model), keep=keep, clock=lambda: 0.0) as run:
                sent = await play(run, requests, model)
                newest = await run.session.turn(sent[-1])
            async with scripted_session(
                rendering, model, numbered(model), sample=run.sample, clock=lambda: 10_000.0
            ) as again:
                await again.session.restore(left(notes).turns)
                assert shown(again.session.tree) == shown(run.session.tree)
                assert await again.session.turn(sent[-1]) == newest  # also long after: its client may not have it
                assert again.tap.num_turns == 0
                assert again.talk.recorded_turns == {part.part: len(part.turns) for part in run.sample.parts}
        assert again.talk.sample_metadata["session"] == run.talk.sample_metadata["session"]

    anyio.run(test)


@pytest.mark.anyio
async def test_a_turn_after_the_death_goes_on_from_the_recorded_tokens(qwen: tuple[Rendering, ServedModel]) -> None:
    """The client of a fork goes on in its fork, and that of the first conversation in that one."""
    rendering, model = qwen
    notes: list[TurnNote | ControlNote] = []

    async def keep(note: TurnNote) -> None:
        notes.append(note)

    async with scripted_session(rendering, model, numbered(model), keep=keep) as run:
        first = await run.session.turn(TurnRequest(ASKS[:1]))
        second = await run.session.turn(TurnRequest((ASKS[0], first.message, ASKS[1])))
        fork = TurnRequest((ASKS[0], first.message, ChatMessage("user", "Stop.")))
        other = await run.session.turn(fork)
    async with scripted_session(rendering, model, numbered(model), sample=run.sample) as again:
        await again.session.restore(left(notes).turns)
        await again.session.turn(TurnRequest((*fork.messages, other.message, ASKS[1])))
        await again.session.turn(TurnRequest((ASKS[0], first.message, ASKS[1], second.message, ASKS[0])))
    recorded = [[*run.tap.prompts[number], *answer.token_ids] for number, answer in ((2, other), (1, second))]
    sent = zip(again.tap.prompts, recorded, strict=True)
    assert all(prompt[: len(before)] == before and len(prompt) > len(before) for prompt, before in sent)
    assert again.talk.sample_metadata["session"] == {"turns": 5, "extended": 3, "forks": {"text": 1}}
    assert [len(part.turns) for part in again.sample.parts] == [3, 2]


@pytest.mark.anyio
async def test_conversations_that_were_opened_in_another_order_are_refused(
    qwen: tuple[Rendering, ServedModel],
) -> None:
    rendering, model = qwen
    notes: list[TurnNote] = []

    async def keep(note: TurnNote) -> None:
        notes.append(note)

    async with scripted_session(rendering, model, numbered(model), keep=keep) as run:
        for text in "abc":
            await run.session.turn(TurnRequest((ChatMessage("user", text),)))
    async with scripted_session(rendering, model, numbered(model), sample=run.sample) as again:
        with pytest.raises(ValueError, match="conversation 2 of the sample cannot be opened before 1"):
            await again.session.restore([notes[0], notes[2]])


def summary(*seqs: int, part: int = 0, index: int = 0) -> SampleSummary:
    refs = tuple(SegmentRef(seq=seq, position=0) for seq in seqs)
    return SampleSummary(index=index, part=part, status=SampleStatus.ABORTED, segments=refs, response_len=len(seqs))


def test_a_sample_goes_on_from_what_was_noted_and_from_further_tokens_of_the_same_attempt() -> None:
    noted = left([], (summary(4), summary(6, part=1)))
    longer = summary(4, 9)
    assert noted.stored([longer]) == [longer, summary(6, part=1)]
    another_attempt = summary(1, 2, 3)
    assert noted.stored([another_attempt, summary(8, part=2)]) == [summary(4), summary(6, part=1)]
    assert noted.stored([summary(4, 9, index=1)]) == [summary(4), summary(6, part=1)]
    assert left([]).stored([another_attempt]) == []
    assert LeftSession.of(Held("s1", encoded(ABOUT), None, b"")).notes is None
