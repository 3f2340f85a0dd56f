"""Prompts from a user's function: what it may give, what it is told, and a run's buffer on it."""

import json
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.buffer.prompts.generated import GeneratedPrompts
from actors.buffer.prompts.prompts import PromptReader
from actors.buffer.prompts.source import load_prompts
from actors.buffer.prompts.source_process import SourceProcess, SourceSettings
from actors.buffer.prompts.source_worker import Hello, Source
from actors.buffer.prompts.tokenizing import load_tokenizing
from actors.registry import hosted
from messages import PromptsLoaded, RolloutRequested, UserFunctionRaised
from runtime.bus.bus import Bus
from runtime.data.data_files import DataError
from runtime.functions.load import load
from runtime.functions.table import SOURCE
from runtime.process.actor import InputError
from runtime.process.hosting import host
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from tests.build.topology import topology_with
from tests.support.rollout import announcement

MODEL = Path(__file__).resolve().parents[4] / "topologies/demo/models/reverse-digits"
TOOLS = [{"name": "add"}]


class InThisProcess(SourceProcess):
    """What the process of a function does, without the process."""

    def __init__(self, value: str) -> None:
        super().__init__(SourceSettings(key="data.0.source", value=value, timeout_s=40))
        self.source = Source(load(SOURCE, "data.0.source", value).function, value, Hello())

    def _start(self) -> None:
        pass

    def _ask(self, request: Any, *_: Any) -> Any:
        return self.source.answer(request)


def made(tmp_path: Path, row: str, *, before: str = "", limit: int | None = None, **settings: Any) -> GeneratedPrompts:
    """Prompts by a function whose return value is given as code; `number` is its argument."""
    file = tmp_path / "mine.py"
    file.write_text(f"{before}\ndef source(number):\n    return {row}\n")
    data = DataConfig(**{"name": "d", "source": f"{file}:source", "rm_type": "f1", **settings})
    reader = PromptReader(load_tokenizing(str(MODEL)), limit)
    return GeneratedPrompts(InThisProcess(f"{file}:source"), data, reader)


def error(tmp_path: Path, row: str, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        made(tmp_path, row, **settings)
    return str(caught.value).removeprefix(f"{tmp_path}/mine.py:")


def test_a_number_gives_a_prompt_as_a_row_of_a_file_would(tmp_path: Path) -> None:
    row = '{"input": str(number), "answer": -number, "metadata": {"k": (number,)}, "tools": [{"name": "add"}]}'
    prompts = made(tmp_path, row, label_key="answer", apply_chat_template=True)
    prompt = prompts.prompt(12)
    assert (prompt.data, prompt.row, prompt.text, prompt.label) == ("d", 12, "<user>12<assistant>", -12)
    assert (prompt.metadata, prompt.rm_type) == ({"k": [12], "tools": TOOLS}, "f1")
    assert prompt.prompt_ids.tolist() == [2, 7, 8, 3]  # as of a file, in test_source.py
    assert prompts.prompt(10**12).row == 10**12


def test_token_ids_may_take_the_prompts_place(tmp_path: Path) -> None:
    prompt = made(tmp_path, '{"prompt_ids": [2, number % 5], "label": 1}', apply_chat_template=True).prompt(4)
    assert (prompt.text, prompt.prompt_ids.tolist()) == ("", [2, 4])
    (tmp_path / "both").mkdir()
    both = made(tmp_path / "both", '{"prompt_ids": [9], "input": "not in this vocabulary"}').prompt(0)
    assert (both.text, both.prompt_ids.tolist()) == ("not in this vocabulary", [9])


def test_token_ids_in_a_file_are_a_column_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input": "12", "prompt_ids": [9]}) + "\n")
    data = [{"name": "d", "path": str(path), "rm_type": "f1"}]
    prompts = load_prompts(topology_with(model={"hf_checkpoint": str(MODEL)}, data=data))
    assert prompts.prompt(0).prompt_ids.tolist() != [9]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("1 / number", "source(0): raised ZeroDivisionError: division by zero"),
        ("exit(3)", "source(0): raised SystemExit: 3"),
        ("None", "source(0): expected a dict of JSON values: "),
        ("{'input': object()}", "source(0): expected a dict of JSON values: "),
        ("{'label': 1}", "source(0): no column 'input' (input_key); there are: label"),
        ("{'input': ''}", "source(0): input is empty"),
        ("{'prompt_ids': []}", "source(0): prompt_ids = []: expected a list of token ids"),
        ("{'prompt_ids': [-1]}", "source(0): prompt_ids = [-1]: expected a list of token ids"),
        ("{'input': '1' * (number + 1)}", "source(3): the prompt has 4 tokens, over the limit of 3"),
        (
            "{'input': '1', 'metadata': {'rm_type': 'os:system'}}",
            "source(0): rm_type = 'os:system': a row may name only",
        ),
    ],
)
def test_what_a_function_does_wrong_is_told_with_its_number(tmp_path: Path, row: str, said: str) -> None:
    assert error(tmp_path, row, limit=3).startswith(said)


def test_a_function_that_is_not_of_its_number_alone_is_refused(tmp_path: Path) -> None:
    row, before = '{"input": str(next(counter))}', "import itertools\ncounter = itertools.count()\n"
    assert error(tmp_path, row, before=before) == (
        "source: returned another row for the same number on a second call; restarts need the same row"
    )


def test_a_function_that_makes_other_prompts_has_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    event = made(tmp_path, '{"input": str(number)}').loaded[0]
    other = made(tmp_path / "other", '{"input": str(number + 1)}').loaded[0]
    assert (event.data, event.num_prompts, event.num_too_long) == ("d", 0, 0)
    assert event.fingerprint != other.fingerprint


def test_a_function_runs_in_a_process_with_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "s")
    file = tmp_path / "mine.py"
    file.write_text(
        "import os, signal, time\n"
        "def source(number):\n"
        "    if number == 1:\n"
        "        time.sleep(60)\n"
        "    if number == 2:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        '    return {"pid": os.getpid(), "secret": os.environ.get("SECRET_OF_THE_RUN")}\n'
    )
    named = {"key": "data.0.source", "value": f"{file}:source"}
    with SourceProcess(SourceSettings(**named, timeout_s=50.0), max_tries=1) as source:
        row = json.loads(source.draw(0, 1).rows[0])
        assert row == {"pid": source.pid, "secret": None}
        with pytest.raises(DataError, match=r"drawing row 2: its process was killed by SIGKILL, 1 time"):
            source.draw(2, 1)
        assert source.pid is None
    with SourceProcess(SourceSettings(**named, timeout_s=0.5), max_tries=1) as source:
        with pytest.raises(DataError, match=r"drawing rows 1 to 1 took longer than 0\.5 s \(data\.0\.timeout_s\)"):
            source.draw(1, 1)
        assert source.pid is None


# A buffer on a function


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    """The function fails at prompt 9."""
    file = tmp_path / "mine.py"
    file.write_text('def source(number):\n    return {"input": "1" * (1 if number < 9 else 1 / 0)}\n')
    data = [{"name": "d", "source": f"{file}:source", "rm_type": "exact_match"}]
    return topology_with(model={"hf_checkpoint": str(MODEL)}, data=data)


@pytest.mark.anyio
async def test_a_run_is_fed_by_a_function(bus: Bus, topology: Topology) -> None:
    async with bus.consume(RolloutRequested, durable="t", ack_wait_s=30, max_ack_pending=8) as tasks:
        async with anyio.create_task_group() as group:
            group.start_soon(host, bus, [hosted("buffer", topology, Path())])
            await bus.publish(announcement(1))
            found = [await tasks.next(40) for _ in range(2)]
            group.cancel_scope.cancel()
    assert sorted(delivery.message.prompt.row for delivery in found if delivery) == [0, 1]
    async with bus.read(PromptsLoaded) as events:
        received = await events.next(40)
    assert received is not None
    assert received.message.num_prompts == 0


@pytest.mark.anyio
async def test_a_function_that_fails_later_ends_the_run_with_its_number(bus: Bus, topology: Topology) -> None:
    rollout = msgspec.structs.replace(topology.rollout, rollout_batch_size=16)
    wide = msgspec.structs.replace(topology, rollout=rollout)
    await bus.publish(announcement(1))
    with pytest.raises(ExceptionGroup) as caught, anyio.fail_after(200):
        await host(bus, [hosted("buffer", wide, Path())])
    (found,) = flatten(caught.value)
    assert isinstance(found, InputError)
    assert str(found).endswith("mine.py:source(9): raised ZeroDivisionError: division by zero")
    async with bus.read(UserFunctionRaised) as events:
        raised = await events.next(40)
    assert raised is not None
    assert raised.message.traceback.endswith("ZeroDivisionError: division by zero")
