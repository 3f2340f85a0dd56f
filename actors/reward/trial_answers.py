"""Answers on which a check tries users' graders, and what the grades say about a grader. Starts no process."""

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from actors.reward.graders.calling import resolve_grader
from actors.reward.grades import Graded, GraderSpec
from messages import Prompt
from runtime.settings.tables.reward import RewardConfig
from runtime.settings.topology import Topology
from runtime.util.tracebacks import places_in


def answers_to(prompt: Prompt) -> tuple[str, ...]:
    """Return answers to a row in the usual forms. They are right if the label is what a right answer says."""
    label = "1" if prompt.label is None else str(cast("object", prompt.label))
    all_forms = (
        f"<think>\nSo it is {label}.\n</think>\n<reasoning>\nSo it is {label}.\n</reasoning>\n"
        f"<answer>{label}</answer>\nThe answer is {label}.\nAnswer: {label}\nFinal answer: {label}\nScore: 1\n"
        f"**{label}**\n\\boxed{{{label}}}\n#### {label}"
    )
    as_json = json.dumps({"answer": label, "score": 1, "reasoning": "It is so."})
    return label, "1", all_forms, as_json, f"```python\nprint({label!r})\n```", prompt.text, ""


def is_own_failure(graded: Graded, topology: Topology) -> bool:
    """Return whether a grade failed by the grader's own doing, on an answer like those of a run.

    Not if the machine or a server failed, if the recipe has a reward for such failures, or if the grader reads what
    only a generation leaves in a sample.
    """
    reward, rollout = topology.reward, topology.rollout
    if graded.error is None or graded.of_machine:
        return False
    if graded.cause == "bad_answer":
        return reward.per == "sample" and not _gives_reward(reward, "bad_answer")
    if graded.cause != "raised":
        return False
    functions = [rollout.custom_generate, rollout.custom_rollout]
    functions += [function for item in topology.eval for function in (item.custom_generate, item.custom_evaluation)]
    generated = bool(reward.sample_fields) or reward.per != "sample" or any(functions)
    return not generated and not _gives_reward(reward, "raised")


def _gives_reward(reward: RewardConfig, cause: Literal["bad_answer", "raised"]) -> bool:
    """Whether a sample gets a reward when its grader fails from this cause."""
    action = getattr(reward.failures, cause)
    return isinstance(action, int | float) or (action in (None, "retry") and reward.on_failure == "zero")


def failure_of(grades: Sequence[Graded], topology: Topology) -> tuple[str, ...] | None:
    """Return how a grader fails on every answer to a row; None if it does not fail, or in several ways.

    An exception whose text differs between the answers is about the answer, such as `KeyError('a word of it')`.
    """
    if not grades or not all(is_own_failure(graded, topology) for graded in grades):
        return None
    first, causes = grades[0], {graded.cause for graded in grades}
    if causes == {"bad_answer"}:
        return ("bad_answer",)
    if len(causes) > 1 or len({(graded.error, places_in(graded.trace or "")) for graded in grades}) > 1:
        return None
    return ((first.error or "").partition("(")[0], *places_in(first.trace or ""))


def place_of(graded: Graded, spec: GraderSpec) -> str:
    """Return the file and the line that a failed grade is about: where the grader raised, or where it is defined."""
    function = _code_of(spec)
    file = None if function is None else function.co_filename
    raised = [place for place in places_in(graded.trace or "") if file is None or f'"{file}"' in place]
    if raised:
        return raised[-1].removeprefix("File ").replace('"', "").replace(", line ", ":", 1)
    return "" if function is None else f"{file}:{function.co_firstlineno}, in {function.co_name}"


def _code_of(spec: GraderSpec) -> Any:
    """The code of a grader, which this process has loaded before; None if it is not written in Python."""
    try:
        function: Callable[..., Any] = inspect.unwrap(resolve_grader(spec))
    except ValueError:
        return None
    code: Any = getattr(function, "__code__", None)
    return code or getattr(getattr(function, "__call__"), "__code__", None)  # noqa: B004, B009 - an object that is called
