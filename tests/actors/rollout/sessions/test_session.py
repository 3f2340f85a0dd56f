"""A session: repeated requests get one turn, refusals are named, and only turns that ended are recorded."""

from itertools import count
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from actors.rollout.sessions.rendering import Rendering
from actors.rollout.sessions.session import REPEATED_S
from actors.rollout.sessions.tree import MAX_BRANCHES
from actors.rollout.sglang.served_model import ServedModel
from messages import WeightSpan
from runtime.sessions.turns import ChatMessage, Tool, ToolCall, TurnAnswer, TurnRefused, TurnRequest, TurnSampling
from tests.support.chat_models import write_chat_model, written
from tests.support.scripted_session import TOOLS, Script, rendering_of, scripted_session

pytestmark = pytest.mark.anyio

ASK, MORE = ChatMessage("user", "What is 1+1?"), ChatMessage("user", "And 2+2?")
FIRST = TurnRequest((ASK,))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rendering, ServedModel]:
    return rendering_of(write_chat_model(tmp_path_factory.mktemp("qwen3"), "qwen3"))


def numbered(model: ServedModel) -> Script:
    """Answers that differ: the number of the turn."""
    numbers = count()
    return lambda prompt, limit: model.encode(f"answer {next(numbers)}<|im_end|>")[:limit]


def says(model: ServedModel, text: str) -> Script:
    return lambda prompt, limit: model.encode(text)[:limit]


def then(answer: TurnAnswer, *more: ChatMessage) -> TurnRequest:
    return TurnRequest((ASK, answer.message, *more))


async def test_a_second_turn_goes_on_from_the_tokens_of_the_first(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    async with scripted_session(rendering, model, numbered(model)) as run:
        first = await run.session.turn(FIRST)
        second = await run.session.turn(then(first, MORE))
    assert (first.message.text, first.finish) == ("answer 0", "stop")
    assert run.tap.prompts[1][: len(run.tap.prompts[0])] == run.tap.prompts[0]
    assert model.decode(run.tap.prompts[1]).endswith(
        "answer 0<|im_end|>\n<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.num_prompt_tokens == len(run.tap.prompts[1])
    assert run.trained == [first.token_ids, second.token_ids]
    assert run.talk.sample_metadata["session"] == {"turns": 2, "extended": 1, "forks": {}}
    assert "And 2+2?" in run.talk.text
    nodes = sorted(run.session.tree.sampled, key=lambda node: node.depth)
    assert [node.turn.weight_spans for node in nodes if node.turn] == [
        (WeightSpan(version=3, start=0, end=len(answer.token_ids)),) for answer in (first, second)
    ]
    assert second.log_probs == pytest.approx([-(number + 1) / 1024 for number in range(len(second.token_ids))])


async def test_a_fork_goes_on_from_recorded_tokens_in_a_conversation_of_its_own(
    qwen: tuple[Rendering, ServedModel],
) -> None:
    rendering, model = qwen
    async with scripted_session(rendering, model, numbered(model)) as run:
        first = await run.session.turn(FIRST)
        second = await run.session.turn(then(first, MORE))
        other = await run.session.turn(then(first, ChatMessage("user", "And 3+3?")))
        third = await run.session.turn(then(first, MORE, second.message, MORE))
        await run.session.turn(then(first, ChatMessage("user", "And 3+3?"), other.message, MORE))
    recorded = [*run.tap.prompts[0], *first.token_ids]
    assert run.tap.prompts[2][: len(recorded)] == recorded
    assert model.decode(run.tap.prompts[2][len(recorded) :]).endswith(
        "user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [len(part.turns) for part in run.sample.parts] == [3, 2]
    assert run.trained[:3] == [first.token_ids, second.token_ids, third.token_ids]
    assert run.tap.num_differing == 0
    assert run.session.tree.forks == {"text": 1}


async def test_the_same_request_joins_a_running_turn_and_a_client_that_goes_away_ends_none(
    qwen: tuple[Rendering, ServedModel],
) -> None:
    rendering, model = qwen
    answers: list[TurnAnswer] = []
    async with scripted_session(rendering, model, numbered(model)) as run:

        async def ask() -> None:
            answers.append(await run.session.turn(FIRST))

        run.tap.gate = anyio.Event()
        async with anyio.create_task_group() as group:
            gone, served = anyio.CancelScope(), list[str]()

            async def go_away() -> None:
                with gone:
                    await run.session.turn(FIRST, lambda: served.append("first"))

            group.start_soon(go_away)
            group.start_soon(ask)
            group.start_soon(ask)
            await run.tap.asked.wait()
            assert served == ["first"]
            gone.cancel()
            run.tap.gate.set()
    assert len(answers) == 2
    assert answers[0] == answers[1]
    assert run.tap.num_turns == 1


async def test_an_answer_is_given_again_until_it_was_used_or_is_old(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    now = 0.0
    async with scripted_session(rendering, model, numbered(model), clock=lambda: now) as run:
        first = await run.session.turn(FIRST)
        now = REPEATED_S
        assert await run.session.turn(FIRST) == first
        now = REPEATED_S + 1
        other = await run.session.turn(FIRST)
        assert other.message.text == "answer 1"
        now += REPEATED_S + 1
        run.session.note_undelivered(FIRST)
        assert await run.session.turn(FIRST) == other  # the client never got it
        await run.session.turn(then(other, MORE))
        again = await run.session.turn(FIRST)  # answered and used: a sibling
        assert again.message.text == "answer 3"
        await run.session.turn(then(again, MORE))
        used = await run.session.turn(FIRST)  # also if it is young
        assert used.message.text == "answer 5"
    assert run.session.tree.forks == {"repeat": 3}
    assert sorted(run.trained) == sorted(run.tap.sampled)


async def test_requests_that_want_something_else_are_turns_of_their_own(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    hot = TurnSampling(temperature=0.5)
    requests = [FIRST, TurnRequest((ASK,), choice=1), TurnRequest((ASK,), sampling=hot), TurnRequest((ASK,), model="m")]
    async with scripted_session(rendering, model, numbered(model)) as run:
        texts = {(await run.session.turn(request)).message.text for request in requests}
    assert len(texts) == run.tap.num_turns == 4


@pytest.mark.parametrize(
    ("request_", "kind", "reason"),
    [
        (TurnRequest((ASK,), sampling=TurnSampling(temperature=-1.0)), "parameter", "temperature"),
        (TurnRequest((ASK,), sampling=TurnSampling(top_p=2.0)), "parameter", "top_p"),
        (TurnRequest((ASK,), sampling=TurnSampling(max_tokens=0)), "parameter", "max_tokens"),
        (TurnRequest((ASK,), sampling=TurnSampling(stop=("",))), "parameter", "stop"),
        (TurnRequest(()), "parameter", "messages"),
        (TurnRequest((), prompt_ids=(1, 1 << 30)), "parameter", "not a token"),
        (TurnRequest((ChatMessage("user", "long " * 500),)), "context_full", "tokens > 99 maximum"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_by_name_and_leaves_nothing(
    qwen: tuple[Rendering, ServedModel], request_: TurnRequest, kind: str, reason: str
) -> None:
    rendering, model = qwen
    async with scripted_session(rendering, model, numbered(model), max_new_tokens=100) as run:
        for _ in range(MAX_BRANCHES + 1):
            with pytest.raises(TurnRefused, match=reason) as refused:
                await run.session.turn(request_)
            assert refused.value.kind == kind
            assert (refused.value.max_tokens == 99) == (refused.value.num_tokens > 99) == (kind == "context_full")
        answer = await run.session.turn(FIRST)
        with pytest.raises(TurnRefused, match="maximum"):
            await run.session.turn(then(answer, ChatMessage("user", "long " * 500)))
        await run.session.turn(then(answer, ChatMessage("user", "a")))  # the branch goes on
    assert run.session.tree.forks == {}
    assert len(run.trained) == 2


async def test_a_turn_is_cut_to_the_room_and_the_next_has_none(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    async with scripted_session(rendering, model, says(model, "word " * 400), max_new_tokens=150) as run:
        answer = await run.session.turn(TurnRequest((ASK,), sampling=TurnSampling(max_tokens=32_000)))
        assert answer.finish == "length"
        assert answer.num_prompt_tokens + len(answer.token_ids) == 150
        with pytest.raises(TurnRefused, match=r"prompt is too long: \d+ tokens > 149 maximum"):
            await run.session.turn(then(answer, MORE))


async def test_the_tail_ends_a_turn_that_was_cut_off(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    async with scripted_session(rendering, model, says(model, "one two three<|im_end|>")) as run:
        answer = await run.session.turn(TurnRequest((ASK,), sampling=TurnSampling(max_tokens=3)))
        await run.session.turn(then(answer, MORE))
    sent = run.tap.prompts[1][answer.num_prompt_tokens + 3 :]
    assert model.decode(sent).startswith("<|im_end|>\n<|im_start|>user\nAnd")
    assert len(run.trained[0]) == 3


async def test_an_abort_of_the_engine_is_no_turn(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    with anyio.CancelScope() as of_the_function:
        async with scripted_session(rendering, model, lambda prompt, limit: []) as run:
            run.talk._run.scope = of_the_function
            with pytest.raises(TurnRefused, match="not sampled to its end"):
                await run.session.turn(FIRST)
    assert list(run.session.tree.sampled) == []
    with pytest.raises(TurnRefused, match="has ended"):
        await run.session.turn(FIRST)


async def test_a_session_whose_attempt_failed_ends_at_once(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    refused: list[TurnRefused] = []
    async with anyio.create_task_group() as group:
        async with scripted_session(rendering, model, numbered(model)) as run:
            run.tap.gate = anyio.Event()  # never set

            async def ask() -> None:
                with pytest.raises(TurnRefused, match="the session has ended") as found:
                    await run.session.turn(FIRST)
                refused.append(found.value)

            group.start_soon(ask)
            await run.tap.asked.wait()
            run.talk.end("aborted", "the agent died")
            run.session.cancel_turns()
    assert [each.kind for each in refused] == ["ended"]
    assert list(run.session.tree.sampled) == []


async def test_calls_have_ids_of_their_own_and_stop_texts_are_no_words(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    call = ToolCall("", "bash", '{"command":  "ls"}')
    async with scripted_session(rendering, model, says(model, written("qwen3", "Look.", "hm", [call, call]))) as run:
        one = await run.session.turn(TurnRequest((ASK,), TOOLS))
        two = await run.session.turn(TurnRequest((MORE,), TOOLS))
        assert (one.finish, one.message.reasoning, one.message.text) == ("tool_calls", "hm", "Look.")
        assert len({each.id for answer in (one, two) for each in answer.message.tool_calls}) == 4
        stopped = await run.session.turn(TurnRequest((ASK,), sampling=TurnSampling(stop=("ok",))))
    assert (stopped.message.text, stopped.finish) == ("Lo", "stop")


@pytest.mark.parametrize("trains", ["tools", "all"])
async def test_a_title_that_is_asked_for_without_tools_does_not_train_beside_turns_with_tools(
    qwen: tuple[Rendering, ServedModel], trains: str
) -> None:
    rendering, model = qwen
    async with scripted_session(rendering, model, numbered(model), trains=trains) as run:
        title = await run.session.turn(TurnRequest((ChatMessage("user", "A title, please."),)))
        await run.session.turn(TurnRequest((ASK,), TOOLS))
    for conversation in run.talk.all:
        conversation.settle()
    without = ((0, len(title.token_ids)),) if trains == "tools" else ()
    assert [part.untrained for part in run.sample.parts] == [without, ()]


async def test_a_session_without_tools_trains_all(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    async with scripted_session(rendering, model, numbered(model)) as run:
        await run.session.turn(FIRST)
    run.talk.settle()
    assert run.sample.untrained == ()


async def test_a_session_that_forks_too_often_fails_by_name(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    async with scripted_session(rendering, model, numbered(model)) as run:
        for number in range(MAX_BRANCHES):
            await run.session.turn(TurnRequest((ChatMessage("user", f"{number}"),)))
        for _ in range(2):
            with pytest.raises(TurnRefused, match="64 branches") as refused:
                await run.session.turn(FIRST)
            assert refused.value.kind == "failed"
    assert run.talk.reason.startswith("the session has 64 branches")


async def test_a_client_that_renders_itself_goes_on_in_its_tokens(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    async with scripted_session(rendering, model, numbered(model)) as run:
        sampling = TurnSampling(stop_token_ids=(9,))
        first = await run.session.turn(TurnRequest((), prompt_ids=(5, 6, 7), sampling=sampling))
        assert run.tap.params[0].stop_token_ids == (9,)
        second = await run.session.turn(TurnRequest((), prompt_ids=(5, 6, 7, *first.token_ids, 8, 9)))
        assert await run.session.turn(TurnRequest((), prompt_ids=(5, 6, 7, *first.token_ids, 8, 9))) == second
        await run.session.turn(TurnRequest((), prompt_ids=(5, 6, 9)))
    assert run.tap.prompts == [[5, 6, 7], [5, 6, 7, *first.token_ids, 8, 9], [5, 6, 9]]
    assert (run.session.tree.num_extended, run.session.tree.forks) == (1, {"text": 1})


async def test_counted_tokens_are_those_of_the_prompt(qwen: tuple[Rendering, ServedModel]) -> None:
    rendering, model = qwen
    async with scripted_session(rendering, model, numbered(model)) as run:
        counted = [await run.session.count(FIRST)]
        first = await run.session.turn(FIRST)
        counted.append(await run.session.count(then(first, MORE)))
        await run.session.turn(then(first, MORE))
        assert await run.session.count(TurnRequest((), prompt_ids=(1, 2))) == 2
    assert counted == [len(prompt) for prompt in run.tap.prompts]
    assert run.session.tree.forks == {}


@pytest.mark.parametrize(
    ("shown", "forks"), [("{{ m.content }}", 0), ("{{ m.content if m.role == 'user' else 'dropped' }}", 1)]
)
async def test_an_unknown_template_renders_all_and_forks_where_it_writes_something_else(
    tmp_path: Path, shown: str, forks: int
) -> None:
    directory = write_chat_model(tmp_path, "qwen3")
    (directory / "chat_template.jinja").write_text("{% for m in messages %}" + shown + "{{ eos_token }}{% endfor %}")
    rendering, model = rendering_of(directory)
    with capture_logs() as logs:
        async with scripted_session(rendering, model, numbered(model)) as run:
            answer = await run.session.turn(FIRST)
            await run.session.turn(then(answer, MORE))
    assert run.session.tree.forks == ({"template": 1} if forks else {})
    assert len(run.sample.parts) == 1 + forks
    assert sorted(run.trained) == sorted(run.tap.sampled)
    [warning] = [line for line in logs if line["event"] == "unknown_chat_template"]
    assert (warning["forks"], warning["turns"], warning["share"]) == (forks, 2, forks / 2)


async def test_tools_that_a_template_leaves_out_are_named(tmp_path: Path) -> None:
    rendering, model = rendering_of(write_chat_model(tmp_path, "smollm2"))
    with capture_logs() as logs:
        async with scripted_session(rendering, model, numbered(model)) as run:
            await run.session.turn(TurnRequest((ASK,), (Tool("bash"),)))
    assert [line["tool"] for line in logs if line["event"] == "chat_template_leaves_out_tools"] == ["bash"]
