"""Drawing tokens: the random numbers, truncation, independence of the batch, floors and stops."""

from pathlib import Path

import pytest
import torch

from actors.tiny_engine.engine.requests import Finish, Request, Sampling, Stopping
from actors.tiny_engine.engine.scheduler import Scheduler
from actors.tiny_engine.model import forward as model
from actors.tiny_engine.model.kv_slots import KvSlots
from actors.tiny_engine.model.sampling import draw, draw_truncated, sampling_mask, truncated, uniforms
from runtime.models.config import read_model
from tests.support.tiny_models import write_model

pytestmark = pytest.mark.usefixtures("inference")

PROBS = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def splitmix64(state: int) -> int:
    """The reference, of Vigna's public-domain splitmix64.c, in Python's integers."""
    mask = (1 << 64) - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_uniforms_are_the_top_bits_of_splitmix64() -> None:
    seeds, positions = [0, 1, 2**62 + 12345, 2**63 - 1], [0, 1, 17, 100_000]
    states = [seed + position * 0x9E3779B97F4A7C15 for seed, position in zip(seeds, positions, strict=True)]
    expected = [(splitmix64(state) >> 41) * 2.0**-23 for state in states]
    assert uniforms(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


def test_draws_follow_the_distribution() -> None:
    size = 200_000
    uniform = uniforms(torch.arange(size), torch.full((size,), 3))
    tokens = draw(PROBS.log().expand(size, -1), uniform)
    shares = torch.bincount(tokens, minlength=5) / size
    assert (shares - PROBS).abs().max() < 0.005  # four standard errors of the largest share


def test_a_draw_never_picks_an_impossible_token() -> None:
    log_probs = torch.tensor([[-float("inf"), 0.0, -float("inf")]]).expand(3, -1)
    extremes = torch.tensor([0.0, 0.5, 1 - 2.0**-23])
    assert draw(log_probs, extremes).tolist() == [1, 1, 1]
    nothing_cut = {"top_k": torch.full((3,), 3), "top_p": torch.ones(3), "min_p": torch.zeros(3)}
    assert draw_truncated(truncated(log_probs, **nothing_cut), extremes).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ((5, 1.0, 0.0), {0, 1, 2, 3, 4}),
        ((2, 1.0, 0.0), {1, 3}),
        ((5, 0.6, 0.0), {1, 3}),  # 0.4, then 0.7 passes 0.6
        ((5, 0.75, 0.0), {1, 3, 4}),
        ((5, 1.0, 0.5), {1, 3}),  # at least 0.2
        ((1, 1.0, 0.0), {1}),
        ((5, 1e-6, 0.0), {1}),
    ],
)
def test_truncation_keeps_the_tokens_that_top_k_top_p_and_min_p_say(
    limits: tuple[int, float, float], kept: set[int]
) -> None:
    size = 4000
    uniform = uniforms(torch.arange(size), torch.zeros(size, dtype=torch.int64))
    top_k, top_p, min_p = (torch.full((size,), limit) for limit in limits)
    left = truncated(PROBS.log().expand(size, -1), top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(draw_truncated(left, uniform).tolist()) == kept
    for token in kept:
        mask, log_prob = sampling_mask(left, 7, token)
        assert set(mask) == kept
        assert log_prob == pytest.approx((PROBS[token] / PROBS[[*kept]].sum()).log().item(), abs=1e-6)


def test_what_a_request_samples_does_not_depend_on_its_neighbours(tiny: Path) -> None:
    alone, crowded = request_of("alone", seed=3), request_of("crowded", seed=3)
    run_out(scheduler_of(tiny), [alone])
    mixed = [
        request_of("greedy", seed=4, sampling=Sampling(greedy=True), limit=7),
        request_of("cut", seed=5, sampling=Sampling(top_k=3, top_p=0.9), limit=31),
        crowded,
        request_of("hot", seed=6, sampling=Sampling(temperature=2.0, min_p=0.01), limit=13),
    ]
    run_out(scheduler_of(tiny), mixed)
    assert crowded.output_ids == alone.output_ids != mixed[1].output_ids


def test_a_truncated_request_samples_within_its_limits_beside_plain_ones(tiny: Path) -> None:
    greedy = request_of("greedy", seed=1, sampling=Sampling(greedy=True))
    top_1 = request_of("top", seed=2, sampling=Sampling(top_k=1))
    nearly = request_of("nearly", seed=3, sampling=Sampling(top_p=1e-6))
    run_out(scheduler_of(tiny), [greedy, top_1, request_of("plain", seed=4), nearly])
    assert greedy.output_ids == top_1.output_ids == nearly.output_ids


def test_a_stop_token_ends_a_request_only_after_its_floor(tiny: Path) -> None:
    free = request_of("free", seed=9)
    run_out(scheduler_of(tiny), [free])
    stop = free.output_ids[4]
    first = free.output_ids.index(stop)
    stopped, held = request_of("stopped", seed=9), request_of("held", seed=9)
    stopped.stopping = Stopping(limit=40, token_ids=frozenset({stop}))
    held.stopping = Stopping(limit=40, floor=30, token_ids=frozenset({stop}))
    run_out(scheduler_of(tiny), [stopped, held])
    assert stopped.output_ids == free.output_ids[: first + 1]
    assert stopped.finish == Finish(type="stop", matched=stop)
    assert len(held.output_ids) >= 30
    assert stop not in held.output_ids[:30]


def test_weights_that_are_not_numbers_do_not_stop_the_engine(tiny: Path) -> None:
    scheduler = scheduler_of(tiny)
    scheduler.slots.weights.head.fill_(float("nan"))
    requests = [request_of("nan", seed=1), request_of("nan greedy", seed=1, sampling=Sampling(greedy=True))]
    requests.append(request_of("nan cut", seed=1, sampling=Sampling(top_k=3)))
    run_out(scheduler, requests)
    assert all(0 <= token < 64 for request in requests for token in request.output_ids)


def scheduler_of(directory: Path) -> Scheduler:
    weights = model.load(read_model(directory).shape, directory)
    return Scheduler(KvSlots(weights, num_slots=16, context_length=512), version="0")


def request_of(rid: str, *, seed: int, sampling: Sampling | None = None, limit: int = 40) -> Request:
    return Request(rid, [3, 4, 5], sampling or Sampling(), Stopping(limit=limit), seed=seed)


def run_out(scheduler: Scheduler, requests: list[Request]) -> None:
    scheduler.submit(requests)
    while not scheduler.idle:
        scheduler.step()
