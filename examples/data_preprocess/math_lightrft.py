"""Convert MATH's raw files to train.parquet and test.parquet in the schema of this project.

    python examples/data_preprocess/math_lightrft.py --local_dataset_path RAW --local_save_dir ~/data/math

RAW is a clone of the hub's DigitalLearningGmbH/MATH-lighteval, a folder with train.* and test.* files, or one file with
a column ``split``; columns: problem, solution, level, type. Without it the data comes from the hub. The last boxed
answer of a solution is the reference.
"""
from lightrft.datasets.sources import command

if __name__ == "__main__":
    command("math", __doc__, "DigitalLearningGmbH/MATH-lighteval")
