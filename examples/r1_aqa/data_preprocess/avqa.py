"""Convert AVQA's questions about sounds to train.parquet and test.parquet in the schema of this project.

    python examples/r1_aqa/data_preprocess/avqa.py --input_jsonl RAW --audio_dir AUDIO --local_save_dir ~/data/avqa

A line of RAW has ``question_text``, ``multi_choice`` (the choices), ``answer`` (the index of the right one) and
``audio_path``, absolute or below AUDIO. Lines whose sound is not there are left out and counted. The rows name the
sounds by path, so training needs ``--media_root AUDIO``.
"""
import argparse
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ANSWER = "Give the answer, one of the choices, inside <answer> and </answer> tags."
THINK = "Reason inside <think> and </think> tags first. "


def to_row(raw: dict[str, Any], audio_dir: Path, split: str, index: int, think: bool) -> dict[str, Any]:
    """Convert one question; the reference is the text of the right choice."""
    choices, path = raw["multi_choice"], str(audio_dir / raw["audio_path"])
    answer = choices[int(raw["answer"])]
    text = f"{raw['question_text']} The choices are: {'; '.join(choices)}. {THINK if think else ''}{ANSWER}"
    return {
        "data_source": "r1-aqa-avqa",
        "prompt": [{"role": "user", "content": [{"type": "audio", "audio_url": path}, {"type": "text", "text": text}]}],
        "audio_path": path, "reference": answer, "label": "avqa_rule", "ability": "audio",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "question": raw["question_text"], "choices": choices,
                       "think": think},
    }  # yapf: disable


def read(file: Path, audio_dir: Path) -> list[dict[str, Any]]:
    """Read the questions whose sounds are in ``audio_dir``.

    Raises:
        SystemExit: there are none.
    """
    raw = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = [row for row in raw if (audio_dir / row["audio_path"]).is_file()]
    if not found:
        raise SystemExit(f"{file}: none of the {len(raw)} sounds is in {audio_dir}. Give their folder with --audio_dir")
    print(f"{file}: {len(raw) - len(found)} of {len(raw)} questions left out, because their sounds are missing")
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_jsonl", type=Path, required=True, help="the questions")
    parser.add_argument("--audio_dir", type=Path, required=True, help="folder of the sounds")
    parser.add_argument("--local_save_dir", type=Path, default=Path("~/data/avqa"), help="where the parquet files go")
    parser.add_argument("--enable_think", action="store_true", help="ask for reasoning before the answer")
    parser.add_argument("--val_ratio", type=float, default=0.05, help="share of the questions that is held out")
    args = parser.parse_args()
    audio_dir, folder = args.audio_dir.expanduser().resolve(), args.local_save_dir.expanduser()
    rows = read(args.input_jsonl, audio_dir)
    random.Random(0).shuffle(rows)
    held_out = max(1, round(args.val_ratio * len(rows)))
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (("test", rows[:held_out]), ("train", rows[held_out:])):
        table = [to_row(raw, audio_dir, split, i, args.enable_think) for i, raw in enumerate(part)]
        pq.write_table(pa.Table.from_pylist(table), folder / f"{split}.parquet")
        print(f"{folder / split}.parquet: {len(table)} rows")


if __name__ == "__main__":
    main()
