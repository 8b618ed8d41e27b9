"""The rules of the house: imports point strictly down, files and functions stay short. There are no exceptions."""
import ast
from dataclasses import dataclass, field
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


@dataclass
class Read:
    """What the tests ask of a file, found in one walk."""
    imports: list[str] = field(default_factory=list)  # dotted names, at the top or inside functions
    functions: list[tuple[str, int]] = field(default_factory=list)  # "line name", and its lines
    broad: list[int] = field(default_factory=list)  # lines of handlers of every exception
    prints: list[int] = field(default_factory=list)

    def take(self, node):
        if isinstance(node, ast.Import):
            self.imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            self.imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.functions.append((f"{node.lineno} {node.name}", node.end_lineno - node.lineno + 1))
        elif isinstance(node, ast.ExceptHandler):
            self.broad += [node.lineno] if node.type is None or named(node.type, "Exception", "BaseException") else []
        elif isinstance(node, ast.Call):
            self.prints += [node.lineno] if named(node.func, "print") else []


def named(node, *names):
    return isinstance(node, ast.Name) and node.id in names


def read_text(text):
    found = Read()
    for node in ast.walk(ast.parse(text)):
        found.take(node)
    return found


@cache
def read_file(path):
    """Once for all tests."""
    return read_text(path.read_text(encoding="utf-8"))


def imports_of(path):
    return read_file(path).imports


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


def test_no_module_imports_a_test():
    """The wheel has none."""

    def tests(names):
        return [name for name in names if name.startswith("lightrft.") and "tests" in name.split(".")]

    assert not tests(name for path in FILES for name in imports_of(path))
    assert tests(read_text("def f():\n    from lightrft.ops import tests").imports) == ["lightrft.ops.tests"]


def test_the_check_sees_siblings_and_lazy_imports():
    names = read_text("def f():\n    from lightrft import models\n    import lightrft.utils.env").imports
    assert upward("strategy", names) == ["lightrft.models"] and not upward("trainer", names)


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
    everything = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    long = [name for name, path in everything.items() if path.read_bytes().count(b"\n") > 400]
    assert not long, f"files over 400 lines: {long}"
    functions = [f"{name}:{function}" for name, path in everything.items()
                 for function, lines in read_file(path).functions if lines > 60]  # yapf: disable
    assert not functions, f"functions over 60 lines: {functions}"


def test_no_broad_except_and_no_print():
    """A command prints."""
    broad = [f"{path.relative_to(PACKAGE)}:{line}" for path in FILES for line in read_file(path).broad]
    prints = [f"{path.relative_to(PACKAGE)}:{line}" for path in FILES if part_of(path) != "cli"
              for line in read_file(path).prints]  # yapf: disable
    assert not broad + prints, broad + prints


def test_the_check_sees_a_broad_except_a_print_and_the_lines_of_a_function():
    found = read_text("async def f():\n    try:\n        print(1)\n    except BaseException:\n        pass\n")
    assert (found.broad, found.prints, found.functions) == ([4], [3], [("1 f", 5)])
    assert read_text("try:\n    pass\nexcept:\n    pass").broad == [3]
    assert not read_text("try:\n    log.print(1)\nexcept OSError:\n    pass").broad
