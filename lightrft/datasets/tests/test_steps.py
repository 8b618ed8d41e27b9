"""Solutions in steps: the known schemas, their tokens, and rows, labels and tokens that cannot be used."""
import pytest

from lightrft.config.rm_schema import StepDataConfig, StepFormat
from lightrft.config.schema import DataConfig
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.rows import DataError, hold_rows, UnusableRow
from lightrft.datasets.steps import encode_steps, split_steps, StepDataset
from lightrft.tests.support import tiny
from lightrft.tests.support.boundary_tokenizers import metaspace
from lightrft.utils.errors import UserError

TOKENIZER = tiny.tokenizer()
ROW = {"input": "1+1?\n2#\n2.0#", "label": ["+", "-"]}
TRL = {"prompt": "1+1?\n", "completions": ["2", "2.0"], "labels": [True, False]}


def read(*rows, **options):
    given = {"placeholder_token": "#", "reward_tokens": ["+", "-"], "max_len": 200} | options
    return StepDataset(StepDataConfig(train_data=[hold_rows([row]) for row in rows], **given), TOKENIZER)


def seen(example):
    """Text of an example, and the text before each label with the label."""
    text = [TOKENIZER.decode([token]) for token in example.token_ids]
    ends = [i for i, keep in enumerate(example.loss_mask) if keep]
    return "".join(text), [("".join(text[:end]), label) for end, label in zip(ends, example.labels, strict=True)]


@pytest.mark.parametrize("row", [
    ROW,
    ROW | {"label": "1+1?\n2+\n2.0- done"},
    ROW | {"input": ROW["input"] + " and so on"},
    ROW | {"label": [1, 0.0]},
    TRL,
    TRL | {"completions": ["2\n", "2.0\n"]},
    TRL | {"labels": None, "label": ["+", "-"]},
])  # yapf: disable
def test_every_schema_gives_the_same_tokens_and_labels(row):
    (example, ) = read(row)
    assert seen(example) == ("1+1?\n2#\n2.0#", [("1+1?\n2", 1.0), ("1+1?\n2#\n2.0", 0.0)])
    assert example.token_ids == TOKENIZER("1+1?\n2#\n2.0#").input_ids, "here as the tokenizer writes the whole text"


def test_labels_are_shares_classes_or_tokens():
    assert [each.labels for each in read(ROW | {"label": [0.25, 1.0]}, ROW)] == [(0.25, 1.0), (1.0, 0.0)]
    assert read(ROW, reward_tokens=["-", "0", "+"])[0].labels == (2.0, 0.0)
    plus, minus = (float(TOKENIZER.convert_tokens_to_ids(each)) for each in "+-")
    assert read(ROW, reward_tokens=[])[0].labels == (plus, minus)


def test_chats_and_other_separators():
    chat = TRL | {"prompt": [{"role": "user", "content": "1+1?"}]}
    text, _ = seen(read(chat, step_separator="; ")[0])
    assert text == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2#; 2.0#"
    assert seen(read(TRL | {"prompt": "1+1?"}, apply_chat_template=True, step_separator="; ")[0])[0] == text
    assert seen(read(ROW, apply_chat_template=True)[0])[0] == ROW["input"], "a whole solution stays as it is"


@pytest.mark.parametrize("row,said", [
    (ROW | {"label": ["+"]}, "1 labels for 2 steps"),
    (ROW | {"label": None}, "0 labels for 2 steps"),
    (ROW | {"label": True}, "the label True for 2 steps"),
    (ROW | {"label": "1+1?\n2+\n3-"}, "the label is a text, but not the solution"),
    (ROW | {"input": "1+1? 2"}, "the solution has no step .no # in it"),
    (ROW | {"input": "1+1?\n2# #"}, "step 2 of 2 is empty"),
    (TRL | {"completions": ["2#", "2"]}, "a step holds #, which marks the end of every step"),
    (TRL | {"completions": ["2", ""]}, "step 2 of 2 is empty"),
    (ROW | {"input": ["1#", "2#"]}, "the column 'input' is .'1#', '2#'., which is no text but list"),
    (TRL | {"completions": ["2", None]}, "step 2 of 2 is None, which is no text but NoneType"),
    (TRL | {"completions": [{"text": "2"}, "2"]}, "step 1 of 2 is {'text': '2'}, which is no text but dict"),
    (TRL | {"labels": [True] * 3}, "3 labels for 2 steps"),
    (TRL | {"prompt": [{"role": "user", "content": [None]}]}, "a chat message of 'user' has a part without text"),
])  # yapf: disable
def test_steps_without_a_label_each_stop_the_run_or_are_counted(row, said):
    with pytest.raises(UnusableRow, match=f"row 1.*{said}"):
        read(row)
    found = read(ROW, row, step_policy="skip")
    assert (len(found), found.dropped) == (1, 1)


@pytest.mark.parametrize("row,options,said", [
    (ROW | {"label": ["+", "?"]}, {}, "the label '.' is not one of --reward_tokens . -, nor true, false or a number"),
    (ROW | {"label": [0.5, 1.5]}, {}, "the label 1.5 is not one of"),
    (ROW | {"label": [0.5, float("nan")]}, {}, "the label nan is not one of"),
    (ROW | {"label": [True, 0.0]}, {"reward_tokens": ["+", "-", "0"]}, "the label True is not one of"),
    (ROW | {"label": [True, 0.0]}, {"reward_tokens": []}, "the label True is not a token: name the tokens"),
    (ROW | {"label": ["good", "bad"]}, {"reward_tokens": []}, "the label 'good' is 4 tokens"),
    ({"prompt": "1+1?", "label": ["+"]}, {}, "the row has no solution"),
    (TRL, {"input_key": "typo"}, "--input_key 'typo': no row of .* has it"),
    (TRL, {"label_key": "typo"}, "--label_key 'typo': no row of .* has it"),
    (ROW, {"system_prompt": "Judge."}, "--system_prompt has no effect on 'input', which holds a whole solution"),
    (ROW, {"input_template": "Q: {}"}, "--input_template has no effect on 'input'"),
])  # yapf: disable
def test_labels_and_rows_of_another_kind_are_refused_whatever_the_policy(row, options, said):
    with pytest.raises((DataError, UserError), match=said):
        read(*[ROW] * ("input" in row), row, step_policy="skip", **options)


@pytest.mark.parametrize("options,said", [
    ({"placeholder_token": "##"}, "--placeholder_token '##' is 2 tokens"),
    ({"placeholder_token": "<unk>"}, "--placeholder_token '<unk>' is unknown"),
    ({"reward_tokens": ["+", "no"]}, "--reward_tokens 'no' is 2 tokens"),
    ({"reward_tokens": ["+", "+"]}, "two of them are one token"),
])
def test_what_is_not_one_token_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        read(ROW, **options)


def test_long_solutions_are_dropped_and_counted():
    found = read(ROW, ROW | {"input": ROW["input"] + "3" * 200 + "#", "label": ["+"] * 3})
    assert (len(found), found.dropped) == (1, 1)
    with pytest.raises(DataError, match="none of 1 solutions can be used"):
        read(ROW, max_len=5)


def test_responses_are_split_like_solutions():
    form, renderer = StepFormat("#", ["+", "-"], "; "), Renderer(DataConfig(), TOKENIZER)
    placeholder, *_ = TOKENIZER("#").input_ids
    assert split_steps("a\n\n b#c \n", form, "\n") == ["a", ";  bc "] and split_steps(" \n#", form, "\n") == []
    assert encode_steps([("a", [7])], [["2", "; 3"]], form, renderer) == [
        ([7, *TOKENIZER("2").input_ids, placeholder, *TOKENIZER("; 3").input_ids, placeholder],
         [False, False, True, False, False, False, True])]  # yapf: disable
    assert encode_steps([("a", [7])], [[]], form, renderer) == [([7], [False])]


@pytest.mark.parametrize("row, prompt", [
    (TRL, "1+1?\n"),
    ({"input": "1+1?\n2<E>\n2.0<E>", "label": ["<U>", "<A>"]}, "1+1?\n"),
    (TRL | {"prompt": [{"role": "user", "content": "1+1?"}]},
     "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"),
])  # yapf: disable
def test_no_blank_comes_before_a_step(row, prompt):
    """Though the tokenizer puts one before every text, also before what follows a special token."""
    tokenizer, form = metaspace(tiny.CHATML), {"placeholder_token": "<E>", "reward_tokens": ["<U>", "<A>"]}
    example = StepDataset(StepDataConfig(train_data=[hold_rows([row])], **form), tokenizer)[0]
    steps = ["2", "<E>", "\n", "2", ".", "0", "<E>"]
    assert tokenizer.convert_ids_to_tokens(example.token_ids) == tokenizer.tokenize(prompt) + steps


@pytest.mark.parametrize("row", [
    {"input": "1+1? a [\nb [", "label": "1+1? a <U>\nb <A>"},
    {"prompt": "1+1? ", "completions": ["a ", "b "], "labels": ["<U>", "<A>"]},
])  # yapf: disable
def test_a_placeholder_with_a_blank_of_its_own_follows_no_other(row):
    """Rows of Math-Shepherd with the tokenizer of Llama 2: the tokens are those of the whole text."""
    tokenizer, form = metaspace(), {"placeholder_token": "[", "reward_tokens": ["<U>", "<A>"]}
    (example, ) = StepDataset(StepDataConfig(train_data=[hold_rows([row])], max_len=99, **form), tokenizer)
    assert example.token_ids == tokenizer("1+1? a [\nb [").input_ids and example.labels == (1.0, 0.0)
    assert tokenizer.convert_ids_to_tokens(example.token_ids).count("▁") == 2, "before 1 and a"
