"""What a request keeps besides plain keys: states of linear layers, rings of windows, latents, keys of indexers.

Each test has a model of each kind. Expected are transformers' log-probs, under one version or over a change of weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.tiny_engine.model.caches import Caches
from actors.tiny_engine.model.forward import draw, load
from actors.trainer.models.config import read_hf_config
from actors.trainer.models.shapes import hf_shapes
from runtime.models.blocks import Attention
from runtime.models.config import read_model
from tests.actors.tiny_engine.test_tiny_numerics import (
    ATOL,
    assert_all_teacher_forced,
    assert_teacher_forced,
    request_of,
    run_out,
    scheduler_of,
)
from tests.actors.trainer.hf import write_model

pytestmark = pytest.mark.usefixtures("inference")

LONG = torch.randint(2, 32, (70,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPT = LONG[:20]  # longer than a window
KINDS = {
    "states": "qwen3_5_text",
    "fused rows": "qwen3_next",
    "windows and sinks": "gpt_oss",
    "latents": "deepseek_v3",
    "chosen keys": "glm_moe_dsa",
}
SIZES = {"max_position_embeddings": 128}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Any]]:
    found: dict[str, tuple[Path, Any]] = {}
    with torch.inference_mode(mode=False):
        for name, kind in KINDS.items():
            directory = tmp_path_factory.mktemp(kind)
            found[name] = directory, write_model(directory, kind, noise=0.2, **SIZES)
    return found


@pytest.fixture(params=KINDS)
def directory(request: pytest.FixtureRequest, models: Mapping[str, tuple[Path, Any]]) -> Path:
    return models[request.param][0]


def test_prompts_of_all_lengths_are_prefilled_together(directory: Path) -> None:
    """Over chunks and windows; what is behind the end of a shorter prompt changes no state."""
    scheduler = scheduler_of(directory)
    requests = [request_of(str(length), LONG[:length], limit=12) for length in (70, 1, 64, 5)]
    assert_all_teacher_forced(directory, scheduler, requests)


def test_a_later_sample_has_the_state_behind_its_prompt(directory: Path) -> None:
    """The sample that it copies has gone on by then. A window has moved on with it, so such a prompt is computed."""
    scheduler = scheduler_of(directory)
    short, first = request_of("short", [5], limit=2), request_of("first", PROMPT, limit=14)
    scheduler.submit([short, first, request_of("second", PROMPT, limit=5)])
    for _ in range(4):
        scheduler.step()
    late, again = request_of("late", PROMPT, limit=5), request_of("again", PROMPT, limit=5)
    scheduler.submit([late, again])
    run_out(scheduler)
    windowed = any(isinstance(block, Attention) and block.window for block in scheduler.slots.caches.blocks)
    assert [late.num_cached, again.num_cached] == [0 if windowed else len(PROMPT), len(PROMPT)]
    for request in (first, late, again):
        assert_teacher_forced(directory, request)


def test_aborts_and_retractions_leave_no_state_behind(directory: Path) -> None:
    """An aborted request goes on from its tokens, in a slot that another had; retracted ones are computed again."""
    whole, scheduler = request_of("a", PROMPT, limit=16), scheduler_of(directory, num_slots=2)
    scheduler.submit([whole])
    run_out(scheduler)
    stopped, other = request_of("a", PROMPT, limit=16), request_of("other", LONG[:9], limit=30)
    scheduler.submit([other, stopped])
    for _ in range(5):
        scheduler.step()
    scheduler.abort(frozenset({"a"}))
    scheduler.step()
    continued = request_of("b", PROMPT + stopped.output_ids, limit=16 - len(stopped.output_ids))
    scheduler.submit([continued])
    for _ in range(3):
        scheduler.step()
    scheduler.retract()
    run_out(scheduler)
    assert 0 < len(stopped.output_ids) < 16
    assert other.num_retractions == continued.num_retractions == 1
    assert stopped.output_ids + continued.output_ids == whole.output_ids
    for request in (stopped, continued, other):
        assert_teacher_forced(directory, request)


@pytest.mark.parametrize("name", KINDS)
def test_new_weights_go_on_from_the_states_of_the_old_ones(
    name: str, models: Mapping[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """After a pause in place as in transformers with its cache; after a retraction as if they had always been there."""
    directory, old = models[name]
    with torch.inference_mode(mode=False):
        new = write_model(tmp_path, KINDS[name], noise=0.35, **SIZES)
    scheduler = scheduler_of(directory)
    request, dropped = request_of("kept", PROMPT, limit=14), request_of("dropped", PROMPT, limit=14)
    scheduler.submit([request])
    for _ in range(5):
        scheduler.step()
    number = len(request.output_ids)
    scheduler.paused = True
    scheduler.use_weights(load(read_model(tmp_path).shape, tmp_path))
    scheduler.paused = False
    run_out(scheduler)
    ids = torch.tensor([PROMPT + request.output_ids])
    border = len(PROMPT) + number - 1  # the last token is not in the cache
    before = old(ids[:, :border], use_cache=True)
    after = new(ids[:, border:-1], past_key_values=before.past_key_values, use_cache=True)
    expected = torch.cat((before.logits, after.logits), 1)[0, len(PROMPT) - 1 :].float().log_softmax(-1)
    own = expected.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(request.log_probs), own, atol=ATOL, rtol=0)
    scheduler.submit([dropped])
    scheduler.step()
    scheduler.retract()
    run_out(scheduler)
    assert_teacher_forced(tmp_path, dropped)


def test_it_takes_all_that_a_trainer_sends(directory: Path) -> None:
    """The trainer sends the tensors of its export, by these names and with these shapes."""
    named = load(read_model(directory).shape, directory).named
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == hf_shapes(read_hf_config(directory))


def test_drawn_weights_start_as_the_trainers_do(models: Mapping[str, tuple[Path, Any]]) -> None:
    named = draw(read_model(models["states"][0]).shape, seed=0, std=0.02, dtype="float32").named
    for name, start in {"linear_attn.dt_bias": 1, "linear_attn.norm.weight": 1, "input_layernorm.weight": 0}.items():
        assert (named[f"model.layers.0.{name}"] == start).all()


def test_a_window_keeps_no_more_than_it_shows(tmp_path: Path) -> None:
    with torch.inference_mode(mode=False):
        write_model(tmp_path, "gpt_oss", sliding_window=512, max_position_embeddings=8192)
    caches = Caches(read_model(tmp_path).shape, num_slots=1, dtype=torch.float32)
    caches.allocate(8192, is_used=False)
    windowed, full = (caches.kept(index)[0].nbytes for index in range(2))
    assert full == 8192 * (2 * 2 * 6) * 4  # keys and values of 2 heads of size 6
    assert windowed <= 0.1 * full


def test_states_do_not_grow_with_requests(models: Mapping[str, tuple[Path, Any]]) -> None:
    scheduler = scheduler_of(models["states"][0])
    scheduler.submit([request_of("a", [5], limit=1)])
    scheduler.step()
    before = [each.nbytes for each in scheduler.slots.caches.kept(0)]
    scheduler.submit([request_of("b", LONG, limit=40)])
    run_out(scheduler)
    assert [each.nbytes for each in scheduler.slots.caches.kept(0)] == before
