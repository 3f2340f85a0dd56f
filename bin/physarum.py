"""The command `physarum`: a verb for each thing to do. A script of bin/, such as bin/ledger, stands for a verb.

Only the module of the verb is imported, after this one: the map that --help prints loads nothing else.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Final, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from runtime.util.import_path import COMMAND, IS_CHECKOUT, VERBS, command_name, refuse_shadows

INPUT_ERROR, INTERRUPTED = 2, 130  # as in runtime.util.exit_codes, which is not imported yet
OF_A_RUN: Final = ("aiohttp", "cryptography", "jinja2", "psutil", "tokenizers", "transformers", "uvloop")


class Verb(NamedTuple):
    """A thing that the command does."""

    says: str  # in the map
    module: str  # in bin/
    function: str = "main"
    runs: bool = True  # needs the extra `run`
    calls_users: bool = False  # calls users' functions in this process


DOES: Final = {
    "start": Verb("Start the run that a topology file describes, or resume it.", "start_topology"),
    "check": Verb("Check whether a run would start on this machine.", "start_topology", "check"),
    "plan": Verb("Print what a run trains, its processes and streams.", "start_topology", "plan"),
    "watch": Verb("Show a run, live or after its end.", "watch"),
    "report": Verb("Write one HTML file about a run.", "report"),
    "ledger": Verb("Print where every prompt group of a run is.", "ledger"),
    "halt": Verb("End the round that a run generates now; the run goes on.", "halt"),
    "try": Verb("Call a function of yours as a run does.", "try_function", calls_users=True),
    "credentials": Verb("Give, list and revoke credentials of external clients.", "credentials"),
    "reward-worker": Verb("Grade samples of a run on another machine.", "reward_worker", runs=False),
    "export": Verb("Write a run's model as a Hugging Face directory.", "export_hf"),
    "import-gguf": Verb("Write the model of a GGUF file as a Hugging Face directory.", "import_gguf"),
    "replay": Verb("Replay the samples of a dump with other settings.", "replay", calls_users=True),
    "from-slime": Verb("Turn a start script of slime into a topology.", "from_slime", runs=False),
    "describe-settings": Verb("Write the reference pages of the settings.", "describe_settings", runs=False),
    "describe-algorithms": Verb("Write the reference pages of losses and graders.", "describe_algorithms", runs=False),
    "describe-models": Verb("Write the table of the keys of config.json.", "describe_models", runs=False),
    "describe-messages": Verb("Write the catalogue of messages.", "describe_messages", runs=False),
}
MAP: Final = """usage: {name} VERB ...

Train language models with reinforcement learning, as actors on a message bus.

{verbs}

{name} VERB --help has the arguments of one. A first run: {name} start laptop

exit codes: 0 done, 1 failed, 2 wrong input, 130 stopped by Ctrl-C"""


def main() -> None:
    """Run what the user asks for: by a verb, or by the name of a script that stands for one."""
    sys.excepthook = _excepthook
    refuse_shadows()
    from bin.entry import run  # after the check, since it imports modules that may be shadowed
    from runtime.util.imports import collecting_nothing

    program, *words = sys.argv[1:] if os.path.basename(sys.argv[0]) == f"{COMMAND}.py" else sys.argv
    script = os.path.basename(program)
    if script != COMMAND:
        words = [VERBS.get(script, script), *words]
    if words[:1] in (["--help"], ["-h"]):
        run(_show_map)
    if not words or words[0] not in DOES:
        asked = f"there is no verb {words[0]!r}" if words else "a verb is needed"
        sys.stderr.write(f"{asked}: {', '.join(DOES)}\n{command_name('')}--help says what each does\n")
        sys.exit(INPUT_ERROR)
    verb, *arguments = words
    does = DOES[verb]
    missing = [name for name in OF_A_RUN if does.runs and not IS_CHECKOUT and find_spec(name) is None]
    if missing:
        sys.stderr.write(f'needs {", ".join(missing)}, not installed here: pip install "physarum[run]"\n')
        sys.exit(INPUT_ERROR)
    with collecting_nothing():
        work = getattr(import_module(f"bin.{does.module}"), does.function)
    run(lambda: work(arguments), calls_users=does.calls_users)


def _show_map() -> int:
    wide = max(map(len, DOES))
    verbs = "\n".join(f"  {verb:{wide}}  {does.says}" for verb, does in DOES.items())
    print(MAP.format(name=command_name("").rstrip(), verbs=verbs))
    return 0


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exception hook: end after Ctrl-C with one line, also during imports; pass others to the interpreter's hook."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison] - None in a process without a stderr
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
