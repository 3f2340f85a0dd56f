"""A released model, SmolLM2-135M-Instruct: its file is imported, and it trains in bfloat16 by the shipped topology."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from tests.learning.demo import Demo, Run, Seen, block_of
from tests.learning.test_demo import FORM
from tests.support.smollm2 import imported, packaged_file
from tests.support.whole_runs import run_topology

ROOT = Path(__file__).parents[1]
TOPOLOGIES = ROOT / "topologies"
GENERATED: dict[str, str] = runpy.run_path(str(TOPOLOGIES / "demo" / "make_sums.py"))["files"]()
LIMIT_S = 900  # a loaded machine takes several times the minute of an idle one


@pytest.fixture(scope="module")
def file() -> Path:
    return packaged_file()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "smollm2"
    types = "210 of type Q4_1, 61 of type F32, 1 of type Q8_0"
    assert imported(out) == f"{out}: LlamaForCausalLM with 134,515,008 parameters; tensors: {types}\n"
    return out


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_an_imported_model_has_the_numbers_of_its_file_and_answers(file: Path, model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors: dict[str, Any] = load_file(model / "model.safetensors")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name, ours in (("token_embd", "embed_tokens"), ("blk.29.ffn_down", "layers.29.mlp.down_proj")):
        tensor = stored[f"{name}.weight"]
        numbers = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).bfloat16().float().numpy()
        np.testing.assert_array_equal(tensors[f"model.{ours}.weight"].float().numpy(), numbers)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text, return_tensors="pt")
    answer = loaded.generate(**tokens, max_new_tokens=12, do_sample=False)[0, tokens["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_released_model_trains_in_bfloat16_and_engines_hold_what_was_trained(model: Path, tmp_path: Path) -> None:
    few = ("train.num_steps=3", "optimizer.lr_warmup_iters=1", "rollout.rollout_batch_size=4", "eval.0.interval=3")
    settings = ("model.dtype=bfloat16", *few)
    finished = run_topology(
        tmp_path, "topologies/smollm2.toml", f"model.hf_checkpoint={model}", *settings, limit_s=LIMIT_S
    )
    assert finished.result["steps"] == 3
    assert finished.result["groups"]["issued"] == finished.result["groups"]["trained"] == 12
    for row in finished.steps:
        assert 0.0 < row["train/grad_norm"] < math.inf
        assert row["train/train_rollout_logprob_abs_diff"] < 0.1  # nats: rounding of bfloat16 in two kernels
    assert [row["weights/version"] for row in finished.steps] == [1, 2, 3]
    log = tmp_path / "printed"
    log.write_text("\n".join(finished.printed) + "\n", encoding="utf-8")
    seen = Seen(log, start=0.0)
    seen.look()
    assert (seen.step, [*seen.points]) == (3, [0, 3])
    points = tuple(seen.points.values())
    assert points[-1].held_out == finished.steps[-1]["eval/sums-held-out"]
    run = Run(seed=1234, points=points)
    demo = Demo(date="2026-11-30", cpu="a CPU", cores=2, dtype="bfloat16", minutes=12.0, runs=(run,))
    assert FORM.fullmatch(block_of(demo))  # as README has it


@pytest.mark.parametrize("name", GENERATED)
def test_committed_prompts_equal_what_the_script_writes(name: str) -> None:
    assert (TOPOLOGIES / "demo" / name).read_text(encoding="utf-8") == GENERATED[name]


def test_no_held_out_sum_is_trained() -> None:
    held_out, train = (set(GENERATED[f"data/sums/{name}.jsonl"].splitlines()) for name in ("eval", "train"))
    assert (len(held_out), len(train), held_out & train) == (100, 700, set())


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("19", 1.0),
        (" 19\n", 1.0),
        ("019", 0.5),
        ("20", 0.5 / 1.2),
        ("24", 0.25),
        ("-6", 0.5 / 6),
        ("519", 0.5 / 101),
        ("12", 0.0),
        ("19.", -0.5),
        ("19 + 0", -0.5),
        ("12 + 7", -0.5),
        ("It is 19", -1.0),
        ("", -1.0),
    ],
)
def test_the_reward_of_an_answer_by_hand(response: str, reward: float) -> None:
    question = "<|im_start|>user\nWhat is 12 + 7? Answer with the number only.<|im_end|>\n"
    sample = SimpleNamespace(prompt=question, response=response, label="19")
    assert runpy.run_path(str(TOPOLOGIES / "recipes" / "sums_reward.py"))["reward"](sample) == pytest.approx(reward)
