"""A request that kills engines: found by sending suspects alone, and failed; those that were there with it complete."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.engines.failures import was_killed
from actors.rollout.requests.quarantine import DeathRecord, RequestStatus
from actors.rollout.requests.request import GenerateRequest
from messages import ActorExited, SamplingParams
from runtime.settings.processes import PortRequest, ProcessSpec, Tier, WhenListening
from tests.support.sampled import request_of
from tests.support.supervised_engines import check_that_one_fails_alone, generating
from tests.support.tiny_models import write_model

DEADLY = 63
NUM_REQUESTS = 256
NUM_TOKENS = 24


def test_records_by_hand() -> None:
    record = DeathRecord()
    statuses = [record.status]
    for alone, killed in [(False, False), (False, False), (True, True), (True, False), (True, False)]:
        record = record.after_death(alone=alone, killed=killed)
        statuses.append(record.status)
    ordinary, suspect, poison = RequestStatus.ORDINARY, RequestStatus.QUARANTINED, RequestStatus.POISON
    assert statuses == [ordinary, ordinary, suspect, suspect, suspect, poison]


@given(st.lists(st.tuples(st.booleans(), st.booleans())))
def test_nothing_is_poison_but_what_two_engines_died_of_alone(deaths: list[tuple[bool, bool]]) -> None:
    record = DeathRecord()
    for alone, killed in deaths:
        record = record.after_death(alone=alone, killed=killed)
    of_it = sum(alone and not killed for alone, killed in deaths)
    assert (record.status is RequestStatus.POISON) == (of_it >= 2)
    assert (record.status is RequestStatus.ORDINARY) == (len(deaths) < 2)


@pytest.mark.parametrize(
    ("exit_code", "reason", "killed"),
    [
        (-9, "killed by SIGKILL", True),
        (-15, "killed by SIGTERM", True),
        (-9, "no first token within 300 s for 1 request that it may hold", False),  # its daemon killed it on request
        (-11, "killed by SIGSEGV", False),
        (7, "exit code 7", False),
    ],
)
def test_what_counts_as_a_kill_from_outside(exit_code: int, reason: str, killed: bool) -> None:
    event = ActorExited(actor="engine.policy.0", node="local", pid=1, exit_code=exit_code, reason=reason)
    assert was_killed(event) == killed


def spec(model: Path, index: int) -> ProcessSpec:
    command = (sys.executable, "-m", "tests.support.mortal_engine", str(DEADLY), "--model-path", str(model))
    return ProcessSpec(
        name=f"engine.policy.{index}",
        command=(*command, "--port", "{port}", "--load-format", "dummy", "--max-running-requests", "256"),
        port=PortRequest(),
        ready=WhenListening(),
        tier=Tier.SERVICE,
        max_restarts=30,
    )


def request(number: int, prompt: list[int]) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    return request_of(f"lease-{number}-1", [prompt], params, seeds=[number])


@pytest.mark.anyio
@pytest.mark.slow
async def test_one_request_that_kills_engines_fails_and_255_complete(tmp_path: Path, router_url: str) -> None:
    model = write_model(tmp_path / "model")
    specs = [spec(model, index) for index in range(2)]
    requests = [
        request(number, [DEADLY if number == 100 else 1, 1 + number % 60, 1 + number // 60])
        for number in range(NUM_REQUESTS)
    ]
    async with generating(tmp_path, router_url, model, specs, start_s=60, believed=model) as (generator, engines):
        await check_that_one_fails_alone(generator, engines, requests, 100)
