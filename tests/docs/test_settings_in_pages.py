"""Every setting that a page for users names is one that there is, in the text and in its TOML."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest

from messages.base import message_types
from tests.docs.snippets import snippets

DOCS: Final = Path(__file__).parents[2] / "docs"
PAGES: Final = sorted(page for folder in ("start", "train", "run") for page in (DOCS / folder).glob("*.md"))
ROW: Final = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
KEYS: Final = frozenset(ROW.findall((DOCS / "reference" / "settings.md").read_text(encoding="utf-8")))
TABLES: Final = frozenset(key.partition(".")[0] for key in KEYS if "." in key)
NAMED: Final = re.compile(rf"[`=\s]((?:{'|'.join(sorted(TABLES))})\.[a-z_][a-z_0-9.<>]*)(?![\w*])")
BLOCK: Final = re.compile(r"^```(\w*)$.*?^```$", re.MULTILINE | re.DOTALL)
LOGIN: Final = frozenset({"user", "password", "token"})  # of bus.credentials, a file of its own
EVENTS: Final = frozenset(message_type.topic for message_type in message_types().values())


def in_general(key: str) -> str:
    """The key as the page of all settings writes it."""
    key = re.sub(r"^(engines|nodes|reward\.judges|reward\.limits)\.(?:[a-z0-9]+|<pool>)(?=\.|$)", r"\1.<name>", key)
    return re.sub(r"^(data|eval)\.(?!0(?:\.|$))", r"\1.0.", key)


def exists(key: str) -> bool:
    """A key, a table, or a key of a table that may hold anything, as reward.graders.words."""
    key = in_general(key)
    parts = key.split(".")
    is_table = any(known.startswith(f"{key}.") for known in KEYS)
    return is_table or any(".".join(parts[:length]) in KEYS for length in range(1, len(parts) + 1))


def keys_of(value: Any, key: str = "") -> Iterator[str]:
    """The keys of decoded TOML, down to those that are settings or that do not exist."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        yield from keys_of(value[0], f"{key}.0")
    elif isinstance(value, dict) and in_general(key) not in KEYS and (not key or exists(key)):
        for name, below in cast("dict[str, Any]", value).items():
            yield from keys_of(below, f"{key}.{name}" if key else name)
    else:
        yield key


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_a_page_names_settings_that_exist(page: Path) -> None:
    text = BLOCK.sub(lambda block: block[0] if block[1] in ("toml", "sh") else "", page.read_text(encoding="utf-8"))
    named = {name.rstrip(".") for name in NAMED.findall(text)} - EVENTS
    unknown = {name for name in named if not exists(name) and not name.endswith((".toml", ".md", ".jsonl", ".json"))}
    for block in snippets(page, "toml"):
        unknown |= {key for key in keys_of(tomllib.loads(block)) if not exists(key) and key not in LOGIN | {"include"}}
    assert sorted(unknown) == []


def test_a_setting_that_does_not_exist_is_found() -> None:
    assert [exists(key) for key in ("rollout.max_stale", "engines.policy.gpu", "rollout")] == [False, False, True]
    assert exists("engines.policy.sglang.mem_fraction_static")
    assert list(keys_of({"engines": {"policy": {"gpu": 1}}, "data": [{"pth": "x"}]})) == [
        "engines.policy.gpu",
        "data.0.pth",
    ]
    assert NAMED.findall("sets `rollout.tempe = 1` and --set train.num_step=3") == ["rollout.tempe", "train.num_step"]
