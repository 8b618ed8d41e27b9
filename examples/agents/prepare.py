"""Make everything an example of agents needs: a tiny untrained model with its tokenizer, and its data sets.

    AGENT=calculator python examples/agents/prepare.py --out runs/calculator [--seed 42]

writes OUT/base (HF model and tokenizer), OUT/data/{train,test}.parquet (prompts) and OUT/data/sft.parquet
(demonstrations), as the module that AGENT names has them.
"""
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chat import write_base

from lightrft.environments.tools import schema_of

sys.path.append(str(Path(__file__).parents[1] / "quickstart"))
from common import command_line, write_folder  # noqa: E402

AGENT = import_module(os.environ["AGENT"])


def demonstration_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return the demonstrations with the tools that prompts show."""
    tools = json.dumps([schema_of(tool) for tool in getattr(AGENT, "tools", [])])
    return [row | {"tools": tools} for row in AGENT.demonstration_rows(count, seed)]


def main() -> None:
    """Run the command line."""
    args = command_line(__doc__, f"runs/{AGENT.__name__}", rows=(2000, 200, AGENT.DEMONSTRATIONS)).parse_args()
    task: Any = SimpleNamespace(prompt_rows=AGENT.prompt_rows, demonstration_rows=demonstration_rows)
    write_folder(args, lambda folder, seed: write_base(folder, seed, AGENT.WORDS), task)


if __name__ == "__main__":
    main()
