"""Starts an SGLang server with the run's API key, read from the environment: any user can read command lines.

    python launch.py sglang.launch_server ARGUMENTS...   become the server
    python launch.py describe                            print the server's arguments as JSON

If the environment lists peer engines, the server takes its first weights from one of them (peer_weights.py).

Needs only the standard library: it runs in the SGLang interpreter.
"""

import argparse
import json
import os
import runpy
import sys
from pathlib import Path

# removed in `main`; with PYTHONSAFEPATH the interpreter omits this directory
sys.path.insert(0, str(Path(__file__).resolve().parent))
from peer_weights import PEERS_VARIABLE, first_weights

KEY_VARIABLE = "PHYSARUM_ENGINE_KEY"
DESCRIBE = "describe"
SERVER = "sglang.launch_server"
KEY_ARGUMENTS = {
    SERVER: ("--api-key={key}",),
    "sglang_router.launch_router": ("--api-key={key}", "--control-plane-api-keys=run:run:admin:{key}"),
}
KINDS = {  # by name of the argument's type function: Python types, json.loads, SGLang functions
    **{"int": "int", "float": "float", "str": "str", "loads": "json"},
    **{"json_list_type": "json", "human_readable_int": "int", "nullable_str": "str"},
}


def main() -> None:
    """Run the server in this process, or print its arguments as JSON."""
    module, *arguments = sys.argv[1:]
    here = str(Path(__file__).resolve().parent)  # the file names here must not shadow modules that SGLang imports
    sys.path[:] = [place for place in sys.path if place != here]
    if module == DESCRIBE:
        sys.stdout.write("\n" + json.dumps(described(server_parser())) + "\n")
        return
    key, peers = os.environ.pop(KEY_VARIABLE, ""), os.environ.pop(PEERS_VARIABLE, "")
    if module == SERVER:
        parser = server_parser()
        arguments = fitted(arguments, parser)
        if peers:
            arguments += first_weights(peers.split(","), key, parser.parse_known_args(arguments)[0].tp_size)
    with_key = [argument.format(key=key) for argument in KEY_ARGUMENTS[module]] if key else []
    sys.argv = [module, *arguments, *with_key]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def server_parser() -> argparse.ArgumentParser:
    """Return the server's argument parser. The modules that it imports are needed by the server, too."""
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)  # pyright: ignore[reportUnknownMemberType]
    return parser


def described(parser: argparse.ArgumentParser) -> list[dict[str, object]]:
    """Describe each argument: names, kind of value, whether it takes several values, and allowed choices."""
    return [
        {
            "names": [name.lstrip("-").replace("-", "_") for name in action.option_strings],
            "kind": "flag" if action.nargs == 0 else kind_of(action),
            "many": action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 0),
            "choices": None if action.choices is None else sorted(map(str, action.choices)),
        }
        for action in parser._actions  # pyright: ignore[reportPrivateUsage] - argparse has no other way to list them
    ]


def kind_of(action: argparse.Action) -> str:
    """Return the kind of an argument's value; "other" if one of SGLang's own functions parses it."""
    return "str" if action.type is None else KINDS.get(getattr(action.type, "__name__", ""), "other")


def fitted(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Convert our argument spelling to the server's.

    Expands lists written as JSON, and drops --no-FLAG where the server has only --FLAG.
    """
    actions = {name: action for action in parser._actions for name in action.option_strings}  # pyright: ignore[reportPrivateUsage]
    words: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        action = actions.get(name)
        if action is None and name.startswith("--no-") and "--" + name[5:] in actions:
            continue  # flags are off by default
        if equals and action is not None and action.nargs in ("+", "*") and value.startswith("["):
            words += [name, *(item if isinstance(item, str) else json.dumps(item) for item in json.loads(value))]
        else:
            words.append(argument)
    return words


if __name__ == "__main__":
    main()
