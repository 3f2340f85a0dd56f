"""topologies/single-gpu.toml with a random model of 0.6 B parameters: its phases, their seconds and bytes."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import anyio

from messages import Phase, PhaseChanged
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import ROOT, Run
from tests.gpu.measured import Measured
from tests.gpu.model import CONFIG, TINY

SINGLE: Final = ROOT / "topologies" / "single-gpu.toml"
DEMO: Final = ROOT / "topologies" / "demo"
PYTHON: Final = os.environ.get("PHYSARUM_SGLANG_PYTHON", str(ROOT / ".venv-gpu" / "bin" / "python"))
NUM_STEPS: Final = 20
LIMIT_S: Final = 1500.0
SMALL: Final = (  # the demo's prompts, since a tokenizer of few words is what lies here
    f"data.0.path={DEMO / 'data/reverse-digits/train.jsonl'}",
    "data.0.input_key=input",
    "data.0.label_key=label",
    f"eval.0.path={DEMO / 'data/reverse-digits/eval.jsonl'}",
    "eval.0.input_key=input",
    "eval.0.label_key=label",
    "eval.0.interval=1000",
    "model.random_init=true",
    "rollout.max_prompt_len=none",
    "rollout.max_response_len=64",
    "rollout.over_sampling_batch_size=none",
    "rollout.dynamic_filter=none",
    "train.save_interval=none",
)
ON_CPU: Final = (
    "nodes.local.gpus=0",
    "trainer.device=cpu",
    "trainer.gpus=none",
    "model.dtype=float32",
    "rollout.rollout_batch_size=2",
    "rollout.n_samples_per_prompt=2",
    "rollout.max_response_len=8",
    "engines.policy.kind=tiny",
    "engines.policy.gpus=none",
    "engines.policy.python=none",
    "engines.policy.sglang={}",
)


def has_sglang() -> bool:
    """Whether the interpreter that PHYSARUM_SGLANG_PYTHON names, else that of .venv-gpu, can import SGLang."""
    try:
        return (
            subprocess.run([PYTHON, "-c", "import sglang"], capture_output=True, timeout=120, check=False).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def single_gpu(device: str, *, tiny: bool = False) -> Measured:
    """Trainer and engine take turns for 20 steps; each phase's seconds and what it moved."""
    if device == "cuda" and not has_sglang():
        return Measured({}, [f"{PYTHON} has no SGLang: PHYSARUM_SGLANG_PYTHON names an interpreter that has"])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(DEMO / "models" / "reverse-digits", model)
        (model / "config.json").write_text(json.dumps(TINY if tiny else CONFIG))
        own = (f"model.hf_checkpoint={model}", *(ON_CPU if device == "cpu" else (f"engines.policy.python={PYTHON}",)))
        run = Run(
            Path(folder),
            num_steps=2 if tiny else NUM_STEPS,
            eval_interval=None,
            topology=SINGLE,
            settings=(),
            overrides=(*SMALL, *own),
        )
        return anyio.run(_measured, run)


async def _measured(run: Run) -> Measured:
    async with run.started() as command:
        command.end_s = LIMIT_S
        family = command.family()
        code = await command.end()
        await run.gone(family)
    if code:
        return Measured({}, [f"exit code {code}: {run.output.read_text()[-3000:]}"])
    await audit(run)
    async with run.reopened() as bus:
        turns = [event for _, event in await read_all(bus, run) if isinstance(event, PhaseChanged)]
    numbers: dict[str, Any] = {
        phase.value: {
            "s": [turn.took_s for turn in turns if turn.previous is phase],
            "moved_bytes": [_moved(turn) for turn in turns if turn.previous is phase],
        }
        for phase in Phase
    }
    missing = [phase for phase, each in numbers.items() if len(each["s"]) < run.num_steps]
    return Measured(numbers, [f"{phase}: less often than there are steps" for phase in missing])


def _moved(turn: PhaseChanged) -> dict[str, int | None]:
    """Bytes that a phase has freed, less those that it took, of each process; none: not shown."""
    return {
        name: None if before is None or (after := turn.bytes_after.get(name)) is None else before - after
        for name, before in turn.bytes_before.items()
    }
