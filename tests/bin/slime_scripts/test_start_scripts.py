"""bin/from-slime: bash is followed without running it, and each flag becomes a setting or a remark."""

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from bin import from_slime
from bin.slime_scripts.convert import CannotConvert, Converted, convert_script
from bin.slime_scripts.script import StartScript, read_script
from bin.slime_scripts.syntax import NotAStartScript
from bin.slime_scripts.written import toml, written_recipe, written_topology
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.reading.toml import convert, load_tables
from runtime.settings.topology import Topology
from tests.support.slime_effective import differences

SCRIPT = """#!/bin/bash
pkill -9 sglang
set -ex
NVLINK_COUNT=$(nvidia-smi topo -m | grep -o 'NV[0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/small.sh"
ROOT=${ROOT:-/models}
CKPT_ARGS=(
   --hf-checkpoint ${ROOT}/small   # the model
   #--hf-checkpoint ${ROOT}/other
   --ref-load ${ROOT}/small_torch_dist
   --load ${ROOT}/out/
   --save ${ROOT}/out
   --save-interval 20
)
ROLLOUT_ARGS=(
   --reward-key score
   --partial-rollout
   --prompt-data ${ROOT}/math.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rm-type math
   --num-rollout 100
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-stop-token-ids 3 5
   --global-batch-size 64
   --balance-data
)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime "${ROOT}/aime.jsonl" gpqa /g.jsonl --n-samples-per-eval-prompt 16)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --max-tokens-per-gpu 9216
)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --lr-warmup-fraction 0.1)
OPTIMIZER_ARGS+=(--weight-decay 0.1)
PLAIN_ARGS=(--attention-dropout 0.0 --hidden-dropout 0.0)
GRPO_ARGS=(--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-bs $(seq 8 8 24))
WANDB_ARGS=(
   # --use-wandb
)
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="{ \\"env_vars\\": { \\"NVLS\\": \\"${HAS_NVLINK}\\" } }" \\
   -- python3 train.py \\
   --actor-num-nodes 1 \\
   --actor-num-gpus-per-node 4 \\
   --colocate \\
   --update-weight-buffer-size $(( 2 * 512 * 1024 )) \\
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} "${ROLLOUT_ARGS[@]}" ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} ${PLAIN_ARGS[@]} \\
   ${WANDB_ARGS[@]} ${PERF_ARGS[@]} ${EVAL_ARGS[@]} ${SGLANG_ARGS[@]} 2>&1 | tee log
"""
MODEL = 'MODEL_ARGS=(\n   --num-layers 4\n   --rotary-base "${ROTARY_BASE:-1000000}"\n)\n'


def read(tmp_path: Path, text: str, **variables: str) -> StartScript:
    """Read a script in slime's style, with its model file beside it."""
    script = tmp_path / "run-small.sh"
    script.write_text(text)
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models" / "small.sh").write_text(MODEL)
    return read_script(script, variables)


def flags_of(tmp_path: Path, arguments: str, before: str = "", **variables: str) -> dict[str, list[str]]:
    """Read a script that calls train.py with some arguments; return each flag's values."""
    script = read(tmp_path, f"{before}\npython3 train.py {arguments}\n", **variables)
    return {given.flag: [word.text for word in given.values] for given in script.given}


def converted(tmp_path: Path, more: str = "", program: str = "train.py", before: str = "") -> Converted:
    """Convert a short script with further arguments."""
    text = f"{before}\npython3 {program} --hf-checkpoint /m --prompt-data /d.jsonl {more}\n"
    return convert_script(read(tmp_path, text), "small")


PLAIN = "--attention-dropout 0 --hidden-dropout 0 --use-dynamic-batch-size --max-tokens-per-gpu 9216"


def lost_of(result: Converted) -> list[str]:
    """Return the flags and variables that are lost, but for dropout, which a short script leaves out."""
    return [left.flag for left in result.left if left.is_lost and "-dropout" not in left.flag]


def value_of(result: Converted, key: str) -> Any:
    return {setting.key: setting.value for setting in result.settings}.get(key)


def state_of(result: Converted, flag: str) -> str:
    (left,) = [left for left in result.left if left.flag.split()[0] == f"--{flag}"]
    return left.state


def test_a_script_in_slimes_style_becomes_a_valid_topology(tmp_path: Path) -> None:
    read(tmp_path, SCRIPT)
    assert from_slime.main([str(tmp_path / "run-small.sh"), "--out", str(tmp_path)]) == 0
    topology = load_topology(tmp_path / "small.toml").topology
    assert topology.run.name == "small"
    assert (topology.trainer.gpus, topology.engines["policy"].gpus) == ("n0:0-3", "n0:0-3")
    assert topology.engines["policy"].colocate == "trainer"
    assert topology.engines["policy"].sglang == {"mem_fraction_static": 0.7, "cuda_graph_bs": [8, 16, 24]}
    assert topology.trainer.export_bucket_bytes == 1 << 20
    assert topology.trainer.megatron.sequence_parallel
    assert (topology.model.hf_checkpoint, topology.model.ref_load, topology.trainer.load) == (
        "/models/small",
        None,
        None,
    )
    assert topology.rollout.stop_token_ids == (3, 5)
    assert topology.algorithm.num_steps_per_rollout == 4  # 32 x 8 samples, 64 in each optimizer step
    assert topology.optimizer.lr_warmup_iters == 40  # a tenth of 100 train steps with 4 optimizer steps each
    assert topology.optimizer.weight_decay == 0.1
    assert (topology.rollout.on_halt, topology.rollout.on_surplus) == ("resume", "drop")
    assert [(one.name, one.path, one.n_samples_per_eval_prompt) for one in topology.eval] == [
        ("aime", "/models/aime.jsonl", 16),
        ("gpqa", "/g.jsonl", 16),
    ]


def test_each_setting_names_its_flag_and_each_other_flag_its_reason(tmp_path: Path) -> None:
    read(tmp_path, SCRIPT)
    assert from_slime.main([str(tmp_path / "run-small.sh"), "--out", str(tmp_path), "--name", "mine"]) == 0
    recipe = (tmp_path / "mine-recipe.toml").read_text()
    assert re.search(r"^save_interval = 20 +# --save-interval$", recipe, re.MULTILINE)
    left = " ".join(line.removeprefix("#").strip() for line in recipe.splitlines() if line.startswith("#"))
    assert (
        "--num-layers 4 (small.sh:2), --rotary-base 1000000 (small.sh:3): read from the checkpoint's config.json"
        in left
    )
    assert "--balance-data (run-small.sh:31): always on" in left
    train = {"save_interval": 20, "num_steps": 100, "max_tokens_per_gpu": 9216, "on_too_long": "fail"}
    assert tomllib.loads(recipe)["train"] == train
    assert tomllib.loads(recipe)["reward"] == {"reward_key": "score"}
    assert re.search(r"^lr_decay_style = \"linear\" +# slime's default without --lr-decay-style$", recipe, re.MULTILINE)


@pytest.mark.parametrize(
    ("before", "argument", "expected"),
    [
        ("A=1", "--x $A", ["1"]),
        ("A='a b'", "--x $A", ["a", "b"]),
        ("A='a b'", '--x "$A"', ["a b"]),
        ("A=(a 'b c')", '--x "${A[@]}"', ["a", "b c"]),
        ("A=(a); A+=(b)", "--x ${A[@]}", ["a", "b"]),
        ("", "--x ${A:-7}", ["7"]),
        ("A=", "--x ${A:-7}", ["7"]),
        ("", "--x=7", ["7"]),
        ("N=3", "--x $((N * 4 - 2))", ["10"]),
        ("N=7", "--x $(( N / 2 ))", ["3"]),
        ("N=2", "--x ${M:-$((N - 1))}", ["1"]),
        ("A=/a/b.json", "--x ${A%.json} ${A##*/}", ["/a/b", "b.json"]),
        ("A=x", "--x pre-${A}-post", ["pre-x-post"]),
        ("export A=x", "--x '$A' \"\\$A\"", ["$A", "$A"]),
        ('A=; if [ -z "$A" ]; then A=1; else A=2; fi', "--x $A", ["1"]),
        ("A=3; if [[ $A == 3 && $A -gt 2 ]]; then A=big; fi", "--x $A", ["big"]),
        ("A=3; if [ $A -lt 2 ]; then A=1; elif [ $A = 3 ]; then A=9; fi", "--x $A", ["3"]),
        ("A=$(nvidia-smi -L | wc -l); if [ $A -le 0 ]; then A=8; fi", "--x $A", ["8"]),
        ("f() { A=1; }; f", "--x $A", ["1"]),
        ('[ -z "$B" ] && A=1', "--x $A", ["1"]),
        ("A=1 # --y\n#A=2", "--x $A", ["1"]),
        ("", "--x -1 -0.5", ["-1", "-0.5"]),
        ("", "--x $'\\n' $'it\\'s' '\\n'", ["\n", "it's", "\\n"]),
    ],
)
def test_bash(tmp_path: Path, before: str, argument: str, expected: list[str]) -> None:
    assert flags_of(tmp_path, argument, before) == {"x": expected}


def test_nothing_of_the_script_runs(tmp_path: Path) -> None:
    flags_of(tmp_path, "--x 1", f"touch {tmp_path}/ran; A=$(touch {tmp_path}/ran); eval touch {tmp_path}/ran")
    assert not (tmp_path / "ran").exists()


def test_a_value_that_only_the_machine_knows_is_asked_for(tmp_path: Path) -> None:
    before = "NUM_GPUS=${NUM_GPUS:-$(nvidia-smi -L | wc -l)}"
    with pytest.raises(
        CannotConvert, match=r"run-small.sh:2: --actor-num-gpus-per-node needs NUM_GPUS: give it with --var"
    ):
        converted(tmp_path, "--actor-num-gpus-per-node $NUM_GPUS", before=before)
    assert flags_of(tmp_path, "--x $NUM_GPUS", before, NUM_GPUS="6") == {"x": ["6"]}


def test_a_variable_that_nobody_sets_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CannotConvert, match=r"--save-interval needs EVERY"):
        converted(tmp_path, "--save-interval $EVERY")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo hello\n", "does not call train.py or train_async.py"),
        ('if [ -z "$BASE" ]; then exit 1; fi\npython3 train.py\n', "would end here.*given with --var: BASE"),
        ("f() { f; }\nf\n", "more than 16"),
        (
            "A=(\n  --a 1\npython3 train.py ${A[@]}\n",
            r"run-small.sh:3: bash would not understand this.*\n.*does not call",
        ),
        (f"python3 train.py --a {'$(echo ' * 3000}x{')' * 3000}\n", "nested too deeply"),
    ],
)
def test_scripts_that_start_no_training(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(NotAStartScript, match=problem):
        read(tmp_path, text)


def test_a_missing_backslash_is_noted(tmp_path: Path) -> None:
    script = read(tmp_path, "python3 train.py \\\n  --a 1\n  --b 2\n")
    assert [given.flag for given in script.given] == ["a"]
    assert script.notes == ("run-small.sh:3: a backslash is missing before this line: train.py does not get it",)


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "run-small.sh").write_bytes(b"\xef\xbb\xbfA=(--a 1)\r\npython3 train.py ${A[@]} \\\r\n  --b 2\r\n")
    script = read_script(tmp_path / "run-small.sh", {})
    assert [(given.flag, given.values[0].text) for given in script.given] == [("a", "1"), ("b", "2")]


def test_a_key_of_a_tracker_is_not_written_down(tmp_path: Path) -> None:
    result = converted(tmp_path, "--wandb-key s3cret", before="export OTHER_KEY=s3cret")
    assert "--wandb-key ***" in [left.flag for left in result.left]
    assert not any("s3cret" in left.flag for left in result.left)


def test_values_in_a_file_of_slimes_arguments_are_left_to_the_user(tmp_path: Path) -> None:
    result = converted(tmp_path, "--use-tis --custom-tis-function-path mine.weigh --custom-config-path mis.yaml")
    assert state_of(result, "custom-config-path") == "by hand"


def test_a_sourced_file_that_is_not_there_is_noted(tmp_path: Path) -> None:
    script = read(tmp_path, "source /nowhere/models/x.sh\npython3 train.py --a 1 ${MODEL_ARGS[@]}\n")
    assert script.notes == ("run-small.sh:1: the sourced file is not here: /nowhere/models/x.sh",)


@pytest.mark.parametrize(
    ("flags", "trainer", "engines", "nodes"),
    [
        ("--actor-num-gpus-per-node 8 --colocate", "n0:0-7", "n0:0-7", 1),
        ("--actor-num-nodes 2 --colocate", "n0:0-7,n1:0-7", "n0:0-7,n1:0-7", 2),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4", "n0:0-3", "n0:4-7", 1),
        ("--actor-num-gpus-per-node 1 --rollout-num-gpus 1", "n0:0", "n0:1", 1),
        ("--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 12", "n0:0-7", "n1:0-7,n2:0-3", 3),
    ],
)
def test_placement_follows_slime(tmp_path: Path, flags: str, trainer: str, engines: str, nodes: int) -> None:
    result = converted(tmp_path, flags)
    assert (value_of(result, "trainer.gpus"), value_of(result, "engines.policy.gpus")) == (trainer, engines)
    assert len([setting for setting in result.settings if setting.key.startswith("nodes.")]) == nodes


@pytest.mark.parametrize(
    ("flag", "values", "state"),
    [
        ("use-stateless-adam", "", "not yet"),
        ("moe-token-dispatcher-type", "flex", "not yet"),
        ("custom-rm-path", "slime.rollout.on_policy_distillation.reward_func", "by hand"),
        ("custom-generate-function-path", "generate", "by hand"),  # no module
        ("rollout-function-path", "slime.rollout.forge_load.generate_rollout", "by hand"),
        ("rollout-function-path", "slime.rollout.sglang_rollout.generate_rollout", "no"),
        ("rollout-batch-size", "many", "by hand"),
        ("no-such-flag", "1", "unknown"),
        ("sequence-parallel", "", "no"),
        ("eval-prompt-data", "aime /a.jsonl", "no"),  # slime evaluates at an interval alone
        ("eval-config", "/e.yaml", "by hand"),
        ("optimizer", "muon", "not yet"),
        ("rm-type", "ifbench2", "not yet"),
        ("kl-loss-coef", "0.1", "no"),  # without --use-kl-loss
        ("rollout-num-gpus", "0", "by hand"),
        ("custom-tis-function-path", "mine.weigh", "no"),  # without --use-tis
        ("custom-tis-function-path", "mine.weigh --use-tis --context-parallel-size 2", "by hand"),
    ],
)
def test_flags_that_become_no_setting(tmp_path: Path, flag: str, values: str, state: str) -> None:
    assert state_of(converted(tmp_path, f"--{flag} {values}"), flag) == state


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("custom-rm-path", "data.0.rm_type"),
        ("custom-generate-function-path", "rollout.custom_generate"),
        ("dynamic-sampling-filter-path", "rollout.dynamic_filter"),
        ("custom-reward-post-process-path", "algorithm.estimator.function"),
        ("use-tis --custom-tis-function-path", "algorithm.tis.function"),
    ],
)
def test_functions_of_the_user_are_written_into_the_recipe_as_they_are(tmp_path: Path, flag: str, key: str) -> None:
    result = converted(tmp_path, f"{PLAIN} --rm-type math --{flag} examples.mine.run.function")
    assert value_of(result, key) == "slime:examples.mine.run:function"
    assert {left.flag.split()[0] for left in result.left} <= {f"--{flag}" for flag in PLAIN.replace("--", "").split()}


def test_a_rollout_function_of_the_user_gets_the_groups_of_a_round(tmp_path: Path) -> None:
    sizes = "--rollout-batch-size 32 --over-sampling-batch-size 48 --n-samples-per-prompt 8"
    of_eval = "--eval-interval 5 --eval-prompt-data aime /a.jsonl"
    default = "--eval-function-path slime.rollout.sglang_rollout.generate_rollout"
    result = converted(tmp_path, f"--rollout-function-path my.rollout.generate {sizes} {of_eval} {default}")
    assert value_of(result, "rollout.custom_rollout") == "slime:my.rollout:generate"
    assert value_of(result, "rollout.custom_rollout_prompts") == 48
    assert value_of(result, "engines.policy.concurrency") == 512  # slime's, which has room for 48 x 8 samples
    assert value_of(result, "eval.0.custom_generate") == "slime:slime.rollout.sglang_rollout:generate"
    assert state_of(converted(tmp_path, f"{of_eval} {default}"), "eval-function-path") == "no"


def test_demonstrations(tmp_path: Path) -> None:
    flags = "--loss-type sft_loss --debug-train-only --max-tokens-per-gpu 4096 --context-parallel-size 2"
    result = converted(
        tmp_path, f"{flags} --rollout-function-path slime.rollout.sft_rollout.generate_rollout", "train_async.py"
    )
    assert value_of(result, "rollout.max_response_len") == 8192
    assert value_of(result, "rollout.max_staleness") is None
    assert value_of(result, "engines.policy.gpus") is None
    assert {left.state for left in result.left} == {"no"}


def test_train_async_is_one_train_step_ahead(tmp_path: Path) -> None:
    assert value_of(converted(tmp_path, "", "train_async.py"), "rollout.max_staleness") == 1


def test_the_kl_loss_is_on_only_where_slime_has_it_on(tmp_path: Path) -> None:
    assert value_of(converted(tmp_path, "--kl-loss-coef 0.1"), "algorithm.kl.loss_coef") is None
    both = converted(tmp_path, "--kl-loss-coef 0.1 --use-kl-loss")
    assert value_of(both, "algorithm.kl.loss_coef") == 0.1
    assert state_of(both, "use-kl-loss") == "no"


def test_evaluation_sets_that_are_no_pairs_are_left_to_the_user(tmp_path: Path) -> None:
    result = converted(tmp_path, "--eval-interval 5 --eval-prompt-data aime /a.jsonl gpqa")
    assert state_of(result, "eval-prompt-data") == "by hand"


def test_the_last_of_two_equal_flags_counts(tmp_path: Path) -> None:
    assert value_of(converted(tmp_path, "--lr 1e-6 --lr 2e-6"), "optimizer.lr") == 2e-6


def test_files_that_exist_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read(tmp_path, SCRIPT)
    (tmp_path / "small.toml").write_text("mine")
    assert from_slime.main([str(tmp_path / "run-small.sh"), "--out", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "small.toml").read_text() == "mine"


@pytest.mark.parametrize(
    "value", [True, 3, 1e-6, 0.28, 'a "b" \\ ü\n', ["a", 1], {"address": "auto", "a b": 8}, "\x7f"]
)
def test_toml_values_read_back(value: Any) -> None:
    assert tomllib.loads(f"x = {toml(value)}") == {"x": value}


# What a script says by leaving flags out


FEW = "--rollout-batch-size 4 --rollout-max-response-len 512 --num-rollout 3 --label-key label --rm-type math"
WITHOUT_EFFECT_ALONE = {  # flags that need another one, and one of them
    **dict.fromkeys(("gamma", "lambd"), "--advantage-estimator ppo"),
    **dict.fromkeys(("tis-clip", "tis-clip-low"), "--use-tis"),
    "kl-loss-coef": "--use-kl-loss",
    "partial-rollout": "",
    "max-tokens-per-gpu": "--use-dynamic-batch-size",
    "global-batch-size": "--n-samples-per-prompt 8",
    "kl-coef": "--advantage-estimator ppo",
    "mtp-num-layers": "--enable-mtp-training",
    "mtp-loss-scaling-factor": "--enable-mtp-training --mtp-num-layers 1",
}
GIVEN = {  # a value that is not the default
    "partial-rollout": "",
    "rollout-temperature": "0.7",
    "rollout-seed": "7",
    "rollout-top-k": "40",
    "rollout-max-context-len": "4096",
    "n-samples-per-prompt": "8",
    "over-sampling-batch-size": "16",
    "rollout-shuffle": "",
    "rollout-stop-token-ids": "3 5",
    "rollout-skip-special-tokens": "",
    "input-key": "prompt",
    "metadata-key": "extra",
    "tool-key": "functions",
    "apply-chat-template": "",
    "num-steps-per-rollout": "2",
    "global-batch-size": "8",
    "max-tokens-per-gpu": "4096",
    "kl-loss-coef": "0.01",
    "kl-coef": "0.01",
    "kl-loss-type": "k3",
    "eps-clip": "0.1",
    "eps-clip-high": "0.3",
    "entropy-coef": "0.02",
    "gamma": "0.99",
    "lambd": "0.95",
    "normalize-advantages": "",
    "disable-rewards-normalization": "",
    "disable-grpo-std-normalization": "",
    "calculate-per-token-loss": "",
    "use-tis": "",
    "tis-clip": "3",
    "tis-clip-low": "0.5",
    "lr": "2e-6",
    "min-lr": "1e-7",
    "lr-decay-style": "constant",
    "lr-warmup-iters": "5",
    "lr-warmup-fraction": "0.5",
    "weight-decay": "0.2",
    "adam-beta2": "0.98",
    "adam-eps": "1e-6",
    "clip-grad": "0.5",
    "seed": "7",
    "reward-key": "score",
    "group-rm": "",
    "moe-aux-loss-coeff": "0.001",
    "mtp-num-layers": "1",
    "mtp-loss-scaling-factor": "0.1",
    "save-interval": "5",
    "context-parallel-size": "2",
}


@pytest.mark.parametrize("flag", ["", *GIVEN])
def test_the_recipe_trains_with_the_values_of_slime(tmp_path: Path, flag: str) -> None:
    arguments = f"{FEW} {WITHOUT_EFFECT_ALONE.get(flag, '')}" + (f" --{flag} {GIVEN[flag]}" if flag else "")
    script = read(tmp_path, f"python3 train.py --hf-checkpoint /m --prompt-data /d.jsonl {arguments}\n")
    result = convert_script(script, "small")
    kept = Converted(settings=result.settings, left=())
    (tmp_path / "made-recipe.toml").write_text(written_recipe(kept, "run.sh"))
    (tmp_path / "made.toml").write_text(written_topology(kept, "run.sh", "made-recipe.toml"))
    made = load_tables(tmp_path / "made.toml", (), Topology)
    assert list(differences(script, set(), convert(made, Topology))) == []


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("", "rollout.on_halt", "drop"),
        ("--partial-rollout", "rollout.on_halt", "resume"),
        ("--partial-rollout", "rollout.on_surplus", "drop"),
        ("", "optimizer.lr_decay_style", "linear"),
        ("--lr-decay-style constant", "optimizer.lr_decay_style", "constant"),
        ("", "trainer.optimizer.use_distributed_optimizer", True),
        ("--rollout-num-gpus 1", "engines.policy.concurrency", 512),
        ("--sglang-server-concurrency 64", "engines.policy.concurrency", 64),
        ("--colocate", "rollout.release_when", "batch_ready"),
        ("", "trainer.megatron.moe_router_bias_update_rate", None),
        ("--moe-router-enable-expert-bias", "trainer.megatron.moe_router_bias_update_rate", 1e-3),
        (
            "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0",
            "trainer.megatron.moe_router_bias_update_rate",
            0,
        ),
        ("--max-tokens-per-gpu 4096", "train.max_tokens_per_gpu", 4096),
        (f"{FEW} --max-tokens-per-gpu 100 --use-dynamic-batch-size", "train.max_tokens_per_gpu", 512),
        (
            "--max-tokens-per-gpu 8192 --use-dynamic-batch-size --context-parallel-size 4 "
            "--rollout-max-response-len 65536 --rollout-max-prompt-len 2000",
            "train.max_tokens_per_gpu",
            16884,  # (2000 + 65536) / 4
        ),
        ("--rollout-max-response-len 32768", "train.max_tokens_per_gpu", 32768),
        ("--mtp-num-layers 1", "trainer.megatron.mtp_num_layers", None),
        ("--kl-coef 0.1 --advantage-estimator gspo", "algorithm.kl.reward_coef", None),
        ("--num-rollout 10 --num-epoch 3", "train.num_epoch", None),
        ("--sglang-tp-size 4 --rollout-num-gpus-per-engine 2", "engines.policy.num_gpus_per_engine", 2),
        ("--sglang-model-path /other", "model.hf_checkpoint", "/m"),
        ("--rollout-top-p 0.9 --rollout-top-k 64", "rollout.return_sampling_mask", True),
        ("--lr-warmup-fraction 0.1 --lr-decay-iters 50", "optimizer.lr_warmup_iters", 5),
        ("--debug-rollout-only", "run.only", "rollout"),
        ("--check-weight-update-equal", "engines.policy.verify", "always"),
        ("--save-hf /x/{rollout_id}", "train.save_hf", True),
        ("--update-weight-transport nccl", "engines.policy.weight_transport", "collective"),
        ("--sglang-router-ip 10.0.0.5 --sglang-router-port 3000", "engines.policy.router_url", "http://10.0.0.5:3000"),
        ("--ref-load /sft_torch_dist", "trainer.load", "/sft_torch_dist"),
        ("--ref-load /sft_torch_dist", "trainer.load_weights_only", True),
        ("--ref-load /m_torch_dist", "trainer.load", None),
        ("--ref-load /m_torch_dist --load /m", "trainer.load", None),
        ("--ref-load /sft --load /run --save /run", "trainer.load", "/sft"),
        ("--ref-load /sft --load /other --save /run", "trainer.load", "/other"),
        ("--loss-type sft_loss", "rollout.on_surplus", None),
    ],
)
def test_defaults_of_slime_and_flags_that_it_ignores(tmp_path: Path, arguments: str, key: str, value: Any) -> None:
    assert value_of(converted(tmp_path, arguments), key) == value


ALL_SEVEN: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("arguments", "lora"),
    [
        ("--lora-rank 32 --target-modules all-linear", {"rank": 32, "alpha": 16.0, "targets": "all-linear"}),
        (
            "--lora-rank 8 --lora-alpha 32 --lora-dropout 0.0 --target-modules linear_qkv,linear_proj,down_proj",
            {"rank": 8, "alpha": 32.0, "dropout": 0.0, "targets": [*ALL_SEVEN[:4], "down_proj"]},
        ),
        (
            "--lora-rank 8 --target-modules all-linear --exclude-modules gate_proj,up_proj --lora-adapter-path /a",
            {"rank": 8, "alpha": 16.0, "load": "/a", "targets": [*ALL_SEVEN[:4], "down_proj"]},
        ),
        ("--lora-rank 0 --lora-alpha 32 --target-modules all-linear", {}),
    ],
)
def test_lora_of_miles_becomes_our_table(tmp_path: Path, arguments: str, lora: dict[str, Any]) -> None:
    found = {each.key: each.value for each in converted(tmp_path, arguments).settings}
    assert {key.removeprefix("trainer.lora."): found[key] for key in found if key.startswith("trainer.lora.")} == lora


# What is lost


@pytest.mark.parametrize(
    ("arguments", "lost"),
    [
        ("--lora-rank 32 --lora-type lora --lora-sync-from-tensor", []),
        ("--lora-rank 0 --target-modules all-linear --multi-lora-n-adapters 0", []),
        ("--lora-adapter-path /a", ["--lora-adapter-path /a"]),  # its rank is not in the script
        ("--lora-rank 8 --lora-train-only", ["--lora-train-only"]),
        ("--lora-rank 8 --multi-lora-n-adapters 2", ["--multi-lora-n-adapters 2"]),
        ("--lora-rank 8 --lora-of-a-fork 1", ["--lora-of-a-fork 1"]),
        ('--multimodal-keys \'{"image": "images"}\'', ['--multimodal-keys {"image": "images"}']),
        ("--freeze-params-name-list embedding", ["--freeze-params-name-list embedding"]),
        ("--rollout-sample-filter-path mine.f", ["--rollout-sample-filter-path mine.f"]),
        ("--update-weights-interval 1", []),
        ("--update-weights-interval 2", ["--update-weights-interval 2"]),
        ("--fp8-format e4m3", ["--fp8-format e4m3"]),
        ("--optimizer adam", []),
        ("--optimizer muon", ["--optimizer muon"]),
        ("--moe-expert-capacity-factor 1.0", ["--moe-expert-capacity-factor 1.0"]),
        ("--reward-key a --eval-reward-key a", []),
        ("--reward-key a --eval-reward-key b", ["--eval-reward-key b"]),
        ("--rollout-top-p 0.9", ["--rollout-top-p 0.9"]),
        ("--no-such-flag 1", ["--no-such-flag 1"]),
        ("--log-multi-turn --log-interval 5 --use-precision-aware-optimizer --distributed-timeout-minutes 30", []),
        ('--train-env-vars \'{"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1"}\'', ["OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1"]),
        ("--eval-config /e.yaml", ["--eval-config /e.yaml"]),
    ],
)
def test_flags_without_which_the_run_is_another_one_are_lost(tmp_path: Path, arguments: str, lost: list[str]) -> None:
    assert lost_of(converted(tmp_path, arguments)) == lost


@pytest.mark.parametrize(
    "text",
    [
        "export QAT=1\npython3 train.py {}",
        "QAT=1 python3 train.py {}",
        "env QAT=1 python3 train.py {}",
        "QAT=1\nexport QAT\npython3 train.py {}",
        'E=\'{{"env_vars": {{"A": "b", "QAT": "1"}}}}\'\nray job submit --runtime-env-json="$E" -- python3 train.py {}',
        'ray job submit --runtime-env-json "{{\\"env_vars\\": {{\\"N\\": \\"$(hostname)\\", \\"QAT\\": \\"1\\"}}}}" '
        "-- python3 train.py {}",
    ],
)
def test_quantization_by_a_variable_of_the_environment_is_lost(tmp_path: Path, text: str) -> None:
    script = read(tmp_path, text.format("--hf-checkpoint /m --prompt-data /d.jsonl\n"))
    assert lost_of(convert_script(script, "small")) == ["QAT=1"]


def test_dropout_of_megatron_is_lost_unless_the_script_turns_it_off(tmp_path: Path) -> None:
    lost = [
        left.flag for left in converted(tmp_path, "--attention-dropout 0.0 --hidden-dropout 0.1").left if left.is_lost
    ]
    assert lost == ["--hidden-dropout 0.1"]
    assert [left.flag for left in converted(tmp_path).left if left.is_lost] == [
        "--attention-dropout, which is absent",
        "--hidden-dropout, which is absent",
    ]


def test_nothing_is_written_if_flags_are_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read(tmp_path, SCRIPT.replace("--balance-data", "--freeze-indexer"))
    out = tmp_path / "out"
    assert from_slime.main([str(tmp_path / "run-small.sh"), "--out", str(out)]) == 2
    assert not out.exists()
    said = capsys.readouterr().err
    assert "run-small.sh:31: --freeze-indexer: models with sparse attention" in said
    assert "nothing is written; --force writes the rest" in said


def test_a_recipe_with_lost_flags_is_refused_until_their_lines_are_gone(tmp_path: Path) -> None:
    read(tmp_path, SCRIPT.replace("--balance-data", "--freeze-indexer --moe-expert-capacity-factor 1.0"))
    assert from_slime.main([str(tmp_path / "run-small.sh"), "--out", str(tmp_path), "--force"]) == 0
    recipe = tmp_path / "small-recipe.toml"
    with pytest.raises(TopologyError) as caught:
        load_topology(tmp_path / "small.toml")
    refused = [problem.key for problem in caught.value.problems]
    assert refused == ["not_converted.--freeze-indexer", "not_converted.--moe-expert-capacity-factor 1.0"]
    assert all(problem.file == str(recipe) for problem in caught.value.problems)
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith(('"--freeze-', '"--moe-'))]
    recipe.write_text("\n".join(lines))
    load_topology(tmp_path / "small.toml")


def test_an_overlay_that_includes_the_recipe_keeps_what_decides_what_is_learnt(tmp_path: Path) -> None:
    more = "--group-rm --seed 7 --moe-aux-loss-coeff 0.01 --load /other"
    read(tmp_path, SCRIPT.replace("--balance-data", more))
    assert from_slime.main([str(tmp_path / "run-small.sh"), "--out", str(tmp_path)]) == 0
    overlay = 'include = "small-recipe.toml"\nrun.name = "mine"\ntrainer.device = "cpu"\nengines.policy.kind = "tiny"\n'
    (tmp_path / "mine.toml").write_text(overlay)
    made = convert(load_tables(tmp_path / "mine.toml", (), Topology), Topology)
    assert (made.reward.reward_key, made.reward.group_rm) == ("score", True)
    assert (made.run.seed, made.trainer.megatron.moe_aux_loss_coeff, made.trainer.load) == (7, 0.01, "/other")


# Scripts that are started from the top of their repository


def test_a_relative_path_reads_the_files_beside_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scripts").mkdir()
    read(tmp_path / "scripts", SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert from_slime.main(["scripts/run-small.sh"]) == 0
    assert "--num-layers 4" in (tmp_path / "small-recipe.toml").read_text()


@pytest.mark.parametrize(
    "source",
    ["models/small.sh", "scripts/models/small.sh", "/root/slime/scripts/models/small.sh", "$HERE/models/small.sh"],
)
def test_a_sourced_file_is_found_as_the_script_would_find_it(tmp_path: Path, source: str) -> None:
    (tmp_path / "scripts").mkdir()
    text = f'HERE=$(cd "$(dirname "$0")" && pwd)\nsource {source}\npython3 train.py ${{MODEL_ARGS[@]}}\n'
    script = read(tmp_path / "scripts", text)
    assert [given.flag for given in script.given] == ["num-layers", "rotary-base"]
    assert (script.notes, script.unread) == ((), ())


def test_flags_of_a_file_that_is_not_there_are_lost(tmp_path: Path) -> None:
    result = converted(tmp_path, "${MODEL_ARGS[@]} ${NO_ARGS[@]}", before="source /nowhere/models/x.sh\nNO_ARGS=()")
    assert lost_of(result) == ["${MODEL_ARGS[@]}"]
    assert lost_of(converted(tmp_path, "${MODEL_ARGS[@]}")) == []  # bash has no flags then


def test_two_variables_in_one_word_are_one_value(tmp_path: Path) -> None:
    assert flags_of(tmp_path, "${A[@]}", "H=h; P=1; A=(--x http://$H:$P/y)") == {"x": ["http://h:1/y"]}
