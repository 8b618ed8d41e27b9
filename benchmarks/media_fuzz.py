"""Feed broken and odd rows of pictures, videos and sounds to the code that reads them, and count what becomes of them.

    python benchmarks/media_fuzz.py [--rows 2000] [--seed 0] [--processor FOLDER]

Rows are drawn from a seed. Each one is found (:func:`find_row_media`) and every medium in it decoded; the processor of
a model in FOLDER takes those that it has a part for. A row is *used*, or *refused* by a MediaError that names it.
Anything else is a fault: another exception, a row that had to be refused and was not (or the reverse), a result that is
not the medium that was written, or one that takes longer than its limit.
"""
import argparse
import faulthandler
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import odd_rows  # noqa: F401  (it adds to KINDS)
from broken_media import Case, KINDS, prepare
from PIL import Image

from lightrft.config.prompt_schema import MediaConfig
from lightrft.datasets.decoding import decode, image_size, Video
from lightrft.datasets.media import MediaError, MediaRules, Medium
from lightrft.datasets.media_rows import find_row_media
from lightrft.datasets.media_store import open_store
from lightrft.datasets.waveform import Waveform
from lightrft.models.tokenizer import load_tokenizer

Process = Callable[[list[Medium]], None]
LIMIT_S, MOST_FRAMES, MOST_PIXELS = 20.0, 32, 2_000_000


@dataclass
class Tally:
    """Counts of one kind of row."""
    rows: int = 0
    used: int = 0
    refused: int = 0
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)


def valid(medium: Any) -> bool:
    """Tell if a decoded medium is one that a processor can take."""
    if isinstance(medium, Waveform):
        samples = medium.samples
        return (medium.rate == 16_000 and samples.ndim == 1 and samples.dtype == np.float32 and len(samples) > 0
                and bool(np.isfinite(samples).all()))
    pictures = medium.frames if isinstance(medium, Video) else [medium]
    sizes = {image.size for image in pictures}
    return (0 < len(pictures) <= MOST_FRAMES and len(sizes) == 1 and all(image.mode == "RGB" for image in pictures)
            and 0 < min(sizes)[0] * min(sizes)[1] <= MOST_PIXELS)


def opened(folder: str, rules: MediaRules) -> Process:
    """Return the processor of the model in ``folder``, for the kinds of media that it takes."""
    store = open_store(folder, load_tokenizer(folder), MediaConfig(media_cache_mib=16))
    store.rules = rules
    parts = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}

    def process(media: list[Medium]) -> None:
        for medium, key in zip(media, store.register(media)):
            if hasattr(store.processor, parts[medium.kind]):
                store.tensors(key)

    return process


def outcome(case: Case, rules: MediaRules, process: Process) -> str:
    """Return "used", "refused", or a sentence about the fault."""
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": case.content}]
    try:
        messages, found = find_row_media(case.columns, MediaConfig(), turns, rules, "rows.jsonl, row 1", case.takes)
        media = [decode(medium, rules) for medium in found]
        process(found)
        sizes = [image_size(medium, rules) for medium in found if medium.kind == "image"]
    except MediaError as error:
        named = str(error).startswith("rows.jsonl, row 1: ") and len(str(error)) < 1000
        return "refused" if named else f"an error that does not name the row, or is long: {str(error)[:200]}"
    except BaseException as error:  # all that may come out of decoders is a fault here
        return f"{type(error).__name__}: {error}"[:200]
    marks = [part["type"] for turn in messages for part in turn["content"] if isinstance(part, dict)]
    if len([mark for mark in marks if mark != "text"]) != len(media):
        return "not one position for each medium"
    if not all(map(valid, media)) or sizes != [image.size[::-1] for image in media if isinstance(image, Image.Image)]:
        return "a medium that no processor takes"
    return "used" if case.check(media) else "silently another medium than was written"


def fuzz(rows: int, seed: int, processor: str = "") -> dict[str, Tally]:
    """Draw ``rows`` rows, every kind in turn, and count what becomes of them. ``processor``: the folder of a model."""
    tallies = {name: Tally() for name in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        root = prepare(Path(folder))
        rules = MediaRules(root=root, decode_timeout_s=LIMIT_S, max_frames=MOST_FRAMES, max_image_pixels=MOST_PIXELS)
        process = opened(processor, rules) if processor else lambda media: None
        for number in range(rows):
            name = list(KINDS)[number % len(KINDS)]
            case, tally = KINDS[name](np.random.default_rng([seed, number]), root), tallies[name]
            start = time.monotonic()
            result = outcome(case, rules, process)
            count(tally, result, case, f"row {number}", time.monotonic() - start)
        if (Path(folder) / "unpickled").exists():
            tallies["pickle"].faults.append("a pickle was loaded")
    return tallies


def count(tally: Tally, result: str, case: Case, row: str, seconds: float) -> None:
    """Add the outcome of one row."""
    tally.rows, tally.slowest = tally.rows + 1, max(tally.slowest, seconds)
    tally.used += result == "used"
    tally.refused += result == "refused"
    if seconds > LIMIT_S + 5:
        tally.faults.append(f"{row}: took {seconds:.0f} s")
    elif result not in ("used", "refused"):
        tally.faults.append(f"{row}: {result}")
    elif case.must not in (result, "either"):
        tally.faults.append(f"{row}: {result}, must be {case.must}")


def total(tallies: dict[str, Tally]) -> Tally:
    """Add up all kinds of rows; every fault names its kind."""
    every = list(tallies.values())
    faults = [f"{name}: {fault}" for name, tally in tallies.items() for fault in tally.faults]
    return Tally(*(sum(getattr(tally, key) for tally in every) for key in ("rows", "used", "refused")), 0.0, faults)


def main() -> int:
    """Print the table; the exit code is 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processor", default="", metavar="FOLDER", help="of a model")
    args = parser.parse_args()
    faulthandler.enable()
    tallies = fuzz(args.rows, args.seed, args.processor)
    print("| rows | number | used | refused | faults |\n|---|---|---|---|---|")
    for name, tally in {**tallies, "all": total(tallies)}.items():
        print(f"| {name} | {tally.rows} | {tally.used} | {tally.refused} | {len(tally.faults)} |")
    slowest = max(tallies, key=lambda name: tallies[name].slowest)
    print(f"\nThe slowest row took {tallies[slowest].slowest:.1f} s ({slowest}).", *total(tallies).faults, sep="\n")
    return int(bool(total(tallies).faults))


if __name__ == "__main__":
    sys.exit(main())
