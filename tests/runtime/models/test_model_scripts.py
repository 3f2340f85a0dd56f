"""The table of model scripts reads them without running any, and counts a flag that no tiny configuration shows."""

from pathlib import Path

import pytest

from runtime.models.family import families
from tests.support.model_scripts import FOLDER, MODELS, WITHOUT, flags_of, rows_of

SHELL = """# --spec "of" "a comment"
N=4
MODEL_ARGS=(
    --num-layers $N  # and --hidden-size 9
    --spec "slime_plugins.models.x" "get"
    --rotary-percent 0.5
    --qk-layernorm
)
"""
PROGRAM = """
from model_args_utils import load_sibling_model_args

def model_args(layers=4):
    return load_sibling_model_args(__file__, "OTHER", layers=layers) + f"--num-layers {layers} " "--swiglu "

raise SystemExit("it runs")
"""


def written(directory: Path, **scripts: str) -> Path:
    folder = directory / FOLDER
    folder.mkdir(parents=True)
    for name, text in scripts.items():
        (folder / name.replace("__", ".")).write_text(text)
    return directory


def test_flags_are_those_of_a_script_and_of_the_ones_it_builds_on(tmp_path: Path) -> None:
    shell = 'MODEL_ARGS_NUM_LAYERS=5 source "$(dirname -- "${BASH_SOURCE[0]}")/base.sh"'
    root = written(tmp_path, base__sh=SHELL, few__sh=shell, base__py='"--hidden-size 8 "', few__py=PROGRAM)
    program = PROGRAM.replace("OTHER", "base")
    (root / FOLDER / "few.py").write_text(program)
    expected = {"num-layers": "$N", "spec": "slime_plugins.models.x", "rotary-percent": "0.5", "qk-layernorm": ""}
    assert flags_of(root / FOLDER / "few.sh") == expected
    assert flags_of(root / FOLDER / "few.py").keys() == {"hidden-size", "num-layers", "swiglu"}


def test_a_script_trains_if_each_flag_is_a_key_or_a_block_of_its_family(tmp_path: Path) -> None:
    some = "MODEL_ARGS=(--num-layers 4 --swiglu --num-query-groups 2 --vocab-size 9)"
    scripts = {"qwen3-1B__sh": some, "qwen3-2B__sh": some.replace(")", " --softmax-type learnable)")}
    scripts |= {"nemotron-3-x__py": '"--num-layers 4 --moe-latent-size 3 "'}
    rows = {name: lacking for name, _, lacking in rows_of(written(tmp_path, **scripts))}
    assert rows["qwen3-1B.sh"] == ""
    assert rows["qwen3-2B.sh"] == "not in the family's tiny configuration: `--softmax-type learnable`"
    assert rows["nemotron-3-x.py"] == WITHOUT["nemotron_h"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("qwen3-1B__sh", "MODEL_ARGS=(--softmax-kind x)", "what --softmax-kind says of a model is unknown here"),
        ("qwen3-1B__sh", "MODEL_ARGS=()", "no flag was found"),
        ("other__sh", "MODEL_ARGS=(--num-layers 4)", "no model type is named for it"),
    ],
)
def test_what_the_table_cannot_say_ends_it(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        list(rows_of(written(tmp_path, **{name: text})))


def test_a_model_type_without_a_declaration_says_what_is_missing_and_others_do_not() -> None:
    declared = {name for family in families().values() for name in family.model_types}
    assert not declared & WITHOUT.keys()
    assert {*MODELS.values()} >= WITHOUT.keys()
