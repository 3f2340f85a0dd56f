"""An adapter plays an environment against the listener, with scripted answers of the model."""

import json
import os
from pathlib import Path
from typing import Any

import anyio

from actors.rollout.sessions.command import words_of
from actors.sessions.listener import ListenerSettings, listening
from runtime.settings.tables.agent import AgentConfig
from tests.support.scripted_sessions import Script, ScriptedSessions, connected


async def played(
    adapter: Any, python: str, run_dir: Path, script: Script, *arguments: str, ends: int = 0, **metadata: Any
) -> tuple[ScriptedSessions, str]:
    """Play an episode; return the sessions, and what the adapter printed as its errors.

    Args:
        adapter: its name.
        python: interpreter that has its package.
        run_dir: of the listener, and of the file with the row.
        script: answers of the model.
        arguments: of the adapter.
        ends: the exit code that it has to have.
        metadata: of the row.
    """
    sessions = ScriptedSessions("s1", script=script)
    file = run_dir / "row.json"
    file.write_text(json.dumps({"prompt": "Walk.", "metadata": metadata, "index": 0}))
    words = words_of(AgentConfig(adapter=adapter, command=(python, *arguments)))
    async with listening(run_dir, ListenerSettings()) as url, connected(run_dir, sessions):
        pair = sessions.pairs["s1"]
        of_model = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": pair.model.reveal()}
        given = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
        with anyio.fail_after(200):
            done = await anyio.run_process(
                words,
                env={**given, **of_model, "PHYSARUM_ROW": str(file)},
                input=pair.control.reveal().encode(),
                check=False,
            )
    printed = done.stderr.decode()
    assert done.returncode == ends, printed[-2000:]
    return sessions, printed
