"""Whole train steps: against an independent trainer, and invariant to how a batch is cut."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from safetensors.torch import load_file

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.rank_model import Replica
from actors.trainer.step import layout
from actors.trainer.step.metrics import DIFF, DIFF_MAX
from actors.trainer.step.train_step import TrainStep
from runtime.settings.topology import Topology
from tests.actors.trainer.hf import BUFFERS, state_of, whole_weights, write_model
from tests.actors.trainer.step.reference import ReferenceTrainer
from tests.actors.trainer.tiny import REWARD_KEYS, random_batch
from tests.build.topology import MakeTopology, joined

CPU = torch.device("cpu")


def trainer(topology: Topology) -> tuple[TrainStep, Replica]:
    replica = Replica(topology, CPU)
    return TrainStep(topology, replica), replica


def compared(topology: Topology, model: Any, batches: list[TrainBatch], **others: Any) -> None:
    """Train both ways; metrics and weights agree after every train step."""
    step, replica = trainer(topology)
    reference = ReferenceTrainer(topology, model, **others)
    for batch in batches:
        metrics = step(batch).metrics
        expected = reference.train(batch)
        for name in expected[0]:
            mean = sum(one[name] for one in expected) / len(expected)
            assert metrics[f"train/{name}"] == pytest.approx(mean, abs=1e-4), name
    state = state_of(model)
    for name, weight in whole_weights(replica.complete_chunks(), replica.hf).items():
        torch.testing.assert_close(weight, state[name], rtol=0, atol=2e-4)


ALGORITHMS = {
    "slime's default reduction": {},
    "per token": {"reduction": {"type": "token-mean"}},
    "engine's log-probs": {"use_rollout_logprobs": True, "loss": {"type": "ppo", "eps_clip_high": 0.28}},
    "entropy": {"entropy_coef": 0.1},
    "one step": {"num_steps_per_rollout": 1},
    "four steps": {"num_steps_per_rollout": 4},
    "Dr. GRPO": {
        "estimator": {"type": "grpo", "normalize_std": False},
        "reduction": {"type": "seq-mean-token-sum-norm", "scale_factor": 4},
    },
    "RLOO, whitened": {"normalize_advantages": True, "estimator": {"type": "rloo"}},
    "GSPO": {"num_steps_per_rollout": 4, "loss": {"type": "gspo", "eps_clip": 0.05}},
    # Two of the eight optimizer steps clip every token, so that their gradient is exactly 0. Plain AdamW would move the
    # weights there by its momentum; the trainer, and this loop, leave them as they are.
    "GSPO, all tokens clipped": {"num_steps_per_rollout": 4, "loss": {"type": "gspo", "eps_clip": 3e-4}},
    "CISPO": {"num_steps_per_rollout": 4, "loss": {"type": "cispo"}},
    "prime-rl": {"loss": {"type": "prime_rl"}, "estimator": {"type": "grpo", "normalize_std": False}},
    "truncated IS": {"tis": {"type": "clip", "upper_bound": 1.5, "lower_bound": 0.5}},
    "normalised IS, one step": {"num_steps_per_rollout": 1, "tis": {"type": "clip", "batch_normalize": True}},
    "geometric IS": {"num_steps_per_rollout": 4, "tis": {"type": "clip", "level": "geometric"}},
    "weights of the current policy": {
        "bypass_mode": True,
        "num_steps_per_rollout": 4,
        "loss": {"type": "gpg"},
        "tis": {"type": "clip", "upper_bound": 1.3},
    },
    "rejection, with entropy": {"entropy_coef": 0.1, "rs": {"type": "ratio", "lower_bound": 0.7, "upper_bound": 1.4}},
    "likelihood of good samples": {"positive_example_nll_weight": 0.3},
    "REINFORCE++, discounted": {
        "normalize_advantages": True,
        "estimator": {"type": "reinforce_plus_plus", "gamma": 0.9},
    },
    "GDPO, whitened": {
        "normalize_advantages": True,
        "estimator": {"type": "gdpo", "reward_keys": REWARD_KEYS, "reward_weights": (1.0, 0.5)},
    },
    "ReMax, overlong": {"overlong_buffer_len": 8, "overlong_penalty_factor": 0.5, "estimator": {"type": "remax"}},
    "MaxRL by sample": {"estimator": {"type": "maxrl"}, "reduction": {"type": "seq-mean-token-mean"}},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_training_equals_an_independent_loop(make_topology: MakeTopology, tmp_path: Path, algorithm: dict) -> None:
    check_against_the_loop(make_topology, tmp_path / "weights", algorithm, tied=False)


@pytest.mark.parametrize("name", ["slime's default reduction", "entropy", "four steps"])
def test_training_with_tied_embeddings_equals_an_independent_loop(
    make_topology: MakeTopology, tmp_path: Path, name: str
) -> None:
    """No loss sees which parameter gave the log-probs: three algorithms cover the weights that are tied."""
    check_against_the_loop(make_topology, tmp_path / "weights", ALGORITHMS[name], tied=True)


def check_against_the_loop(make_topology: MakeTopology, directory: Path, algorithm: dict, *, tied: bool) -> None:
    model = write_model(directory, tied=tied)
    topology = make_topology(
        model={"hf_checkpoint": str(directory), "random_init": False},
        algorithm={"num_steps_per_rollout": 2} | algorithm,
        rollout={"temperature": 0.8},
    )
    compared(topology, model, [random_batch(step) for step in range(2)])


def test_training_of_experts_equals_an_independent_loop(make_topology: MakeTopology, tmp_path: Path) -> None:
    directory = tmp_path / "hf"
    model = write_model(directory, "qwen3_moe", initializer_range=0.1)
    topology = make_topology(
        model={"hf_checkpoint": str(directory), "random_init": False},
        optimizer={"adam_eps": 1e-4},
        algorithm={"entropy_coef": 0.1},
    )
    compared(topology, model, [random_batch(step) for step in range(2)])


def test_the_divergence_from_a_reference_model_equals_that_of_an_independent_loop(
    make_topology: MakeTopology, tmp_path: Path
) -> None:
    directories = [tmp_path / "weights", tmp_path / "reference"]
    model = write_model(directories[0])
    reference_model = write_model(directories[1], initializer_range=0.1)
    topology = make_topology(
        model={"hf_checkpoint": str(directories[0]), "random_init": False, "ref_load": str(directories[1])},
        algorithm={"kl": {"type": "k3", "loss_coef": 0.2}},
    )
    compared(topology, model, [random_batch(step) for step in range(2)], reference_model=reference_model)


IN_THE_REWARD = {
    "REINFORCE++": {"normalize_advantages": True, "estimator": {"type": "reinforce_plus_plus", "gamma": 0.95}},
    "REINFORCE++-baseline": {
        "normalize_advantages": True,
        "estimator": {"type": "reinforce_plus_plus_baseline"},
    },
    "GRPO": {"kl": {"type": "k3"}},
    "GRPO, engine's log-probs": {"use_rollout_logprobs": True},
    "GRPO, before the group's mean": {"kl": {"type": "k1", "before_normalization": True}},
    "RLOO, before the group's mean": {
        "estimator": {"type": "rloo"},
        "kl": {"type": "k3", "before_normalization": True},
    },
    "one step": {"num_steps_per_rollout": 1},
}


@pytest.mark.parametrize("algorithm", IN_THE_REWARD.values(), ids=IN_THE_REWARD.keys())
def test_the_divergence_in_the_reward_equals_that_of_an_independent_loop(
    make_topology: MakeTopology, tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    directories = [tmp_path / "weights", tmp_path / "reference"]
    model = write_model(directories[0])
    reference_model = write_model(directories[1], initializer_range=0.1)
    topology = make_topology(
        model={"hf_checkpoint": str(directories[0]), "random_init": False, "ref_load": str(directories[1])},
        algorithm=joined({"num_steps_per_rollout": 2, "kl": {"type": "k1", "reward_coef": 0.05}}, algorithm),
        rollout={"temperature": 0.8},
    )
    compared(topology, model, [random_batch(step) for step in range(2)], reference_model=reference_model)


def test_the_divergence_and_the_returns_are_metrics_of_tokens(make_topology: MakeTopology) -> None:
    step, _ = trainer(
        make_topology(
            algorithm={"normalize_advantages": True, "estimator": {"type": "reinforce_plus_plus"}}
            | {"kl": {"type": "k1", "reward_coef": 0.1}, "use_rollout_logprobs": True, "num_steps_per_rollout": 2}
        )
    )
    batch = random_batch()
    metrics = step(batch).metrics
    mask = batch.loss_mask_N != 0
    own = own_log_probs(make_topology(), batch)
    divergence = batch.rollout_log_probs_N[mask] - own[mask]
    assert metrics["rollout/kl"] == pytest.approx(divergence.mean(), rel=1e-4)
    assert metrics["rollout/advantages"] == pytest.approx(0.0, abs=1e-5)
    ends = np.cumsum(batch.lengths_B)
    returns = np.zeros(len(mask))
    for start, end, reward in zip(ends - batch.lengths_B, ends, batch.rewards_B, strict=True):
        lost = 0.1 * np.where(mask, batch.rollout_log_probs_N - own, 0.0)[start:end]
        returns[start:end] = reward - np.cumsum(lost[::-1])[::-1]
    assert metrics["rollout/returns"] == pytest.approx(returns[mask].mean(), rel=1e-4)


def test_a_divergence_without_a_coefficient_runs_no_forward_pass(
    make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fill = Replica.fill_log_probs

    def counted(replica: Replica, *arguments: Any, **options: Any) -> None:
        calls.append("a pass")
        fill(replica, *arguments, **options)

    monkeypatch.setattr(Replica, "fill_log_probs", counted)
    engines = {"use_rollout_logprobs": True}
    plain, replica = trainer(
        make_topology(algorithm={"kl": {"type": "k1", "loss_coef": 0.0, "reward_coef": 0.0}} | engines)
    )
    without = [plain(random_batch(number)).metrics for number in range(4)]
    assert calls == []
    assert not any("kl_loss" in name for metrics in without for name in metrics)
    measured, other = trainer(make_topology(algorithm={"kl": {"type": "k2", "metric_interval": 2}} | engines))
    found: list[dict[str, float]] = []
    passes: list[int] = []
    for number in range(4):
        found.append(measured(random_batch(number)).metrics)
        passes.append(len(calls))
    assert passes == [1, 1, 2, 2]
    assert ["train/kl_loss" in metrics for metrics in found] == [True, False, True, False]
    assert ["perf/ref_log_probs_time" in metrics for metrics in found] == [True, False, True, False]
    always, _ = trainer(make_topology(algorithm={"kl": {"type": "k2", "loss_coef": 1e-12}} | engines))
    expected = [always(random_batch(number)).metrics["train/kl_loss"] for number in range(3)]
    assert found[2]["train/kl_loss"] == pytest.approx(expected[2], rel=1e-3)
    assert expected[2] > 0
    weights = whole_weights(replica.complete_chunks(), replica.hf)
    for name, weight in whole_weights(other.complete_chunks(), other.hf).items():
        assert torch.equal(weight, weights[name]), name


def test_the_reference_is_the_first_weights_unless_another_is_named(make_topology: MakeTopology) -> None:
    algorithm = {"num_steps_per_rollout": 1, "kl": {"type": "k2", "loss_coef": 0.1}}
    step, _ = trainer(make_topology(algorithm=algorithm))
    assert step(random_batch(0)).metrics["train/kl_loss"] == 0.0
    assert step(random_batch(1)).metrics["train/kl_loss"] > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("per_token", [False, True])
def test_training_does_not_depend_on_the_cut_into_micro_batches(make_topology: MakeTopology, per_token: bool) -> None:
    algorithm = {"entropy_coef": 0.05, "reduction": {"type": "token-mean" if per_token else "rollout-mean"}}
    whole, *cut = (
        trained(make_topology(algorithm=algorithm, train={"max_tokens_per_gpu": limit})) for limit in (9216, 1, 20, 50)
    )
    for other in cut:
        assert_same(whole, other)


def test_training_does_not_depend_on_packing(make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = trained(make_topology())
    build = Replica.__init__

    def packed(replica: Replica, *arguments: Any) -> None:
        build(replica, *arguments)
        replica.packed = True

    monkeypatch.setattr(Replica, "__init__", packed)
    assert_same(padded, trained(make_topology(train={"max_tokens_per_gpu": 40})))


def test_training_does_not_depend_on_the_balance(make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of about equal computation, against a sample a micro-batch in the batch's order."""
    balanced = trained(make_topology(train={"max_tokens_per_gpu": 40}))

    def in_order(lengths_B: np.ndarray, samples: np.ndarray, **_: Any) -> list[list[np.ndarray]]:
        del lengths_B
        return [[samples[index : index + 1] for index in range(len(samples))]]

    monkeypatch.setattr(layout, "plan_micro_batches", in_order)
    assert_same(balanced, trained(make_topology()))


def trained(topology: Topology) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    step, replica = trainer(topology)
    metrics = [step(random_batch(number)).metrics for number in range(2)]
    return metrics, whole_weights(replica.complete_chunks(), replica.hf)


def assert_same(one: tuple, other: tuple) -> None:
    for first, second in zip(one[0], other[0], strict=True):
        for name in first:
            if name.startswith("train/"):
                assert first[name] == pytest.approx(second[name], abs=1e-5), name
    for name, weight in one[1].items():
        torch.testing.assert_close(weight, other[1][name], rtol=0, atol=1e-4)


def test_the_same_batches_give_bit_equal_weights(make_topology: MakeTopology) -> None:
    one, other = trained(make_topology()), trained(make_topology())
    assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())


def own_log_probs(topology: Topology, batch: TrainBatch) -> np.ndarray:
    """What an engine with the trainer's first weights would have said."""
    step, _ = trainer(topology)
    column = np.zeros_like(batch.rollout_log_probs_N)
    step._replica.fill_log_probs([m for s in step._planner.steps(batch) for m in s.micro_batches], column)
    return column


@pytest.mark.parametrize("algorithm", [{}, {"use_rollout_logprobs": True, "get_mismatch_metrics": True}])
def test_the_difference_to_the_engine_is_taken_before_the_first_optimizer_step_for_all_samples(
    make_topology: MakeTopology, algorithm: dict[str, Any]
) -> None:
    topology = make_topology(algorithm={"num_steps_per_rollout": 4, **algorithm})
    exact = own_log_probs(topology, random_batch())
    step, _ = trainer(topology)
    assert step(replace(random_batch(), rollout_log_probs_N=exact)).metrics[DIFF] < 1e-6
    off = exact + np.where(random_batch().loss_mask_N, 0.25, 0).astype(np.float32)
    metrics = trainer(topology)[0](replace(random_batch(), rollout_log_probs_N=off)).metrics
    assert (metrics[DIFF], metrics[DIFF_MAX]) == pytest.approx((0.25, 0.25), abs=1e-5)


def test_the_engines_log_probs_for_the_old_ones_save_a_forward_pass(
    make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference is then that of the first optimizer step's samples, which is measured for nothing."""
    topology = make_topology(algorithm={"num_steps_per_rollout": 4, "use_rollout_logprobs": True})
    batch, (step, _) = random_batch(), trainer(topology)
    first = np.concatenate([micro_batch.columns_M for micro_batch in step._planner.steps(batch)[0].micro_batches])
    off = own_log_probs(topology, batch)
    off[first] += 0.25
    monkeypatch.setattr(step._replica, "fill_log_probs", lambda *_: pytest.fail("a forward pass more"))
    metrics = step(replace(batch, rollout_log_probs_N=off)).metrics
    assert (metrics[DIFF], metrics[DIFF_MAX]) == pytest.approx((0.25, 0.25), abs=1e-5)


def test_the_largest_difference_is_over_tokens_that_the_current_weights_sampled(make_topology: MakeTopology) -> None:
    topology = make_topology()
    batch = random_batch()
    exact = own_log_probs(topology, batch)
    trains = np.flatnonzero(batch.loss_mask_N)
    staleness = batch.staleness_N.copy()
    exact[trains[0]] -= 3.0
    staleness[trains[0]] = 1
    metrics = trainer(topology)[0](replace(batch, rollout_log_probs_N=exact, staleness_N=staleness)).metrics
    assert metrics[DIFF_MAX] < 1e-5
    assert metrics[DIFF] == pytest.approx(3.0 / len(trains), rel=1e-3)
    assert metrics["train/stale_token_ratio"] == pytest.approx(1 / len(trains))


def test_a_batch_whose_tokens_are_all_masked_trains_without_a_loss(make_topology: MakeTopology) -> None:
    batch = random_batch()
    nothing = replace(batch, loss_mask_N=np.zeros_like(batch.loss_mask_N))
    metrics = trainer(make_topology())[0](nothing).metrics
    assert (metrics["train/loss"], metrics["train/grad_norm"], metrics["rollout/masked_ratio"]) == (0.0, 0.0, 1.0)


def test_pass_rates_are_logged_if_asked(make_topology: MakeTopology) -> None:
    """The first group has one passing rollout of four, in one of its two parts; the others have none."""
    batch = random_batch()
    raw = np.zeros_like(batch.raw_rewards_B)
    raw[0] = 1.0
    batch = replace(batch, raw_rewards_B=raw)
    assert not any(name.startswith("passrate/") for name in trainer(make_topology())[0](batch).metrics)
    metrics = trainer(make_topology(rollout={"log_passrate": True}))[0](batch).metrics
    found = [metrics[f"passrate/pass@{k}"] for k in (1, 2, 4)]
    assert found == pytest.approx([0.25 / 4, 0.5 / 4, 1.0 / 4])


def test_groups_of_one_train_on_their_rewards_with_a_warning(make_topology: MakeTopology) -> None:
    with structlog.testing.capture_logs() as logs:
        step, _ = trainer(make_topology(rollout={"n_samples_per_prompt": 1}))
    assert [entry["event"] for entry in logs] == ["rewards_not_normalized"]
    batch = random_batch(group_size=1)
    metrics = step(batch).metrics
    expected = np.repeat(batch.rewards_B, batch.lengths_B)[batch.loss_mask_N != 0].mean()
    assert metrics["rollout/advantages"] == pytest.approx(expected)


def test_a_batch_in_which_nothing_trains_changes_nothing(make_topology: MakeTopology) -> None:
    step, replica = trainer(make_topology())
    before = {name: weight.clone() for name, weight in whole_weights(replica.complete_chunks(), replica.hf).items()}
    batch = random_batch()
    metrics = step(replace(batch, loss_mask_N=np.zeros_like(batch.loss_mask_N))).metrics
    assert metrics["train/loss"] == 0.0
    after = whole_weights(replica.complete_chunks(), replica.hf)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_learning_rate_follows_optimizer_steps_over_train_steps(make_topology: MakeTopology) -> None:
    step, _ = trainer(make_topology(optimizer={"lr": 1.0, "lr_warmup_iters": 4}))
    assert [step(random_batch(number)).metrics["train/lr-pg_0"] for number in range(3)] == [0.5, 1.0, 1.0]


def test_without_a_clip_the_norm_is_still_reported(make_topology: MakeTopology) -> None:
    free = trainer(make_topology(optimizer={"clip_grad": 0.0}))[0](random_batch()).metrics
    clipped = trainer(make_topology(optimizer={"clip_grad": 1e9}))[0](random_batch()).metrics
    assert free["train/grad_norm"] == pytest.approx(clipped["train/grad_norm"])


@pytest.mark.parametrize("kind", ["glm4_moe", "ernie4_5_moe"])
def test_biases_of_experts_stay_float32_in_bfloat16(kind: str, make_topology: MakeTopology, tmp_path: Path) -> None:
    """Each step moves them by less than bfloat16 can tell."""
    write_model(tmp_path / "hf", kind, noise=3.0)
    step, replica = trainer(
        make_topology(
            model={"hf_checkpoint": str(tmp_path / "hf"), "random_init": False, "dtype": "bfloat16"},
            trainer={"megatron": {"moe_router_bias_update_rate": 1e-3}},
        )
    )
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    (name,) = (name for name in tensors if name.startswith("model.layers.1.") and name.endswith(BUFFERS))
    first = tensors[name]
    assert torch.equal(whole_weights(replica.complete_chunks(), replica.hf)[name], first)
    step(random_batch())
    moved = whole_weights(replica.complete_chunks(), replica.hf)[name] - first
    assert moved.abs().sum() > 0
    torch.testing.assert_close(moved, (moved / 1e-3).round() * 1e-3, rtol=0, atol=1e-5)


def test_bfloat16_trains(make_topology: MakeTopology) -> None:
    step, replica = trainer(make_topology(model={"dtype": "bfloat16"}))
    metrics = [step(replace(random_batch(0), step=number)).metrics for number in range(3)]
    assert all(np.isfinite(list(one.values())).all() for one in metrics)
    assert all(
        weight.dtype is torch.bfloat16 for weight in whole_weights(replica.complete_chunks(), replica.hf).values()
    )


def test_the_parts_of_training_sum_to_it(make_topology: MakeTopology) -> None:
    topology = make_topology(algorithm={"kl": {"type": "k1", "loss_coef": 0.1}})
    metrics = TrainStep(topology, Replica(topology, torch.device("cpu")))(random_batch()).metrics
    parts = ("plan", "log_probs", "ref_log_probs", "forward_backward", "optimizer", "metrics")
    times = [metrics[f"perf/{part}_time"] for part in parts]
    assert all(took > 0 for took in times)
    assert sum(times) == pytest.approx(metrics["perf/train_time"])
    assert metrics["perf/actor_train_tok_per_s"] > 0
    assert metrics["perf/actor_train_tflops"] > 0
