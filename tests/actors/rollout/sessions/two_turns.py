"""An agent that knows nothing of this project: asks the model, calls its tool, and asks again."""

import json
import os
import sys
import urllib.request
from pathlib import Path

row = json.loads(Path(os.environ["PHYSARUM_ROW"]).read_text())
messages = [{"role": "user", "content": row["prompt"]}]


def ask() -> str:
    """Return the next message of the model, which is added to the conversation."""
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 4}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        message = json.loads(response.read())["choices"][0]["message"]
    messages.append({"role": "assistant", "content": message["content"]})
    return str(message["content"])


def note(word: str) -> None:
    """Append a word to the file of the command line or of the row, if there is one."""
    if file := sys.argv[1] if sys.argv[1:] else row["metadata"].get("notes"):
        with open(file, "a", encoding="utf-8") as notes:
            notes.write(f"{word}\n")


note(f"starts {os.getpid()}")
breaks = row["metadata"].get("breaks")
if breaks and breaks == len(Path(row["metadata"]["notes"]).read_text().splitlines()):
    sys.exit("no such tool")
called = ask()
total = sum(int(digit) for digit in called if digit.isdigit())
messages.append({"role": "user", "content": str(total % 10)})
ask()
note(f"ends {os.getpid()}")
