"""Public data sets of preferred pictures, videos and sounds, by name: ``--train_data hpdv3:/data/hpdv3/train.json``.

A reader converts a published row to a pair whose answers are media: the prompt of the generator is the user's turn, its
output the assistant's. The names are those of LightRFT.
"""
import re
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from itertools import combinations, groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightrft.datasets.prompt_rows import missing
from lightrft.datasets.rows import DataError, has_no_file, load_rows, Row, Rows
from lightrft.utils.errors import UserError
from lightrft.utils.logging import warn_of_all
from lightrft.utils.registry import Registry


@dataclass(frozen=True)
class PairSource:
    """Reader of the rows of one data set.

    Attributes:
        read: row -> pair (:func:`media_pair`), or None for a row without a label. A missing column is a ``KeyError``.
        join: makes rows of pairs from rows of single candidates.
    """
    read: Callable[[Row], Row | None]
    join: Callable[[Rows], Rows] | None = None


PAIR_SOURCES: Registry[Callable[[], PairSource]] = Registry("source of rows")
"""Name -> function that returns its :class:`PairSource`. Plugins add entries (docs/extending.md, A form of rows)."""
LEVELS = 3  # folders above the file of the rows in which media are looked for


def parse_source(spec: str) -> tuple[str, str]:
    """Split an entry ``source:path`` into both; the source of any other entry is empty.

    Raises:
        UserError: no such source.
    """
    found = re.fullmatch(r"([A-Za-z][\w.-]+):((?!//).+)", spec, re.DOTALL)
    if found is None or has_no_file(spec) or Path(spec).expanduser().exists():
        return "", spec
    PAIR_SOURCES.get(found[1])
    return found[1], found[2]


def load_entry(spec: str, split: str = "train") -> Rows:
    """Read an entry of the data, with ``source:path`` as pairs; the rest as :func:`load_rows`.

    Raises:
        DataError: also if a row lacks a column of its source, or no row has a label.
    """
    source, path = parse_source(spec)
    if not source:
        return load_rows(spec, split)
    reader, rows = _source(source), load_rows(path, split)
    rows = _joined(reader, rows, source)
    pairs = {i: _read(reader, row, rows.where(i), source) for i, row in enumerate(rows.rows)}
    labelled = {i: pair for i, pair in pairs.items() if pair is not None}
    if not labelled:
        raise DataError(f"{spec}: none of {len(rows)} rows says which candidate is better. Name another file")
    if len(labelled) < len(rows):
        warn_of_all(f"{spec}: {len(rows) - len(labelled)} of {len(rows)} rows do not say which one is better: left out")
    kept = rows.pick(labelled)
    return Rows([*labelled.values()], kept.files, kept.numbers, _media_root(kept, [*labelled.values()]))


def _source(name: str) -> PairSource:
    made = PAIR_SOURCES.get(name)
    needed = [one.name for one in signature(made).parameters.values() if one.default is one.empty]
    if needed:
        raise UserError(f"source of rows {name!r}: what is registered takes {', '.join(needed)}; register a function "
                        "without arguments, which returns PairSource(read)")
    return made()


def _joined(reader: PairSource, rows: Rows, source: str) -> Rows:
    try:
        return reader.join(rows) if reader.join else rows
    except KeyError as error:
        raise DataError(f"{rows.where(0)}: {source}: a row has no {error.args[0]}. Name the file of the data set, or "
                        "remove the row") from error


def _read(reader: PairSource, row: Row, where: str, source: str) -> Row | None:
    try:
        return reader.read(row)
    except KeyError as error:
        raise DataError(f"{where}: {source}: the row has no {error.args[0]} (it has {', '.join(row)}). Name the file "
                        "of the data set, or remove the row") from error
    except ValueError as error:
        raise DataError(f"{where}: {source}: {error}. Correct or remove the row") from error


def _media_root(rows: Rows, pairs: list[Row]) -> str | None:
    """Return the folder, that of the rows or one above, that holds the first file of the pairs; None without one."""
    file = Path(rows.origin(0)[0])
    paths = [one for kind in ("images", "videos", "audios") for one in pairs[0].get(kind, []) if isinstance(one, str)]
    folders = [file.parent, *file.parent.parents][:1 + LEVELS] if file.exists() and paths else []
    return next((str(folder) for folder in folders if (folder / paths[-1]).exists()), None)


def value(row: Row, name: str) -> Any:
    """Return a column of a row.

    Raises:
        KeyError: it is missing or empty.
    """
    if missing(row.get(name)):
        raise KeyError(name)
    return row[name]


def better(first: float, second: float) -> str:
    """Return which of two scores is higher: "first", "second" or "tie"."""
    return "tie" if first == second else "first" if first > second else "second"


def media_pair(kind: str, prompt: str, media: tuple[Any, Any], choice: str, asked: Any = None,
               heads: dict[str, str] | None = None) -> Row:
    """Return a pair in our schema.

    Args:
        kind: "image", "video" or "audio".
        media: both candidates.
        choice: the better one: "first", "second" or "tie".
        asked: a picture that belongs to the prompt.
        heads: by name which one is better by other standards, likewise.
    """
    order = media if choice != "second" else media[::-1]
    named = {"tie": "tie", choice: "chosen"}
    answer = [{"role": "assistant", "content": f"<{kind}>"}]
    row = {f"{kind}s": [*order], "chosen": answer, "rejected": answer, "tie": choice == "tie"}
    if choice == "tie":
        named |= {"first": "chosen", "second": "rejected"}
    if heads:
        row["heads"] = {name: named.get(its, "rejected") for name, its in heads.items()}
    if asked is not None:
        row["images"] = [asked]
    return row | {"prompt": [{"role": "user", "content": prompt if asked is None else f"<image>{prompt}"}]}


# -- pictures ---------------------------------------------------------------------------------------------------------
@PAIR_SOURCES.register("hpdv3")
def hpdv3() -> PairSource:
    """Read HPDv3 (arXiv:2508.03789), a JSON list: prompt, path1 (the preferred picture), path2, among others."""
    return PairSource(lambda row: media_pair("image", value(row, "prompt"),
                                             (value(row, "path1"), value(row, "path2")), "first"))


_BETTER = re.compile(r"<answer>\s*Image ([12]) is better\s*</answer>")
_MEDIUM = re.compile(r"\s*<(?:image|video|audio)>")


def _judged(row: Row) -> Row:
    """Return a pair with the judgement of a chat, in which ``Image 1`` and ``Image 2`` are the candidates."""
    turns, media = value(row, "conversations"), value(row, "images")
    if len(turns) < 2 or len(media) != 2:
        raise ValueError(f"{len(turns)} turns and {len(media)} pictures are not a question and a judgement about two "
                         "pictures")
    said = str(value(turns[-1], "value"))
    if (found := _BETTER.search(said)) is None:
        raise ValueError(f"the judgement ends with {said[-60:]!r}, and not <answer>Image 1 is better</answer> or 2")
    first = found[1] == "1"
    names = {"1": "{chosen}", "2": "{rejected}"} if first else {"1": "{rejected}", "2": "{chosen}"}
    pair = media_pair("image",
                      _MEDIUM.sub("", str(value(turns[0], "value"))).strip(), (media[0], media[1]),
                      "first" if first else "second")
    return pair | {"judgement": re.sub(r"\bImage ([12])\b", lambda name: names[name[1]], said)}


@PAIR_SOURCES.register("imagegen-cot-reward-5k")
def imagegen_cot_reward() -> PairSource:
    """Read ImageGen-CoT-Reward-5K (arXiv:2505.03318), a JSON list: images (two paths), conversations (ShareGPT), whose
    first turn asks and whose last one judges, with ``Image 1 is better`` in ``<answer>`` tags at its end."""
    return PairSource(_judged)


@PAIR_SOURCES.register("imagerewarddb")
def imagerewarddb() -> PairSource:
    """Read ImageRewardDB (arXiv:2304.05977): pictures with prompt_id, prompt, image_path and rank (1 is the best).

    Every two pictures of a prompt in a file that have different ranks are a pair.
    """
    return PairSource(hpdv3().read, _ranked_pairs)


def _ranked_pairs(rows: Rows) -> Rows:
    found: list[tuple[str, Row]] = []
    keyed = [(rows.origin(i)[0], str(value(row, "prompt_id")), i) for i, row in enumerate(rows.rows)]
    for (file, _), group in groupby(sorted(keyed), key=lambda each: each[:2]):
        ranked = sorted((rows.rows[i] for _, _, i in group), key=lambda row: value(row, "rank"))
        found += [(file, {"prompt": value(first, "prompt"), "path1": value(first, "image_path"),
                          "path2": value(second, "image_path")})
                  for first, second in combinations(ranked, 2) if first["rank"] < second["rank"]]  # yapf: disable
    files = [(file, len([*group])) for file, group in groupby(file for file, _ in found)]
    return Rows([row for _, row in found], files)


# -- pictures, videos and sounds --------------------------------------------------------------------------------------
def _omni(kind: str, columns: tuple[str, str]) -> PairSource:

    def read(row: Row) -> Row:
        choice = {"response1": "first", "response2": "second"}.get(value(row, "criteria_preference"), "tie")
        first, second = (f"media_data/{value(row, name)}" for name in columns)
        return media_pair(kind, value(row, "prompt"), (first, second), choice)

    return PairSource(read)


@PAIR_SOURCES.register("omnirewardbench-t2i")
def omnirewardbench_t2i() -> PairSource:
    """Read OmniRewardBench (arXiv:2510.23451), parquet: prompt, response1_path and response2_path below media_data,
    criteria_preference (response1, response2, or a tie)."""
    return _omni("image", ("response1_path", "response2_path"))


@PAIR_SOURCES.register("omnirewardbench-t2v")
def omnirewardbench_t2v() -> PairSource:
    """Read its videos, whose paths are in response1 and response2."""
    return _omni("video", ("response1", "response2"))


@PAIR_SOURCES.register("omnirewardbench-t2a")
def omnirewardbench_t2a() -> PairSource:
    """Read its sounds, like its pictures."""
    return _omni("audio", ("response1_path", "response2_path"))


def _rapidata(row: Row, asked: Any = None) -> Row:
    standards = {name: better(*(float(value(row, f"weighted_results{i}_{name}")) for i in (1, 2)))
                 for name in ("Preference", "Coherence", "Alignment")}  # yapf: disable
    first, second = (f"videos/{_below_videos(value(row, name))}" for name in ("file_name1", "file_name2"))
    heads = {name.lower(): standards[name] for name in ("Coherence", "Alignment")}
    return media_pair("video", value(row, "prompt"), (first, second), standards["Preference"], asked, heads)


def _below_videos(name: str) -> str:
    """Return the path of the file of a video; of an address, its last two parts: model and file."""
    return "/".join(urlsplit(name).path.split("/")[-2:]) if name.startswith(("http://", "https://")) else name


@PAIR_SOURCES.register("rapidata-t2v")
def rapidata_t2v() -> PairSource:
    """Read the text-2-video human preferences of Rapidata, parquet: prompt, file_name1 and file_name2 below videos,
    weighted_results1_Preference and its like, whose Coherence and Alignment are further heads."""
    return PairSource(_rapidata)


@PAIR_SOURCES.register("rapidata-i2v")
def rapidata_i2v() -> PairSource:
    """Read its image-2-video preferences, which also have the first picture, prompt_asset."""
    return PairSource(lambda row: _rapidata(row, value(row, "prompt_asset")))


@PAIR_SOURCES.register("videogen-rewardbench")
def videogen_rewardbench() -> PairSource:
    """Read VideoGen-RewardBench (arXiv:2501.13918), CSV: prompt, path_A, path_B, Overall (A, B, same, or nothing)."""

    def read(row: Row) -> Row | None:
        if missing(row.get("Overall")):
            return None
        choices = {"A": "first", "B": "second", "same": "tie"}
        if row["Overall"] not in choices:
            raise ValueError(f"Overall is {row['Overall']!r}, and not {', '.join(choices)}")
        return media_pair("video", value(row, "prompt"), (value(row, "path_A"), value(row, "path_B")),
                          choices[row["Overall"]])

    return PairSource(read)


@PAIR_SOURCES.register("audio-alpaca")
def audio_alpaca() -> PairSource:
    """Read Audio-alpaca (arXiv:2404.09956), parquet: prompt, chosen and rejected with the bytes of the sounds."""
    return PairSource(lambda row: media_pair("audio", value(row, "prompt"),
                                             (value(row, "chosen"), value(row, "rejected")), "first"))
