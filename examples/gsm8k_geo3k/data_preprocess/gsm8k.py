"""Convert GSM8K's raw files to train.parquet and test.parquet in the schema of this project.

    python examples/gsm8k_geo3k/data_preprocess/gsm8k.py --local_dataset_path RAW --local_save_dir ~/data/gsm8k

RAW is a clone of the hub's openai/gsm8k (``RAW@main``), a folder with train.* and test.* files, or one file with a
column ``split`` such as ``examples/gsm8k_geo3k/data/raw_200.jsonl``. Without it the data comes from the hub.
"""
from lightrft.datasets.sources import command

if __name__ == "__main__":
    command("gsm8k", __doc__, "openai/gsm8k@main")
