"""Convert Geometry3K's raw files to train.parquet and test.parquet in the schema of this project.

    python examples/gsm8k_geo3k/data_preprocess/geo3k.py --local_dataset_path RAW --local_save_dir ~/data/geo3k

RAW is a clone of the hub's hiyouga/geometry3k, or a folder with its parquet files train-*, validation-* and test-*.
Without it the data comes from the hub. The figures go into the files, as bytes in the column ``images``.
"""
from lightrft.datasets.sources import command

if __name__ == "__main__":
    command("geo3k", __doc__, "hiyouga/geometry3k")
