"""A run on an engine that spoils every fifth answer, in all the ways of tests/support/odd_answers.py in turn."""

import json
import re
import shutil
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import pytest

from messages import EngineRequestsFailed
from tests.chaos.audit import audit
from tests.chaos.harness import BATCH_SIZE, Run
from tests.support.odd_answers import CASES
from tests.support.spoiling_proxy import Case, spoiling
from tests.support.tiny_engine import running_engine

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

MODEL: Final = Path(__file__).parents[2] / "topologies/demo/models/reverse-digits"
FLAGS: Final = ("--load-format", "dummy", "--max-running-requests", "64", "--incremental-streaming-output")
NUM_STEPS: Final = 4
EVERY: Final = 5  # so many answers, one is spoiled
CLOSE: Final = 1e-4  # natural log: of the engine's log-probs and the trainer's, of each token that was trained
QUICK: Final = ("engines.policy.first_token_after_s=4", "engines.policy.next_token_after_s=4")
NOT_HERE: Final = "more tokens than asked for"  # most answers end before their limit: one more may be true
ONE_BY_ONE: Final = "engines.policy.batch_requests=false"


def write_model(directory: Path) -> Path:
    """The recipe's model with room for answers that are streamed."""
    shutil.copytree(MODEL, directory)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 512}))
    return directory


@pytest.mark.parametrize(
    ("how", "max_response_len"), [("streamed", 300), pytest.param("whole", 4, marks=pytest.mark.nightly)]
)
async def test_a_run_with_spoiled_answers_trains_only_true_ones_and_its_books_close(
    tmp_path: Path, how: str, max_response_len: int
) -> None:
    fitting = [case for case in CASES if (case.streamed if how == "streamed" else case.whole)]
    rows: Iterator[Case] = cycle(case for case in fitting if case.name != NOT_HERE)
    num_calls = 0

    def every_fifth(_: dict[str, Any]) -> Case | None:
        nonlocal num_calls
        num_calls += 1
        return None if num_calls % EVERY else next(rows)

    model = write_model(tmp_path / "model")
    with running_engine(model, *FLAGS) as engine:
        async with spoiling(engine.url, every_fifth) as proxy:
            settings = (
                f"model.hf_checkpoint={model}",
                ONE_BY_ONE,
                f"rollout.max_response_len={max_response_len}",
                *QUICK,
            )
            metrics = "algorithm.get_mismatch_metrics=true"
            run = Run(
                tmp_path,
                num_steps=NUM_STEPS,
                eval_interval=NUM_STEPS,
                overrides=(f'engines.policy.urls=["{proxy.url}"]', metrics, *settings),
            )
            async with run.started() as command:
                told = await command.log.until(lambda event: isinstance(event, EngineRequestsFailed))
                family = command.family()
                assert await command.end() == 0
                await run.gone(family)
            assert isinstance(told, EngineRequestsFailed)
            assert told.engine == f"external-0 ({proxy.url})"
            assert f"a request to external-0 ({proxy.url}) failed" in run.output.read_text()
            assert len(proxy.spoiled) >= 20
    books = await audit(run)
    assert (books.issued, books.trained) == (NUM_STEPS * BATCH_SIZE, NUM_STEPS * BATCH_SIZE)
    differences = [row["train/train_rollout_logprob_abs_diff_max"] for row in run.rows() if row["step"] > 0]
    assert len(differences) == NUM_STEPS
    assert max(differences) <= CLOSE
    assert not re.search("Traceback", run.output.read_text())
