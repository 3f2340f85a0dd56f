"""LoRA adapters of the tiny engine: products as in peft, several in one batch, and SGLang's calls."""

import base64
import pickle
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from actors.tiny_engine.engine.requests import Request, Sampling, Stopping
from actors.tiny_engine.engine.scheduler import Scheduler
from actors.tiny_engine.http.adapters import checksum_of
from actors.tiny_engine.model import forward as model
from actors.tiny_engine.model.adapters import ALL, Adapter, AdapterReader
from actors.tiny_engine.model.kv_slots import KvSlots
from runtime.models.config import read_model
from tests.actors.trainer.tiny import OF_KIND
from tests.support.adapters import adapter_config, adapter_tensors, write_adapter
from tests.support.tiny_client import Answer, EngineClient
from tests.support.tiny_engine import running_engine
from tests.support.tiny_models import LLAMA, QWEN3, QWEN3_MOE, write_model

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft reads it
]
ATOL = 1e-5  # nats
PROMPT = [60, 2, 33, 9, 9, 17, 21]
LONG = 480  # tokens of a request that is still running when something happens to it
LATENTS = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **OF_KIND["deepseek_v3"]}
HYBRID = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **OF_KIND["qwen3_5_text"]}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base"))


def reader_of(directory: Path, **limits: Any) -> AdapterReader:
    return AdapterReader(read_model(directory).shape, torch.float32, **({"max_rank": 8, "targets": [ALL]} | limits))


def drawn(directory: Path, name: str, seed: int) -> Adapter:
    return reader_of(directory).of(name, "", adapter_config(), adapter_tensors(directory, seed=seed))


def scheduler_of(directory: Path, *, num_slots: int = 8, max_loras: int | None = None) -> Scheduler:
    weights = model.load(read_model(directory).shape, directory)
    slots = KvSlots(weights, num_slots=num_slots, context_length=256)
    return Scheduler(slots, version="0", max_loras=max_loras)


def request_of(adapter: Adapter | None, seed: int, prompt: list[int] = PROMPT, *, limit: int = 12) -> Request:
    name = "" if adapter is None else adapter.name
    return Request(
        f"{name}-{seed}", list(prompt), Sampling(), Stopping(limit=limit), seed=seed, lora=name or None, adapter=adapter
    )


def run_out(scheduler: Scheduler) -> None:
    with torch.inference_mode():
        while not scheduler.idle:
            scheduler.step()


@pytest.mark.parametrize(
    ("changes", "targets", "config"),
    [
        (QWEN3, (*ATTENTION, "gate_proj", "up_proj", "down_proj"), {}),
        (LLAMA, ("q_proj", "down_proj"), {"use_rslora": True, "lora_alpha": 3}),
        (QWEN3_MOE, ATTENTION, {"lora_alpha": 1}),
        (LATENTS, ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), {}),
        (HYBRID, ATTENTION, {}),
    ],
    ids=["qwen3", "llama-some-rslora", "moe-attention", "latents", "hybrid"],
)
def test_log_probs_are_those_of_peft(
    tmp_path: Path, changes: dict[str, Any], targets: tuple[str, ...], config: dict[str, Any]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path / "model", **changes)
    place = write_adapter(tmp_path / "adapter", directory, seed=1, targets=targets, **config)
    request = request_of(reader_of(directory).read("own", place), 3)
    scheduler = scheduler_of(directory)
    scheduler.submit([request])
    run_out(scheduler)
    wrapped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), place)
    with torch.inference_mode():
        logits = wrapped.eval()(torch.tensor([request.prompt_ids + request.output_ids])).logits[0]
    rows = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(request.output_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(request.log_probs), expected, atol=ATOL, rtol=0)


def test_adapters_in_one_batch_sample_what_each_samples_alone(base: Path) -> None:
    """Requests of several adapters and of the base begin at different steps, and one prompt is shared by all."""
    adapters = [None, *(drawn(base, f"v{seed}", seed) for seed in (1, 2, 3))]
    prompts = [PROMPT, PROMPT[:3]]
    together = scheduler_of(base)
    batch: list[Request] = []
    for seed, adapter in enumerate([*adapters, *adapters]):
        batch.append(request_of(adapter, seed, prompts[seed % 2], limit=5 + seed))
        together.submit(batch[-1:])
        with torch.inference_mode():
            together.step()
    run_out(together)
    found = set[tuple[int, ...]]()
    for request in batch:
        alone = scheduler_of(base, num_slots=1)
        expected = request_of(request.adapter, request.seed, request.prompt_ids, limit=request.stopping.limit)
        alone.submit([expected])
        run_out(alone)
        assert request.output_ids == expected.output_ids
        torch.testing.assert_close(torch.tensor(request.log_probs), torch.tensor(expected.log_probs), atol=ATOL, rtol=0)
        found.add(tuple(expected.output_ids))
    assert len(found) == len(batch)


def test_prompts_are_shared_within_an_adapter_alone(base: Path) -> None:
    first, second = drawn(base, "v1", 1), drawn(base, "v2", 2)
    scheduler = scheduler_of(base)
    order = [None, None, first, first, second, second]
    requests = [request_of(adapter, seed, limit=8) for seed, adapter in enumerate(order)]
    scheduler.submit(requests[:5])
    with torch.inference_mode():
        scheduler.step()
    scheduler.submit(requests[5:])
    run_out(scheduler)
    assert [request.num_cached for request in requests] == [0, 7, 0, 7, 0, 7]


def test_adapters_beyond_the_limit_of_a_batch_wait_and_are_overtaken(base: Path) -> None:
    first, second = drawn(base, "v1", 1), drawn(base, "v2", 2)
    scheduler = scheduler_of(base, max_loras=2)
    requests = [request_of(each, seed, limit=4) for seed, each in enumerate([first, None, second, first])]
    scheduler.submit(requests)
    with torch.inference_mode():
        scheduler.step()
    assert {request.rid for request in scheduler.slots.requests} == {"v1-0", "-1", "v1-3"}
    assert list(scheduler.waiting) == [requests[2]]
    run_out(scheduler)
    assert all(len(request.output_ids) == 4 for request in requests)


@pytest.fixture(scope="module")
def url(base: Path) -> Iterator[str]:
    flags = ("--max-lora-rank", "4", "--max-loaded-loras", "3", "--weight-version", "v0")
    with running_engine(base, "--enable-lora", *flags) as engine:
        yield engine.url


@pytest.fixture
async def client(url: str) -> AsyncGenerator[EngineClient]:
    """A client of the module's engine. Afterwards no adapter is loaded, and the engine is at full speed."""
    async with EngineClient(url) as client:
        yield client
        await client.post("/slow_down", {"forward_sleep_time": 0})
        await client.post("/abort_request", {"abort_all": True})
        for name in await loaded(client):
            await client.post("/unload_lora_adapter", {"lora_name": name})
        assert await loaded(client) == {}


async def loaded(client: EngineClient) -> dict[str, str]:
    models = (await client.get("/v1/models")).body["data"]
    return {each["id"]: each["root"] for each in models if each.get("parent")}


async def load(client: EngineClient, name: str, path: Path) -> Answer:
    return await client.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


def packed(tensors: object) -> list[str]:
    return [base64.b64encode(pickle.dumps(tensors)).decode()]


def tensors_body(name: str, tensors: Mapping[str, Tensor], **fields: Any) -> dict[str, Any]:
    body = {"lora_name": name, "config_dict": adapter_config(), "serialized_named_tensors": packed(dict(tensors))}
    return body | fields


async def test_requests_name_their_adapters(client: EngineClient, base: Path, tmp_path: Path) -> None:
    paths = {f"v{seed}": write_adapter(tmp_path / f"v{seed}", base, seed=seed) for seed in (1, 2)}
    for name, path in paths.items():
        answer = await load(client, name, path)
        assert (answer.status, answer.body["success"]) == (200, True)
    assert answer.body["loaded_adapters"] == await loaded(client) == {name: str(p) for name, p in paths.items()}
    greedy = {"temperature": 0}
    alone = [await client.generate(params=greedy, lora_path=name) for name in (None, "v1", "v2")]
    together = await client.generate(input_ids=[[3, 4, 5]] * 3, params=greedy, lora_path=[None, "v1", "v2"])
    assert [each["output_ids"] for each in together] == [each["output_ids"] for each in alone]
    assert len({tuple(each["output_ids"]) for each in alone}) == 3
    assert {each["meta_info"]["weight_version"] for each in together} == {"v0"}  # of the base, as in SGLang


async def test_tensors_load_as_files_do(client: EngineClient, base: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors(base, seed=1)
    await load(client, "files", write_adapter(tmp_path, base, seed=1))
    sums = {name: checksum_of(tensor) for name, tensor in tensors.items()}
    answer = await client.post(
        "/load_lora_adapter_from_tensors", tensors_body("sent", tensors, expected_checksums=sums)
    )
    assert answer.status == 200, answer.text
    files, sent = [await client.generate(params={"temperature": 0}, lora_path=each) for each in ("files", "sent")]
    assert files["meta_info"]["output_token_logprobs"] == sent["meta_info"]["output_token_logprobs"]


async def test_impossible_loads_and_requests_are_refused(client: EngineClient, base: Path, tmp_path: Path) -> None:
    place = write_adapter(tmp_path / "v1", base, seed=1)
    await load(client, "v1", place)
    tensors = adapter_tensors(base, seed=1)
    name = next(iter(tensors))
    changed = tensors | {name: tensors[name] + 1}
    sums = {name: checksum_of(tensor) for name, tensor in tensors.items()}
    url = "/load_lora_adapter_from_tensors"
    answers = {
        "already loaded": await load(client, "v1", place),
        "with rank 8 is incompatible": await load(client, "x", write_adapter(tmp_path / "high", base, seed=1, rank=8)),
        "use_dora": await load(client, "x", write_adapter(tmp_path / "dora", base, seed=1, use_dora=True)),
        "adapter_config.json": await load(client, "x", tmp_path / "nothing"),
        "expected [4, 32]": await client.post(url, tensors_body("x", tensors | {name: tensors[name][:, 1:]})),
        "1 value-diff": await client.post(url, tensors_body("x", changed, expected_checksums=sums)),
        "object has no attribute 'items'": await client.post(
            url, tensors_body("x", {}, serialized_named_tensors=packed(list(tensors.items())))
        ),
        "is of no linear layer": await client.post(
            url, tensors_body("x", {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)})
        ),
        "x does not exist": await client.post("/unload_lora_adapter", {"lora_name": "x"}),
    }
    for text, answer in answers.items():
        assert (answer.status, answer.body["success"]) == (400, False)
        assert text in answer.body["error_message"], answer.text
    unknown = await client.post("/generate", {"input_ids": [3], "lora_path": "v7"})
    assert unknown.status == 400
    assert "v7" in unknown.text
    assert "['v1']" in unknown.text
    assert await loaded(client) == {"v1": str(place)}


async def test_an_unload_waits_for_its_requests_and_they_end_well(
    client: EngineClient, base: Path, tmp_path: Path
) -> None:
    await load(client, "v1", write_adapter(tmp_path / "v1", base, seed=1))
    expected = await client.generate(max_new_tokens=LONG, params={"temperature": 0}, lora_path="v1")
    await client.post("/slow_down", {"forward_sleep_time": 0.005})
    running: list[int] = []
    answers: list[Any] = []

    async def generate() -> None:
        answers.append(await client.generate(max_new_tokens=LONG, params={"temperature": 0}, lora_path="v1"))

    async def unload() -> None:
        assert (await client.post("/unload_lora_adapter", {"lora_name": "v1"})).status == 200
        running.append((await client.get("/v1/loads")).body["loads"][0]["num_running_reqs"])

    async with anyio.create_task_group() as group:
        group.start_soon(generate)
        await client.until(running=1)
        group.start_soon(unload)
        while await loaded(client):
            await anyio.lowlevel.checkpoint()
        assert (await client.post("/generate", {"input_ids": [3], "lora_path": "v1"})).status == 400
        await client.until(running=1)
        assert not running
        await client.post("/slow_down", {"forward_sleep_time": 0})
    assert running == [0]
    assert answers[0]["output_ids"] == expected["output_ids"]


async def test_the_least_recently_used_adapter_makes_room(client: EngineClient, base: Path, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        await load(client, f"v{seed}", write_adapter(tmp_path / f"v{seed}", base, seed=seed))
    await client.generate(lora_path="v1")
    await load(client, "v4", write_adapter(tmp_path / "v4", base, seed=4))
    assert set(await loaded(client)) == {"v1", "v3", "v4"}


async def test_an_engine_without_lora_says_so(tiny_engine: Any) -> None:
    async with EngineClient(tiny_engine.url) as client:
        answer = await client.post("/load_lora_adapter", {"lora_name": "v1", "lora_path": "/nowhere"})
        assert (answer.status, "--enable-lora" in answer.body["error_message"]) == (400, True)
        request = await client.post("/generate", {"input_ids": [3], "lora_path": "v1"})
        assert (request.status, "--enable-lora" in request.text) == (400, True)
