"""Prompts that are prefilled once: of requests that come together, later, in other slots, and under newer weights."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.tiny_engine.engine.requests import Request, Sampling, Stopping
from actors.tiny_engine.engine.scheduler import Scheduler
from actors.tiny_engine.model import forward as model
from actors.tiny_engine.model.kv_slots import KvSlots
from actors.tiny_engine.model.receiving import write
from runtime.models.config import read_model
from tests.actors.trainer.hf import write_model as write_family
from tests.support.tiny_models import LLAMA, teacher_forced, write_model, write_weights

pytestmark = pytest.mark.usefixtures("inference")

ATOL = 1e-5  # nats
# states, a window, latents, chosen keys
KINDS = ("qwen3_5_text", "qwen3_next", "gpt_oss", "deepseek_v3", "glm_moe_dsa")
PROMPT = [60, 2, 33, 9, 9, 17, 21]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KV heads for four heads."""
    return write_model(tmp_path_factory.mktemp("llama"), **LLAMA)


@pytest.fixture(scope="module", params=["llama", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS)])
def served(request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param != "llama":
        directory = tmp_path_factory.mktemp(request.param)
        write_family(directory, request.param, noise=0.2, vocab_size=64)
        return directory
    return llama


def scheduler_of(directory: Path, *, num_slots: int = 8) -> Scheduler:
    weights = model.load(read_model(directory).shape, directory)
    return Scheduler(KvSlots(weights, num_slots=num_slots, context_length=256), version="0")


def request_of(seed: int, prompt: list[int] = PROMPT, *, limit: int = 12) -> Request:
    return Request(str(seed), list(prompt), Sampling(), Stopping(limit=limit), seed=seed)


def run_out(scheduler: Scheduler) -> None:
    while not scheduler.idle:
        scheduler.step()


def assert_teacher_forced(directory: Path, requests: list[Request]) -> None:
    for request in requests:
        expected = teacher_forced(directory, request.prompt_ids, request.output_ids)
        torch.testing.assert_close(torch.tensor(request.log_probs), expected, atol=ATOL, rtol=0)


def test_a_group_that_comes_together_computes_its_prompt_once(llama: Path) -> None:
    scheduler = scheduler_of(llama)
    group = [request_of(seed) for seed in range(4)]
    other = request_of(9, [5, 6])
    scheduler.submit([group[0], group[1], other, group[2], group[3]])
    run_out(scheduler)
    assert [request.num_cached for request in (*group, other)] == [0, 7, 7, 7, 0]
    assert len({tuple(request.output_ids) for request in group}) == 4
    assert_teacher_forced(llama, [*group, other])


def test_a_later_sample_copies_the_prompt_of_a_running_one_that_moved(llama: Path) -> None:
    scheduler = scheduler_of(llama)
    short, long = request_of(1, [5, 6], limit=3), request_of(2, limit=20)
    scheduler.submit([short, long])
    for _ in range(5):
        scheduler.step()
    assert scheduler.slots.requests == [long]  # in the first slot, which was not its own
    late = request_of(3)
    scheduler.submit([late])
    run_out(scheduler)
    assert late.num_cached == 7
    again = request_of(4)
    scheduler.submit([again])  # no request has the prompt any more
    run_out(scheduler)
    assert again.num_cached == 0
    assert_teacher_forced(llama, [short, long, late, again])


def test_keys_of_earlier_weights_are_not_copied(llama: Path, tmp_path: Path) -> None:
    write_model(tmp_path, **LLAMA)
    write_weights(tmp_path, tmp_path, seed=7)
    scheduler = scheduler_of(llama)
    scheduler.submit([request_of(1, limit=30)])
    scheduler.step()
    fresh = model.load(read_model(tmp_path).shape, tmp_path)
    write(scheduler.slots.weights, fresh.named.items())  # in place, as buckets of an update are
    late, last = request_of(2), request_of(3)
    for request in (late, last):
        scheduler.submit([request])
        scheduler.step()
    run_out(scheduler)
    assert (late.num_cached, last.num_cached) == (0, 7)
    assert_teacher_forced(tmp_path, [late, last])


def test_a_prompt_whose_log_probs_are_wanted_is_computed(llama: Path) -> None:
    scheduler = scheduler_of(llama)
    plain, scored = request_of(1), request_of(2)
    scored.logprob_start = 0
    scheduler.submit([plain, scored])
    run_out(scheduler)
    assert scored.num_cached == 0
    expected = teacher_forced(llama, PROMPT[:1], PROMPT[1:])
    torch.testing.assert_close(torch.tensor(scored.input_log_probs), expected, atol=ATOL, rtol=0)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 3)), min_size=2, max_size=14),
    retracted_at=st.integers(0, 12),
)
def test_samples_do_not_depend_on_what_is_shared(
    served: Path, arrivals: list[tuple[int, int, int]], retracted_at: int
) -> None:
    """Arrivals are (prompt, tokens, steps until the next one); each sample is compared with itself alone."""
    prompts = [PROMPT, PROMPT[:3], [8]]
    shared, alone = scheduler_of(served, num_slots=4), scheduler_of(served, num_slots=1)
    pairs: list[tuple[Request, Request]] = []
    for seed, (prompt, limit, steps) in enumerate(arrivals):
        pair = request_of(seed, prompts[prompt], limit=limit), request_of(seed, prompts[prompt], limit=limit)
        pairs.append(pair)
        shared.submit([pair[0]])
        for _ in range(steps):
            shared.step()
        if seed == retracted_at:
            shared.retract()
    run_out(shared)
    for ours, expected in pairs:
        alone.submit([expected])
        run_out(alone)
        assert ours.output_ids == expected.output_ids
        found, other = torch.tensor(ours.log_probs), torch.tensor(expected.log_probs)
        torch.testing.assert_close(found, other, atol=2 * ATOL, rtol=0)  # both are within the limit of the exact ones


def test_a_flush_clears_the_cache_and_keeps_its_memory_unless_it_was_for_one_long_request(llama: Path) -> None:
    scheduler = scheduler_of(llama)
    slots = scheduler.slots
    for length, kept in ((200, True), (7, False), (7, True), (7, True)):
        request = request_of(1, [3] * length, limit=4)
        scheduler.submit([request])
        run_out(scheduler)
        cache = slots.caches.kept(0)[0]
        place = cache.data_ptr()
        assert cache.any()
        cache[:, :, -1] = torch.nan  # as weights would leave it that were not finite
        assert scheduler.flush()
        cache = slots.caches.kept(0)[0]
        assert (cache.numel() > 0 and cache.data_ptr() == place) == kept
        assert not cache.any()
        assert_teacher_forced(llama, [request])
