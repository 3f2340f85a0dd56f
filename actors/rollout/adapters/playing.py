"""What adapters of environments share: the row, the session's two keys, turns of the model and rewards.

The control key comes by standard input: neither the environment nor a file has it, so no child of an adapter can read
it, such as an agent with a shell.
"""

import ctypes
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

TURN_S: Final = 86_400.0  # a connection is held while a turn takes; the run has a limit of its own
CALL_S: Final = 60.0  # of a control call
SET_DUMPABLE: Final = 4  # of prctl: without it, no process of this user reads this one's memory
FULL: Final = "context_length_exceeded"
Message = Mapping[str, Any]


class ContextFull(Exception):
    """The conversation does not fit into the model's context any more."""


class Session:
    """The session of a sample, for the program that plays its environment.

    Args:
        variables: environment of the program, with address and key of the model, and the file of the row.
    """

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        self.url, self._model = variables["OPENAI_BASE_URL"].removesuffix("/v1"), variables["OPENAI_API_KEY"]
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
        self._control = sys.stdin.read().strip()
        self.row: Mapping[str, Any] = json.loads(Path(variables["PHYSARUM_ROW"]).read_text(encoding="utf-8"))
        prompt = self.row["prompt"]
        said: Sequence[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        self.messages = [message for message in said if message["content"]]

    def say(self, text: str) -> None:
        """Add words of the environment to the conversation; those of the row's prompt are in the same message."""
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == "user":
            text = f"{last['content']}\n\n{text}"
            self.messages.pop()
        self.messages.append({"role": "user", "content": text})

    def ask(self) -> str:
        """Return the model's next message, which is added to the conversation.

        Raises:
            ContextFull: there is no room for it.
            OSError: the request failed.
        """
        body = {"model": "policy", "messages": self.messages}
        answer = self._call("POST", "/v1/chat/completions", self._model, body, TURN_S)
        message = answer["choices"][0]["message"]
        self.messages.append(message)
        return message.get("content") or ""

    def end(
        self,
        rewards: Sequence[float | None],
        *,
        truncated: bool,
        total: float | None = None,
        named: Mapping[str, float] | None = None,
    ) -> None:
        """End the sample with a reward; without any it has failed, as what is absent is not 0.

        Args:
            rewards: of each turn so far; None: the environment gave none.
            truncated: whether the episode was cut off, and not over.
            total: the reward; None: the sum of those of turns.
            named: further rewards by name.
        """
        known = [reward for reward in rewards if reward is not None]
        if total is None and not known:
            return self.fail("the environment gave no reward")
        reward = sum(known) if total is None else total
        content = {"reward": reward, "rewards": dict(named or {}), "turns": list(rewards)}
        self._call("PUT", "/session/reward", self._control, content, CALL_S)
        self._call("POST", "/session/end", self._control, {"truncated": truncated}, CALL_S)

    def fail(self, reason: str) -> None:
        """Have the sample fail, without a reward."""
        self._call("POST", "/session/fail", self._control, {"reason": reason}, CALL_S)

    def _call(self, method: str, path: str, key: str, content: object, timeout_s: float) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(content).encode(), headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            if FULL in said:
                raise ContextFull from None
            raise OSError(f"{method} {path}: {error.code}: {said[:500]}") from None


def loaded(name: str) -> Any:
    """Return the function of a file, of `FILE.py:FUNCTION`. Modules beside the file can be imported.

    Raises:
        ValueError: there is no such file or function.
    """
    place, _, function = name.rpartition(":")
    spec = spec_from_file_location(Path(place).stem, place) if Path(place).is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"{name}: there is no such file; FILE.py:FUNCTION is expected")
    sys.path.insert(0, str(Path(place).parent))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, function, None)):
        raise ValueError(f"{name}: the file has no function {function!r}")
    return found
