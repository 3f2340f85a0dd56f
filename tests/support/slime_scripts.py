"""Converts every start script of a slime checkout with bin/from-slime, and checks the result; writes a results page.

Run: python -m tests.support.slime_scripts CHECKOUT COMMIT > docs/results/DATE-slime-scripts.md
"""

import io
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from bin import start_topology
from bin.slime_scripts.convert import CannotConvert, convert_script
from bin.slime_scripts.script import read_script
from bin.slime_scripts.syntax import NotAStartScript
from bin.slime_scripts.written import written_recipe, written_topology
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from tests.support.slime_effective import differences, wrong_defaults

VARIABLES: Final = {
    "BASE_DIR": "/base",
    "BASE_FOLDER": "/base",
    "MASTER_ADDR": "10.0.0.1",
    "NUM_GPUS": "8",
    "RUN_ROOT": "/run",
    "WANDB_KEY": "key",
}
HEAD: Final = """# slime's start scripts, {date}

`bin/from-slime` read every bash script of slime at commit {commit} that starts training.
`bin/start-topology --check --elsewhere` checked what it wrote. That check leaves out what only the machine of the run
can show: GPUs, model and data files, and functions that a script names. These variables were given: {variables}.
No script ran.

"Lost" counts flags and variables without which the run is another one: functions and files of slime's to set by hand,
and what is not implemented. For such a script `bin/from-slime` writes nothing without `--force`; the check here is
that of the recipe without its lines of lost flags. "Differs" counts settings of the recipe that are not the values with
which slime would train: flags as given, otherwise slime's and Megatron's defaults, but for the lost ones. The last
column says why a script has no recipe, or its check fails.

{whole} of {all} scripts lose nothing; {good} of {all} pass the check. {differing} settings differ.

Written by `python -m tests.support.slime_scripts CHECKOUT COMMIT`.

| script | lost | check | differs | why |
|---|---|---|---|---|
"""


def main() -> None:
    """Write the page to standard output."""
    checkout, commit = Path(sys.argv[1]), sys.argv[2]
    scripts = sorted([*checkout.glob("scripts/**/run*.sh"), *checkout.glob("examples/**/*.sh")])
    if wrong := list(wrong_defaults(checkout)):
        raise SystemExit("\n".join(wrong))
    rows = [(str(script.relative_to(checkout)), *_converted(script)) for script in scripts]
    sys.stdout.write(
        HEAD.format(
            date=datetime.now(UTC).date(),
            commit=commit,
            variables=", ".join(f"`{name}`" for name in VARIABLES),
            good=sum(passes for _, _, passes, _, _ in rows),
            all=len(rows),
            whole=sum(lost == 0 for _, lost, _, _, _ in rows),
            differing=sum(len(differing) for _, _, _, differing, _ in rows),
        )
    )
    for name, lost, passes, differing, why in rows:
        result = "passes" if passes else "fails"
        shown = "-" if lost is None else lost
        reasons = "; ".join([why, *differing] if why else differing)
        sys.stdout.write(f"| `{name}` | {shown} | {result} | {len(differing)} | {reasons} |\n")


def _converted(script: Path) -> tuple[int | None, bool, list[str], str]:
    """Convert and check one script: its lost flags, whether the check passes, what differs, and the first problem."""
    try:
        read = read_script(script, VARIABLES)
        whole = convert_script(read, "made")
    except (NotAStartScript, CannotConvert) as error:
        return None, False, [], str(error).splitlines()[0].replace(f"{script.parent}/", "")
    lost = sum(left.is_lost for left in whole.left)
    result = msgspec.structs.replace(whole, left=tuple(left for left in whole.left if not left.is_lost))
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()) as said,
    ):
        (Path(folder) / "recipe.toml").write_text(written_recipe(result, script.name))
        (Path(folder) / "made.toml").write_text(written_topology(result, script.name, "recipe.toml"))
        code = start_topology.main([f"{folder}/made.toml", "--check", "--elsewhere"])
        try:
            made = load_topology(Path(folder) / "made.toml").topology
        except TopologyError:
            return lost, False, [], said.getvalue().splitlines()[0].partition(": ")[2]
    left = {left.flag.split()[0].lstrip("-") for left in whole.left}
    return lost, code == 0, list(differences(read, left, made)), ""


if __name__ == "__main__":
    main()
