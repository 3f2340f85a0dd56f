"""docs/train/data.md, sft.md and own-functions.md: their files, slices, sources and demonstrations do what they say."""

import json
from pathlib import Path

import msgspec
import pytest

from actors.buffer.prompts.generated import GeneratedPrompts
from actors.buffer.prompts.source import load_prompts
from actors.buffer.prompts.source_worker import Draw, Hello, Source
from actors.buffer.prompts.tokenizing import load_tokenizing
from actors.buffer.prompts.turns import pieces_of
from messages import Prompt
from runtime.data.rows import read_rows
from runtime.functions.load import load
from runtime.functions.table import SOURCE, SOURCE_CLASS
from runtime.ledger.state import GroupOutcome
from runtime.settings.load import load_topology
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.topology import Topology
from tests.docs.snippets import snippet, snippets
from tests.support.checks import function_problems

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "train" / "data.md"
SFT = PAGE.with_name("sft.md")
OWN = PAGE.with_name("own-functions.md")
MODEL = ROOT / "topologies/demo/models/reverse-digits"
START = f"""include = "laptop.toml"
rollout.shuffle = false
model.hf_checkpoint = "{MODEL}"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files."""
    (tmp_path / "sums.jsonl").write_text(snippets(PAGE, "json")[0])
    for block in snippets(PAGE, "python"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_table(folder: Path, index: int) -> Topology:
    """The laptop topology with the data tables of one block."""
    file = folder / f"topology{index}.toml"
    file.write_text(START + snippets(PAGE, "toml")[index])
    return load_topology(file).topology


def test_the_rows_of_the_page_are_read_by_the_columns_it_names(folder: Path) -> None:
    first, second = read_rows(with_table(folder, 0).data[0])
    assert (first.prompt, first.label, first.metadata) == ("What is 12 + 30?", 42, {})
    assert (second.prompt[0], second.label) == ({"role": "user", "content": "What is 5 + 5?"}, 10)
    assert second.metadata == {"level": 1}


def test_the_slices_of_the_page_split_a_file(folder: Path) -> None:
    topology = with_table(folder, 1)
    columns = {"input_key": "question", "apply_chat_template": True}
    paths = [topology.data[0].path, topology.eval[0].path]
    split = [list(read_rows(DataConfig(name="d", path=path, **columns))) for path in paths]
    assert [[row.number for row in rows] for rows in split] == [[0], [1]]


def test_the_weights_of_the_page_mix_its_files(folder: Path) -> None:
    for name in ("easy", "hard"):
        rows = [{"input": str(number), "label": 1} for number in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts(msgspec.structs.replace(with_table(folder, 2), eval=()))
    assert [prompts.prompt(number).data for number in range(8)] == ["easy", "easy", "hard", "easy"] * 2


def test_the_functions_of_the_page_make_prompts(folder: Path) -> None:
    topology = with_table(folder, 3)
    assert function_problems(topology) == []
    source = topology.data[0].source
    assert source == f"{folder}/my_data.py:addition"
    row = load(SOURCE, "data.0.source", source).function(7)
    assert eval(row["input"].removeprefix("What is ").removesuffix("?")) == row["label"]
    ids = msgspec.structs.replace(topology.data[0], source="my_ids.py:counting", label_key=None)
    prompts = load_prompts(msgspec.structs.replace(topology, data=(ids,), eval=()))
    assert isinstance(prompts, GeneratedPrompts)
    found: list[Prompt] = [prompts.prompt(number) for number in (0, 9)]
    prompts.close()
    assert [prompt.prompt_ids.tolist() for prompt in found] == [[2, 3], [2, 5]]
    assert found[1].metadata == {"number": 9}


def test_the_class_of_the_page_of_functions_draws_and_goes_on_from_its_state(folder: Path) -> None:
    (folder / "my_source.py").write_text(snippet(OWN, "python", "# my_source.py"))
    file = folder / "source.toml"
    file.write_text(START + snippet(OWN, "toml", "my_source.py"))
    topology = load_topology(file).topology
    assert function_problems(topology) == []
    name = topology.data[0].source_class or ""
    source = Source(load(SOURCE_CLASS, "k", name).function, name, Hello())
    drawn = source.answer(Draw(first=0, count=32))
    outcomes = tuple(GroupOutcome(number=n, kind="kept", rewards=(float(n != 5),)) for n in range(32))
    again = source.answer(Draw(first=32, count=2, outcomes=outcomes, restart=True, state=drawn.state))
    assert msgspec.json.decode(drawn.rows[0])["label"] < 19
    assert max(msgspec.json.decode(row)["label"] for row in again.rows) > 18
    assert again.state is not None
    assert msgspec.json.decode(again.state.content)[0] == 2  # digits: the next level


def test_the_demonstrations_of_the_page_train_the_turns_it_says(folder: Path) -> None:
    (folder / "talks.jsonl").write_text(snippets(SFT, "json")[0])
    file = folder / "sft.toml"
    file.write_text('include = "boxed-copy-sft.toml"\n' + snippets(SFT, "toml")[0])
    topology = load_topology(file).topology
    tokenizing = load_tokenizing(str(MODEL))
    trained = [
        [piece.text for piece in pieces_of(row.prompt, tokenizing) if piece.trains and not isinstance(row.prompt, str)]
        for row in read_rows(topology.data[0])
    ]
    assert trained == [["4<end>"], ["No, 6.<end>"]]
