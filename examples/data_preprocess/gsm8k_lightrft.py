"""Prepare gsm8k: ``gsm8k_geo3k/data_preprocess/gsm8k.py`` under the name that LightRFT has for it."""
import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[1] / "gsm8k_geo3k" / "data_preprocess" / "gsm8k.py"), run_name="__main__")
