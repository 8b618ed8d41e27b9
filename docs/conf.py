"""Configuration of Sphinx: pages in Markdown; tables of options and algorithms and the API page are generated."""
import pkgutil
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import lightrft  # noqa: E402

project = "lightrft"
author = "the lightrft authors"
copyright = author
release = lightrft.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
smartquotes_action = "qe"  # two hyphens begin a flag
html_theme = "furo"
html_title = f"lightrft {release}"
exclude_patterns = ["_build", "generated/*.md", "generated/algorithms"]  # the tables are included by other pages
suppress_warnings = ["myst.header"]
autodoc_mock_imports = ["triton"]  # of CUDA
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_rtype = False


def _tables() -> dict[str, str]:
    from algorithm_pages import pages
    from lightrft.preflight.report import option_table
    from lightrft.cli.offline import OFFLINE
    from lightrft.config.evaluate_schema import EvaluateConfig
    from lightrft.config.generate_schema import GenerateConfig
    from lightrft.config.inference_schema import ChatConfig
    from lightrft.config.schema import Config
    from lightrft.config.serve_schema import ServeConfig
    return {
        "options.md": option_table(Config), **{
            f"{name}_options.md": option_table(command.tree) for name, command in OFFLINE.items()
        }, "generate_options.md": option_table(GenerateConfig), "evaluate_options.md": option_table(EvaluateConfig),
        "chat_options.md": option_table(ChatConfig), "serve_rm_options.md": option_table(ServeConfig),
        **{f"algorithms/{page}.md": text for page, text in pages().items()}
    }


def _api() -> str:
    """Render one page with every module of the package except tests."""
    lines = ["API", "===", ""]
    for info in pkgutil.walk_packages(lightrft.__path__, "lightrft."):
        if info.ispkg or "tests" in info.name:
            continue
        lines += [info.name, "-" * len(info.name), "", f".. automodule:: {info.name}", "   :members:", ""]
    return "\n".join(lines)


def generate(app: object) -> None:
    """Write ``docs/generated``; a file is written only if its text changes, so live builds do not loop."""
    from algorithm_pages import draw
    folder = HERE / "generated"
    folder.mkdir(exist_ok=True)
    for name, text in {**_tables(), "api.rst": _api()}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    draw(folder / "curves")


def plain_text(app, what, name, obj, options, lines):
    """Keep bars and stars of docstrings as they are, and turn the fields of the algorithm files into a list."""
    for number, line in enumerate(lines):
        line = re.sub(r"(``.*?``)|([|]|[*](?! ))", lambda match: match[1] or "\\" + match[2], line)
        if name.startswith("lightrft.algorithms."):  # of a module, or of a function in a file of several algorithms
            line = re.sub(r"^(Paper|Equation|Degenerate|Deviation): ", r":\1: ", line)
        lines[number] = line


def setup(app):
    app.connect("builder-inited", generate)
    app.connect("autodoc-process-docstring", plain_text, priority=400)
