"""A stranger's model directory opens, copies and shows no file outside of it, whatever links it has."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from actors.buffer.prompts.tokenizing import load_tokenizing
from actors.buffer.storage.recorder import _copy_tokenizer  # pyright: ignore[reportPrivateUsage]
from actors.observer.samples import _decoder_of  # pyright: ignore[reportPrivateUsage]
from actors.rollout.preflight import _has_chat_template  # pyright: ignore[reportPrivateUsage]
from actors.rollout.sglang.served_model import ServedModel
from actors.tiny_engine.http.chat import ChatTemplate
from actors.tiny_engine.model.text import Text
from actors.trainer.models.files import copy_small_files, file_source
from actors.trainer.step.probe import special_tokens
from bin.start_topology import main
from runtime.data.data_files import DataError
from runtime.models.config import read_model
from runtime.models.directory import COPIED_FILES, ModelError, check_links, file_of
from runtime.models.safetensors import INDEX_FILE, SINGLE_FILE, safetensors_files

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "topologies/demo/models/reverse-digits"
SECRET = b'{"aws_secret_access_key": "AKIA-do-not-show"}'
NAMES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "my_token.json", "tokenizer.model", "notes.txt", "LICENSE"),
    *("modeling_x.py", "model.safetensors", "model.safetensors.index.json", "extra/model.json", "pytorch_model.bin"),
)
CHECKED = (
    "config.json",
    "tokenizer.json",
    "my_token.json",
    "extra/model.json",
)  # by the whole command: half a second each


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "home" / ".aws"
    file.parent.mkdir()
    file.write_bytes(SECRET)
    file.chmod(0o600)
    return file


def model_at(place: Path) -> Path:
    shutil.copytree(MODEL, place)
    (place / "generation_config.json").write_text("{}")
    return place


def linked(model: Path, name: str, target: Path | str) -> Path:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(target)
    return model


def contents(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["absolute", "relative", "of a folder", "twice"])
def test_a_link_out_is_refused_with_its_target_and_never_copied(
    tmp_path: Path, secret: Path, name: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_at(tmp_path / "model")
    match way:
        case "absolute":
            linked(model, name, secret)
        case "relative":
            linked(model, name, os.path.relpath(secret, (model / name).parent))
        case "of a folder":
            (model / "there").symlink_to(secret.parent)
            linked(model, name, model / "there" / secret.name)
        case _:
            linked(linked(model, "first", secret), name, model / "first")
    with pytest.raises(ModelError, match=str(secret.parent)):
        check_links(model)
    dump, export = tmp_path / "dump", tmp_path / "export"
    export.mkdir()
    for copy in (lambda: _copy_tokenizer(model, dump), lambda: copy_small_files(model, export, tokenizer=True)):
        with suppress(ModelError):
            copy()
    assert SECRET not in contents(dump) + contents(export)
    if way == "absolute" and name in CHECKED:
        assert main([str(ROOT / "topologies/laptop.toml"), "--check", "--set", f"model.hf_checkpoint={model}"]) == 2
        assert f"to {secret}" in capsys.readouterr().err


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "the trainer's and the tiny engine's config": ("config.json", read_model),
    "its end tokens": ("generation_config.json", read_model),
    "the served model": ("config.json", ServedModel.read),
    "the served model's end tokens": ("generation_config.json", ServedModel.read),
    "the served model's tokenizer": ("tokenizer.json", lambda model: ServedModel.read(model).tokens()),
    "the served model's special tokens": ("tokenizer_config.json", lambda model: ServedModel.read(model).end_ids),
    "prompts": ("tokenizer.json", lambda model: load_tokenizing(str(model))),
    "the chat template": ("chat_template.jinja", lambda model: load_tokenizing(str(model))),
    "a file that transformers reads": ("added_tokens.json", lambda model: load_tokenizing(str(model))),
    "the tiny engine's tokenizer": ("tokenizer.json", Text.load),
    "the tiny engine's template": ("chat_template.jinja", ChatTemplate.load),
    "the tiny engine's special tokens": ("tokenizer_config.json", ChatTemplate.load),
    "the template of a judge": ("tokenizer_config.json", _has_chat_template),
    "weights": (SINGLE_FILE, file_source),
    "an index": (INDEX_FILE, safetensors_files),
}


@pytest.mark.parametrize("reader", READERS)
def test_each_reader_refuses_a_link_out(tmp_path: Path, secret: Path, reader: str) -> None:
    model = model_at(tmp_path / "model")
    name, read = READERS[reader]
    linked(model, name, secret)
    with pytest.raises((ModelError, DataError), match=str(secret)):
        read(model)


def test_a_page_and_a_probe_do_without_a_file_that_is_a_link_out(tmp_path: Path) -> None:
    elsewhere, model = tmp_path / "tokenizer.json", model_at(tmp_path / "model")
    shutil.copyfile(MODEL / "tokenizer.json", elsewhere)
    assert _decoder_of(model) is not None
    assert special_tokens(model)
    linked(model, "tokenizer.json", elsewhere)
    assert _decoder_of(model) is None
    assert not special_tokens(model)


def test_the_cache_of_the_hub_is_links_and_works(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in MODEL.iterdir():
        shutil.copyfile(file, blobs / f"of-{file.name}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"of-{file.name}"))
    (snapshot / "onnx").mkdir()
    (snapshot / "onnx" / "model.json").symlink_to(Path("..", "..", "..", "blobs", "of-config.json"))
    (tmp_path / "here").symlink_to(snapshot)
    for directory in (snapshot, tmp_path / "here"):
        check_links(directory)
        assert read_model(directory) == read_model(MODEL)
        assert load_tokenizing(str(directory)).encode(["12"])[0].tolist()
        target = tmp_path / f"export-{directory.name}"
        target.mkdir()
        copy_small_files(directory, target, tokenizer=True)
        assert (target / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
        assert not (target / "tokenizer.json").is_symlink()


@pytest.mark.parametrize("way", ["another model's blobs", "blobs that are a link", "no snapshot"])
def test_only_the_blobs_beside_a_snapshot_are_allowed(tmp_path: Path, secret: Path, way: str) -> None:
    own, folder = tmp_path / "models--a--b", "snapshots" if way != "no snapshot" else "versions"
    other = tmp_path / "models--c--d" / "blobs"
    for blobs in (other, own / "blobs"):
        blobs.mkdir(parents=True)
        shutil.copyfile(secret, blobs / "x")
    if way == "blobs that are a link":
        shutil.rmtree(own / "blobs")
        (own / "blobs").symlink_to(other)
    model = model_at(own / folder / "0123")
    linked(model, "config.json", other / "x" if way == "another model's blobs" else own / "blobs" / "x")
    with pytest.raises(ModelError, match="leads out of"):
        read_model(model)
    with pytest.raises(ModelError, match="leads out of"):
        check_links(model)


def test_links_inside_of_a_directory_work(tmp_path: Path) -> None:
    model = model_at(tmp_path / "model")
    (model / "config.json").rename(model / "config.of-today.json")
    linked(model, "config.json", "config.of-today.json")
    linked(model, "nowhere.json", "no-such-file")
    check_links(model)
    assert read_model(model) == read_model(MODEL)
    assert file_of(model, "nowhere.json") is None


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    model = model_at(tmp_path / "model")
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")  # reading it would wait for ever
    with pytest.raises(ModelError, match=r"config\.json: is not a regular file"):
        read_model(model)


def test_only_files_of_known_names_are_copied(tmp_path: Path) -> None:
    model, export, dump = model_at(tmp_path / "model"), tmp_path / "export", tmp_path / "dump"
    code = '{"auto_map": {"AutoModel": "modeling_own.Own", "AutoTokenizer": ["tokenization_own.Own", null]}}'
    (model / "tokenizer_config.json").write_text(code)
    unknown = ("my_token.json", "hf_token", "vocab.secret", "tokenizer.key", ".env", "id_rsa", "chat_template.txt")
    named = ("modeling_own.py", "tokenization_own.py", "special_tokens_map.json", "LICENSE")
    for name in (*unknown, *named, "other.py", "pytorch_model.bin"):
        (model / name).write_text(name)
    export.mkdir()
    copy_small_files(model, export, tokenizer=True)
    _copy_tokenizer(model, dump)
    assert {path.name for path in export.iterdir()} <= {*COPIED_FILES, *named}
    assert {*named, "config.json", "tokenizer.json"} <= {path.name for path in export.iterdir()}
    assert {"config.json", "tokenizer.json", "special_tokens_map.json"} <= {path.name for path in dump.iterdir()}
    assert not {*unknown, "other.py", *named[:2]} & {path.name for path in dump.iterdir()}
