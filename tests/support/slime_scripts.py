"""Converts every start script of a slime checkout with bin/from-slime, and checks the result; writes a results page.

Run: python -m tests.support.slime_scripts CHECKOUT COMMIT > docs/results/DATE-slime-scripts.md
"""

import io
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bin import start_topology
from runtime.settings.slime.scripts.convert import CannotConvert, convert_script
from runtime.settings.slime.scripts.script import read_script
from runtime.settings.slime.scripts.syntax import NotAStartScript
from runtime.settings.slime.scripts.written import written_recipe, written_topology

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

"By hand" counts flags that someone must set: functions and files of slime's. The check passes without them,
but the run is another one until they are set. The last column says why a script has no recipe, or its check fails.

{good} of {all} scripts pass the check, {whole} of them with nothing to set by hand.

Written by `python -m tests.support.slime_scripts CHECKOUT COMMIT`.

| script | check | by hand | not yet | why |
|---|---|---|---|---|
"""


def main() -> None:
    """Write the page to standard output."""
    checkout, commit = Path(sys.argv[1]), sys.argv[2]
    scripts = sorted([*checkout.glob("scripts/**/run*.sh"), *checkout.glob("examples/**/*.sh")])
    rows = [(str(script.relative_to(checkout)), *_converted(script)) for script in scripts]
    good = [states for _, passes, states, _ in rows if passes]
    sys.stdout.write(
        HEAD.format(
            date=datetime.now(UTC).date(),
            commit=commit,
            variables=", ".join(f"`{name}`" for name in VARIABLES),
            good=len(good),
            all=len(rows),
            whole=sum(states["by hand"] == 0 for states in good),
        )
    )
    for name, passes, states, why in rows:
        result = "passes" if passes else "fails"
        sys.stdout.write(f"| `{name}` | {result} | {states['by hand']} | {states['not yet']} | {why} |\n")


def _converted(script: Path) -> tuple[bool, Counter[str], str]:
    """Convert and check one script: whether the check passes, its flags without a setting, and the first problem."""
    try:
        result = convert_script(read_script(script, VARIABLES), "made")
    except (NotAStartScript, CannotConvert) as error:
        return False, Counter(), str(error).splitlines()[0].replace(f"{script.parent}/", "")
    states = Counter(left.state for left in result.left)
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()) as said,
    ):
        (Path(folder) / "recipe.toml").write_text(written_recipe(result, script.name))
        (Path(folder) / "made.toml").write_text(written_topology(result, script.name, "recipe.toml"))
        code = start_topology.main([f"{folder}/made.toml", "--check", "--elsewhere"])
    return code == 0, states, "" if code == 0 else said.getvalue().splitlines()[0].partition(": ")[2]


if __name__ == "__main__":
    main()
