"""Functions with slime's signatures weigh the policy loss and post-process rewards; what they return is checked."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.trainer.algorithms.advantage_inputs import AdvantageInputs
from actors.trainer.algorithms.corrections import importance_weights
from actors.trainer.algorithms.loss_inputs import LossInputs, Sequences
from actors.trainer.plugins.dry_run import try_plugin
from actors.trainer.plugins.functions import CustomWeights, custom_advantage, custom_weights
from runtime.functions.load import PluginError
from runtime.functions.table import ADVANTAGE, WEIGHTS
from runtime.process.actor import InputError
from tests.build.topology import algorithm_of, topology_with

FUNCTIONS = """
import torch

from slime.utils.types import Sample


def masks(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):  # as slime's icepop_function
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    inside = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    weights = torch.where(inside, ratio, torch.zeros_like(ratio))
    return pg_loss * weights, loss_masks, {"tis": ratio.clone()}


def rejects(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    # as compute_mis_weights_with_cp: a sequence whose mean ratio is out of bounds leaves the mask
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp

    lengths = list(zip(total_lengths, response_lengths))
    old = [all_gather_with_cp(values, *each) for values, each in zip(train_log_probs, lengths)]
    engine = [all_gather_with_cp(values, *each) for values, each in zip(rollout_log_probs, lengths)]
    ratios = [torch.exp((a - b).mean()).expand_as(a) for a, b in zip(old, engine)]
    modified = [mask * (ratio <= args.tis_upper_bound) for mask, ratio in zip(loss_masks, ratios)]
    ratio = torch.cat([slice_log_prob_with_cp(values, *each) for values, each in zip(ratios, lengths)])
    return pg_loss, modified, {"mis_ratio": ratio}


def pair(args, *, pg_loss, **kwargs): return pg_loss, {}
def no_masks(args, *, pg_loss, **kwargs): return pg_loss, None, {}
def short(args, *, pg_loss, loss_masks, **kwargs): return pg_loss[:1], loss_masks, {}
def reads(args, *, pg_loss, **kwargs): return args.num_layers
def takes_samples(args, samples): return samples


def centred(args, samples):  # as slime's own: minus the mean of the group
    raw = [sample.get_reward_value(args) for sample in samples]
    rewards = torch.tensor(raw).reshape(-1, 2)
    assert [sample.group_index for sample in samples[::2]] == sorted({sample.group_index for sample in samples})
    assert all(isinstance(sample, Sample) and sample.response_length > 0 for sample in samples)
    return raw, (rewards - rewards.mean(dim=-1, keepdim=True)).flatten().tolist()


def too_few(args, samples): return [], [0.0]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slimes.py").write_text(FUNCTIONS)
    return tmp_path


def columns(numbers: Sequence[int], ratios: Sequence[float], group: object = None) -> LossInputs:
    engine = torch.full((len(numbers),), -2.0, dtype=torch.float64)
    zeros, old = torch.zeros_like(engine), engine + torch.tensor(ratios, dtype=torch.float64).log()
    found = Sequences(torch.tensor(numbers, dtype=torch.int64), 3, group)
    return LossInputs(
        log_probs=zeros.clone().requires_grad_(), old_log_probs=old, rollout_log_probs=engine,
        advantages=zeros, entropy=zeros, sequences=found,
    )  # fmt: skip


def weights(folder: Path, name: str, **tis: float) -> CustomWeights:
    value = f"slime:slimes.py:{name}"
    config = algorithm_of(tis={"type": "custom", "function": value, **tis})
    return custom_weights(value, (folder,), algorithm=config)


def test_a_function_of_slime_weighs_tokens_as_ours_wherever_they_stand(folder: Path) -> None:
    inputs = columns([2, 0, 2, 0, 0], [0.5, 1.0, 3.0, 1.5, 0.1])
    correction = weights(folder, "masks", upper_bound=2.0, lower_bound=0.2)(inputs)
    ours = importance_weights(inputs, mode="mask", low=0.2, high=2.0)
    assert correction.factors.tolist() == pytest.approx([0.5, 1.0, 0.0, 1.5, 0.0])  # by hand
    torch.testing.assert_close(correction.factors, ours.factors)
    assert correction.metrics["train/tis"].tolist() == pytest.approx([0.5, 1.0, 3.0, 1.5, 0.1])


def test_tokens_that_a_function_takes_out_of_the_mask_have_the_factor_0(folder: Path) -> None:
    # geometric means: of 2 and 8 it is 4, of 1 and 2 the root of 2
    correction = weights(folder, "rejects", upper_bound=3.0)(columns([1, 0, 1, 0], [2.0, 1.0, 8.0, 2.0]))
    assert correction.factors.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert correction.metrics["train/mis_ratio"].tolist() == pytest.approx([4.0, 2**0.5, 4.0, 2**0.5])


def test_a_micro_batch_without_trained_tokens_has_the_same_metrics(folder: Path) -> None:
    correction = weights(folder, "masks")(columns([], []))
    assert correction.factors.shape == (0,)
    assert {name: values.shape for name, values in correction.metrics.items()} == {"train/tis": (0,)}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("pair", "expected (pg_loss, loss_masks, metrics)"),
        ("no_masks", "its masks are None"),
        ("short", "pg_loss is a float32 tensor [1]"),
        ("reads", "args.num_layers is not provided to functions of slime"),
    ],
)
def test_a_faulty_function_is_refused_before_the_run(folder: Path, name: str, problem: str) -> None:
    value = f"slime:slimes.py:{name}"
    with pytest.raises(InputError) as caught:
        try_plugin(topology_with(), WEIGHTS, "algorithm.tis.function", value, (folder,))
    assert problem in str(caught.value)
    assert value in str(caught.value)


def test_other_signatures_and_parts_of_sequences_are_refused(folder: Path) -> None:
    with pytest.raises(PluginError, match=r"takes \(args, samples\) but is called with"):
        weights(folder, "takes_samples")
    with pytest.raises(InputError, match="context_parallel_size = 1"):
        weights(folder, "masks")(columns([0], [1.0], group=object()))


def test_post_processed_rewards_are_advantages(folder: Path) -> None:
    inputs = AdvantageInputs(
        rewards=np.array([1.0, 5.0, np.nan, 0.0, 7.0]), groups=np.array([4, 9, 4, 4, 9]), rollouts=np.arange(5),
        lengths=np.full(5, 3), loss_mask=np.tile([False, True, True], 5), response_mask=np.tile([False, True, True], 5),
    )  # fmt: skip
    found = custom_advantage("slime:slimes.py:centred", (folder,))(inputs)
    np.testing.assert_allclose(found.advantages, np.repeat([0.5, -1.0, np.nan, -0.5, 1.0], 3))
    try_plugin(topology_with(), ADVANTAGE, "algorithm.estimator.function", "slime:slimes.py:centred", (folder,))
    with pytest.raises(InputError, match=r"as rewards; expected 2 numbers"):
        try_plugin(topology_with(), ADVANTAGE, "algorithm.estimator.function", "slime:slimes.py:too_few", (folder,))
