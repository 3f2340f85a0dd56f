"""Our rendering and tokenising against transformers' own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from actors.buffer.prompts.tokenizing import FastTokenizing, TransformersTokenizing, load_tokenizing
from runtime.data.data_files import DataError
from runtime.models.directory import TOKENIZER_FILES, copy_files

ROOT = Path(__file__).resolve().parents[4]
MODEL = Path(__file__).resolve().parents[4] / "topologies/demo/models/reverse-digits"
TURNS = [
    {"role": "system", "content": "1"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "4"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": 'a <b> & "c" ü'}}]
# Written for this test: each uses something that only transformers' environment has or does.
TEMPLATES = {
    "special tokens": "{{ eos_token }}{% for m in messages %}{{ m.content }}{{ pad_token }}{% endfor %}",
    "whitespace": "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "json": "{% if tools %}{% for t in tools %}{{ t | tojson }}{{ t | tojson(indent=2) }}{% endfor %}{% endif %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set n = namespace(a=0) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}",
    "arguments": "{% if enable_thinking is defined and not enable_thinking %}0{% endif %}{{ messages[-1]['content'] }}",
    "generation prompt": "{{ messages[0].content }}{% if add_generation_prompt %}9{% endif %}",
    "date": "{{ strftime_now('%Y') }}",
}


def model_with(tmp_path: Path, template: Any) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return directory


def both(directory: Path) -> tuple[FastTokenizing, TransformersTokenizing]:
    return FastTokenizing(directory), TransformersTokenizing(AutoTokenizer.from_pretrained(directory))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    ours, theirs = both(model_with(tmp_path, template))
    for tools in (None, TOOLS):
        expected = theirs.render(TURNS, tools=tools, enable_thinking=False)
        assert ours.render(TURNS, tools=tools, enable_thinking=False) == expected


def test_the_shipped_tokenizer_is_the_same_in_transformers() -> None:
    ours, theirs = both(MODEL)
    text = ours.render([{"role": "user", "content": "47"}])
    assert text == theirs.render([{"role": "user", "content": "47"}])
    texts = [text, "0123456789", "\\boxed{12}<end><pad>"]
    assert [ids.tolist() for ids in ours.encode(texts)] == [ids.tolist() for ids in theirs.encode(texts)]
    assert ours.encode(texts)[2].tolist() == [4, 7, 8, 5, 1, 0]


def test_a_template_file_goes_before_the_setting(tmp_path: Path) -> None:
    directory = model_with(tmp_path, "1")
    (directory / "chat_template.jinja").write_text("2")
    ours, theirs = both(directory)
    assert ours.render(TURNS) == theirs.render(TURNS) == "2"


def test_rows_with_tools_take_the_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "1"}, {"name": "tool_use", "template": "2"}]
    ours, theirs = both(model_with(tmp_path, named))
    assert [ours.render(TURNS), ours.render(TURNS, tools=TOOLS)] == ["1", "2"]
    assert [theirs.render(TURNS), theirs.render(TURNS, tools=TOOLS)] == ["1", "2"]


def test_a_template_for_tools_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    directory = model_with(tmp_path, "0")
    (directory / "additional_chat_templates").mkdir()
    (directory / "chat_template.jinja").write_text("1")
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("2")
    (tmp_path / "copy").mkdir()
    copy_files(directory, tmp_path / "copy", TOKENIZER_FILES)
    for place in (directory, tmp_path / "copy"):
        ours, theirs = both(place)
        assert [ours.render(TURNS), ours.render(TURNS, tools=TOOLS)] == ["1", "2"]
        assert [theirs.render(TURNS), theirs.render(TURNS, tools=TOOLS)] == ["1", "2"]


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    ours, theirs = both(model_with(tmp_path, "{{ raise_exception('roles must alternate') }}"))
    for tokenizing in (ours, theirs):
        with pytest.raises(ValueError, match="roles must alternate"):
            tokenizing.render(TURNS)


@pytest.mark.parametrize("tag", ["include 'x'", "import 'x' as x", "extends 'x'"])
def test_a_template_that_wants_another_file_is_refused(tmp_path: Path, tag: str) -> None:
    ours, theirs = both(model_with(tmp_path, f"{{% {tag} %}}"))
    with pytest.raises(ValueError, match="it includes 'x', but a chat template must be a single file"):
        ours.render(TURNS)
    with pytest.raises(ValueError, match=r"the chat template fails: .*no loader"):
        theirs.render(TURNS)


@pytest.mark.parametrize("fails", ["1 / 0", "1 + 'x'", "[][3].x", "x()", "'%d' % 'x'"])
def test_a_template_that_fails_says_how(tmp_path: Path, fails: str) -> None:
    for tokenizing in both(model_with(tmp_path, f"{{{{ {fails} }}}}")):
        with pytest.raises(ValueError, match="the chat template"):
            tokenizing.render(TURNS)


def test_a_template_cannot_reach_the_interpreter(tmp_path: Path) -> None:
    ours = FastTokenizing(model_with(tmp_path, "{{ ''.__class__.__mro__ }}"))
    with pytest.raises(ValueError, match="unsafe"):
        ours.render(TURNS)


def test_a_template_with_a_syntax_error_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the chat template of .*: line 2: unexpected"):
        FastTokenizing(model_with(tmp_path, "{{ 1 }}\n{{ messages }")).render(TURNS)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("chat_template.jinja", b"\xff\xfe{{", "chat_template.jinja: .*can't decode byte 0xff"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json: JSON is malformed"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json: Expected `object`, got `array`"),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', "a list needs objects with name and template"),
    ],
)
def test_a_file_of_the_tokenizer_that_cannot_be_read_is_named(
    tmp_path: Path, file: str, content: bytes, problem: str
) -> None:
    directory = model_with(tmp_path, "{{ 1 }}")
    (directory / file).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        load_tokenizing(str(directory))


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        FastTokenizing(model_with(tmp_path, None)).render(TURNS)


OWN_TOKENIZER = """
import json
import os
from pathlib import Path

from transformers import PreTrainedTokenizer

Path(os.environ["RAN"]).write_text("ran")


class OwnTokenizer(PreTrainedTokenizer):
    def __init__(self, vocab_file=None, **options):
        self._ids = {chr(code): code - 32 for code in range(32, 127)}
        super().__init__(**options)

    @property
    def vocab_size(self):
        return len(self._ids)

    def get_vocab(self):
        return dict(self._ids)

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self._ids[token]

    def _convert_id_to_token(self, index):
        return chr(index + 32)
"""
LOADS = """
import os
import sys

from actors.buffer.prompts.tokenizing import load_tokenizing
from runtime.data.data_files import DataError

for trusted in (False, True):
    try:
        print(load_tokenizing(sys.argv[1], trust_remote_code=trusted).encode(["!#"])[0].tolist())
    except DataError:
        print("refused")
    print(os.path.exists(os.environ["RAN"]))
"""


@pytest.mark.slow
def test_code_of_a_tokenizer_runs_only_when_trusted(tmp_path: Path) -> None:
    """In a process of its own: transformers keeps the code that it has imported."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "vocab.json").write_text("{}")
    (model / "own_tokenizer.py").write_text(OWN_TOKENIZER)
    names = {"auto_map": {"AutoTokenizer": ["own_tokenizer.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    (model / "tokenizer_config.json").write_text(json.dumps(names))
    environment = {**os.environ, "RAN": str(tmp_path / "ran"), "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(model)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.split("\n")[:4] == ["refused", "False", "[1, 3]", "True"], done.stderr
