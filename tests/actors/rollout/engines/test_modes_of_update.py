"""Real weights that change in the middle of a generation: every token is labelled with the weights that sampled it."""

from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.rollout.sglang.labels import version_of
from messages import (
    GroupCompleted,
    Int32Array,
    RolloutRequested,
    SampleStatus,
    SamplingParams,
    Segment,
    SegmentsPublished,
    SegmentsSpilled,
    WeightsAnnounced,
)
from runtime.bus.bus import Bus
from runtime.models.checksums import checksums_of
from tests.build.topology import topology_with
from tests.support.rollout import announcement, completed, grade, next_event, rollout_actor, task
from tests.support.tiny_client import EngineClient
from tests.support.tiny_engine import RunningEngine, running_engine
from tests.support.tiny_models import teacher_forced, write_model, write_weights

pytestmark = [pytest.mark.anyio]  # transformers takes its time to load

PROMPT = [7, 8, 9]
LENGTH = 400  # tokens of a response: long enough to be streamed
CLOSE = 2e-4  # natural log, between the engine's cached float32 passes and a whole one
FAR = 1e-2


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Directories of two versions of a model."""
    first = write_model(tmp_path_factory.mktemp("v1"), seed=1)
    second = write_model(tmp_path_factory.mktemp("v2"), seed=1)
    write_weights(second, second, seed=2)
    return {1: first, 2: second}


@pytest.fixture(scope="module")
def engine(weights: dict[int, Path]) -> Iterator[RunningEngine]:
    with running_engine(weights[1], "--stream-interval", "16", "--incremental-streaming-output") as engine:
        yield engine


def announced(weights: dict[int, Path], version: int) -> WeightsAnnounced:
    directory = weights[version]
    checksum = checksums_of(directory).total
    return msgspec.structs.replace(announcement(version), path=str(directory), checksum=checksum)


def long_task() -> RolloutRequested:
    prompt = msgspec.structs.replace(task(0).prompt, prompt_ids=Int32Array(PROMPT))
    return msgspec.structs.replace(task(0), prompt=prompt, sampling=SamplingParams(max_new_tokens=LENGTH))


async def segments_of(bus: Bus, event: GroupCompleted, index: int) -> list[Segment]:
    refs = event.samples[index].segments
    return [(await bus.fetch(SegmentsPublished, ref.seq)).segments[ref.position] for ref in refs]


def labels(segments: list[Segment]) -> list[int]:
    """The version of each token."""
    return [span.version for segment in segments for span in segment.weight_spans for _ in range(span.start, span.end)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["drain", "abort", "retract", "in_place"])
async def test_every_token_is_labelled_with_the_weights_that_sampled_it(
    bus: Bus, router_url: str, engine: RunningEngine, weights: dict[int, Path], mode: str
) -> None:
    topology = topology_with(
        rollout={"on_weight_update": mode, "max_staleness": 1, "max_response_len": LENGTH, "spill_every_s": 0.2}
    )
    async with EngineClient(engine.url) as client, anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        async with rollout_actor(bus, router_url, [engine], topology):
            await bus.publish(announced(weights, 1))
            await client.post("/slow_down", {"forward_sleep_time": 0.004})
            await bus.publish(long_task())
            await next_event(bus, SegmentsSpilled)
            await bus.publish(announced(weights, 2))
            if mode != "drain":
                await until_version(client, 2)
            await client.post("/slow_down", {"forward_sleep_time": 0})
            event = await completed(bus)
        group.cancel_scope.cancel()
    assert event.attempt == 0
    for index in range(2):
        assert event.samples[index].status is SampleStatus.TRUNCATED
        segments = await segments_of(bus, event, index)
        assert [segment.prompt_ids.tolist() for segment in segments] == [PROMPT] + [[]] * (len(segments) - 1)
        check_labels(segments, weights, mode)


@pytest.mark.slow
async def test_a_request_that_waited_during_an_update_in_place_is_sent_again(
    bus: Bus, router_url: str, weights: dict[int, Path]
) -> None:
    """One slot: the first sample has tokens of both versions, the second waited and has those of the new one alone."""
    topology = topology_with(
        rollout={"on_weight_update": "in_place", "max_staleness": 1, "max_response_len": LENGTH, "spill_every_s": 0.2}
    )
    sizes = ("--stream-interval", "16", "--incremental-streaming-output", "--max-running-requests", "1")
    with running_engine(weights[1], *sizes) as engine, capture_logs() as logged:
        async with EngineClient(engine.url) as client, anyio.create_task_group() as group:
            group.start_soon(grade, bus)
            async with rollout_actor(bus, router_url, [engine], topology):
                await bus.publish(announced(weights, 1))
                await client.post("/slow_down", {"forward_sleep_time": 0.004})
                await bus.publish(long_task())
                await next_event(bus, SegmentsSpilled)
                await bus.publish(announced(weights, 2))
                await until_version(client, 2)
                await client.post("/slow_down", {"forward_sleep_time": 0})
                event = await completed(bus)
            group.cancel_scope.cancel()
    assert [entry["event"] for entry in logged].count("request_outdated") == 1
    found = [await segments_of(bus, event, index) for index in range(2)]
    first, second = sorted(found, key=lambda segments: labels(segments)[0])
    check_labels(first, weights, "in_place")
    assert set(labels(second)) == {2}
    ids = [token for segment in second for token in segment.response_ids.tolist()]
    log_probs = np.concatenate([np.asarray(segment.rollout_log_probs) for segment in second])
    assert np.abs(log_probs - teacher_forced(weights[2], PROMPT, ids).numpy()).max() < CLOSE


def check_labels(segments: list[Segment], weights: dict[int, Path], mode: str) -> None:
    """Compare with the log-probs that transformers computes under each version."""
    ids = [token for segment in segments for token in segment.response_ids.tolist()]
    log_probs = np.concatenate([np.asarray(segment.rollout_log_probs) for segment in segments])
    versions = np.array(labels(segments))
    assert len(ids) == len(versions) == LENGTH
    differences = {
        version: np.abs(log_probs - teacher_forced(directory, PROMPT, ids).numpy())
        for version, directory in weights.items()
    }
    changed = int((versions == 1).sum())
    assert (versions[:changed] == 1).all()  # they only rise
    assert differences[1][:changed].max() < CLOSE
    if mode == "drain":
        assert changed == LENGTH
        return
    assert 0 < changed < LENGTH
    if mode == "in_place":  # with keys and values of the old weights: neither version alone explains them
        assert differences[1][changed] > FAR
    else:
        assert differences[2][changed:].max() < CLOSE


async def until_version(client: EngineClient, version: int) -> None:
    with anyio.fail_after(10):
        while version_of((await client.get("/model_info")).body["weight_version"]) != version:
            pass
