"""Flags of other manuals on the command line: replaced by the flags here that mean the same, each with a notice."""
import re
from collections.abc import Collection, Mapping, Sequence

from lightrft.config.compat import fact_of
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import options
from lightrft.utils.logging import get_logger

BOOLEANS = {"true": True, "false": False}


def synonyms(tree: type) -> dict[str, str]:
    """Merge ``SYNONYMS`` of a tree and its bases: those of its options, unless they are options themselves."""
    known = options(tree)
    bases = reversed(tree.__mro__ if issubclass(tree, Tree) else Tree.__mro__)
    merged = {flag: meant for base in bases for flag, meant in vars(base).get("SYNONYMS", {}).items()}
    return {flag: meant for flag, meant in merged.items()
            if flag not in known and re.split(r"\W", meant.split()[-1])[0] in known}  # yapf: disable


def in_own_flags(words: Sequence[str], tree: type) -> list[str]:
    """Replace the flags among ``words`` that are synonyms of options of ``tree``."""
    known, own = synonyms(tree), list[str]()
    words = [word if _name(word) in known else _without_group(word, after)
             for word, after in zip(words, [*words[1:], ""])]  # yapf: disable
    written = {_name(word) for word in words}
    for word in _joined(words, known):
        own += _own_flags(word, known, written)
    return _with_items(own)


def _joined(words: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """Join each of the ``known`` flags with true, false or 0, if that follows it."""
    joined: list[str] = []
    for word in words:
        flag = joined[-1] if joined else ""
        if (word.lower() in BOOLEANS or _is_zero(word)) and "=" not in flag and _name(flag) in known:
            joined[-1] = f"{flag}={word}"
        else:
            joined.append(word)
    return joined


def _name(word: str) -> str:
    """Return the name of a flag, with underscores for the dots of OpenRLHF; empty for another word. Its group ``data``
    is left out, because names of its options here begin with the kind of the data."""
    flag = re.match(r"--(?:data\.)?([\w.]+)(?=$|=)", word)
    return flag[1].replace(".", "_") if flag else ""


def _without_group(word: str, after: str) -> str:
    """Shorten a flag of OpenRLHF with dots to its end, if that asks for what always holds, as
    ``--vllm.sync_backend nccl``; ``after`` is the next word."""
    flag, equals, value = word.partition("=")
    parts = flag.removeprefix("--").split(".") if re.fullmatch(r"--\w+(\.\w+)+", flag) else []
    ends = ("_".join(parts[start:]) for start in range(len(parts)))
    asked = value if equals else "true" if after.startswith("--") or not after else after
    name = next((end for end in ends if fact_of(end, asked)), "")
    return f"--{name}{equals}{value}" if name else word


def _is_zero(value: str) -> bool:
    return re.fullmatch(r"0+(\.0*)?", value) is not None


def _own_flags(word: str, known: Mapping[str, str], written: Collection[str]) -> list[str]:
    """Return the flags that ``word`` stands for; the last one takes its value, unless it has one. False and 0 turn off
    the switches that the word implies, and mean no more than the default where the last one has a value."""
    if _name(word) not in known:
        return [word]
    *implied, last = known[_name(word)].split()
    flag, equals, value = word.partition("=")
    zero = _is_zero(value)
    off = zero or BOOLEANS.get(value.lower()) is False
    if off and "=" in last:
        get_logger().info("%s has no effect: it asks for the default", word)
        return []
    names = [part.partition("?")[0] for part in implied if _is_implied(part, written) and not (zero and "=" in part)]
    flags = [f"--no_{name}" if off and "=" not in name else f"--{name}" for name in names] + [f"--{last}"]
    get_logger().info("%s is read as %s", flag, re.sub(r"\+?=", " ", " ".join(flags), count=len(flags)))
    return [*flags[:-1], flags[-1] if "=" in last else f"{flags[-1]}{equals}{value}"]


def _is_implied(part: str, written: Collection[str]) -> bool:
    """Return True for an option that is not written itself, and whose condition is met."""
    option, _, other = part.partition("?")
    name = option.partition("=")[0]
    return not {name, f"no_{name}"} & {*written} and (not other or other in written)


def _with_items(words: list[str]) -> list[str]:
    """Add the items of lists, ``--FLAG+=ITEM``, to those of the flag, if it is written too."""
    items = dict.fromkeys(word for word in words if re.match(r"--\w+\+=", word))
    given = [word for word in words if word not in items]
    for flag, item in (word.split("+=", 1) for word in items):
        at = next((i for i, word in enumerate(given) if word.partition("=")[0] == flag), len(given))
        first = given[at].partition("=")[2] if at < len(given) else ""
        given[at:at + 1] = [flag, *([first] if first else []), item]
    return given
