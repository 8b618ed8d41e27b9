"""The doctor among packages that are missing, old or broken, and beside engines that hold others back."""
import re
import subprocess
import sys

import pytest

from lightrft.cli.doctor import asked_extras
from lightrft.config.engines import ENGINES
from lightrft.preflight.checks.packages import check_engine, check_import, check_versions, SUMMARY
from lightrft.tests.support.doctor import by_name, config, only
from lightrft.tests.support.packages import needs_installed_lightrft
from lightrft.utils.errors import install_command


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Write distributions that come before the installed ones, here and in child processes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, version: str, *metadata: str, code: str = "") -> None:
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata]
        (info / "METADATA").write_text("\n".join(lines), encoding="utf-8")
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")

    return write


@needs_installed_lightrft
def test_broken_packages_are_told_without_a_traceback(packages):
    for name in ("torch", "yaml", "wandb"):
        packages(name, "0.1", code="raise ImportError('its library is broken')")
    done = subprocess.run([sys.executable, "-m", "lightrft.cli.doctor"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and not done.stderr
    for name in ("devices", "process group"):
        assert f"fail  {name:<16} cannot be checked: ImportError: its library is broken; " in done.stdout
    assert re.search(r"fail  torch  .* 0\.1, lightrft needs .*>=2\.11; pip install 'torch.*>=2\.11'", done.stdout)
    assert "fail  transformers     cannot be imported: " in done.stdout and "warn  wandb            0.1" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("verdict: fail (")


def test_ranges_and_extras_come_from_the_metadata(packages):
    packages("lightrft", "0.0", f"Summary: {SUMMARY}", "Requires-Python: >=3.10", "Requires-Dist: tqdm>=4.66",
             "Requires-Dist: nosuch-a>=1", "Requires-Dist: nosuch-b>=2; extra == 'b'",
             "Requires-Dist: packaging>=1; python_version < '3'", "Requires-Dist: sglang>=1; extra == 's'",
             "Provides-Extra: b", "Provides-Extra: s", "Provides-Extra: dev")
    packages("tqdm", "0.1")
    packages("sglang", "0.1")
    found = by_name(check_versions())
    told = {name: str(found[name])[:5].strip() for name in ("python", "tqdm", "nosuch-a", "nosuch-b", "sglang")}
    assert told == {"python": "ok", "tqdm": "fail", "nosuch-a": "fail", "nosuch-b": "ok", "sglang": "warn"}
    assert found["tqdm"].remedy == "pip install 'tqdm>=4.66'" and "packaging" not in found
    assert found["nosuch-b"].text == "not installed; pip install -e '.[b]' in the checkout of lightrft (optional)"
    asked = by_name(check_versions({"b", "s"}))
    assert asked["nosuch-b"].verdict == asked["sglang"].verdict == "fail"


def test_an_engine_holds_packages_back_only_where_it_is(packages):
    packages("lightrft", "0.0", f"Summary: {SUMMARY}", "Requires-Python: >=3.10", "Provides-Extra: sglang",
             "Requires-Dist: tqdm>=1", "Requires-Dist: sglang>=1; extra == 'sglang'",
             "Requires-Dist: tqdm<2; extra == 'sglang'")
    packages("tqdm", "4.0")

    def of_tqdm(*asked: str) -> list[str]:
        return [str(finding) for finding in check_versions(asked) if finding.name == "tqdm"]

    ok, refused = f"ok    {'tqdm':<16} 4.0 (>=1)", f"{'tqdm':<16} 4.0, lightrft[sglang] needs <2; pip install 'tqdm<2'"
    assert of_tqdm() == [ok] and of_tqdm("sglang") == [ok, f"fail  {refused}"]
    packages("sglang", "1.0")
    assert of_tqdm() == [ok, f"warn  {refused}"]


@needs_installed_lightrft
def test_another_project_of_this_name_is_noticed(packages):
    assert by_name(check_versions())["python"].verdict == "ok", "this one is installed"
    packages("lightrft", "0.1.1", "Summary: another project")
    found = only(check_versions())
    assert found.verdict == "fail" and "another project" in found.text and "pip uninstall lightrft" in found.remedy


def test_the_options_say_which_extras_are_needed():
    asked = asked_extras(config(use_wandb=True, use_liger=True, optim="adamw_8bit"))
    assert {"wandb", "liger", "bitsandbytes", "hf"} <= asked and "trackio" not in asked


def test_each_package_has_one_line_with_the_command_of_its_extra(packages):
    packages("lightrft", "0.0", f"Summary: {SUMMARY}", "Requires-Python: >=3.10", "Provides-Extra: flash-attn",
             "Requires-Dist: flash-attn>=9999; extra == 'flash-attn'")
    assert [one.name for one in check_versions()] == ["python", "flash-attn"]
    assert "pip install --no-build-isolation -e '.[flash-attn]'" in install_command("flash-attn")


@needs_installed_lightrft
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_missing_engine_comes_with_its_command(name):
    found = by_name(check_versions({name}))[name]
    if found.text.startswith("not installed"):
        said = f"not installed; {ENGINES[name].install}"
        assert (found.verdict, found.text) == ("fail", said), "not what the run says"
        assert by_name(check_versions())[name].verdict == "ok"
    else:
        assert name in by_name(check_engine("hf"))


def test_an_engine_that_wants_other_packages(packages):
    packages("sglang", "9.0", "Requires-Dist: torch==0.1", "Requires-Dist: numpy>=1", "Requires-Dist: tqdm==0.1",
             "Requires-Dist: tokenizers==0.1; extra == 'x'")
    found = by_name(check_engine("hf"))["sglang"]
    assert found.verdict == "warn" and found.text.startswith("it wants torch==0.1, ") and found.text.count("wants") == 1
    assert found.remedy == f"in a separate environment: {ENGINES['sglang'].install}"


def test_the_chosen_engine_is_imported_in_another_process(packages):
    packages("sglang", "9.0", code="raise ImportError('libcudart.so.13: cannot open')")
    fits, broken = [found for found in check_engine("sglang") if found.name == "sglang"]
    assert fits.verdict == "ok" and broken.verdict == "fail" and "sglang" not in sys.modules
    assert broken.text == "cannot be imported: ImportError: libcudart.so.13: cannot open"
    assert broken.remedy == "pip install --force-reinstall --no-deps sglang==9.0"


@pytest.mark.parametrize("library, remedy", [
    ("libnuma.so.1", "the system lacks libnuma.so.1: apt-get install libnuma1"),
    ("libother.so.2", "the system lacks libother.so.2: install the package of the system that has it"),
    ("libcudart.so.13", "pip install --force-reinstall --no-deps sglang==9.0"),
])
def test_a_library_of_the_system_is_named(packages, library, remedy):
    """SGLang's kernels report it, and then that none of them could be loaded."""
    code = (f"try:\n    raise ImportError('{library}: cannot open shared object file: No such file or directory')\n"
            "except ImportError as error:\n    raise ImportError('Could not load any common_ops library!') from error")
    packages("sglang", "9.0", code=code)
    assert [found.remedy for found in check_engine("sglang") if found.verdict == "fail"] == [remedy]


@pytest.mark.parametrize("code, verdict, words", [
    ("import time; time.sleep(60)", "warn", "importing it takes more than 1 s; put the environment on a local disk"),
    ("import os; os._exit(7)", "fail", "cannot be imported: exit code 7; "),
    ("raise ImportError('torchvision::nms does not exist')", "fail", "; torchvision was built for another torch: "),
])
def test_an_import_that_hangs_dies_or_meets_a_wrong_torchvision(packages, code, verdict, words):
    packages("sglang", "9.0", code=code)
    found = only(check_import("sglang", timeout_s=1 if "sleep" in code else 60))
    assert found.verdict == verdict and words in str(found)
