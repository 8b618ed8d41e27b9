"""The table of families with state in the docs is what tests compare, and has all families of transformers."""
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightrft.tests.support import hybrids

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
STATE = re.compile(r"update_conv_state|update_recurrent_state|set_linear_cache|_is_stateful = True")
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="installed without its repository")


def with_state() -> set[str]:
    """Model types of text families whose code in transformers keeps a state."""
    found = set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        package = CONFIG_MAPPING[kind].__module__.rpartition(".")[0]
        spec = find_spec(f"{package}.modeling_{package.rpartition('.')[2]}")
        if spec and spec.origin and STATE.search(Path(spec.origin).read_text(encoding="utf-8")):
            found.add(kind)
    return found


def test_the_table_is_what_tests_compare():
    assert hybrids.table() in PAGE.read_text(encoding="utf-8")


def test_every_family_with_state_is_right_or_refused_by_name():
    text = PAGE.read_text(encoding="utf-8")
    refused = {kind for row in re.findall(r"^\| \d+ refused: .* \| (`.*`) \|$", text, re.MULTILINE)
               for kind in re.findall(r"`([^`]+)`", row)}  # yapf: disable
    _, _, after = text.partition("Refused with a state: ")
    listed = set(re.findall(r"`([^`]+)`", after.partition(".")[0]))
    rows = {name.removesuffix("_text") for name in hybrids.FAMILIES} | {"lfm2_moe"}
    kinds = with_state()
    assert {kind.removesuffix("_text") for kind in kinds - listed} == rows
    assert listed <= kinds & refused
