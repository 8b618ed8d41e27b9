"""Save rollouts as JSON lines, and show a few of them on the console."""
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightrft.utils.logging import get_logger

_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # json.dumps would build one per row
_SHOWN = ("reward", "advantage", "reference", "finish_reason", "response_length")


def jsonable(value: Any) -> Any:
    """Convert ``value`` for JSON: numbers that it lacks (nan, inf) to None; tuples, arrays and tensors to lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return jsonable(value.tolist()) if hasattr(value, "tolist") else str(value)


def json_line(row: dict[str, Any]) -> str:
    """Encode a row as one line of a jsonl file."""
    try:
        return _ENCODE(row) + "\n"
    except (TypeError, ValueError):  # numbers and types that JSON lacks; rare, and slower
        return json.dumps(jsonable(row), ensure_ascii=False) + "\n"


def save_rollout(folder: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the rows of one rollout to ``folder/step_N.jsonl``, one sample per line, in order; an existing file is
    replaced, but only when all is written.

    Keys are those of :func:`lightrft.trainer.scores.log_row`, with ``step`` as the first one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step}.jsonl"
    part = path.with_suffix(".jsonl.part")
    with open(part, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json_line({"step": step, **row}))
    os.replace(part, path)
    return path


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def shorten(text: str, width: int) -> str:
    """Cut ``text`` in the middle if it is longer than ``width`` characters, with the number of those left out."""
    half = width // 2
    return text if len(text) <= width else f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def format_samples(rows: Iterable[Mapping[str, Any]], width: int = 1200) -> str:
    """Format rows: prompt, response (cut in the middle at ``width`` characters each), verdict."""
    blocks = []
    for number, row in enumerate(rows, 1):
        facts = "  ".join(f"{name} {_shown(row[name])}" for name in _SHOWN if row.get(name) is not None)
        prompt, response = (shorten(row[name].strip(), width) for name in ("prompt", "response"))
        blocks.append(f"--- {number} ---  {facts}\n  prompt:   {prompt}\n  response: {response}")
    return "\n".join(blocks)


def print_samples(rows: Iterable[Mapping[str, Any]], title: str) -> None:
    """Show rows in the log of rank 0, under ``title``."""
    get_logger().info(f"{title}\n{format_samples(rows)}")
