"""A tokenizer of each kind."""

from __future__ import annotations

import pytest
from small_tokenizers import (
    KINDS,
    write_tokenizer,
)

from megavm.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=sorted(KINDS))
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(write_tokenizer(directory, KINDS[request.param]()))
