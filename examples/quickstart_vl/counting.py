"""The task of the quickstarts that see and hear: count the targets among decoys in three rows of three cells.

A layout ``c.s|.cc|...`` has targets (three kinds: a, b, c), decoys (s) and empty cells; the answer to this one is
``<think>1+2+0</think>\\boxed{3}``. The demonstrations often count the decoys of a row too, so supervised training
learns the method and the error. Reinforcement learning on the exact answer alone repairs the error. No torch here.
"""
import hashlib
import random
from collections.abc import Callable
from typing import Any

TARGETS, DECOY, EMPTY = "abc", "s", "."
SHARES = (0.35, 0.10)  # of targets and decoys among the cells; 0.3 or more of the held-out layouts have no decoy
CARELESS = 0.6  # probability that a demonstration counts the decoys of a row
HELD_OUT = 10  # one layout in this many is held out

Layout = tuple[str, str, str]
Medium = Callable[[Layout], bytes]


def draw_layout(rng: random.Random) -> Layout:
    """Draw nine cells, each on its own."""
    cells = rng.choices([*TARGETS, DECOY, EMPTY],
                        [SHARES[0] / len(TARGETS)] * len(TARGETS) + [SHARES[1], 1 - sum(SHARES)], k=9)
    return "".join(cells[:3]), "".join(cells[3:6]), "".join(cells[6:])


def counts(layout: Layout) -> list[int]:
    """Return the targets in each row."""
    return [sum(cell in TARGETS for cell in row) for row in layout]


def solution(layout: Layout, rng: random.Random, careless: float = 0.0) -> str:
    """Write a worked answer that counts the decoys of each row with probability ``careless``."""
    seen = [count + (rng.random() < careless) * row.count(DECOY) for count, row in zip(counts(layout), layout)]
    return f"<think>{'+'.join(map(str, seen))}</think>\\boxed{{{sum(seen)}}}"


def is_held_out(layout: Layout) -> bool:
    """Return True if a layout belongs to the test split, by its hash."""
    digest = hashlib.blake2b("|".join(layout).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0


def distinct_layouts(count: int, rng: random.Random, held_out: bool) -> list[Layout]:
    """Return ``count`` different layouts of one split."""
    chosen: dict[Layout, None] = {}
    while len(chosen) < count:
        layout = draw_layout(rng)
        if is_held_out(layout) == held_out:
            chosen[layout] = None
    return list(chosen)


def prompt_row(layout: Layout, split: str, index: int, source: str) -> dict[str, Any]:
    """Return one row in the schema that verl reads, without its medium."""
    return {
        "data_source": source,
        "ability": "counting",
        "reward_model": {"style": "rule", "ground_truth": str(sum(counts(layout)))},
        "extra_info": {"split": split, "index": index, "rows": counts(layout), "layout": "|".join(layout)},
    }  # yapf: disable


class Counting:
    """Makes the rows of a counting task.

    Args:
        source: name of the data set.
        question: what is asked, with the placeholder of the medium.
        column: column of the media, e.g. ``images``.
        suffix: of the names of the media, e.g. ``.png``.
        render: turns a layout into the bytes of a file.
    """

    def __init__(self, source: str, question: str, column: str, suffix: str, render: Medium) -> None:
        self.source, self.question, self.column, self.suffix, self.render = source, question, column, suffix, render

    def prompt_rows(self, count: int, split: str, seed: int) -> list[dict[str, Any]]:
        """Return ``count`` distinct problems of ``split`` ("train" or "test")."""
        layouts = distinct_layouts(count, random.Random(f"{split}-{seed}"), split == "test")
        return [self._chat(layout, f"{split}_{i}") | prompt_row(layout, split, i, self.source)
                for i, layout in enumerate(layouts)]  # yapf: disable

    def demonstration_rows(self, count: int, seed: int, careless: float = CARELESS) -> list[dict[str, Any]]:
        """Return ``count`` careless demonstrations on training layouts, as chat messages."""
        rng = random.Random(f"sft-{seed}")
        layouts = distinct_layouts(count, rng, held_out=False)
        return [self._chat(layout, f"sft_{i}", solution(layout, rng, careless)) for i, layout in enumerate(layouts)]

    def _chat(self, layout: Layout, name: str, answer: str | None = None) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.question}]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        return {"messages": messages, self.column: [{"bytes": self.render(layout), "path": name + self.suffix}]}
