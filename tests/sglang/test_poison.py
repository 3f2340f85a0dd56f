"""A request that kills SGLang's own server: found by being sent alone, and failed; the others complete.

The request has a token that the model has not, which ends a scheduler. Our client never sends one to a model that it
knows: here it is made to take the model for a larger one, as it would any request whose deadliness it cannot know.
"""

from pathlib import Path
from typing import Final

import anyio
import pytest

from actors.engine_processes import CRASH_WORDS
from actors.rollout.requests.request import GenerateRequest
from actors.rollout.sglang.errors import RequestRefused
from runtime.settings.processes import PortRequest, ProcessSpec, Tier, WhenListening
from tests.sglang.rig import request
from tests.sglang.router import Router
from tests.sglang.server import CPU_FLAGS, SGLANG_START_S, sglang_environment, sglang_python
from tests.support.supervised_engines import generating
from tests.support.tiny_models import write_model

OUTSIDE: Final = 60_000
NUM_REQUESTS: Final = 16
NUM_TOKENS: Final = 64
ADDED: Final = ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS")

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1800)]


def spec(model: Path) -> ProcessSpec:
    """SGLang's server as the node agent of a run has it."""
    environment = sglang_environment()
    sizes = ("--max-running-requests", "16", "--max-total-tokens", "4096", "--incremental-streaming-output")
    return ProcessSpec(
        name="engine.policy.0",
        command=(
            *(sglang_python(), "-m", "sglang.launch_server", "--model-path", str(model), "--load-format", "dummy"),
            *("--host", "{host}", "--port", "{port}", *sizes, *CPU_FLAGS),
        ),
        env={name: environment[name] for name in ADDED},
        port=PortRequest(),
        ready=WhenListening(),
        ready_timeout_s=SGLANG_START_S,
        crash_words=CRASH_WORDS,
        tier=Tier.SERVICE,
        max_restarts=10,
    )


def asked(number: int, *, deadly: bool) -> GenerateRequest:
    return request([OUTSIDE if deadly else 3, 2 + number], NUM_TOKENS, rid=f"lease-{number}-1")


@pytest.mark.sglang_all
async def test_a_request_that_kills_the_server_fails_alone(tmp_path: Path, session_router: Router) -> None:
    served = write_model(tmp_path / "served", tokenizer=True)
    believed = write_model(tmp_path / "believed", tokenizer=True, vocab_size=OUTSIDE + 1)
    completed: list[int] = []
    refused: dict[int, str] = {}

    async with generating(
        tmp_path, session_router.url, served, [spec(served)], start_s=SGLANG_START_S, believed=believed
    ) as (generator, engines):

        async def ask(number: int) -> None:
            try:
                generated = await generator.generate(asked(number, deadly=number == 5))
            except RequestRefused as error:
                refused[number] = str(error)
            else:
                assert generated is not None
                assert len(generated.answers[0].output_ids) == NUM_TOKENS
                completed.append(number)

        async with anyio.create_task_group() as group:
            for number in range(NUM_REQUESTS):
                group.start_soon(ask, number)
        deaths = engines.num_deaths
    assert refused == {5: "engines die of it: 2 that had nothing else to do"}
    assert sorted(completed) == [number for number in range(NUM_REQUESTS) if number != 5]
    assert deaths == 4  # two with others, two alone
