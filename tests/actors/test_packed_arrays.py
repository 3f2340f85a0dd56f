"""Arrays of samples stay packed: they become lists only in JSON and for users' functions."""

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH_OF_A_SAMPLE = (  # from an engine's answer to a micro-batch
    "messages",
    "actors/rollout/samples",
    "actors/rollout/offline",
    "actors/rollout/requests",
    "actors/rollout/samples",
    "actors/rollout/sglang",
    "actors/buffer",
    "actors/trainer/data/assembly.py",
    "actors/trainer/data/batch.py",
    "actors/trainer/data/feed.py",
)
ALLOWED = {
    "messages/arrays.py": 1,  # an array in a JSON message is a list
    "actors/buffer/prompts/prompts.py": 1,  # ids of the first prompts, for the weight probe
    "actors/rollout/samples/arguments.py": 1,  # ids in errors
    # what a generate function reads: prompt_ids, ids and turns; tokens before a turn of a session that goes on
    "actors/rollout/samples/context.py": 5,
    "actors/rollout/samples/conversation.py": 1,  # the prompt of a session that goes on after a death
    "actors/rollout/samples/evaluation_function.py": 1,  # ids of an ended sample, which an evaluation function reads
    "actors/rollout/samples/rollout_function.py": 1,  # ids of an ended sample, which a rollout function reads
    "actors/rollout/sglang/body.py": 1,  # the tokens so far, which a request begins with
    "actors/rollout/sglang/served_model.py": 1,  # the last few tokens, for a tokenizer
}


def test_only_requests_to_engines_and_json_make_lists_of_arrays() -> None:
    files = [file for each in PATH_OF_A_SAMPLE for file in (ROOT / each).rglob("*.py")]
    files += [ROOT / each for each in PATH_OF_A_SAMPLE if each.endswith(".py")]
    assert len(files) > 50
    assert lists_of_arrays(files) == ALLOWED


def lists_of_arrays(files: Iterable[Path]) -> dict[str, int]:
    """The number of calls that make a list of an array, by file."""
    found: dict[str, int] = {}
    for file in files:
        calls = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.Call)]
        lists = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "tolist"]
        if lists:
            found[str(file.relative_to(ROOT))] = len(lists)
    return found
