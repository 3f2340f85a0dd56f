"""The first train step counts the tokens that each rule masks."""

from dataclasses import replace

import numpy as np

from actors.trainer.data.batch import LeftOut
from runtime.report.lines import masked_line
from tests.actors.trainer.step.test_train_step import own_log_probs, trainer
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology

PREFIX = "train/masked_tokens/"


def test_tokens_are_counted_by_rule_in_the_first_train_step_alone(make_topology: MakeTopology) -> None:
    topology = make_topology(algorithm={"rs": {"type": "ratio", "upper_bound": 2.0, "veto_threshold": 1e-3}})
    batch, step = random_batch(), trainer(topology)[0]
    trains = np.flatnonzero(batch.loss_mask_N)
    mask, staleness = batch.loss_mask_N.copy(), np.where(batch.loss_mask_N, 0, -1).astype(np.int32)
    mask[trains[:2]] = 0  # two tokens are masked for their staleness
    engine = own_log_probs(topology, batch)
    engine[trains[2:5]] -= 1.0  # three are likelier for the trainer than for the engine
    engine[trains[-1]] += 9.0  # and one takes its whole sample out
    left_out = batch.left_out_B.copy()
    left_out[3] = LeftOut.TOO_LONG
    batch = replace(batch, loss_mask_N=mask, staleness_N=staleness, rollout_log_probs_N=engine, left_out_B=left_out)
    rewards = batch.rewards_B.copy()
    rewards[batch.groups_B == 1] = 1.0  # a group without spread, which gets no passes
    metrics = step(replace(batch, rewards_B=rewards)).metrics
    found = {name.removeprefix(PREFIX): count for name, count in metrics.items() if name.startswith(PREFIX)}
    veto = int(batch.mask_sums_B[np.flatnonzero(batch.mask_sums_B)[-1]])
    equal = int(batch.mask_sums_B[batch.groups_B == 1].sum())
    assert (found["stale"], found["rejected_high"], found["rejected_low"], found["veto"]) == (2, 3, 1, veto)
    assert (found["not_finite"], found["too_long_samples"], found["invalid_samples"]) == (0, 1, 0)
    assert found["zero_advantage"] >= equal
    assert 0 < found["loss_mask"] < metrics["train/num_response_tokens"]
    again = step(replace(batch, step=1)).metrics
    assert not any(name.startswith(PREFIX) for name in again)


def test_the_tokens_of_a_sample_without_a_finite_loss_are_counted_as_such(make_topology: MakeTopology) -> None:
    batch, topology = random_batch(), make_topology(algorithm={"estimator": {"type": "grpo", "normalize": False}})
    sample, rewards = int(np.argmax(batch.mask_sums_B)), batch.rewards_B.copy()
    rewards[sample] = np.nan
    metrics = trainer(topology)[0](replace(batch, rewards_B=rewards)).metrics
    assert metrics[f"{PREFIX}not_finite"] == float(batch.mask_sums_B[sample]) != 0.0


def test_the_terminal_has_one_line_of_them() -> None:
    assert masked_line({"train/loss": 1.0}) is None
    nothing = {"train/num_response_tokens": 1200.0, f"{PREFIX}clip": 0.0}
    assert masked_line(nothing) == "first train step: no rule masked any of 1,200 response tokens"
    some = nothing | {f"{PREFIX}clip": 1010.0, f"{PREFIX}veto": 3.0}
    counts = "1,010 clip (their probability has changed too much), 3 veto"
    assert masked_line(some) == f"first train step: masked or limited of 1,200 response tokens: {counts}"


def test_a_dump_has_the_rules_of_each_token_and_what_the_trainer_thought_of_it(make_topology: MakeTopology) -> None:
    algorithm = {"rs": {"type": "ratio", "upper_bound": 2.0}}
    topology = make_topology(algorithm=algorithm, observe={"tokens": True}, run={"dump_details": "d"})
    batch, step = random_batch(), trainer(topology)[0]
    trains = np.flatnonzero(batch.loss_mask_N)
    mask, staleness = batch.loss_mask_N.copy(), np.where(batch.loss_mask_N, 0, -1).astype(np.int32)
    mask[trains[:2]] = 0
    own = own_log_probs(topology, batch)
    engine = own.copy()
    engine[trains[2:5]] -= 1.0
    batch = replace(batch, loss_mask_N=mask, staleness_N=staleness, rollout_log_probs_N=engine)
    for number in range(2):  # not of the first train step alone
        tokens = step(replace(batch, step=number)).tokens
        assert tokens is not None
        names = [
            {name for bit, name in enumerate(tokens.rule_names) if rules >> bit & 1} for rules in tokens.rules.tolist()
        ]
        assert [place for place, found in enumerate(names) if "stale" in found] == trains[:2].tolist()
        assert not any("loss_mask" in names[place] for place in trains)
        known = np.flatnonzero(np.isfinite(tokens.trainer_log_probs))
        assert known.tolist() == trains[2:].tolist()
        if number == 0:
            assert [place for place, found in enumerate(names) if "rejected_high" in found] == trains[2:5].tolist()
            np.testing.assert_allclose(tokens.trainer_log_probs[known], own[known], atol=1e-5)
        assert tokens.lengths.sum() == len(tokens.rules)
    assert trainer(make_topology())[0](random_batch()).tokens is None
