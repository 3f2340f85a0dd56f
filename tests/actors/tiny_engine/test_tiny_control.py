"""Orders to a real tiny engine: abort, pause, weights, memory, information, disconnects."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.abc import TaskGroup
from safetensors.numpy import load_file

from runtime.models.checksums import checksums_of
from tests.support.tiny_client import EngineClient
from tests.support.tiny_engine import RunningEngine, running_engine, write_config

pytestmark = pytest.mark.anyio
LONG = 480  # tokens of a request that is still running when something happens to it


class Pending:
    """A /generate call under way, and its answer once there is one."""

    def __init__(self, client: EngineClient, group: TaskGroup, **fields: Any) -> None:
        self._answered = anyio.Event()
        group.start_soon(self._run, client, fields)

    async def _run(self, client: EngineClient, fields: dict[str, Any]) -> None:
        self._answer = await client.generate(**fields)
        self._answered.set()

    @property
    def done(self) -> bool:
        return self._answered.is_set()

    async def answer(self) -> Any:
        with anyio.fail_after(200):
            await self._answered.wait()
        return self._answer


@asynccontextmanager
async def slow(client: EngineClient, seconds: float = 0.005) -> AsyncIterator[TaskGroup]:
    """A slowed engine and a task group for calls to it; full speed again before the group is waited for."""
    await client.post("/slow_down", {"forward_sleep_time": seconds})
    async with anyio.create_task_group() as group:
        yield group
        await client.post("/slow_down", {"forward_sleep_time": 0})


@pytest.fixture
def model_path(tiny_engine: RunningEngine) -> Path:
    flags = tiny_engine.process.args
    assert isinstance(flags, list)
    return Path(str(flags[flags.index("--model-path") + 1]))


@pytest.fixture
async def restored(client: EngineClient, model_path: Path) -> AsyncGenerator[None]:
    """Puts the first weights back after a test that changed them."""
    yield
    await client.post("/continue_generation", {})
    body = {"model_path": str(model_path), "weight_version": "v0", "abort_all_requests": True}
    assert (await client.post("/update_weights_from_disk", body)).status == 200


async def test_an_abort_returns_what_was_generated(client: EngineClient) -> None:
    async with slow(client) as group:
        pending = Pending(client, group, rid="gone", max_new_tokens=LONG)
        other = Pending(client, group, rid="gone2", max_new_tokens=LONG)
        await client.until_generated(20)
        aborted = await client.post("/abort_request", {"rid": "gone"})
        assert (aborted.status, aborted.text) == (200, "")
        answer = await pending.answer()
    meta = answer["meta_info"]
    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert meta["finish_reason"] == reason
    assert 0 < len(answer["output_ids"]) < LONG
    assert len(meta["output_token_logprobs"]) == len(answer["output_ids"]) == meta["completion_tokens"]
    assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": len(answer["output_ids"])}]
    assert (await other.answer())["meta_info"]["finish_reason"]["type"] == "length"  # its id only begins the same


async def test_unknown_and_empty_aborts_are_answered_and_do_nothing(client: EngineClient) -> None:
    for body in ({"rid": "nobody"}, {"rid": ""}, {}):
        assert (await client.post("/abort_request", body)).status == 200
    assert (await client.post("/abort_request", {"rid": 3})).status == 400
    assert (await client.post("/abort_request")).status == 400
    assert len((await client.generate())["output_ids"]) == 6


async def test_abort_all_ends_running_and_waiting_requests(client: EngineClient) -> None:
    async with slow(client) as group:
        pending = Pending(client, group, input_ids=[[3]] * 80, max_new_tokens=LONG)  # 64 run, 16 wait
        await client.until(running=64, waiting=16)
        await client.post("/abort_request", {"abort_all": True})
        answers = await pending.answer()
    reasons = [answer["meta_info"]["finish_reason"] for answer in answers]
    assert [reason["type"] for reason in reasons] == ["abort"] * 80
    assert reasons[-1] == {"type": "abort", "message": "Abort in waiting queue"}
    assert answers[-1]["output_ids"] == []
    assert "prompt_tokens" not in answers[-1]["meta_info"]


async def test_a_paused_engine_holds_new_requests_back_and_is_not_ready(client: EngineClient) -> None:
    assert (await client.get("/ready")).status == 200
    paused = await client.post("/pause_generation", {"mode": "in_place"})
    assert paused.body["status"] == "ok"
    assert (await client.get("/ready")).status == 503
    async with anyio.create_task_group() as group:
        pending = Pending(client, group, rid="early")
        await client.until(running=0, waiting=1)
        await client.post("/abort_request", {"rid": "early"})  # held back: not known to the engine yet
        assert not pending.done
        await client.post("/continue_generation", {})
        answer = await pending.answer()
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


async def test_health_waits_for_the_end_of_a_pause(client: EngineClient) -> None:
    assert (await client.get("/health")).status == 200
    await client.post("/pause_generation", {})
    statuses: list[int] = []

    async def check() -> None:
        statuses.append((await client.get("/health_generate")).status)

    async with anyio.create_task_group() as group:
        group.start_soon(check)
        await client.get("/v1/loads")
        assert not statuses
        await client.post("/continue_generation", {})
    assert statuses == [200]


async def test_a_pause_that_aborts_returns_when_nothing_is_left(client: EngineClient) -> None:
    async with slow(client) as group:
        pending = Pending(client, group, max_new_tokens=LONG)
        await client.until_generated(10)
        await client.post("/pause_generation", {})
        await client.until(running=0, waiting=0)
        assert (await pending.answer())["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await client.post("/flush_cache")).status == 200
        await client.post("/continue_generation", {})


@pytest.mark.usefixtures("restored")
async def test_a_retracted_request_goes_on_under_new_weights(
    client: EngineClient, model_path: Path, tmp_path: Path
) -> None:
    from tests.support.tiny_models import teacher_forced, write_model, write_weights

    write_weights(write_model(tmp_path, eos_token_id=1), model_path, seed=8)
    async with slow(client) as group:
        pending = Pending(client, group, max_new_tokens=60)
        await client.until_generated(20)
        await client.post("/pause_generation", {"mode": "retract"})
        await client.until(running=0, waiting=1)
        body = {"model_path": str(tmp_path), "weight_version": "v1"}
        updated = await client.post("/update_weights_from_disk", body)
        assert updated.body["success"], updated.text
        assert updated.body["num_paused_requests"] == 1
        assert not pending.done
        await client.post("/continue_generation", {})
        answer = await pending.answer()
    meta = answer["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"], second["end"]) == ("v0", "v1", 60)
    assert first["end"] == second["start"] > 0
    assert meta["num_retractions"] == 1
    assert meta["weight_version"] == "v1"
    prompt, output = [3, 4, 5], answer["output_ids"]
    split = first["end"]
    expected = teacher_forced(model_path, prompt, output)[:split].tolist()
    expected += teacher_forced(tmp_path, prompt, output)[split:].tolist()
    assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx(expected, abs=1e-5)
    assert (await client.get("/model_info")).body["model_path"] == str(tmp_path)


async def test_a_retracted_request_that_is_aborted_in_the_queue_loses_what_was_not_streamed(
    client: EngineClient,
) -> None:
    async with slow(client) as group:
        pending = Pending(client, group, rid="back", max_new_tokens=LONG)
        await client.until_generated(10)
        await client.post("/pause_generation", {"mode": "retract"})
        await client.post("/abort_request", {"rid": "back"})
        answer = await pending.answer()
        await client.post("/continue_generation", {})
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert answer["output_ids"] == answer["meta_info"]["output_token_logprobs"] == []


@pytest.mark.usefixtures("restored")
async def test_an_update_in_place_keeps_the_cache_only_if_told(
    client: EngineClient, model_path: Path, tmp_path: Path
) -> None:
    from tests.support.tiny_models import write_weights

    write_weights(tmp_path, model_path, seed=9)
    body = {"model_path": str(tmp_path), "weight_version": "v2"}
    before = await checksum(client)
    async with slow(client) as group:
        pending = Pending(client, group, max_new_tokens=60)
        await client.until_generated(20)
        await client.post("/pause_generation", {"mode": "in_place"})
        assert (await client.post("/flush_cache")).status == 400
        refused = await client.post("/update_weights_from_disk", body)
        assert refused.status == 400
        assert "cache was not flushed" in refused.body["message"]
        assert (await client.get("/model_info")).body["weight_version"] == "v0"
        assert await checksum(client) != before  # the weights did change
        kept = await client.post("/update_weights_from_disk", body | {"flush_cache": False})
        assert kept.status == 200
        await client.post("/continue_generation", {})
        answer = await pending.answer()
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["v0", "v2"]
    assert answer["meta_info"]["num_retractions"] == 0


@pytest.mark.usefixtures("restored")
async def test_an_update_waits_for_running_requests_and_holds_new_ones(
    client: EngineClient, model_path: Path, tmp_path: Path
) -> None:
    from tests.support.tiny_models import write_weights

    write_weights(tmp_path, model_path, seed=10)
    updates: list[int] = []

    async def update(**changes: Any) -> None:
        body = {"model_path": str(tmp_path), "weight_version": "v3"} | changes
        updates.append((await client.post("/update_weights_from_disk", body)).status)

    async with slow(client) as group:
        running = Pending(client, group, max_new_tokens=100)
        await client.until_generated(10)
        group.start_soon(update)
        held = Pending(client, group, max_new_tokens=5)
        await client.until(waiting=1)
        assert not updates
        first, second = await running.answer(), await held.answer()
    assert updates == [200]
    assert len(first["output_ids"]) == 100
    assert first["meta_info"]["weight_versions"] == [{"version": "v0", "start": 0, "end": 100}]
    assert second["meta_info"]["weight_versions"] == [{"version": "v3", "start": 0, "end": 5}]

    async with slow(client) as group:
        running = Pending(client, group, max_new_tokens=LONG)
        await client.until_generated(10)
        await update(abort_all_requests=True)
        assert (await running.answer())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_bad_checkpoint_is_refused_and_the_old_weights_stay(
    client: EngineClient, model_path: Path, tmp_path: Path
) -> None:
    from tests.support.tiny_models import write_model

    before = await checksum(client)
    other = write_model(tmp_path / "other", hidden_size=16, head_dim=4)
    bare = write_model(tmp_path / "bare", hidden_size=16, head_dim=4)
    (bare / "config.json").unlink()
    partial = write_model(tmp_path / "partial", num_hidden_layers=1)
    (partial / "config.json").unlink()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "model.safetensors").write_bytes((model_path / "model.safetensors").read_bytes()[:5000])
    reasons = {
        tmp_path / "nowhere": "nowhere",
        other: "another model",
        bare: "the model has",
        partial: "missing",
        damaged: "damaged",
    }
    for directory, reason in reasons.items():
        body = {"model_path": str(directory), "weight_version": "bad"}
        answer = await client.post("/update_weights_from_disk", body)
        assert answer.status == 400
        assert not answer.body["success"]
        assert reason in answer.body["message"]
    assert (await client.post("/update_weights_from_disk", {})).status == 400
    assert await checksum(client) == before
    assert (await client.generate())["meta_info"]["weight_version"] == "v0"


async def checksum(client: EngineClient) -> str:
    answer = await client.post("/weights_checker", {"action": "checksum"})
    assert answer.body["success"]
    return answer.body["per_engine_checksum"]


async def test_the_checksum_is_over_its_own_tensors(client: EngineClient, model_path: Path) -> None:
    """Under SGLang's names, by SGLang's algorithm on the CPU; computed here from the file."""
    files = load_file(model_path / "model.safetensors")
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    expected: dict[str, str] = {}
    for name in files:
        module = name.split(".")[-2]
        to = next((to for to, parts in fused.items() if module in parts), module)
        held = np.concatenate([files[name.replace(module, part)] for part in fused.get(to, (module,))])
        expected[name.replace(module, to)] = hashlib.sha256(held.tobytes()).hexdigest()[:16]
    answer = (await client.get("/weights_checker")).body
    (rank,) = answer["ranks"]
    assert rank["checksums"] == expected
    of_rank = hashlib.sha256("".join(name + expected[name] for name in sorted(expected)).encode()).hexdigest()
    assert rank["per_gpu_checksum"] == of_rank
    assert answer["per_engine_checksum"] == hashlib.sha256(of_rank.encode()).hexdigest()
    assert checksums_of(model_path).total not in (answer["per_engine_checksum"], of_rank)
    skipped = await client.post("/weights_checker", {"skip_tensor_list": ["lm_head"]})
    assert expected.keys() - skipped.body["ranks"][0]["checksums"].keys() == {"lm_head.weight"}
    assert (await client.post("/weights_checker", {"action": "compare"})).status == 400


@pytest.mark.usefixtures("restored")
async def test_the_version_can_be_relabelled(client: EngineClient) -> None:
    async with slow(client) as group:
        pending = Pending(client, group, max_new_tokens=60)
        await client.until_generated(20)
        body = {"new_version": "v9", "abort_all_requests": False}
        answer = await client.post("/update_weight_version", body)
        assert answer.body == {"success": True, "message": "Weight version updated to v9", "new_version": "v9"}
        spans = (await pending.answer())["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["v0", "v9"]
        doomed = Pending(client, group, max_new_tokens=LONG)
        await client.until_generated(10)
        await client.post("/update_weight_version", {"new_version": "v10"})
        assert (await doomed.answer())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_the_cache_is_flushed_only_when_idle(client: EngineClient) -> None:
    assert (await client.post("/flush_cache")).status == 200
    async with slow(client) as group:
        pending = Pending(client, group, max_new_tokens=100)
        await client.until_generated(10)
        busy = await client.post("/flush_cache")
        assert (busy.status, busy.text) == (400, "Flush cache failed.\n")
        assert (await client.post("/flush_cache?timeout=15")).status == 200
        assert pending.done or (await pending.answer())
    assert (await client.post("/flush_cache?timeout=soon")).status == 400


@pytest.mark.usefixtures("restored")
async def test_released_memory_holds_requests_until_it_is_resumed(client: EngineClient, model_path: Path) -> None:
    before = await checksum(client)
    async with slow(client) as group:
        running = Pending(client, group, max_new_tokens=LONG)
        await client.until_generated(10)
        assert (await client.post("/release_memory_occupation", {})).status == 400
        await client.post("/abort_request", {"abort_all": True})
        await running.answer()
    released = await client.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    assert (released.status, released.text) == (200, "null")
    assert (await client.post("/release_memory_occupation", {"tags": ["weights"]})).status == 400
    assert (await client.get("/weights_checker")).status == 400
    body = {"model_path": str(model_path)}
    assert (await client.post("/update_weights_from_disk", body)).status == 400
    assert (await client.post("/resume_memory_occupation", {"tags": ["cuda_graph"]})).status == 400
    async with anyio.create_task_group() as group:
        held = Pending(client, group)
        await client.until(waiting=1)
        await client.post("/pause_generation", {"mode": "retract"})
        assert (await client.post("/resume_memory_occupation", {"tags": ["weights"]})).status == 200
        assert (await client.post("/update_weights_from_disk", body)).status == 200
        assert (await client.post("/resume_memory_occupation", {"tags": ["kv_cache"]})).status == 200
        await client.post("/continue_generation", {})
        assert len((await held.answer())["output_ids"]) == 6
    assert await checksum(client) == before


async def test_information_is_served_under_both_names(client: EngineClient, model_path: Path) -> None:
    info = (await client.get("/model_info")).body
    assert info == (await client.get("/get_model_info")).body
    assert info["model_path"] == str(model_path)
    assert (info["weight_version"], info["is_generation"]) == ("v0", True)
    server = (await client.get("/server_info")).body
    assert (server["context_length"], server["max_running_requests"], server["max_req_input_len"]) == (512, 64, 506)
    assert server["internal_states"] == [{"weight_version": "v0", "paused": False}]
    models = (await client.get("/v1/models")).body
    assert [model["id"] for model in models["data"]] == [str(model_path)]


async def test_loads_count_requests_and_tokens(client: EngineClient) -> None:
    async with slow(client) as group:
        pending = Pending(client, group, input_ids=[[3, 4]] * 70, max_new_tokens=LONG)
        await client.until(running=64, waiting=6)
        (load,) = (await client.get("/v1/loads")).body["loads"]
        assert load["num_total_reqs"] == 70
        assert load["num_used_tokens"] >= 128
        assert load["max_total_num_tokens"] == 64 * 512
        assert load["queues"] == {"waiting": 6, "grammar": 0, "paused": 0, "retracted": 0}
        await client.post("/abort_request", {"abort_all": True})
        await pending.answer()


async def test_a_client_that_disconnects_aborts_its_requests(client: EngineClient, tiny_engine: Any) -> None:
    await client.post("/slow_down", {"forward_sleep_time": 0.005})
    async with EngineClient(tiny_engine.url) as leaving, anyio.create_task_group() as group:
        Pending(leaving, group, input_ids=[[3]] * 70, max_new_tokens=LONG)
        await client.until(running=64, waiting=6)
        group.cancel_scope.cancel()
    await client.until(running=0, waiting=0)


async def test_a_client_that_leaves_a_stream_aborts_its_request(client: EngineClient, tiny_engine: Any) -> None:
    await client.post("/slow_down", {"forward_sleep_time": 0.005})
    async with EngineClient(tiny_engine.url) as leaving:
        stream = leaving.stream(max_new_tokens=LONG)
        first = await anext(aiter(stream))
        assert first["meta_info"]["finish_reason"] is None
        await client.until(running=1)
    await client.until(running=0)


async def test_a_full_queue_refuses_and_streams_can_be_incremental(tmp_path: Path) -> None:
    write_config(tmp_path)
    flags = ["--load-format", "dummy", "--max-running-requests", "2", "--max-queued-requests", "2"]
    flags += ["--incremental-streaming-output", "--stream-interval", "8", "--served-model-name", "tiny"]
    with running_engine(tmp_path, *flags) as engine:
        async with EngineClient(engine.url) as client:
            chunks = [chunk async for chunk in client.stream(max_new_tokens=30)]
            ids = [token for chunk in chunks for token in chunk["output_ids"]]
            triples = [entry for chunk in chunks for entry in chunk["meta_info"]["output_token_logprobs"]]
            assert len(ids) == 30
            assert len(chunks) > 2
            assert [entry[1] for entry in triples] == ids
            assert chunks[-1]["meta_info"]["completion_tokens"] == 30
            assert (await client.get("/model_info")).body["served_model_name"] == "tiny"
            async with slow(client) as group:
                pending = Pending(client, group, input_ids=[[3]] * 4, max_new_tokens=LONG)
                await client.until(running=2, waiting=2)
                full = await client.post("/generate", {"input_ids": [3]})
                assert (full.status, full.body["error"]["message"]) == (503, "The request queue is full.")
                await client.post("/abort_request", {"abort_all": True})
                await pending.answer()
            assert len((await client.generate())["output_ids"]) == 6


async def test_a_server_that_drew_its_weights_loads_others_only_as_what_they_are(tmp_path: Path) -> None:
    """As SGLang, which would go on drawing."""
    from tests.support.tiny_models import write_model

    model = write_model(tmp_path)
    with running_engine(model, "--load-format", "dummy") as engine:
        async with EngineClient(engine.url) as client:
            before = await checksum(client)
            body = {"model_path": str(model), "weight_version": "1"}
            refused = await client.post("/update_weights_from_disk", body)
            assert refused.status == 400
            assert "Failed to get model loader" in refused.body["message"]
            assert await checksum(client) == before
            assert (await client.post("/update_weights_from_disk", body | {"load_format": "auto"})).status == 200
            assert await checksum(client) != before
            assert (await client.post("/update_weights_from_disk", body)).status == 200  # its own by now


async def test_a_prompt_alone_is_answered_with_its_log_probs(client: EngineClient) -> None:
    answer = await client.generate(input_ids=[3, 4, 5], max_new_tokens=0, return_logprob=True, logprob_start_len=0)
    meta = answer["meta_info"]
    assert answer["output_ids"] == []
    assert [token for _, token, _ in meta["input_token_logprobs"]] == [3, 4, 5]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(log_prob < 0 for log_prob, _, _ in meta["input_token_logprobs"][1:])
