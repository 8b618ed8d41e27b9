"""A plugin with an option of its own: the file that ``docs/extending.md`` shows, from the flag to the gradient."""
import argparse
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lightrft.algorithms import POLICY_LOSSES, table
from lightrft.algorithms.base import REGISTRIES
from lightrft.cli import train
from lightrft.config import tree as config_tree
from lightrft.config.cli import parse_config, parse_keywords
from lightrft.config.files import to_yaml
from lightrft.config.options import ConfigError, option
from lightrft.config.schema import AlgorithmConfig, Config
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.tree import build, extend, flatten, group_from_args, group_options, options
from lightrft.preflight.hardware import Machine
from lightrft.preflight.report import option_table, report
from lightrft.preflight.validate import changes, validate
from lightrft.tests.support import runs
from lightrft.tests.support.config_problems import GOOD
from lightrft.utils.cli_args import add_arguments

DOCS = Path(__file__).parents[2] / "docs"
PLUGIN = ["--plugin", "my_loss"]
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="installed without its repository")
no_picture = runs.no_picture


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """The folder of the plugin is found; what a test has registered is gone after it."""
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.setattr(config_tree, "_EXTENSIONS", {})
    monkeypatch.setattr(POLICY_LOSSES, "_entries", dict(POLICY_LOSSES._entries))
    yield
    sys.modules.pop("my_loss", None)


def error_of(capsys, argv):
    with pytest.raises(SystemExit) as error:
        parse_config(argv, "prog")
    assert error.value.code == 2
    return capsys.readouterr().err


def problems(*argv):
    with pytest.raises(ConfigError) as error:
        validate(parse_config([*PLUGIN, *argv], defaults=GOOD).config, 1)
    return error.value.problems


def test_the_page_shows_this_file():
    assert "{literalinclude} my_loss.py" in (DOCS / "extending.md").read_text(encoding="utf-8")


def test_help_lists_it_with_the_plugin_alone(capsys):
    for argv, shown in (([], False), (PLUGIN, True)):
        with pytest.raises(SystemExit):
            parse_config([*argv, "--help"], "prog")
        text = " ".join(capsys.readouterr().out.split())
        assert ("--tilt FLOAT tilted: weight of the tokens whose advantage is negative (default: 0.5)" in text) is shown


@pytest.mark.parametrize("text", ["tilt: 0.25", "algorithm: {tilt: 0.25}", "algorithm:\n  tilt: 2.5e-1"])
def test_files_and_flags_set_it(text, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"plugin: [my_loss]\n{text}\n")
    parsed = parse_config(["--config", str(path)])
    assert parsed.config.algorithm.tilt == 0.25 and parsed.provenance["tilt"] == f"yaml:{path}"
    parsed = parse_config(["--config", str(path), "--tilt", "0.75"], defaults={"tilt": 0.125})
    assert parsed.config.algorithm.tilt == 0.75 and parsed.provenance["tilt"] == "flag"
    assert "tilt" + " " * 29 + "0.75" in report(parsed.config, parsed.provenance, Machine.here(1))


@pytest.mark.parametrize("argv,message", [
    ([*PLUGIN, "--tild", "0.3"], "unknown flag --tild (did you mean --tilt?)"),
    ([*PLUGIN, "--tilt", "much"], "--tilt: expected a number, got 'much'"),
    (["--tilt", "0.3"], "unknown flag --tilt"),
])
def test_mistakes_are_named(argv, message, capsys):
    assert message in error_of(capsys, argv)


def test_mistakes_in_a_file_are_named(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("plugin: my_loss\nalgorithm: {tild: 1}\n")
    assert "unknown key algorithm.tild (did you mean tilt?)" in error_of(capsys, ["--config", f"{tmp_path}/c.yaml"])


def test_its_rules_hold():
    assert problems("--policy_loss", "tilted", "--tilt", "3") == ["--tilt 3: must be in [0, 1]; nearest valid value: 1"]
    assert problems("--tilt", "0.3") == ["--tilt 0.3: ppo does not use it; drop it, or use --policy_loss tilted"]
    assert "--eps_clip 0.3: tilted does not use it" in problems("--policy_loss", "tilted", "--eps_clip", "0.3")[0]


def test_it_is_in_the_tables_and_compared_on_resume():
    first = parse_config([*PLUGIN, "--policy_loss", "tilted"]).config
    again = parse_config([*PLUGIN, "--policy_loss", "tilted", "--tilt", "0.75"]).config
    assert changes(flatten(first), again) == ["--tilt 0.75 (was 0.5)"] and changes(flatten(first), first) == []
    row = next(line for line in table().splitlines() if line.startswith("| `tilted`"))
    assert "`--tilt`" in row and "w_t = tilt where A_t < 0" in row
    assert "| `--tilt` | float | `0.5` |" in option_table(Config) and "--tilt" not in option_table(SFTConfig)


def test_other_ways_to_a_tree():
    parse_config(PLUGIN)
    assert build(Config, {"tilt": 0.25}).algorithm.tilt == 0.25 and Config().algorithm.tilt == 0.5
    assert Config() == Config() and isinstance(Config().algorithm, AlgorithmConfig)
    args = add_arguments(argparse.ArgumentParser()).parse_args(["--tilt", "0.75"])
    assert group_from_args(AlgorithmConfig, args).tilt == 0.75
    plain = build(Config, GOOD)
    plain.algorithm = AlgorithmConfig()
    validate(plain, 1)
    assert "tilt" not in options(plain) and flatten(plain).keys() == options(plain).keys()


def number(default=0.5, **known):
    return option(default, "my number", **{"within": "[0, 1]"} | known)


def declared(name="mine", annotation=float, line=None, base=AlgorithmConfig):
    line = number() if line is None else line
    return dataclass(type("Mine", (base, ), {"__annotations__": {name: annotation}, name: line}))


@pytest.mark.parametrize("made,message", [
    (lambda: declared("eps_clip"), "there is an option --eps_clip already"),
    (lambda: declared("plugin"), "there is an option --plugin already"),
    (lambda: declared("fsdp"), "there is an option --fsdp already"),
    (lambda: declared(line=0.5), r"mine: declare it with option\(default, help\)"),
    (lambda: declared(line=option(0.5, "my number")), "a number needs its interval"),
    (lambda: declared(annotation=set), "nearest valid: bool, int, float, str"),
    (lambda: declared(annotation=list[str], line=option("a", "names")), "the default of a list is a list"),
    (lambda: declared(annotation=tuple[str], line=option("a", "names")), "nearest valid: bool, int, float, str"),
    (lambda: declared(line=number(within="0..1")), "within='0..1' is not an interval; write it as"),
    (lambda: declared(line=number(within="[1, 0]")), "is not an interval"),
    (lambda: declared(line=number(within=(0, 1))), r"within=\(0, 1\): expected text"),
    (lambda: declared(annotation=str, line=option("a", "name", within="[0, 1]")), "only numbers have an interval"),
    (lambda: declared(line=number("a")), "its default: expected a number, got 'a'; change the default or the type"),
    (lambda: declared(line=number(None)), "its default: expected a number, got None"),
    (lambda: declared(line=number("0.5")), "its default '0.5' is read as 0.5; declare that"),
    (lambda: declared(annotation=int, line=number(1.0)), "its default 1.0 is read as 1; declare that"),
    (lambda: declared(line=number(5.0)), r"mine: its default 5: must be in \[0, 1\]; nearest valid value: 1"),
    (lambda: declared(annotation=list[float], line=number([0.5, 5.0])), r"its default 5: must be in \[0, 1\]"),
    (lambda: declared(annotation=str, line=option("q", "way",
                                                  ("a", "b"))), "its default: expected one of a, b, got 'q'"),
    (lambda: declared(annotation=str, line=option("q", "way", "pq")), "choices='pq': expected a tuple of texts"),
    (lambda: declared(line=number(choices=("0.5", ))), "for an option of type str or bool"),
    (lambda: declared(line=number(needs=("eps_clip", ))), "needs=.*: expected text"),
    (lambda: declared(line=field(default=0.5, metadata={"help": "mine"})), r"declare it with option\(default, help\)"),
    (lambda: declared(base=object), "derived from AlgorithmConfig"),
    (lambda: type("Mine", (AlgorithmConfig, ), {}), "a @dataclass"),
])
def test_declarations_that_are_refused(made, message):
    with pytest.raises(ConfigError, match=message):
        extend(AlgorithmConfig, made())
    assert "mine" not in options(Config)


def test_names_that_are_taken_elsewhere():
    extend(AlgorithmConfig, declared())
    assert extend(AlgorithmConfig, declared()) == ("mine", ), "the same module, loaded again"
    with pytest.raises(ConfigError, match=f"there is an option --mine already .{__name__}.Mine.; choose another name"):
        other = declared()
        other.__qualname__ = "Other"
        extend(AlgorithmConfig, other)


@pytest.mark.parametrize("name,line,message", [
    ("seed", {}, "--seed is declared twice, by {0} and lightrft.config.shared_schema.OptimConfig; rename one of them"),
    ("no_disable_ckpt", {}, "{0}.no_disable_ckpt: --no_disable_ckpt is the flag that switches off --disable_ckpt "
     "(lightrft.config.shared_schema.CheckpointConfig); choose another name"),
    ("mine", {"needs": "kl_targt 0.1"}, "{0}.mine: needs='kl_targt 0.1': there is no option kl_targt (did you mean "
     "kl_target?); name one, or drop needs"),
])  # yapf: disable
def test_problems_that_the_tree_shows(name, line, message):
    extend(AlgorithmConfig, declared(name, line=number(**line)))
    with pytest.raises(ConfigError, match=f"^{re.escape(message.format(f'{__name__}.Mine'))}$"):
        options(Config)


LINE = "    tilt: float = option(0.5, "
DECORATOR = '@policy_loss("tilted", skips_zero=True, reads=(), options=TiltedOptions)'


@pytest.mark.parametrize("wrong,right,part", [
    ('"[0, 1]"', '"0..1"', "my_other_loss.TiltedOptions.tilt: within='0..1' is not an interval"),
    (LINE, LINE.replace("0.5", "'a'"), "my_other_loss.TiltedOptions.tilt: its default: expected a number, got 'a'"),
    (LINE, LINE.replace("tilt", "save_path"), "--save_path is declared twice, by my_other_loss.TiltedOptions and "),
    ('"[0, 1]"', '"[0, 1]", needs="nonexist 0.1"', "tilt: needs='nonexist 0.1': there is no option nonexist"),
    (LINE, LINE.replace("tilt: float", "no_disable_ckpt: bool"), "only numbers have an interval"),
    (LINE, "    no_disable_ckpt: bool = option(False, 'a')\n" + LINE, "switches off --disable_ckpt"),
    ("import torch\n", "import tortch\n", "my_other_loss.py:4: ModuleNotFoundError: No module named 'tortch'"),
    ("return -weight", "return return", "my_other_loss.py:28: SyntaxError: invalid syntax; python -c"),
    (LINE, "    tilt = option(0.5, ", "my_other_loss.py:14: TypeError: 'tilt' is a field but has no type annotation"),
    ('"tilted", ', '"ppo", ', "my_other_loss.py:20: ValueError: policy loss 'ppo' is registered twice"),
    (DECORATOR, '@POLICY_LOSSES.register("tilted_too")',
     "policy loss 'tilted_too': register the function with @policy_loss(NAME, ...) of lightrft.algorithms.base instead"
     ),
    (', within="[0, 1]"', "", "TiltedOptions.tilt: a number needs its interval"),
    ("reads=()", "reads=('eps_clp', )", "AlgorithmConfig has no option eps_clp (did you mean eps_clip?)"),
])
def test_a_mistake_of_a_plugin_names_it(wrong, right, part, tmp_path, monkeypatch, capsys):
    source = (DOCS / "my_loss.py").read_text(encoding="utf-8").replace(wrong, right).replace(
        "import policy_loss,", "import policy_loss, POLICY_LOSSES,")
    (tmp_path / "my_other_loss.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = error_of(capsys, ["--plugin", "my_other_loss"])
    sys.modules.pop("my_other_loss", None)
    assert "--plugin my_other_loss: " in message and part in message
    assert message.count("\n") == 2, "one line, and the one about --help"


def test_two_plugins_with_the_same_option_are_named(tmp_path, monkeypatch, capsys):
    source = (DOCS / "my_loss.py").read_text(encoding="utf-8").replace('"tilted", ', '"other", ')
    (tmp_path / "my_second_loss.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = error_of(capsys, [*PLUGIN, "--plugin", "my_second_loss"])
    assert ("--plugin my_second_loss: my_second_loss.TiltedOptions.tilt: there is an option --tilt already "
            "(my_loss.TiltedOptions); choose another name") in message


@pytest.fixture(name="files")
def fixture_files(tmp_path, monkeypatch):
    """A folder with plugins that say that they were imported, as the current one; what they add is gone after it."""
    for name in ("one.py", "two.py", "pl/three.py", "pack/__init__.py", "pack/four.py", "bare/five.py", "~/sixth.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import sys\nsys.imported_plugins.append(__name__)\n")
    (tmp_path / "pack" / "four.py").write_text("from . import sys\nsys.imported_plugins.append(__name__)\n")
    (tmp_path / "json.py").touch()
    (tmp_path / "wrong.py").write_text("def f(:\n")
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "imported_plugins", [], raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "~"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in ("one", "two", "three", "pack", "pack.four", "five", "sixth", "bare"):
            del sys.modules[name]


@pytest.mark.parametrize("words,names", [
    (["one.py", "two"], "one two"),
    (["./one.py,pl/three.py"], "one three"),
    (["one", "--plugin", "pl/three", "--seed", "1"], "one three"),
    (["{0}/two.py", "~/sixth.py"], "two sixth"),
    (["pack", "pack/four.py"], "pack pack.four"),
    (["pack/", "pack/__init__.py"], "pack"),
    (["../{1}/pl/three.py"], "three"),
])
def test_plugins_are_files_and_modules(words, names, files):
    words = [word.format(files, files.name) for word in words]
    plugins = parse_config(["--plugin", *words]).plugins
    assert sys.imported_plugins == names.split()
    (files / "c.yaml").write_text(to_yaml(Config(), plugins))
    assert parse_config(["--config", "c.yaml"]).plugins == plugins
    assert parse_keywords({}, plugins=[Path(plugin) for plugin in plugins[:1]]).plugins == [str(Path(plugins[0]))]


def test_plugins_of_a_program_and_of_a_file_are_one_text_too(files):
    assert parse_keywords({}, plugins="one.py,pl/three.py").plugins == ["one.py", "pl/three.py"]
    (files / "c.yaml").write_text("plugin: two.py, pack\n".replace(", ", ","))
    assert parse_config(["--config", "c.yaml"]).plugins == ["two.py", "pack"]
    assert sys.imported_plugins == ["one", "three", "two", "pack"]


@pytest.mark.parametrize("name,told", [
    ("onne.py", "no such file (did you mean one.py?)"),
    ("pl/tree.py", "no such file (did you mean three.py?)"),
    (".one", "no name of a module; give --plugin one"),
    ("bare/", "a folder without __init__.py, of which nothing is imported; name a file in it, such as bare/my_file.py"),
    ("bare", "a folder without __init__.py, of which nothing is imported; name a file in it, such as bare/my_file.py"),
    ("./json.py", "already; give the file another name"),
    ("wrong.py", "wrong.py:1: SyntaxError: invalid syntax; python "),
    ("no_such_module", "no such module (looked in "),
    ("", "expected a Python file or the name of a module"),
])  # yapf: disable
def test_what_is_no_plugin_is_named(name, told, files, capsys):
    assert "--plugin" in (message := error_of(capsys, ["--plugin", name])) and told in message, message


def test_a_group_keeps_its_words():
    extend(AlgorithmConfig, declared())
    group = config_tree.extended(AlgorithmConfig)
    assert group.__doc__ == AlgorithmConfig.__doc__ and group is config_tree.extended(AlgorithmConfig)
    assert [*group_options(group)] == [*group_options(AlgorithmConfig), "mine"]


def test_a_file_of_the_package_is_read_before_it_is_imported(tmp_path):
    """Help and the doctor know the options of an algorithm's file without torch."""
    (tmp_path / "lightrft" / "algorithms" / "losses").mkdir(parents=True)
    source = (DOCS / "my_loss.py").read_text(encoding="utf-8").replace("import torch", "raise AssertionError")
    (tmp_path / "lightrft" / "algorithms" / "losses" / "new.py").write_text(source, encoding="utf-8")
    config_tree._read_folder(AlgorithmConfig, tmp_path / "lightrft", "algorithms")
    first = Config()
    assert first.algorithm.tilt == 0.5 and options(Config)["tilt"].within == "[0, 1]"
    imported = declared("tilt", line=option(0.5, options(Config)["tilt"].help, within="[0, 1]"))
    imported.__module__, imported.__qualname__ = "lightrft.algorithms.losses.new", "TiltedOptions"
    assert extend(AlgorithmConfig, imported) == ("tilt", ) and Config() == first, "the import changes nothing"


def test_bare_options_are_those_of_every_algorithm():
    code = ("from lightrft.config.schema import Config\nfrom lightrft.config.tree import options\n"
            "print(*options(Config))")
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    own = {name for registry in REGISTRIES.values() for entry in map(registry.get, registry) for name in entry.own}
    assert own <= set(bare.stdout.split())


def test_it_trains_and_resumes(tmp_path, capsys):
    home = runs.write_home(tmp_path)
    (tmp_path /
     "length.py").write_text("def reward_func(queries, prompts, labels):\n    return [len(q) for q in queries]\n")
    values = {**runs.BASE, "pretrain": home / "model", "prompt_data": home / "train.jsonl", "stop": "x",
              "save_path": tmp_path / "run", "disable_ckpt": False, "reward": tmp_path / "length.py",
              "advantage_estimator": "reinforce", "policy_loss": "tilted"}  # yapf: disable
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    train.main([*PLUGIN, *words, "--tilt", "0.25"])
    saved = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert f"```yaml\n{saved}```" in (tmp_path / "run" / "hf" / "README.md").read_text(encoding="utf-8")
    assert "  tilt: 0.25\n" in saved and "plugin:\n- my_loss\n" in saved
    train.main(["--config", f"{tmp_path}/run/config.yaml", "--load_checkpoint", "--max_steps", "2", "--tilt", "0.5"])
    assert "--tilt 0.5 (was 0.25)" in "".join(capsys.readouterr())
    lines = runs.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["policy/tilted_frac"] == 0 for line in lines), "every advantage is a length"
