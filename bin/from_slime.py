"""Turn a start script of slime into a recipe and a topology. The script is read, never run."""

import argparse
import sys
from pathlib import Path

from bin.entry import Screen, WrongInput, command_path, ended, parser_of
from runtime.util.exit_codes import EXIT_OK

EPILOG = """Two files are written: NAME.toml, the topology, and NAME-recipe.toml, the recipe that it includes. Each
setting has the flag that it comes from; so have slime's defaults where ours differ. The recipe ends with the flags that
became no setting: those that are not implemented yet, and those that need no setting, with the reason.

A flag is lost if the run trains or measures something else without it, and no setting says the same. Then nothing is
written. With --force the recipe has a line for each such flag in [not_converted], and --check refuses the recipe
until you delete them.

Bash is followed as far as a start script needs: variables with defaults, arrays, sourced files, simple conditions.
Where the script asks the machine (nvidia-smi, hostname), give the variable: --var NUM_GPUS=8. A variable that is not
set is needed as well.

exit codes: 0 written, 2 the script cannot be read, a variable is missing, or a flag is lost"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    from bin.slime_scripts.convert import CannotConvert
    from bin.slime_scripts.syntax import NotAStartScript

    return ended(lambda: _convert(args), CannotConvert, NotAStartScript, OSError)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("from-slime", __doc__, EPILOG)
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="Start script in bash that calls train.py.")
    parser.add_argument(
        "--var",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Value of a variable of the script. Repeatable.",
    )
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="Where to write. By default here.")
    parser.add_argument("--name", help="Name of the run and the files. By default the script's, without run-.")
    parser.add_argument(
        "--force", action="store_true", help="Write although flags are lost, and replace the files if they exist."
    )
    return parser


def _convert(args: argparse.Namespace) -> int:
    from bin.slime_scripts.convert import convert_script, plain_name
    from bin.slime_scripts.script import read_script
    from bin.slime_scripts.written import STATES, written_recipe, written_topology

    name = plain_name(args.name or args.script.stem.removeprefix("run-").removeprefix("run_"))
    script = read_script(args.script, dict(_variable(text) for text in args.var))
    converted = convert_script(script, name)
    source = f"{args.script.name} ({script.program})"
    topology, recipe = args.out / f"{name}.toml", args.out / f"{name}-recipe.toml"
    there = [str(path) for path in (topology, recipe) if path.exists()]
    if there and not args.force:
        raise WrongInput(f"exists already: {', '.join(there)}; --force replaces it")
    lost = [f"{left.place}: {left.flag}: {left.remark}" for left in converted.left if left.is_lost]
    if lost and not args.force:
        what = f"{len(lost)} of the script's flags and variables would be lost, and the run would be another one"
        after = "nothing is written; --force writes the rest, and a line for each that --check refuses"
        raise WrongInput("\n".join([*script.notes, *lost, f"{args.script}: {what}; {after}"]))
    args.out.mkdir(parents=True, exist_ok=True)
    recipe.write_text(written_recipe(converted, source), encoding="utf-8")
    topology.write_text(written_topology(converted, source, recipe.name), encoding="utf-8")
    screen = Screen(sys.stdout)
    screen.show_all(script.notes)
    counts = ", ".join(
        f"{count} {state}" for state in STATES if (count := sum(left.state == state for left in converted.left))
    )
    screen.show(f"{topology}, {recipe}: {len(converted.settings)} settings; flags without one: {counts or 'none'}")
    screen.show_all([f"lost: {line}" for line in lost])
    screen.show(f"next: {' '.join(command_path('start-topology', Path.cwd()))} {topology} --check")
    return EXIT_OK


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise WrongInput(f"--var {text}: expected NAME=VALUE")
    return name, value
