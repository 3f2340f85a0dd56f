"""A request that kills SGLang's own server: found by being sent alone, and failed; the others complete.

The request has a token that the model has not, which ends a scheduler. Our client never sends one to a model that it
knows: here it is made to take the model for a larger one, as it would any request whose deadliness it cannot know.
"""

from pathlib import Path
from typing import Final

import pytest

from actors.rollout.requests.request import GenerateRequest
from actors.rollout.sglang.facts import CRASH_WORDS
from runtime.settings.processes import PortRequest, ProcessSpec, Tier, WhenListening
from tests.sglang.rig import request
from tests.sglang.router import Router
from tests.sglang.server import CPU_FLAGS, SGLANG_START_S, sglang_environment, sglang_python
from tests.support.supervised_engines import check_that_one_fails_alone, generating
from tests.support.tiny_models import write_model

OUTSIDE: Final = 60_000
NUM_REQUESTS: Final = 16
DEADLY: Final = 5  # of them
NUM_TOKENS: Final = 64
ADDED: Final = ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS")

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1800)]


def spec(model: Path) -> ProcessSpec:
    """SGLang's server, started as a node daemon starts it."""
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


@pytest.mark.nightly
async def test_a_request_that_kills_the_server_fails_alone(tmp_path: Path, session_router: Router) -> None:
    served = write_model(tmp_path / "served", tokenizer=True)
    believed = write_model(tmp_path / "believed", tokenizer=True, vocab_size=OUTSIDE + 1)
    requests = [asked(number, deadly=number == DEADLY) for number in range(NUM_REQUESTS)]
    async with generating(
        tmp_path, session_router.url, served, [spec(served)], start_s=SGLANG_START_S, believed=believed
    ) as (generator, engines):
        await check_that_one_fails_alone(generator, engines, requests, DEADLY)
