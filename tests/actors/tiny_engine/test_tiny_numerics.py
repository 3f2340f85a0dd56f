"""The engine's log-probs against transformers' forward pass, through joins, aborts, retractions and weight swaps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.tiny_engine.engine.requests import Request, Sampling, Span, Stopping
from actors.tiny_engine.engine.scheduler import Scheduler
from actors.tiny_engine.model import forward as model
from actors.tiny_engine.model.kv_slots import KvSlots
from runtime.models.config import ModelError, not_in_tiny_engine, read_model, read_tiny_engine_model
from tests.actors.trainer.hf import write_model as write_family
from tests.actors.trainer.hf import write_mtp_model
from tests.actors.trainer.tiny import kinds
from tests.support.tiny_models import (
    LLAMA,
    LLAMA3_ROPE,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    teacher_forced,
    write_model,
    write_weights,
)

pytestmark = pytest.mark.usefixtures("inference")

ATOL = 1e-5  # nats
PROMPTS = [[3, 4, 5], [60, 2, 33, 9, 9, 17, 21], [8], [40, 41, 42, 43, 44]]
MODELS = {
    "qwen3_tied": QWEN3 | {"tie_word_embeddings": True},
    "qwen3_untied": QWEN3,
    "qwen3_biased": QWEN3 | {"attention_bias": True},
    "qwen2_tied": QWEN2 | {"tie_word_embeddings": True},
    "qwen2_untied": QWEN2,
    "llama_tied": LLAMA | {"tie_word_embeddings": True},
    "llama_untied": LLAMA,
    "llama_biased": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama_3_rope": LLAMA | LLAMA3_ROPE,
    "qwen2_windows": QWEN2 | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3_window": QWEN3 | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
    "llama_one_kv_head": LLAMA | {"num_key_value_heads": 1},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_tied": QWEN3_MOE | {"tie_word_embeddings": True, "norm_topk_prob": False, "mlp_only_layers": [0]},
    "llama_all_kv_heads": LLAMA | {"num_key_value_heads": 4},
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_equal_a_teacher_forced_forward(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, **MODELS[name])
    scheduler = scheduler_of(tmp_path, num_slots=3)  # fewer than requests: one joins when another has left
    requests = [request_of(str(index), prompt, limit=9 + 7 * index) for index, prompt in enumerate(PROMPTS)]
    assert_all_teacher_forced(tmp_path, scheduler, requests)


@pytest.mark.parametrize("kind", kinds())
def test_each_family_equals_transformers(kind: str, tmp_path: Path) -> None:
    """Every parameter has noise. The last two requests have one prompt, computed once. Or the engine refuses it."""
    with torch.inference_mode(mode=False):
        write_family(tmp_path, kind, noise=0.2)
    if lacking := not_in_tiny_engine(layer.attention for layer in read_model(tmp_path).shape.layers):
        with pytest.raises(ModelError, match=" and ".join(lacking)):
            read_tiny_engine_model(tmp_path)
        return
    scheduler = scheduler_of(tmp_path, num_slots=3)
    prompts = [[3, 4, 5], [8], [30, 2, 9, 9, 17, 21], [30, 2, 9, 9, 17, 21]]
    requests = [request_of(str(index), prompt, limit=9 + 5 * index) for index, prompt in enumerate(prompts)]
    assert_all_teacher_forced(tmp_path, scheduler, requests)


def test_mtp_layers_of_the_files_are_skipped(tmp_path: Path) -> None:
    with torch.inference_mode(mode=False):
        write_mtp_model(tmp_path)
    scheduler, request = scheduler_of(tmp_path), request_of("a", [5, 6, 7], limit=6)
    scheduler.submit([request])
    run_out(scheduler)
    assert_teacher_forced(tmp_path, request)


def test_sequences_that_outgrow_their_slots_keep_their_keys(qwen3: Path) -> None:
    scheduler = scheduler_of(qwen3)
    requests = [request_of("long", PROMPTS[0], limit=150), request_of("longer", PROMPTS[1], limit=200)]
    assert_all_teacher_forced(qwen3, scheduler, requests)


def test_temperature_scales_the_log_probs_it_reports(qwen3: Path) -> None:
    scheduler = scheduler_of(qwen3)
    hot = request_of("hot", PROMPTS[0], limit=12, sampling=Sampling(temperature=1.7))
    greedy = request_of("greedy", PROMPTS[1], limit=12, sampling=Sampling(greedy=True))
    scheduler.submit([hot, greedy])
    run_out(scheduler)
    assert_teacher_forced(qwen3, hot, temperature=1.7)
    assert_teacher_forced(qwen3, greedy)


def test_an_aborted_request_continues_from_its_tokens_as_if_it_had_not_stopped(qwen3: Path) -> None:
    whole = request_of("whole", PROMPTS[1], limit=30)
    first = scheduler_of(qwen3)
    first.submit([whole])
    run_out(first)

    second = scheduler_of(qwen3)
    stopped = request_of("stopped", PROMPTS[1], limit=30)
    second.submit([stopped, request_of("other", PROMPTS[0], limit=40)])
    for _ in range(11):
        second.step()
    second.abort(frozenset({"stopped"}))
    second.step()  # a running request gets one more token
    assert stopped.finish is not None
    assert stopped.finish.type == "abort"
    assert 0 < len(stopped.output_ids) < 30
    continued = request_of("continued", stopped.prompt_ids + stopped.output_ids, limit=30 - len(stopped.output_ids))
    second.submit([continued])
    run_out(second)

    assert stopped.output_ids + continued.output_ids == whole.output_ids
    joined = torch.tensor(stopped.log_probs + continued.log_probs)
    torch.testing.assert_close(joined, torch.tensor(whole.log_probs), atol=ATOL, rtol=0)


def test_retracted_requests_are_computed_again_and_go_on(qwen3: Path) -> None:
    scheduler = scheduler_of(qwen3)
    requests = [request_of(str(index), prompt, limit=25) for index, prompt in enumerate(PROMPTS)]
    scheduler.submit(requests)
    for _ in range(8):
        scheduler.step()
    scheduler.retract()
    assert scheduler.slots.num_used_tokens == 0
    run_out(scheduler)
    for request in requests:
        assert request.num_retractions == 1
        assert len(request.output_ids) == 25
        assert_teacher_forced(qwen3, request)


def test_requests_that_outgrow_the_total_are_retracted_and_end_right(qwen3: Path) -> None:
    scheduler = scheduler_of(qwen3, max_total_tokens=90)
    requests = [request_of(str(index), prompt, limit=60) for index, prompt in enumerate(PROMPTS)]
    scheduler.submit(requests)
    most, reported = 0, set[int]()
    while not scheduler.idle:
        scheduler.step()
        most = max(most, scheduler.slots.num_used_tokens)
        reported.add(scheduler.num_retracted)
    assert 60 < most <= 90
    assert max(reported) > 0
    assert scheduler.num_retracted == 0  # the newest statistics count what came after those before
    assert sum(request.num_retractions for request in requests) > 0
    for request in requests:
        assert len(request.output_ids) == 60
        assert_teacher_forced(qwen3, request)


def test_weights_swapped_in_flight_sample_under_their_version_after_a_retraction(qwen3: Path, tmp_path: Path) -> None:
    write_model(tmp_path)
    write_weights(tmp_path, tmp_path, seed=7)
    scheduler = scheduler_of(qwen3, version="1")
    request = request_of("swapped", PROMPTS[1], limit=20)
    scheduler.submit([request])
    for _ in range(6):
        scheduler.step()
    num_before = len(request.output_ids)
    scheduler.retract()
    scheduler.use_weights(model.load(read_model(tmp_path).shape, tmp_path))
    scheduler.use_version("2")
    run_out(scheduler)

    assert request.spans == [Span("1", 0, num_before), Span("2", num_before, 20)]
    old = teacher_forced(qwen3, request.prompt_ids, request.output_ids)
    new = teacher_forced(tmp_path, request.prompt_ids, request.output_ids)
    expected = torch.cat((old[:num_before], new[num_before:]))
    torch.testing.assert_close(torch.tensor(request.log_probs), expected, atol=ATOL, rtol=0)


def test_weights_swapped_in_place_keep_the_old_keys(qwen3: Path, tmp_path: Path) -> None:
    write_model(tmp_path)
    write_weights(tmp_path, tmp_path, seed=7)
    scheduler = scheduler_of(qwen3, version="1")
    request = request_of("swapped", PROMPTS[1], limit=20)
    scheduler.submit([request])
    for _ in range(6):
        scheduler.step()
    num_before = len(request.output_ids)
    scheduler.use_weights(model.load(read_model(tmp_path).shape, tmp_path))
    scheduler.use_version("2")
    run_out(scheduler)

    assert request.spans == [Span("1", 0, num_before), Span("2", num_before, 20)]
    new = teacher_forced(tmp_path, request.prompt_ids, request.output_ids)
    assert (torch.tensor(request.log_probs) - new)[num_before:].abs().max() > 10 * ATOL


def test_prompt_log_probs_equal_a_teacher_forced_forward(qwen3: Path) -> None:
    scheduler = scheduler_of(qwen3)
    prompt = PROMPTS[1]
    request = request_of("prompt", prompt, limit=3, sampling=Sampling(temperature=0.5))
    request.logprob_start = 2
    scheduler.submit([request])
    run_out(scheduler)
    expected = teacher_forced(qwen3, prompt[:3], prompt[3:])  # untempered, as SGLang reports prompts
    torch.testing.assert_close(torch.tensor(request.input_log_probs), expected, atol=ATOL, rtol=0)


def test_a_limit_of_zero_scores_the_prompt_and_generates_nothing(qwen3: Path) -> None:
    scheduler = scheduler_of(qwen3)
    request = request_of("scored", PROMPTS[1], limit=0)
    request.logprob_start = 0
    scheduler.submit([request])
    run_out(scheduler)
    assert request.output_ids == []
    assert request.finish is not None
    assert request.finish.type == "length"
    assert len(request.input_log_probs or []) == len(PROMPTS[1]) - 1


def test_bfloat16_weights_compute_in_float32(qwen3: Path, tmp_path: Path) -> None:
    write_model(tmp_path)
    write_weights(tmp_path, tmp_path, seed=3, dtype=torch.bfloat16)
    scheduler = scheduler_of(tmp_path)
    request = request_of("bf16", PROMPTS[0], limit=10)
    scheduler.submit([request])
    run_out(scheduler)
    assert_teacher_forced(tmp_path, request)


def test_bfloat16_computes_as_exactly_as_transformers_does(tmp_path: Path) -> None:
    """The yardstick is transformers' own rounding, on the same weights: no tolerance of ours."""
    write_model(tmp_path, **LLAMA, hidden_size=128, num_hidden_layers=4)
    write_weights(tmp_path, tmp_path, seed=3, dtype=torch.bfloat16)
    scheduler = scheduler_of(tmp_path, dtype=torch.bfloat16)
    requests = [request_of(str(index), prompt, limit=40) for index, prompt in enumerate(PROMPTS)]
    scheduler.submit(requests)
    run_out(scheduler)
    ours, theirs = list[torch.Tensor](), list[torch.Tensor]()
    for request in requests:
        exact = teacher_forced(tmp_path, request.prompt_ids, request.output_ids)
        rounded = teacher_forced(tmp_path, request.prompt_ids, request.output_ids, dtype=torch.bfloat16)
        ours.append(torch.tensor(request.log_probs) - exact)
        theirs.append(rounded - exact)
    assert 0 < torch.cat(ours).abs().mean() < 1.5 * torch.cat(theirs).abs().mean()


def test_drawn_weights_are_the_same_numbers_in_each_dtype(qwen3: Path) -> None:
    shape = read_model(qwen3).shape
    single = model.draw(shape, seed=1, std=0.02, dtype="bfloat16").named
    half = model.draw(shape, seed=1, std=0.02, dtype="bfloat16", computed_in=torch.bfloat16).named
    for name, tensor in half.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), single[name], atol=0, rtol=0)


def test_expert_biases_are_float32_in_each_dtype(tmp_path: Path) -> None:
    with torch.inference_mode(mode=False):
        write_family(tmp_path, "glm4_moe")
    shape = read_model(tmp_path).shape
    single, half = (model.load(shape, tmp_path, dtype).named for dtype in (torch.float32, torch.bfloat16))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert half["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(half[name], single[name], atol=0, rtol=0)


def test_drawn_weights_depend_on_the_seed_alone(qwen3: Path) -> None:
    shape = read_model(qwen3).shape
    first, again, other = (model.draw(shape, seed=seed, std=0.02, dtype="bfloat16").checksums() for seed in (1, 1, 2))
    assert first == again != other


def scheduler_of(
    directory: Path,
    *,
    num_slots: int = 8,
    version: str = "0",
    max_total_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Scheduler:
    described = read_model(directory)
    weights = model.load(described.shape, directory, dtype, num_mtp_layers=described.num_mtp_layers)
    return Scheduler(
        KvSlots(weights, num_slots=num_slots, context_length=512), version=version, max_total_tokens=max_total_tokens
    )


def request_of(rid: str, prompt_ids: list[int], *, limit: int, sampling: Sampling | None = None) -> Request:
    return Request(rid, prompt_ids, sampling or Sampling(), Stopping(limit=limit), seed=5)


def run_out(scheduler: Scheduler) -> list[Any]:
    while not scheduler.idle:
        scheduler.step()
    return scheduler.take_reports()


def assert_all_teacher_forced(directory: Path, scheduler: Scheduler, requests: list[Request]) -> None:
    """Run requests to their end, and compare each with a pass over its tokens."""
    scheduler.submit(requests)
    run_out(scheduler)
    for request in requests:
        assert_teacher_forced(directory, request)


def assert_teacher_forced(directory: Path, request: Request, temperature: float = 1.0) -> None:
    expected = teacher_forced(directory, request.prompt_ids, request.output_ids, temperature)
    torch.testing.assert_close(torch.tensor(request.log_probs), expected, atol=ATOL, rtol=0)
