"""Scores the export of a demo's run with plain transformers, greedily, and compares it with the run's own evaluation.

Run: python -m tests.learning.score RUN_DIR [--step N] [--dtype DTYPE]. It exports a checkpoint, the newest by default.
It answers the prompts of the first evaluation set. Exit code 1: the scores differ by more than MAX_DIFFERENCE.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from actors.reward.graders.builtin import exact_match

ROOT: Final = Path(__file__).parents[2]
EXPORT: Final = (sys.executable, "-P", str(ROOT / "bin" / "physarum.py"), "export-hf")
EXPORTED: Final = re.compile(r"checkpoint of step (?P<step>\d+)")
EXPORT_S: Final = 600.0
MAX_DIFFERENCE: Final = 0.03  # of two scores in bfloat16: where two tokens are equally likely, rounding decides
BATCH: Final = 50  # prompts at a time


class Scored(NamedTuple):
    """One model, scored twice."""

    step: int  # train steps in it
    transformers: float
    run: float  # evaluation of the run

    @property
    def agrees(self) -> bool:
        """Whether the scores differ by no more than rounding explains."""
        return abs(self.transformers - self.run) <= MAX_DIFFERENCE


def scored(run_dir: Path, *, step: int | None = None, dtype: str | None = None) -> Scored:
    """Export a checkpoint and score it.

    Args:
        run_dir: directory of the run.
        step: train step of the checkpoint; None: the newest.
        dtype: to compute in; None: that of the run.

    Raises:
        ValueError: the run has no evaluation after this step.
    """
    topology = json.loads((run_dir / "topology.json").read_text())
    evaluation = topology["eval"][0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "hf"
        step = _export(run_dir, out, step)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        found = [row[f"eval/{evaluation['name']}"] for row in rows if row.get("eval/step") == step]
        if not found:
            raise ValueError(f"{run_dir} has no evaluation after step {step}")
        limit = evaluation["max_response_len"] or topology["rollout"]["max_response_len"]
        data = [json.loads(line) for line in Path(evaluation["path"]).read_text(encoding="utf-8").splitlines()]
        answers = answers_of(out, [row["input"] for row in data], limit, dtype or topology["model"]["dtype"])
    right = [exact_match(answer, row["label"]) for answer, row in zip(answers, data, strict=True)]
    return Scored(step, sum(right) / len(right), found[0])


def _export(run_dir: Path, out: Path, step: int | None) -> int:
    """Export a checkpoint, and return its train step."""
    words = [] if step is None else ["--step", str(step)]
    command = [*EXPORT, str(run_dir), "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_S, check=False)
    found = EXPORTED.search(done.stdout)
    if done.returncode or found is None:
        raise ValueError(f"{run_dir}: no checkpoint was exported: {(done.stderr or done.stdout).strip()}")
    return int(found["step"])


def answers_of(model: Path, prompts: Sequence[str], max_new_tokens: int, dtype: str) -> list[str]:
    """Answer prompts of one user's turn with transformers' `generate`, greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    answers: list[str] = []
    for start in range(0, len(texts), BATCH):
        tokens = tokenizer(texts[start : start + BATCH], return_tensors="pt", padding=True, add_special_tokens=False)
        made = loaded.generate(**tokens, max_new_tokens=max_new_tokens, do_sample=False)
        answers += tokenizer.batch_decode(made[:, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--step", type=int, help="train step of the checkpoint (default: the newest)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="to compute in (default: that of the run)")
    args = parser.parse_args(argv)
    found = scored(args.run, step=args.step, dtype=args.dtype)
    print(f"step {found.step}: transformers {found.transformers:.3f}, the run's evaluation {found.run:.3f}")
    return 0 if found.agrees else 1


if __name__ == "__main__":
    sys.exit(main())
