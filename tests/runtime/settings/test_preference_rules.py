"""Rules of runs on preference pairs: DPO, reward models, and evaluation sets of pairs."""

from contextlib import closing
from pathlib import Path

import pytest

from actors.buffer.deciding.tasks import schedule_of
from actors.buffer.prompts.source import load_held_out, load_prompts
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError

EXAMPLES = Path(__file__).parents[3] / "topologies" / "examples"
DPO, RM, SFT = (EXAMPLES / f"{name}.toml" for name in ("dpo", "rm", "sft"))


def problems(path: Path, *overrides: str) -> dict[str, str]:
    with pytest.raises(TopologyError) as caught:
        load_topology(path, overrides)
    return {problem.key: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("path", "override", "key", "message"),
    [
        (RM, "algorithm.loss.beta=0.2", "algorithm.loss.beta", 'is a key of type = "dpo" or "preference_ipo"'),
        (RM, "model.ref_load=/none", "model.ref_load", "has no effect"),
        (RM, "algorithm.reduction.type=token-mean", "algorithm.reduction.type", "the mean over pairs"),
        (RM, "trainer.log_probs_ahead=true", "trainer.log_probs_ahead", "has no log-probs to compute"),
        (RM, "trainer.megatron.mtp_num_layers=1", "trainer.megatron.mtp_num_layers", "the model scores them"),
        (
            RM,
            "train.custom_megatron_before_log_prob_hook=hooks:f",
            "train.custom_megatron_before_log_prob_hook",
            "a reward model has no log-probs",
        ),
        (
            SFT,
            "algorithm.loss.label_smoothing=0.1",
            "algorithm.loss.label_smoothing",
            'is a key of type = "dpo" or "rm", not of "sft"',
        ),
        (DPO, "data.0.chosen_key=null", "data.0.chosen_key", 'is needed with algorithm.loss.type = "dpo"'),
        (RM, "data.0.rejected_key=null", "data.0.rejected_key", 'is needed with algorithm.loss.type = "rm"'),
        (DPO, "eval.0.temperature=0.0", "eval.0.temperature", "nothing is sampled and graded"),
        (DPO, "eval.0.n_samples_per_eval_prompt=4", "eval.0.n_samples_per_eval_prompt", "nothing is sampled"),
        (RM, "eval.0.rm_type=exact_match", "eval.0.rm_type", "nothing is sampled and graded"),
        (RM, "rollout.eval_overlap=false", "rollout.eval_overlap", "nothing is trained during an evaluation"),
    ],
)
def test_a_setting_without_effect_on_pairs_is_refused(path: Path, override: str, key: str, message: str) -> None:
    assert message in problems(path, override)[key]


def test_held_out_pairs_are_read_where_the_data_is() -> None:
    overrides = ('nodes={a={address="10.0.0.1"}, b={address="10.0.0.2"}}', 'trainer.nodes=["b"]')
    message = problems(RM, *overrides)["eval.0.path"]
    assert message.startswith("not implemented yet: the trainer reads held-out pairs on its node b")
    assert "eval.0.path" not in problems(RM, *overrides, "eval=[]", "rollout.temperature=0.5")


def test_the_trainer_and_the_buffer_read_held_out_pairs_and_the_buffer_evaluates_none() -> None:
    topology = load_topology(RM).topology
    held_out = load_held_out(topology)
    with closing(load_prompts(topology)) as prompts:
        pass
    assert prompts.evals.keys() == held_out.keys() == {"held-out"}
    assert [prompt.rejected is not None for prompt in held_out["held-out"]] == [True] * 60
    assert {event.data: event.num_prompts for event in prompts.loaded}["held-out"] == 60
    assert schedule_of(topology, {"held-out": 60}).evals == ()
    assert load_held_out(load_topology(SFT).topology) == {}


def test_no_held_out_prompt_of_the_examples_is_trained() -> None:
    topology = load_topology(DPO).topology
    with closing(load_prompts(topology)) as prompts:
        trained = {prompts.prompt(number).text for number in range(200)}
    assert len(trained) == 80
    assert trained.isdisjoint(prompt.text for prompt in load_held_out(topology)["held-out"])
