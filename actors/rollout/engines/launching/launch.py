"""Starts a server of SGLang with the run's key, which comes in the environment: every user reads command lines.

    python launch.py sglang.launch_server ARGUMENTS...   become the server
    python launch.py describe                            say as JSON which arguments the server has

A server that is told of its peers takes its first weights from one of them (peer_weights.py).

Needs nothing but the standard library: it runs in the interpreter that has SGLang.
"""

import argparse
import json
import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # until `main`: an interpreter may look there for nothing
from peer_weights import PEERS_VARIABLE, first_weights

KEY_VARIABLE = "PHYSARUM_ENGINE_KEY"
DESCRIBE = "describe"
SERVER = "sglang.launch_server"
KEY_ARGUMENTS = {
    SERVER: ("--api-key={key}",),
    "sglang_router.launch_router": ("--api-key={key}", "--control-plane-api-keys=run:run:admin:{key}"),
}
KINDS = {  # by the name of what reads a value: Python's types and json.loads, and functions of SGLang
    **{"int": "int", "float": "float", "str": "str", "loads": "json"},
    **{"json_list_type": "json", "human_readable_int": "int", "nullable_str": "str"},
}


def main() -> None:
    """Become the server, or describe it."""
    module, *arguments = sys.argv[1:]
    here = str(Path(__file__).resolve().parent)  # its files are not what SGLang means by their names
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
    """What reads the server's command line. The server imports the same right after."""
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)  # pyright: ignore[reportUnknownMemberType]
    return parser


def described(parser: argparse.ArgumentParser) -> list[dict[str, object]]:
    """Each argument: its names, what kind of value it takes, whether several, and which are allowed."""
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
    """What an argument's value is; "other": a function of the server's own reads it."""
    return "str" if action.type is None else KINDS.get(getattr(action.type, "__name__", ""), "other")


def fitted(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Words as the server takes them, from words that say a list as JSON, and --no-flag of any flag."""
    actions = {name: action for action in parser._actions for name in action.option_strings}  # pyright: ignore[reportPrivateUsage]
    words: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        action = actions.get(name)
        if action is None and name.startswith("--no-") and "--" + name[5:] in actions:
            continue  # off unless it is given
        if equals and action is not None and action.nargs in ("+", "*") and value.startswith("["):
            words += [name, *(item if isinstance(item, str) else json.dumps(item) for item in json.loads(value))]
        else:
            words.append(argument)
    return words


if __name__ == "__main__":
    main()
