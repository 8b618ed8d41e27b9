"""The rules of the house: imports point strictly down, files and functions stay short. There are no exceptions."""
import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
LAYERS = {
    "utils": 0, "config": 1, "ops": 2, "types": 3, "algorithms": 4, "models": 5, "strategy": 5, "datasets": 5,
    "rollout": 6, "rewards": 7, "environments": 8, "preflight": 8, "trainer": 9, "inference": 10, "cli": 11, "api": 12
}
EXCEPTIONS: set[tuple[str, str]] = set()
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "tests" not in path.relative_to(PACKAGE).parts)


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree):
    """Dotted names of every import in a module, at the top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports_of(path):
    """What a file imports; three tests read all files."""
    return tuple(imported(ast.parse(path.read_text(encoding="utf-8"))))


def upward(part, names):
    """Names that a module of the package part ``part`` may not import."""
    theirs = [(name, name.split(".")[1]) for name in names if name.startswith("lightrft.")]
    return [name for name, other in theirs if other in LAYERS and other != part and LAYERS[other] >= LAYERS[part]]


def test_every_part_has_a_layer():
    assert {part_of(path) for path in FILES} - {"__init__"} == set(LAYERS)
    assert not EXCEPTIONS, "there are none"


@pytest.mark.parametrize("part", LAYERS)
def test_imports_point_down(part):
    found = {(str(path.relative_to(PACKAGE)), name) for path in FILES if part_of(path) == part
             for name in upward(part, imports_of(path))}
    assert found <= EXCEPTIONS, sorted(found)


def test_the_check_sees_siblings_and_lazy_imports():
    tree = ast.parse("def f():\n    from lightrft import models\n    import lightrft.utils.env")
    assert upward("strategy", imported(tree)) == ["lightrft.models"] and not upward("trainer", imported(tree))


def test_no_file_imports_itself_through_others():
    """Also not inside a package, and not inside functions."""
    modules = {".".join(("lightrft", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
               for path in FILES}  # yapf: disable
    graph = {name: set(imports_of(path)) & modules.keys() - {name, "lightrft"} for name, path in modules.items()}
    while free := [name for name, needed in graph.items() if not needed & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph, f"import circles among {sorted(graph)}"


def test_only_strategy_rollout_the_watchdog_and_the_launcher_talk_to_other_ranks():
    using = {
        part_of(path) for path in FILES
        if str(path.relative_to(PACKAGE)) not in ("utils/watchdog.py", "cli/main.py") and any(
            name == "torch.distributed" or name.startswith("torch.distributed.") for name in imports_of(path))
    }
    assert using <= {"strategy", "rollout"}, using


def test_only_one_file_knows_image_tensors():
    word = "pixel" + "_values"
    assert [path.name for path in FILES if word in path.read_text(encoding="utf-8")] in ([], ["actor_modality.py"])


def test_files_and_functions_are_short():
    everything = sorted(PACKAGE.rglob("*.py"))
    texts = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in everything}
    assert not [name for name, text in texts.items() if text.count("\n") > 400], "files over 400 lines"
    functions = [(name, node) for name, text in texts.items() for node in ast.walk(ast.parse(text))
                 if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    long = [f"{name}:{node.lineno} {node.name}" for name, node in functions if node.end_lineno - node.lineno >= 60]
    assert not long, f"functions over 60 lines: {long}"


def test_no_broad_except_and_no_print():
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            broad = isinstance(node, ast.ExceptHandler) and (node.type is None or ast.unparse(node.type)
                                                             in ("Exception", "BaseException"))
            printing = isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and part_of(path) != "cli"
            found += [f"{path.relative_to(PACKAGE)}:{node.lineno}"] if broad or printing else []
    assert not found, found
