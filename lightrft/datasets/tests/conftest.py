"""Small data files and the test tokenizer."""
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from lightrft.tests.support import tiny


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny.tokenizer()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """``write(rows, name)`` -> path of a jsonl file."""

    def save(rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return save
