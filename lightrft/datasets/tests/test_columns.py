"""The columns and the keys of turns that are reported as read are those that readers use; the first row is shown."""
import logging
import re
from pathlib import Path

import pytest

from lightrft.config.generate_schema import GenerateDataConfig
from lightrft.config.offline_schema import PairDataConfig
from lightrft.config.preference_schema import JudgedDataConfig
from lightrft.config.rm_schema import StepDataConfig
from lightrft.config.schema import DataConfig
from lightrft.datasets.answered import read_responses
from lightrft.datasets.columns import columns_of
from lightrft.datasets.judged import JudgedDataset
from lightrft.datasets.preferences import PairDataset
from lightrft.datasets.preview import preview, SHOWN, WIDTH
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.rows import DataError, hold_rows, Rows
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.datasets.steps import StepDataset
from lightrft.tests.support import field
from lightrft.tests.support.boundary_tokenizers import metaspace
from lightrft.utils.logging import get_logger

ASKED = [{"role": "user", "content": "1+1?", "name": "Ann"}]
SAID = [{"role": "assistant", "content": "2"}]
OTHER = {"source": "s", "empty": None, "notes": [{"a": 1}]}
PAIR = {"prompt": ASKED, "chosen": SAID, "rejected": [{"role": "assistant", "content": "3"}], "margin": 0.5}
STEPS = {"prompt": ASKED, "completions": ["1+1", "is 2"], "labels": [True, False]}


@pytest.fixture(scope="module")
def tokenizer():
    return field.field_tokenizer()


@pytest.fixture
def reported(caplog, monkeypatch):
    """Return a function that gives the lines about columns that are logged."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level(logging.INFO, logger="lightrft")
    return lambda: [text.partition(": ")[2].partition(": ")[2] for text in caplog.messages if text.startswith("data: ")]


def sft(rows, tokenizer):
    return SFTDataset(DataConfig(prompt_data=[hold_rows(rows)]), tokenizer, 900)


def prompts(rows, tokenizer, **options):
    return PromptsDataset(DataConfig(prompt_data=[hold_rows(rows)], **options), tokenizer, 500)


def pairs(rows, tokenizer):
    return PairDataset(PairDataConfig(train_data=[hold_rows(rows)]), tokenizer)


def judged(rows, tokenizer):
    rows = [*rows, rows[0] | {"prompt": [{"role": "user", "content": "2+2?"}], "label": False}]
    return JudgedDataset(JudgedDataConfig(train_data=[hold_rows(rows)]), tokenizer)


def steps(rows, tokenizer):
    options = {"placeholder_token": "#", "reward_tokens": ["+", "-"]}
    return StepDataset(StepDataConfig(train_data=[hold_rows(rows)], **options), tokenizer)


CASES = {
    "sft": (sft, {"messages": ASKED + SAID, "system": "Be kind.", "answer": "5", "id": "a"},
            ["reads messages (role, content), system", "leaves alone messages (name), answer, id, source, notes"]),
    "completion": (sft, {"prompt": ASKED, "completion": SAID, "answer": "5"},
                   ["reads prompt (role, content), completion (role, content)",
                    "leaves alone prompt (name), answer, source, notes"]),
    "tools": (sft, field.rows("tools_sft")[0], ["reads messages (role, content, tool_calls), tools",
                                                "leaves alone messages (name), source, notes"]),
    "prompts": (prompts,
                {"prompt": ASKED, "id": "a", "chat_template_kwargs": {"enable_thinking": False, "effort": 1},
                 "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": 0}},
                ["reads prompt (role, content), id, chat_template_kwargs (enable_thinking), "
                 "reward_model (ground_truth)",
                 "leaves to the rewards prompt (name), chat_template_kwargs (effort), reward_model (style), "
                 "extra_info, source, notes"]),
    "variables": (sft, {"messages": ASKED + SAID, "chat_template_kwargs": {"effort": 1}, "enable_thinking": True},
                  ["reads messages (role, content), enable_thinking",
                   "leaves alone messages (name), chat_template_kwargs (effort), source, notes"]),
    "pairs": (pairs, PAIR, ["reads prompt (role, content), chosen (role, content), rejected (role, content), margin",
                            "leaves alone prompt (name), source, notes"]),
    "kto": (judged, {"prompt": ASKED, "completion": SAID, "label": True},
            ["reads prompt (role, content), completion (role, content), label",
             "leaves alone prompt (name), source, notes"]),
    "prm": (steps, STEPS, ["reads prompt (role, content), completions, labels",
                           "leaves alone prompt (name), source, notes"]),
}  # yapf: disable


@pytest.mark.parametrize("kind", CASES)
def test_each_source_says_what_it_reads_and_leaves(kind, tokenizer, reported):
    make, row, lines = CASES[kind]
    make([row | OTHER], tokenizer)
    assert reported() == lines


def test_the_example_of_the_docs_is_what_is_said(tokenizer, reported):
    page = Path(__file__).parents[3] / "docs" / "data.md"
    if not page.exists():
        pytest.skip("installed without its repository")
    data = sft([{"messages": ASKED + SAID, "answer": "2"}], tokenizer)
    lines = [f"data: rows.jsonl: {line}" for line in reported()] + [*preview(data[0], tokenizer)]
    assert re.findall(r"```text\n(data: .*?)\n```", page.read_text(), re.DOTALL) == ["\n".join(lines)]


def test_options_that_name_columns_are_seen(tokenizer, reported):
    row = {"question": "1+1?", "gold": "2", "prompt": "not this", "answer": "5", "hard": 1}
    prompts([row], tokenizer, input_key="question", reference_key="gold", difficulty_key="hard", difficulty_max=2.0)
    assert reported() == ["reads question, gold, hard", "leaves to the rewards prompt, answer"]


def test_neutral_values_and_columns_of_later_rows_are_seen():
    """Their removal changes nothing, or they are not in the first row."""
    rows = Rows([{"x": 1.0}, {"y": 2}, {"z": None}], [("file", 3)])
    found = columns_of(rows, lambda rows: [row.get("x", 1.0) * row.get("w", 1) for row in rows.rows])
    assert found.used == ["x"] and found.left == ["y"]


@pytest.mark.parametrize("row,scored,lines", [
    ({"prompt": ASKED, "output": "2", "answer": "2"}, True,
     ["reads prompt (role, content, name), output, answer", "leaves to the rewards source, notes"]),
    ({"chosen": ASKED + SAID, "reward": 1}, False,
     ["reads chosen (role, content, name), reward", "leaves alone source, notes"]),
])  # yapf: disable
def test_rows_that_are_scored_say_what_is_read(row, scored, lines, tokenizer, reported):
    """A reward gets the messages with all their keys."""
    data = GenerateDataConfig(prompt_data=[hold_rows([row | OTHER])], input_key="prompt" if scored else "chosen")
    (answered, ) = read_responses(data, scored)
    assert reported() == lines
    assert [*preview(answered, None)] == ["the first row, a prompt and its response (marked >):", "  | 1+1?", "  > 2"]


def test_pictures_that_a_reward_model_would_not_see_are_refused(tokenizer):
    row = {"input": "<image>?", "output": "2", "images": ["a.png"]}
    data = GenerateDataConfig(prompt_data=[hold_rows([row])])
    assert read_responses(data, True)[0].row == row, "a function may open them"
    with pytest.raises(DataError, match="row 1: the row has media .images., and --eval_task rm shows none"):
        read_responses(data, True, Renderer(DataConfig(), tokenizer))


def test_a_call_is_no_text_to_score():
    chat = field.rows("tools_sft")[0]["messages"][:2]
    with pytest.raises(DataError, match="row 1: the response calls a tool"):
        read_responses(GenerateDataConfig(prompt_data=[hold_rows([{"chosen": chat}])], input_key="chosen"), True)


def text_of(lines):
    return "".join(line[4:] for line in lines if line.startswith(("  | ", "  > "))).replace("\\n", "\n")


def test_the_first_row_is_shown_with_what_is_learnt(tokenizer):
    data = sft(field.rows("tools_sft"), tokenizer)
    lines = [*preview(data[0], tokenizer)]
    assert text_of(lines) == tokenizer.decode(data[0].token_ids)
    learnt = "".join(line[4:] for line in lines if line.startswith("  > "))
    assert learnt == ('<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>'
                      "It is 4 C.<|im_end|>")
    counts = len(data[0].token_ids), sum(data[0].loss_mask)
    assert lines[0] == "the first row: {} tokens, of which {} are learnt (marked >):".format(*counts)


def test_a_blank_before_an_answer_is_shown():
    """Which a Metaspace tokenizer removes from a text that begins with it."""
    tokenizer = metaspace()
    lines = [*preview(sft([{"prompt": "Q:", "completion": " 2"}], tokenizer)[0], tokenizer)]
    assert lines[1:] == ["  | Q:", "  >  2</s>"], lines


@pytest.mark.parametrize("kind,heads,learnt", [
    ("pairs", ["the first row, chosen, margin 0.5", "the first row, rejected"], ["2<|im_end|>", "3<|im_end|>"]),
    ("ties", ["the first row, chosen, a tie, style 0.5", "the first row, rejected"], ["2<|im_end|>", "3<|im_end|>"]),
    ("kto", ["the first row, desirable"], ["2<|im_end|>"]),
    ("prm", ["the first row, with the labels 1, 0"], ["#", "#"]),
    ("prompts", ["the first prompt, "], []),
    ("weights", ["the first row: 17 tokens, of which 2 are learnt (marked >), with the weights 0.5"], ["2<|im_end|>"]),
])  # yapf: disable
def test_every_kind_of_row_is_shown(kind, heads, learnt, tokenizer):
    ties = (pairs, PAIR | {"margin": None, "tie": True, "heads": {"style": "tie"}}, [])
    weights = (sft, {"messages": [*ASKED, SAID[0] | {"weight": 0.5}]}, [])
    make, row, _ = (CASES | {"ties": ties, "weights": weights})[kind]
    lines = [*preview(make([row], tokenizer)[0], tokenizer)]
    found = [line for line in lines if not line.startswith("  ")]
    assert len(found) == len(heads) and all(line.startswith(head) for line, head in zip(found, heads))
    assert [line[4:] for line in lines if line.startswith("  > ")] == learnt
    assert "  | <|im_start|>user\\n" in lines and "  | 1+1?<|im_end|>\\n" in lines


def test_long_texts_are_shortened_in_the_middle(tokenizer):
    row = {"messages": [{"role": "user", "content": "begin " + "a b " * 150 + "end"}, *SAID]}
    lines = [*preview(sft([row], tokenizer)[0], tokenizer)]
    assert max(map(len, lines)) <= WIDTH and len(text_of(lines)) < SHOWN + 100
    assert "begin a b" in text_of(lines) and "characters ...]" in text_of(lines) and "b end<|im_end|>" in text_of(lines)
