"""Whole runs with a judge in an engine pool: its scores reach the reward, also through a user's grader."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from runtime.data.dump_files import read_pair, steps_in
from tests.support import judging
from tests.support.distilling import STUDENT, write_teacher
from tests.support.judging import score_of
from tests.support.tiny_engine import post, running_engine
from tests.support.whole_runs import run_topology

pytestmark = [pytest.mark.slow]
STEPS, BATCH, SAMPLES = 2, 4, 2
OWN = Path(judging.__file__)


def test_the_answers_of_a_judge_become_rewards_and_users_graders_call_it_too(tmp_path: Path) -> None:
    model = write_teacher(tmp_path / "judge")
    settings = (
        *(f"train.num_steps={STEPS}", f"rollout.rollout_batch_size={BATCH}", f"rollout.n_samples_per_prompt={SAMPLES}"),
        f'engines.judge={{kind = "tiny", hf_checkpoint = "{model}"}}',
        f'reward.judges.digits={{template = "{{response}}", max_tokens = 3, parser = "{OWN}:digits"}}',
        *('data.0.rm_type="digits"', f'eval.0.rm_type="{OWN}:asks"', "eval.0.interval=2"),
        *("run.name=judged", "run.dump_details=dump"),
    )
    run = run_topology(tmp_path, "topologies/laptop.toml", *settings)
    assert run.result["groups"]["trained"] == STEPS * BATCH
    answers: dict[str, str] = {}
    tokenizer = Tokenizer.from_file(str(STUDENT / "tokenizer.json"))
    for step in steps_in(tmp_path / "dump"):
        for group in read_pair(tmp_path / "dump", step):
            for sample, segments in zip(group.samples, group.segments, strict=True):
                ids = [token for segment in segments for token in segment.response_ids.tolist()]
                assert sample.score is not None
                answers[tokenizer.decode(ids)] = sample.score["judge_answer"]
                assert sample.reward == pytest.approx(score_of(sample.score["judge_answer"]))
    with running_engine(model) as engine:
        for response, answer in list(answers.items())[:8]:
            messages = [{"role": "user", "content": response}]
            body = {"messages": messages, "temperature": 0, "max_tokens": 3}
            _, again = post(f"{engine.url}/v1/chat/completions", body)
            assert again["choices"][0]["message"]["content"] == answer
    assert len(set(answers.values())) > 1
    (evaluated,) = [value for row in run.rows for key, value in row.items() if key == "eval/reverse-digits-held-out"][
        -1:
    ]
    assert 0 < evaluated <= 1
