"""The wheel holds every module and works from an empty environment; versions and requirements agree."""
import ast
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from lightrft import __version__

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="installed without its repository")
WALK = """
import pkgutil, lightrft
print(lightrft.__file__, sum(1 for _ in pkgutil.walk_packages(lightrft.__path__, "lightrft.")))
"""


def run(*command, cwd):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=250,
                            env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def modules():
    paths = [path.relative_to(ROOT) for suffix in ("py", "html") for path in (ROOT / "lightrft").rglob(f"*.{suffix}")]
    return {path.as_posix() for path in paths if "tests" not in path.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that no build folder of this checkout can leak into it."""
    import shutil
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "lightrft", source / "lightrft", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", out,
        source, cwd=out)
    return next(out.glob("lightrft-*.whl"))


def test_the_wheel_holds_every_module_and_no_test(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.startswith("lightrft/")} == modules()


@pytest.mark.slow
def test_the_wheel_works_from_an_empty_environment(wheel, tmp_path):
    """Its modules are those of the checkout, where test_import imports each; test_layering: none imports a test."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q", wheel,
        cwd=tmp_path)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # an editable finder there loses to the wheel
    where, count = run(python, "-c", WALK, cwd=tmp_path).split()[-2:]
    assert where.startswith(str(tmp_path)) and int(count) > 60, where
    assert "--advantage_estimator" in run(python, "-m", "lightrft.cli.train", "--help", cwd=tmp_path)
    assert "--train_data" in run(python, "-m", "lightrft.cli.train_sft", "--help", cwd=tmp_path)


def requirement_names(text):
    return {match[1].lower() for match in re.finditer(r"^([A-Za-z][\w-]*)\s*[=<>;]", text, re.MULTILINE)}


def lists_in_setup():
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    values = {
        node.targets[0].id: node.value for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return ast.literal_eval(values["CORE"]), ast.literal_eval(values["EXTRAS"])


def test_pins_cover_the_core_and_stay_in_its_ranges():
    from packaging.requirements import Requirement
    core, extras = lists_in_setup()
    pins, there = (ROOT / "requirements.txt").read_text(encoding="utf-8"), core + extras["deepspeed"]
    assert {Requirement(text).name for text in there} <= requirement_names(pins)
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", pins, re.MULTILINE))
    assert not [text for text in there if not Requirement(text).specifier.contains(pinned[Requirement(text).name])]
    kinds = {
        "vllm", "sglang", "deepspeed", "liger", "flash-attn", "bitsandbytes", "vl", "audio", "video", "wandb",
        "trackio", "agents", "reasoning", "docs", "dev"
    }
    assert set(extras) == kinds
    wanted = requirement_names((ROOT / "requirements-dev.txt").read_text(encoding="utf-8")) | requirement_names(pins)
    assert {Requirement(text).name.lower() for text in extras["dev"] + extras["docs"]} <= wanted


# distributions whose module has another name, and those that others import for us
MODULES = {"math-verify": "math_verify", "pyyaml": "yaml", "liger-kernel": "liger_kernel", "flash-attn": "flash_attn",
           "reasoning-gym": "reasoning_gym"}  # yapf: disable
INDIRECT = {
    "pillow": "transformers, to read pictures", "torchvision": "transformers, to read pictures", "httpx": "renderers",
    "cuda-python": "flashinfer; an older one has files of cuda-bindings", "tokenizers":
    "transformers; its release is part of the set"
}


def test_every_requirement_is_imported():
    """Also in functions, and by name (``import_module``, ``require``, ``find_spec``)."""
    from packaging.requirements import Requirement
    core, extras = lists_in_setup()
    asked = core + [text for name, texts in extras.items() if name not in ("dev", "docs") for text in texts]
    code = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in modules())
    found = set(re.findall(r"^\s*(?:from|import) (\w+)", code, re.MULTILINE))
    found |= set(re.findall(r"""(?:import_module|require|find_spec)\(["'](\w+)""", code))
    names = {Requirement(text).name for text in asked}
    assert names - {name for name in names if MODULES.get(name, name) in found} == set(INDIRECT) & names


def test_make_runs_what_is_promised(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "torchvision").mkdir()
    for stamp in ("bin/python", ".installed-core", ".installed-dev", "torchvision/.installed"):
        (tmp_path / stamp).touch()
    show = ["make", "-n", f"VENV={tmp_path}", "-o", "setup.py"]
    show += [word for kind in ("", "-dev", "-vllm", "-vision") for word in ("-o", f"requirements{kind}.txt")]
    show += ["-o", "examples/torchvision_on_cpu.py"]
    for name in ("quickstart", "quickstart-vl", "quickstart-audio"):
        script = f"run_{name.replace('-', '_')}.sh --seed 2"
        assert script in run(*show, name, "ARGS=--seed 2", cwd=ROOT)
    core = run(*(word for word in show if word != "setup.py"), "-W", "setup.py", "quickstart", cwd=ROOT)
    assert re.search("echo .Installing PyTorch.*minutes.*\n.*install +--disable-pip.* -r requirements.txt", core), core
    expected = {
        "test": "-m pytest -q -n 2", "newest": f"--target {tmp_path}/newest transformers", "numeric":
        "ATEN_CPU_CAPABILITY=", "chain": "preference_chain.py --seeds 1", "format": "yapf --in-place", "fcheck":
        "mypy lightrft", "docs": "docs/_build/html/index.html", "docs-live": "sphinx-autobuild", "dbuild":
        f" --tag lightrft:{__version__} ", "dbuild ENGINE=sglang":
        f"--build-arg ENGINE=sglang --tag lightrft:{__version__}-sglang ", "dpush IMAGE_NAME=host/me/lightrft:1":
        "docker push host/me/lightrft:1\n"
    }
    assert f"-v /data:/data lightrft:{__version__}\n" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for target, command in expected.items():
        assert command in run(*show, *target.split(), cwd=ROOT), target
    ignored = re.findall(r"--ignore (\S+)", run(*show, "numeric", cwd=ROOT))
    assert ignored and all((ROOT / path).is_file() for path in ignored), ignored


def test_make_says_what_is_missing_without_python(tmp_path):
    result = subprocess.run(["make", f"VENV={tmp_path}/env", f"{tmp_path}/env/bin/python"], cwd=ROOT, text=True,
                            timeout=60, capture_output=True, env={"PATH":
                                                                  f"{tmp_path}:/nowhere"}, executable=_which("make"))
    assert result.returncode != 0 and "Python >= 3.10" in result.stderr, result.stderr


def _which(name):
    from shutil import which
    return which(name)


# -- torchvision beside a torch for CPUs ------------------------------------------------------------------------------
APART = """
import importlib.util, sys
assert "torchvision_on_cpu" in sys.modules and "torch" not in sys.modules
assert importlib.util.find_spec("torchvision") and not {"torch", "torchvision"} & set(sys.modules)
from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor
Qwen2VLVideoProcessor(size={"shortest_edge": 784, "longest_edge": 3136})
print(sys.modules["torchvision"].__file__)
"""


@pytest.fixture
def apart():
    """The module that the environment loads, unless it has a torchvision of the usual kind or none."""
    return pytest.importorskip("torchvision_on_cpu", reason="needs torchvision apart: make test installs it")


def test_every_process_can_import_torchvision_apart(apart, tmp_path):
    """And a process that does not use it loads nothing."""
    assert Path(apart.__file__).read_bytes() == (ROOT / "examples" / "torchvision_on_cpu.py").read_bytes()
    assert str(apart.PACKAGE) in run(sys.executable, "-c", APART, cwd=tmp_path)


def test_another_torchvision_is_left_alone(apart, tmp_path):
    """One that comes first, as site-packages does, is loaded without declarations, which its own would repeat."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").touch()
    code = "import sys, torchvision, torchvision_on_cpu; print(torchvision.__file__, 'torch' in sys.modules)"
    assert run(sys.executable, "-c", code, cwd=tmp_path) == f"{tmp_path}/torchvision/__init__.py False\n"
