"""Secrets do not show, whoever prints what holds them."""

import json
import os
import pickle
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.util.files import write_atomically
from runtime.util.secrets import (
    Login,
    Secret,
    kept_secret,
    make_private,
    read_private,
    split_login,
    with_login,
    without,
    without_logins,
)

MARK = "swordfish"
TEXTS = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1)


def test_a_secret_is_hidden_however_it_is_printed() -> None:
    secret = Secret(MARK)
    login = Login(user="me", password=secret)
    shown = [
        f"{secret} {secret!r} {secret!s:>40}",
        str(secret),
        repr([secret]),
        "".join([secret]),
        json.dumps({"key": secret}),
        msgspec.json.encode({"key": secret}, enc_hook=repr).decode(),
        msgspec.json.encode(login, enc_hook=repr).decode(),
        repr(login),
    ]
    assert all("***" in text and MARK not in text for text in shown)
    assert secret.reveal() == MARK
    with pytest.raises(TypeError):  # without a hook it is not encoded at all
        msgspec.json.encode(login)


def test_a_secret_is_neither_pickled_nor_equal_to_its_text() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(Secret(MARK))
    assert Secret(MARK) == Secret(MARK)
    assert Secret(MARK) != Secret("other")
    assert Secret(MARK) != "***"
    assert len({Secret.random() for _ in range(10)}) == 10


@given(user=st.none() | TEXTS, password=TEXTS)
def test_a_login_survives_the_url(user: str | None, password: str) -> None:
    login = Login(user=user, password=Secret(password))
    url = with_login("nats://a:1,tls://b", login)
    assert split_login(url) == ("nats://a:1,tls://b", login)
    assert without_logins(f"no connection to {url}") == "no connection to nats://***@a:1,tls://***@b"


def test_a_url_without_a_login_stays() -> None:
    assert split_login("nats://a:1,nats://b:2") == ("nats://a:1,nats://b:2", None)
    assert with_login("nats://a:1", None) == "nats://a:1"
    assert without_logins("nats://a:1 and me@home") == "nats://a:1 and me@home"


def test_servers_of_one_bus_have_one_login() -> None:
    with pytest.raises(ValueError, match="different logins: nats://b,nats://d"):
        split_login("nats://a@b,nats://c@d")


def test_what_is_printed_loses_known_secrets() -> None:
    assert without(b"api_key='swordfish'", [Secret(MARK)]) == b"api_key='***'"


def test_a_secret_is_kept_where_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "bus" / "password"
    secret = kept_secret(path)
    assert kept_secret(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"others may read it \(mode 640\): chmod 600"):
        kept_secret(path)


def test_a_private_file_is_never_open_to_others(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_atomically(tmp_path / "a", b"x")
        make_private(tmp_path / "dir")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "dir").stat().st_mode & 0o777 == 0o700
    assert read_private(tmp_path / "a") == "x"
    (tmp_path / "open").mkdir(mode=0o755)
    make_private(tmp_path / "open")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700
