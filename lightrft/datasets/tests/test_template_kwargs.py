"""Tools and further variables of chat templates: from columns and options into the tokens of every kind of row."""
import copy
import json
from types import SimpleNamespace

import pytest

from lightrft.config.offline_schema import PairDataConfig
from lightrft.config.preference_schema import JudgedDataConfig
from lightrft.config.rm_schema import JudgeDataConfig, StepDataConfig
from lightrft.config.schema import DataConfig, RewardConfig
from lightrft.datasets.judged import JudgedDataset
from lightrft.datasets.judgements import judge_format, JudgementDataset
from lightrft.datasets.preferences import PairDataset
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.datasets.sft_dataset import Learning, PretrainingDataset, SFTDataset
from lightrft.datasets.steps import StepDataset
from lightrft.datasets.template_kwargs import template_kwargs
from lightrft.datasets.template_variables import check_read
from lightrft.rewards.base import RewardInput
from lightrft.rewards.generative import ComparingJudge
from lightrft.rewards.judge import JudgeForm
from lightrft.rewards.reward_requests import BadRequest, Reader
from lightrft.tests.support import field

TOKENIZER = field.field_tokenizer()
THOUGHT = "<think>\n\n</think>\n\n"
SCHEMA = field.rows("tools_prompt")[0]["tools"][0]
ASKED, SAID = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}


def prompts(*rows, **options):
    return PromptsDataset(DataConfig(prompt_data=[hold_rows(rows)], **options), TOKENIZER, 500, scored=False)


def demonstrations(*rows, **options):
    return SFTDataset(DataConfig(prompt_data=[hold_rows(rows)], **options), TOKENIZER, 500)


def texts_of(kind, row, **options):
    """The tokens of a row in the data set of each trainer, as text."""
    if kind == "prompt":
        return [TOKENIZER.decode(prompts(row | {"prompt": [ASKED]}, **options)[0].token_ids)]
    if kind == "sft":
        return [TOKENIZER.decode(demonstrations(row | {"messages": [ASKED, SAID]}, **options)[0].token_ids)]
    if kind == "pair":
        cfg = PairDataConfig(train_data=[hold_rows([row | {"prompt": [ASKED], "chosen": "2", "rejected": "3"}])])
        pair = PairDataset(replaced(cfg, options), TOKENIZER)[0]
        return [TOKENIZER.decode(side.token_ids) for side in (pair.chosen, pair.rejected)]
    if kind == "judged":
        rows = [row | {"prompt": [ASKED | {"content": text}], "output": "2", "label": True} for text in "ab"]
        judged = JudgedDataset(replaced(JudgedDataConfig(train_data=[hold_rows(rows)]), options), TOKENIZER)[0]
        return [TOKENIZER.decode(side.token_ids) for side in (judged.answer, judged.mismatched)]
    rows = [row | {"prompt": [ASKED], "completions": ["2"], "labels": [1.0]}]
    cfg = StepDataConfig(train_data=[hold_rows(rows)], placeholder_token="#", reward_tokens=["+", "-"])
    return [TOKENIZER.decode(StepDataset(replaced(cfg, options), TOKENIZER)[0].token_ids)]


def replaced(cfg, options):
    vars(cfg).update(options)
    return cfg


@pytest.mark.parametrize("kind", ["prompt", "sft", "pair", "judged", "steps"])
@pytest.mark.parametrize("column", [[SCHEMA], json.dumps([SCHEMA]), [SCHEMA["function"]], [json.dumps(SCHEMA)], SCHEMA])
def test_tools_are_in_the_tokens_before_the_users_turn(kind, column):
    head = f"<|im_start|>system\n{json.dumps(SCHEMA)}\n<|im_end|>\n<|im_start|>user\n"
    assert all(text.startswith(head) for text in texts_of(kind, {"tools": column}))


@pytest.mark.parametrize("kind", ["prompt", "sft", "pair", "judged", "steps"])
def test_keyword_arguments_of_option_and_row_reach_the_template(kind):
    """Those of a row win, key by key."""
    off, on = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (False, True))
    verl = {"enable_thinking": False}
    cases = [({}, {}), (off, {}), ({}, off), (on, off), (off, on), (verl, on), (on | verl, {})]
    for side in range(2 if kind in ("pair", "judged") else 1):
        thoughts = [texts_of(kind, row, **options)[side].count("assistant\n" + THOUGHT) for row, options in cases]
        assert thoughts == [0, 1, 1, 0, 1, 1, 0]
    of_row = {"chat_template_kwargs": {"a": 1}}
    assert prompts({"prompt": [ASKED]} | of_row, **off)[0].template_kwargs == {"a": 1, "enable_thinking": False}


@pytest.mark.parametrize("kind", ["prompt", "sft", "pair", "judged", "steps"])
def test_an_option_that_no_template_reads_is_refused(kind):
    with pytest.raises(DataError, match="kwargs sets thinking, which the chat .* It reads enable_thinking. Correct"):
        texts_of(kind, {}, chat_template_kwargs={"thinking": True, "enable_thinking": True})


@pytest.mark.parametrize("make,row", [(prompts, {"prompt": "1+1?"}),
                                      (demonstrations, {"prompt": "1", "response": "2"})])
def test_an_option_for_texts_that_no_template_renders_is_refused(make, row):
    option = {"chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(DataError, match="all prompts are texts, which no template renders. Use --apply_chat_template"):
        make(row, **option)
    make(row, **option, apply_chat_template=True)
    beside = PretrainingDataset(DataConfig(prompt_data=[hold_rows([{"text": "1"}])], **option), TOKENIZER, 9,
                                learning=Learning(whole=True))
    assert len(beside) == 1, "the option is for the prompts of the policy"


@pytest.mark.parametrize("template,names", [
    ("{% for m in messages %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% break %}{% endfor %}",
     set()),
    ("{% set ns = namespace(a=1) %}{% if mode is defined and mode == 'on' %}{{ ns.a }}{% endif %}", {"mode"}),
    ("{% macro f(x) %}{{ x }}{{ depth }}{% endmacro %}{{ f(messages) }}", {"depth"}),
    ("{{ raise_exception('no') if not messages }}{{ strftime_now('%d') if dated }}", {"dated"}),
    ({"default": "{{ a }}", "tool_use": "{{ b }}{{ tools }}"}, {"a", "b"}), ("{% if %}", set()), (None, set())
])  # yapf: disable
def test_variables_of_templates(template, names):
    tokenizer = tokenizer_of(template)
    check_read(dict.fromkeys(names, 1), [tokenizer])
    told = f"It reads {', '.join(sorted(names))}." if names else "It reads no variable."
    with pytest.raises(DataError, match=f"sets other, which .* does not read. {told}"):
        check_read({"other": 1}, [tokenizer])
    check_read({"other": 1, "enable_thinking": 1}, [tokenizer_of("{{ other }}"), TOKENIZER])


def tokenizer_of(template):
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = template
    return tokenizer


def test_rows_with_other_variables_keep_their_order():
    rows = [{"prompt": [ASKED | {"content": str(i)}], "enable_thinking": bool(i % 3)} for i in range(9)]
    found = [(prompt.messages[0]["content"], THOUGHT in prompt.text) for prompt in prompts(*rows)]
    assert found == [(str(i), not i % 3) for i in range(9)]


@pytest.mark.parametrize("row, told", [
    ({"tools": "get_weather"}, "column 'tools' is 'get_weather', which is not JSON"),
    ({"tools": [3]}, "column 'tools' holds 3: expected schemas"),
    ({"tools": [{"type": "function"}]}, "expected schemas"),
    ({"chat_template_kwargs": [1]}, "expected an object"),
    ({"chat_template_kwargs": "x"}, "not JSON"),
    ({"chat_template_kwargs": {"tools": [], "add_generation_prompt": False}}, "sets add_generation_prompt, tools"),
])
def test_columns_that_hold_something_else(row, told):
    with pytest.raises(DataError, match=f"there: .*{told}"):
        template_kwargs(row, True, "there")


def test_texts_that_are_not_rendered_have_no_place_for_tools():
    with pytest.raises(DataError, match="row 1: the row has tools for a chat template.*--apply_chat_template"):
        prompts({"prompt": "1+1?", "tools": [SCHEMA]})
    assert "get_weather" in prompts({"prompt": "1+1?", "tools": [SCHEMA]}, apply_chat_template=True)[0].text
    with pytest.raises(DataError, match="--chat_template_kwargs sets tokenize"):
        prompts({"prompt": [ASKED]}, chat_template_kwargs={"tokenize": False})


@pytest.mark.parametrize("empty", [None, [], "", "[]"])
def test_no_tools(empty):
    assert template_kwargs({"tools": empty, "chat_template_kwargs": None, "functions": "sin"}, False, "") == {}
    functions = [{"name": "f", "parameters": {"type": "object", "properties": {"a": None}}}]
    bare = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    assert template_kwargs({"tools": empty, "functions": functions}, True,
                           "") == {"tools": [{"type": "function", "function": bare}]}


def test_requests_to_a_judge_have_variables_and_tools():
    """The tools as text, in the words of the reward that the judge will be."""
    call = [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]
    row = {"prompt": [ASKED], "chosen": [SAID | {"tool_calls": call}], "rejected": "3", "tools": [SCHEMA],
           "enable_thinking": False}  # yapf: disable
    cfg = JudgeDataConfig(train_data=[hold_rows([row])], max_len=900)
    text = TOKENIZER.decode(JudgementDataset(cfg, TOKENIZER)[0].token_ids)
    assert f"Prompt: tools: {json.dumps([SCHEMA])}\n\n1+1?\n" in text and f"assistant\n{THOUGHT}<answer>" in text
    judge = SimpleNamespace(form=judge_format(cfg), reader=SimpleNamespace(media=lambda item: ()))
    called = f'2\n{json.dumps(call[0]["function"])}'
    items = [RewardInput("", said, [ASKED], template_kwargs={"tools": [SCHEMA]}) for said in (called, "3")]
    assert text.partition("user\n")[2].partition(field.MARKERS[2])[0] in [
        request for request, _ in ComparingJudge.ask(judge, items)]  # yapf: disable


def test_a_server_renders_with_the_tools_of_each_text():
    item = RewardInput("P", "R", [ASKED, SAID | {"tool_calls": [{"function": {"name": "f"}}]}],
                       template_kwargs={"tools": [SCHEMA], "enable_thinking": False})
    body = {"query": ["PR"], "prompts": ["P"], "messages": [item.messages], "tools": [[SCHEMA]],
            "chat_template_kwargs": [{"enable_thinking": False}]}  # yapf: disable
    (found, ) = Reader((), 4).queries(body)
    assert (found.messages, found.template_kwargs) == (item.messages, item.template_kwargs)
    assert JudgeForm(RewardConfig()).prompt(item).count("get_weather") == 1, "the judge is told of the tools"
    with pytest.raises(BadRequest, match="text 0: the column 'tools'"):
        Reader((), 4).queries(body | {"tools": [[3]]})
