"""Package of lightrft: ranges of the dependencies and the optional extras.

An upper bound is the last release that the tests or an engine's own pins have seen; constraints/ has whole sets.
"""
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "lightrft" / "__init__.py").read_text(encoding="utf-8"))

CORE = [
    "torch>=2.11,<2.15", "transformers>=5.17,<5.25", "tokenizers>=0.22,<0.24", "safetensors>=0.5,<0.9",
    "accelerate>=1.10,<1.16", "peft>=0.18,<0.22", "datasets>=4.0,<6", "math-verify>=0.8,<0.10", "numpy>=2.0,<2.6",
    "pyarrow>=19,<27", "matplotlib>=3.8,<4", "tensorboard>=2.18,<3", "tqdm>=4.66,<5", "rich>=13,<16", "pyyaml>=6.0,<7",
    "jinja2>=3.1,<4", "requests>=2.31,<3", "cloudpickle>=3.0,<4", "pandas>=2.2,<4"
]
EXTRAS = {
    # It pins torch 2.13. An older cuda-python, which the resolver may take, has files of cuda-bindings.
    "vllm": ["vllm>=0.32,<0.33", "transformers<5.20", "cuda-python>=13,<14; sys_platform == 'linux'"],
    "sglang": ["sglang>=0.5.23,<0.5.24", "transformers<5.20"],  # pins torch 2.14
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],
    "liger": ["liger-kernel>=0.8,<0.9"],
    "flash-attn": ["flash-attn>=2.6,<3"],  # built against the torch that is installed; no test here has a GPU for it
    "bitsandbytes": ["bitsandbytes>=0.50,<0.51"],
    "vl": ["pillow>=12", "torchvision"],
    # renderers imports httpx, and has it only with an older openai
    "agents": ["renderers>=0.1.12,<0.2; python_version >= '3.11'", "httpx>=0.27,<1"],
    "reasoning": ["reasoning-gym>=0.1.19,<0.2"],
    "audio": ["soxr>=1.0,<1.2", "soundfile>=0.13,<0.15"],
    "video": ["av>=16,<19"],
    "wandb": ["wandb>=0.19,<1"],
    "trackio": ["trackio>=0.4,<1"],
    "docs": ["sphinx>=8.0", "furo>=2024.8", "myst-parser>=4.0", "sphinx-autobuild"],
    "dev": [
        "pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "pillow", "wheel", "flake8", "yapf", "mypy",
        "types-PyYAML", "types-requests", "types-tqdm", "uv", "playwright", "mlflow-skinny", "bitsandbytes", "nbclient",
        "ipykernel"
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
    package_data={"lightrft.utils": ["report.html"]},
    packages=find_packages(include=["lightrft", "lightrft.*"], exclude=["*.tests", "*.tests.*"]),
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["lightrft = lightrft.cli.main:main"]},
)
