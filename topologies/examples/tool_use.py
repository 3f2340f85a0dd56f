"""The generate function and the grader of tool-use.toml."""

import re
import select
import subprocess
import sys
import threading

import anyio

CALL = re.compile(r"(\d)(\d)\}$")  # two digits and a brace at the end of a turn call the calculator
RESULT = "<user>{}<assistant>"  # how the chat template of this model shows the result and opens the next turn

# The tool's process: it evaluates a line at a time, and can open no file or socket, start no process and write nothing.
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
LIMIT_S = 2.0  # of one call; then the process is killed, and the next call starts another one


async def with_calculator(conversation):
    """Let the model write a turn; if it ends in a call, run the tool, append its result, and let the model go on.

    What `append` adds is read by the model and by graders, and never trained. If a sample is halted, this function
    runs again from its start and gets the finished turns as they were: it must do the same when it sees the same.
    """
    turn = await conversation.generate(stop=["}"], max_new_tokens=5)
    call = CALL.search(turn)
    if call is None:
        return  # no call: the turn is the whole response
    conversation.append(RESULT.format(await calculator(call[1], call[2])))
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
        """Return what the expression is, or the name of an error."""
        with self.one_call:
            if self.process is None or self.process.poll() is not None:
                command, pipe = [sys.executable, "-I", "-S", "-c", TOOL], subprocess.PIPE
                self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env={}, cwd="/", text=True)
            self.process.stdin.write(expression + "\n")
            self.process.stdin.flush()
            if select.select([self.process.stdout], [], [], LIMIT_S)[0] and (answer := self.process.stdout.readline()):
                return answer.strip()
            self.process.kill()
            self.process.communicate()
            return "TimeoutError"


TOOLS = Tools()  # its process starts with the first call, and ends with the actor


def reward(sample):
    """A quarter for a call, a quarter for a call with the digits of the question, half for the answer."""
    called, result, answer = sample.response.rpartition("<assistant>")
    if not result:
        return {"score": 0.0, "tool_calls": 0}
    right_call = called[:2] in sample.prompt
    right = sum(ours == theirs for ours, theirs in zip(answer, sample.label, strict=False))
    right_answer = right / max(len(answer), len(sample.label))
    return {"score": 0.25 + 0.25 * right_call + 0.5 * right_answer, "tool_calls": 1}
