"""Package of lightrft: ranges of the dependencies and the optional extras (requirements.txt pins the tested set)."""
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "lightrft" / "__init__.py").read_text(encoding="utf-8"))

CORE = [
    "torch>=2.11", "transformers>=5.17,<6", "tokenizers>=0.22", "safetensors>=0.5", "accelerate>=1.10", "peft>=0.18",
    "datasets>=4.0", "math-verify>=0.8", "numpy>=2.0", "pyarrow>=19", "matplotlib>=3.8", "tensorboard>=2.18",
    "tqdm>=4.66", "pyyaml>=6.0", "jinja2>=3.1", "requests>=2.31"
]
EXTRAS = {
    "vllm": ["vllm>=0.32"],
    "sglang": ["sglang>=0.5.23"],
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],
    "liger": ["liger-kernel>=0.8"],
    "vl": ["pillow>=10", "torchvision", "qwen-vl-utils>=0.0.14"],
    "wandb": ["wandb>=0.19"],
    "trackio": ["trackio>=0.4"],
    "docs": ["sphinx>=8.0", "furo>=2024.8", "myst-parser>=4.0", "sphinx-autobuild"],
    "dev": [
        "pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "pillow", "wheel", "flake8", "yapf", "mypy",
        "types-PyYAML", "types-requests", "types-tqdm"
    ],
}

setup(
    name="lightrft",
    version=VERSION[1],
    description="Reinforcement fine-tuning of language models, from one CPU to a cluster, as one torchrun program",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["lightrft", "lightrft.*"], exclude=["*.tests", "*.tests.*"]),
    install_requires=CORE,
    extras_require=EXTRAS,
)
