"""The generate function and the grader of tool-use.toml."""

import re

CALL = re.compile(r"(\d)(\d)\}$")  # two digits and a brace at the end of a turn call the calculator
RESULT = "<user>{}<assistant>"  # how the chat template of this model shows the result and opens the next turn


async def with_calculator(conversation):
    """Let the model write a turn; if it ends in a call, run the tool, append its result, and let the model go on.

    What `append` adds is read by the model and by graders, and never trained. If a sample is halted, this function
    runs again from its start and gets the finished turns as they were: it must do the same when it sees the same.
    """
    turn = await conversation.generate(stop=["}"], max_new_tokens=5)
    call = CALL.search(turn)
    if call is None:
        return  # no call: the turn is the whole response
    conversation.append(RESULT.format(calculator(call[1], call[2])))
    conversation.sample_metadata["tool_calls"] = 1  # filters and dumps see it
    await conversation.generate(max_new_tokens=4)


def calculator(first, second):
    """The tool. A real one may be slow: await it, or run it in a thread."""
    return f"{int(first) + int(second):02}"


def reward(sample):
    """A quarter for a call, a quarter for a call with the digits of the question, half for the answer."""
    called, result, answer = sample.response.rpartition("<assistant>")
    if not result:
        return {"score": 0.0, "tool_calls": 0}
    right_call = called[:2] in sample.prompt
    right = sum(ours == theirs for ours, theirs in zip(answer, sample.label, strict=False))
    right_answer = right / max(len(answer), len(sample.label))
    return {"score": 0.25 + 0.25 * right_call + 0.5 * right_answer, "tool_calls": 1}
