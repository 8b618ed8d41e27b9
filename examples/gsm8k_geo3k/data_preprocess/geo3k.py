"""Convert Geometry3K's raw files to train.parquet and test.parquet in the schema of this project.

    python examples/gsm8k_geo3k/data_preprocess/geo3k.py --local_dataset_path RAW --local_save_dir ~/data/geo3k

RAW is a clone of the hub's hiyouga/geometry3k, or a folder with its parquet files train-*, validation-* and test-*.
Without it the data comes from the hub. The figures go into the files, as bytes in the column ``images``.
"""
import argparse
from pathlib import Path

from lightrft.datasets.sources import convert


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", default="hiyouga/geometry3k", help="raw folder or hub id")
    parser.add_argument("--local_save_dir", type=Path, default=Path("~/data/geo3k"), help="where the parquet files go")
    args = parser.parse_args()
    folder = args.local_save_dir.expanduser()
    for split, count in convert("geo3k", args.local_dataset_path, folder).items():
        print(f"{folder / split}.parquet: {count} rows")


if __name__ == "__main__":
    main()
