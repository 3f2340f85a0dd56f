"""bin/from-slime: bash is followed without running it, and each flag becomes a setting or a remark."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bin import from_slime
from runtime.settings.load import load_topology
from runtime.settings.slime.scripts.convert import CannotConvert, Converted, convert_script
from runtime.settings.slime.scripts.script import StartScript, read_script
from runtime.settings.slime.scripts.syntax import NotAStartScript
from runtime.settings.slime.scripts.written import toml

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
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} "${ROLLOUT_ARGS[@]}" ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} \\
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
    assert "--balance-data (run-small.sh:29): always on" in left
    assert tomllib.loads(recipe)["train"] == {"save_interval": 20, "num_steps": 100, "max_tokens_per_gpu": 9216}


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
    (left,) = converted(tmp_path, "--wandb-key s3cret").left
    assert (left.flag, left.state) == ("--wandb-key ***", "no")


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
        ("custom-reward-post-process-path", "algorithm.custom_advantage"),
        ("use-tis --custom-tis-function-path", "algorithm.custom_tis"),
    ],
)
def test_functions_of_the_user_are_written_into_the_recipe_as_they_are(tmp_path: Path, flag: str, key: str) -> None:
    result = converted(tmp_path, f"--rm-type math --{flag} examples.mine.run.function")
    assert value_of(result, key) == "slime:examples.mine.run:function"
    assert not result.left


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
    assert value_of(converted(tmp_path, "--kl-loss-coef 0.1"), "algorithm.kl_loss_coef") is None
    both = converted(tmp_path, "--kl-loss-coef 0.1 --use-kl-loss")
    assert value_of(both, "algorithm.kl_loss_coef") == 0.1
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
