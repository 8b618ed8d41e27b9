"""Convert pairs of candidates to train.parquet and test.parquet: prompts for a judge whose answers can be verified.

    python examples/grm_vl_rl/data_preprocess/pairs.py --pairs pairs.jsonl --local_save_dir ~/data/grm

Pairs are rows of ``lightrft grm`` (docs/judges.md), with or without media. The order of the candidates is random, and
the data source of a row says where the better one is: ``judge/first``, ``judge/second``, or ``judge/tie``.
"""
import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightrft.config.rm_schema import JudgeDataConfig
from lightrft.datasets.judgements import chosen_is_second, INSTRUCTION, to_judgement
from lightrft.datasets.rows import load_rows

PLACES = ("first", "second", "tie")
THINK = "\nReason inside <think> and </think> tags first."


def to_row(raw: dict[str, Any], seed: int, index: int, where: str) -> dict[str, Any]:
    """Convert one pair; the reference is the right answer."""
    config = JudgeDataConfig(task_instruction=INSTRUCTION + THINK)
    found = to_judgement(raw, config, chosen_is_second(seed, str(index)), where)
    place = PLACES[found.right]
    return {
        "data_source": f"judge/{place}", "prompt": [{"role": "user", "content": found.request}], **found.media,
        "ability": "judge", "reward_model": {"style": "rule", "ground_truth": found.answer},
        "extra_info": {"index": index, "place": place, "reference": found.answer},
    }  # yapf: disable


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", required=True, help="file, folder or hub id of the pairs")
    parser.add_argument("--local_save_dir", type=Path, default=Path("~/data/grm"), help="where the parquet files go")
    parser.add_argument("--test_rows", type=int, default=200, help="pairs that are held out, from the end")
    parser.add_argument("--seed", type=int, default=42, help="seed of the order of the candidates")
    args = parser.parse_args()
    found, folder = load_rows(args.pairs, "train"), args.local_save_dir.expanduser()
    rows = [to_row(row, args.seed, i, found.where(i)) for i, row in enumerate(found.rows)]
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (("train", rows[:-args.test_rows]), ("test", rows[-args.test_rows:])):
        pq.write_table(pa.Table.from_pylist(part), folder / f"{split}.parquet")
        print(f"{folder / split}.parquet: {len(part)} rows")


if __name__ == "__main__":
    main()
