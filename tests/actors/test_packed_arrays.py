"""Arrays of samples stay packed: they become lists only in JSON and for users' functions."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH_OF_A_SAMPLE = (  # from an engine's answer to a micro-batch
    "messages",
    "actors/rollout/samples",
    "actors/rollout/slime",
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
    "actors/rollout/samples/context.py": 4,  # what a generate function reads: prompt_ids, ids and turns
    "actors/rollout/samples/evaluation_function.py": 1,  # ids of an ended sample, which an evaluation function reads
    "actors/rollout/samples/rollout_function.py": 1,  # ids of an ended sample, which a rollout function reads
    "actors/rollout/slime/call.py": 1,  # ids of the prompt, which a rollout function of slime posts
    "actors/rollout/sglang/body.py": 1,  # the tokens so far, which a request begins with
    "actors/rollout/sglang/served_model.py": 1,  # the last few tokens, for a tokenizer
}


def test_only_requests_to_engines_and_json_make_lists_of_arrays() -> None:
    files = [file for each in PATH_OF_A_SAMPLE for file in (ROOT / each).rglob("*.py")]
    files += [ROOT / each for each in PATH_OF_A_SAMPLE if each.endswith(".py")]
    assert len(files) > 50
    found: dict[str, int] = {}
    for file in files:
        calls = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.Call)]
        lists = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "tolist"]
        if lists:
            found[str(file.relative_to(ROOT))] = len(lists)
    assert found == ALLOWED
