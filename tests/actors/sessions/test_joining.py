"""Requests of several answers to one prompt: each is a turn of its own."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from actors.sessions.dialects.chat import ChatDialect
from actors.sessions.joining import Joining, Prepared
from runtime.sessions.turns import TurnAnswer, TurnRequest
from tests.support.chat_models import write_chat_model
from tests.support.scripted_session import rendering_of, scripted_session

pytestmark = pytest.mark.anyio


async def test_several_answers_to_one_prompt_are_sampled_each(tmp_path: Path) -> None:
    rendering, model = rendering_of(write_chat_model(tmp_path, "qwen3"))
    texts = iter(["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"])
    body = b'{"model": "m", "n": 3, "messages": [{"role": "user", "content": "Go."}]}'
    async with scripted_session(rendering, model, lambda prompt, limit: model.encode(next(texts))) as run:

        async def ask(number: str, session: str, request: TurnRequest, accepted: Callable[[], None]) -> TurnAnswer:
            return await run.session.turn(request, accepted)

        async with anyio.create_task_group() as tasks:
            running = Joining(ask, tasks, repeat_s=600.0).join("s", Prepared(ChatDialect().read(body)))
            await running.done.wait()
    assert running.decided.is_set()
    assert sorted(answer.message.text for answer in running.turn.answers) == ["one", "three", "two"]
    assert len(run.sample.parts) == 3
    assert run.session.tree.forks == {"repeat": 2}
