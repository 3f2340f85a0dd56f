"""A whole run starts from a quantized directory: it trains the dequantized weights, and exports plain ones."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor

from actors.trainer.models.config import read_hf_config
from actors.trainer.models.files import random_source
from actors.trainer.models.shapes import hf_shapes
from bin.export_hf import main as export_hf
from runtime.models.safetensors import SINGLE_FILE
from tests.support.commands import called
from tests.support.quantized import FP8, INT4, MXFP4, fp8, int4, mxfp4
from tests.support.whole_runs import ROOT, run_topology

pytestmark = pytest.mark.nightly
TOKENIZER: Final = ROOT / "topologies/demo/models/reverse-digits"
NUM_STEPS: Final = 3
LEARNING_RATE: Final = 1e-3
LIMIT_S: Final = 600.0
EXPERTS: Final = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
YARN: Final = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32},
    **{"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
}


class Form(NamedTuple):
    """A quantization, and a tiny model with it."""

    draw: Callable[..., tuple[dict[str, Tensor], Tensor]]
    method: dict[str, Any]  # its quantization_config
    pieces: str  # in the names of the quantized tensors
    factor: float  # of what is drawn, as stored scales or exponents allow, for weights of a usual size
    keys: dict[str, Any]  # of config.json, besides those of the laptop's model


FORMS: Final = {
    "fp8": Form(fp8, FP8, "_proj.weight", 0.5, {"hidden_size": 136, "intermediate_size": 264}),
    "mxfp4": Form(
        *(mxfp4, MXFP4, ".experts.", 2.0**-4),
        {
            **{"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, **EXPERTS},
            **{"intermediate_size": 64, "sliding_window": 4, "attention_bias": True, "rope_parameters": YARN},
        },
    ),
    "compressed-tensors": Form(
        *(int4, INT4, ".mlp.experts.", 0.5),
        {
            **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, **EXPERTS},
            **{"moe_intermediate_size": 64, "norm_topk_prob": True},
        },
    ),
}


def scaled(stored: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Make numbers smaller by their scales, which are exponents of 2 in MXFP4."""
    name = next(name for name in stored if name.endswith(("_scale_inv", "_scales", "_scale")))
    own = stored[name]
    return stored | {name: own * factor if own.is_floating_point() else own + round(math.log2(factor))}


def write(directory: Path, form: Form) -> dict[str, Tensor]:
    """Write a quantized model with the laptop's tokenizer; return its weights by the definition."""
    shutil.copytree(TOKENIZER, directory)
    config = json.loads((TOKENIZER / "config.json").read_text()) | form.keys
    if "rope_parameters" in config:
        del config["rope_theta"]
    (directory / "config.json").write_text(json.dumps(config))
    hf = read_hf_config(directory)
    source, draw = random_source(hf, 1), Generator().manual_seed(1)
    stored, numbers = dict[str, Tensor](), dict[str, Tensor]()
    for name, shape in hf_shapes(hf).items():
        if form.pieces in name and "bias" not in name:
            parts, own = form.draw(name, shape, draw)
            stored |= scaled(parts, form.factor)
            numbers[name] = own.float() * form.factor
        else:
            stored[name] = numbers[name] = source(name)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, directory / SINGLE_FILE)
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": form.method}))
    return numbers


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("name", FORMS)
def test_a_run_trains_and_exports_dequantized_weights(name: str, tmp_path: Path) -> None:
    numbers = write(tmp_path / "model", FORMS[name])
    words = (f"model.hf_checkpoint={tmp_path / 'model'}", "model.random_init=false", f"train.num_steps={NUM_STEPS}")
    words += (f"optimizer.lr={LEARNING_RATE}", "train.save_hf=true")
    finished = run_topology(tmp_path, "topologies/laptop.toml", *words, limit_s=LIMIT_S)
    assert [row["step"] for row in finished.steps] == [1, 2, 3]
    text = "\n".join(finished.printed)
    assert f"model.hf_checkpoint is quantized ({name}): the trainer dequantizes its weights" in text
    assert "engines.policy start without quantization and without that directory's weights" in text
    # engine and trainer compute the same model, from the first step on
    assert max(row["train/train_rollout_logprob_abs_diff_max"] for row in finished.steps) < 1e-3
    files = (finished.run_dir / "logs").glob("rollout*.jsonl")
    logs = [line for file in files for line in file.read_text().splitlines()]
    assert sum(json.loads(line)["event"] == "weights_verified" for line in logs) >= NUM_STEPS
    done = called(export_hf, str(finished.run_dir), "--trust", "--out", "exported", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for directory in (finished.run_dir / "hf", tmp_path / "exported"):
        assert "quantization_config" not in json.loads((directory / "config.json").read_text())
        exported = load_file(directory / SINGLE_FILE)
        assert exported.keys() == numbers.keys()
        moved = max(float((exported[each] - numbers[each]).abs().max()) for each in numbers)
        assert 0 < moved < 20 * NUM_STEPS * LEARNING_RATE, moved
