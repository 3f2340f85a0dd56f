"""A task set of verifiers with a harness of its own: a number is read from the model's last message."""

from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf


class Numbers(vf.TaskData):
    """A sum, and whether it is rewarded."""

    answer: str
    ending: str = "graded"


class NumberTask(vf.Task[Numbers]):
    """Say the sum of two digits."""

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last message is the answer."""
        if self.data.ending == "raises":
            raise RuntimeError("no grader is in")
        return float(trace.assistant_messages[-1].content.strip() == self.data.answer)


class NumberTaskset(vf.Taskset[NumberTask, vf.TasksetConfig]):
    """Three tasks."""

    def load(self) -> Iterable[NumberTask]:
        """Yield them."""
        for ending in ("graded", "raises", "breaks"):
            yield NumberTask(Numbers(prompt="47", answer="47", ending=ending), self.config.task)


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    """Asks twice, in this process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        """Hold the conversation."""
        if data.ending == "breaks":
            raise RuntimeError("the sandbox is gone")
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=None) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                headers = {"Authorization": f"Bearer {secret}"}
                answered = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                answered.raise_for_status()
                messages += [answered.json()["choices"][0]["message"], {"role": "user", "content": "1"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["NumberTaskset", "TwoTurns"]
