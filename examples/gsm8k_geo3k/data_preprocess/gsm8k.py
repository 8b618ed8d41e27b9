"""Convert GSM8K's raw files to train.parquet and test.parquet in the schema of this project.

    python examples/gsm8k_geo3k/data_preprocess/gsm8k.py --local_dataset_path RAW --local_save_dir ~/data/gsm8k

RAW is a clone of the hub's openai/gsm8k (``RAW@main``), a folder with train.* and test.* files, or one file with a
column ``split`` such as ``examples/gsm8k_geo3k/data/raw_200.jsonl``. Without it the data comes from the hub.
"""
import argparse
from pathlib import Path

from lightrft.datasets.sources import convert


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", default="openai/gsm8k@main", help="raw file, folder or hub id")
    parser.add_argument("--local_save_dir", type=Path, default=Path("~/data/gsm8k"), help="where the parquet files go")
    args = parser.parse_args()
    folder = args.local_save_dir.expanduser()
    for split, count in convert("gsm8k", args.local_dataset_path, folder).items():
        print(f"{folder / split}.parquet: {count} rows")


if __name__ == "__main__":
    main()
