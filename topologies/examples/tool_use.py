"""The generate function and the grader of tool-use.toml."""

import contextlib
import re
import select
import subprocess
import sys
import threading

import anyio

CALL = re.compile(r"(\d)(\d)\}$")  # two digits and a brace at the end of a turn call the calculator
RESULT = "<user>{}<assistant>"  # how the chat template of this model shows the result and opens the next turn

# The tool's process evaluates a line at a time. It can open no file or socket, nor write; as root it may start others.
TOOL = """
import resource, sys
limits = {"AS": 1 << 28, "CPU": 600, "FSIZE": 0, "NOFILE": 3, "NPROC": 0}
for kind, most in limits.items():
    resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
for line in sys.stdin:
    try:
        answer = str(eval(line, {"__builtins__": {"int": int}}))
    except Exception as error:
        answer = type(error).__name__
    print(answer[:16], flush=True)
"""
LIMIT_S = 30.0  # of one call; then the process is killed, and another one is asked


async def with_calculator(conversation):
    """Let the model write a turn; if it ends in a call, run the tool, append its result, and let the model go on.

    What `append` adds is read by the model and by graders, and never trained. If a sample is halted, this function
    runs again from its start and gets the finished turns as they were: it must do the same when it sees the same.
    """
    turn = await conversation.generate(stop=["}"], max_new_tokens=5)
    call = CALL.search(turn)
    if call is None:
        return  # no call: the turn is the whole response
    result = await calculator(call[1], call[2])
    if not result:
        conversation.end("aborted", "the calculator did not answer")  # no fault of the model: the sample starts again
        return
    conversation.append(RESULT.format(result))
    conversation.sample_metadata["tool_calls"] = 1  # filters and dumps see it
    await conversation.generate(max_new_tokens=4)


async def calculator(first, second):
    """The tool. A thread waits for it, so that other samples go on."""
    return await anyio.to_thread.run_sync(TOOLS.evaluate, f"'%02d' % (int('{first}') + int('{second}'))")


class Tools:
    """A Python process with limits, one call at a time."""

    def __init__(self):
        self.process = None
        self.one_call = threading.Lock()

    def evaluate(self, expression):
        """Return what the expression is, or the name of an error. Empty: two processes ended before they answered."""
        with self.one_call:
            return self.answer(expression) or self.answer(expression)

    def answer(self, expression):
        """Return the answer of one process; empty if it ends, or takes too long."""
        if self.process is None:
            command, pipe = [sys.executable, "-I", "-S", "-c", TOOL], subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env={}, cwd="/", text=True)
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self.process.stdin.write(expression + "\n")
            self.process.stdin.flush()
            if select.select([self.process.stdout], [], [], LIMIT_S)[0] and (answer := self.process.stdout.readline()):
                return answer.strip()
        self.process.kill()
        self.process.communicate()  # closes its pipes
        self.process = None
        return ""


TOOLS = Tools()  # its process starts with the first call, and ends with the actor


def reward(sample):
    """Half for the call, position by position: the digits of the question. Half for the answer to the right call."""
    called, result, answer = sample.response.rpartition("<assistant>")
    call = called.partition("<user>")[0] if result else answer
    wanted = "".join(letter for letter in sample.prompt if letter.isdigit()) + "}"
    score = agreement(call, wanted) / 2
    if result and call == wanted:
        score += agreement(answer, sample.label) / 2
    return {"score": score, "tool_calls": int(bool(result))}


def agreement(text, right):
    """Share of positions where both agree."""
    return sum(ours == theirs for ours, theirs in zip(text, right, strict=False)) / max(len(text), len(right))
