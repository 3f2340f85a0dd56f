"""What tests of weights to one tiny engine share."""

from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest

from actors.rollout.sglang.client import SglangClient
from tests.support.tiny_engine import write_config
from tests.support.tiny_models import write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model without weights."""
    directory = tmp_path_factory.mktemp("model")
    write_config(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture
async def client() -> AsyncGenerator[SglangClient]:
    async with aiohttp.ClientSession() as session:
        yield SglangClient(session)
