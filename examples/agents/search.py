"""Search over a local index (BM25). Demonstrations search with half of what was asked for more often than not, each in
documents of its own.

``city of Anna`` -> ``<tool_call>{"name": "search", "arguments": {"query": "Anna city"}}</tool_call>``; the tool answers
with the best of 80 documents, ``Anna city Oslo``, and the model repeats its last word. No torch in this file, which
worker processes import.
"""
import math
import random
from collections import Counter
from functools import cache
from typing import Any

NAMES = ["Anna", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivan", "Jane", "Karl", "Lena", "Max", "Nora",
         "Otto", "Pia", "Quin", "Rosa", "Sam", "Tom"]  # yapf: disable
FACTS = {"city": ["Oslo", "Rome", "Lima", "Bern", "Kyiv", "Cork", "Baku", "Riga"],
         "food": ["rice", "soup", "bread", "fish", "nuts", "plums", "eggs", "leek"],
         "animal": ["cat", "dog", "owl", "fox", "hen", "cow", "ant", "bee"],
         "sport": ["golf", "judo", "chess", "polo", "rugby", "darts", "squash", "yoga"]}  # yapf: disable
WORDS = [*NAMES, *FACTS, *(value for values in FACTS.values() for value in values), "search", "query", " of "]
WHOLE = 0.35  # share of demonstrations that search with both words
HELD_OUT = 5  # one question in this many is held out
DEMONSTRATIONS = 300 * 32
OPTIONS = {"prompt_max_len": 32, "generate_max_len": 48, "max_turns": 2, "reward": [f"{__file__}:right"],
           "actor_learning_rate": 5e-4}  # yapf: disable
K1, B = 1.5, 0.75  # of BM25, as is usual
Fact = tuple[str, str, str]


@cache
def facts() -> list[Fact]:
    """Return who, what and which, the same in every process: the documents."""
    rng = random.Random(0)
    return [(name, kind, rng.choice(values)) for name in NAMES for kind, values in FACTS.items()]


@cache
def rarity(word: str) -> float:
    """Return the weight of a word: the rarer in the documents, the higher."""
    having = sum(word in fact for fact in facts())
    return math.log(1 + (len(facts()) - having + 0.5) / (having + 0.5))


def relevance(query: list[str], document: Fact) -> float:
    """Return the score of a document by BM25 (Robertson and Zaragoza 2009)."""
    counts, mean = Counter(document), sum(map(len, facts())) / len(facts())
    length = K1 * (1 - B + B * len(document) / mean)
    return sum(rarity(word) * counts[word] * (K1 + 1) / (counts[word] + length) for word in query)


def search(query: str) -> str:
    """Search for a document.

    Args:
        query: Words that the document has.
    """
    words = query.split()
    return " ".join(max(facts(), key=lambda document: relevance(words, document)))


tools = [search]


def right(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, turns: list[dict[str,
                                                                                                    Any]]) -> float:
    """Return 1.0 if the last turn is the answer, else 0.0: what the tool said earns nothing by itself."""
    last = turns[-1]
    return float(last["role"] == "assistant" and last["content"].strip() == ground_truth)


def questions(held_out: bool) -> list[Fact]:
    """Return the facts of one split: the same persons, asked for something else."""
    return [fact for number, fact in enumerate(facts()) if (number % HELD_OUT == 0) == held_out]


def asked(fact: Fact) -> dict[str, str]:
    """Return the message of the user."""
    return {"role": "user", "content": f"{fact[1]} of {fact[0]}"}


def prompt_rows(count: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Return ``count`` questions of ``split`` ("train" or "test"), or all that there are, with their answers."""
    chosen = questions(split == "test")
    random.Random(f"{split}-{seed}").shuffle(chosen)
    return [{"prompt": [asked(fact)], "reference": fact[2]} for fact in chosen[:count]]


def demonstration_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return ``count`` demonstrations on training questions, as chat messages."""
    rng, known = random.Random(f"sft-{seed}"), questions(held_out=False)
    return [{"messages": demonstration(rng.choice(known), rng)} for _ in range(count)]


def demonstration(fact: Fact, rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation: a search, its result, and the last word of that. The index is another one each time, so
    that the answer can only be read, and not be known."""
    name, kind, _ = fact
    words = [name, kind] if rng.random() < WHOLE else [kind]
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": " ".join(words)}}}
    who, what = name if name in words else rng.choice(NAMES), rng.choice(FACTS[kind])
    return [
        asked(fact), {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": f"{who} {kind} {what}"}, {"role": "assistant", "content": what}
    ]
