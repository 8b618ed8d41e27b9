"""Calls of tools, their results, marks of turns and padded objects: what of them reaches the tokens and the loss."""
import json
from contextlib import nullcontext

import pytest
import torch
import transformers
from packaging.version import Version

from lightrft.config.offline_schema import PairDataConfig
from lightrft.config.preference_schema import JudgedDataConfig
from lightrft.config.schema import DataConfig
from lightrft.datasets.judged import JudgedDataset
from lightrft.datasets.preferences import PairDataset
from lightrft.datasets.prompt_rows import to_message, to_messages
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.datasets.sft_dataset import Learning, SFTDataset
from lightrft.models.loss import GPTLMLoss
from lightrft.ops.aggregate import Denominators
from lightrft.tests.support import field, tiny
from lightrft.trainer.offline.sft_trainer import pack_rows

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>'
OF_TEXTS = field.TEMPLATE.replace("{{ call.function | tojson }}",
                                  "{{ call.function.name + ' ' + call.function.arguments }}")
OF_NULLS = field.TEMPLATE.replace("m.tool_calls or []", "(m.tool_calls if m.content is none else [])")

MARKED = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
          "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}"
          "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def demonstrations(rows, template=field.TEMPLATE, learning=Learning(), **options):
    data = [rows] if isinstance(rows, str) else [hold_rows(rows)]
    return SFTDataset(DataConfig(prompt_data=data, **options), field.field_tokenizer(template), 500, learning=learning)


def learnt(example):
    """The runs of tokens in the loss, as text."""
    tokenizer, runs, last = field.field_tokenizer(), [], False
    for token, keep in zip(example.token_ids, example.loss_mask):
        runs += [[]] * (keep and not last)
        runs[-1:] = [[*runs[-1], token]] if keep else runs[-1:]
        last = keep
    return [tokenizer.decode(run) for run in runs]


def calling(arguments, **more):
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call], **more}]}


@pytest.mark.parametrize("name", ["tools_sft", "sharegpt_tools"])
def test_calls_are_learnt_and_results_are_not(name):
    example = demonstrations(field.rows(name))[0]
    assert learnt(example) == [CALL, "It is 4 C.<|im_end|>"]
    text = field.field_tokenizer().decode(example.token_ids)
    assert "<|im_start|>tool\n4 C<|im_end|>" in text and text.startswith("<|im_start|>system\n{\"type\": \"function\"")


def test_a_call_is_an_answer_of_a_pair_and_of_a_judged_row():
    pair = PairDataset(PairDataConfig(train_data=[hold_rows(field.rows("tools_pair"))]), field.field_tokenizer())[0]
    assert learnt(pair.chosen) == [CALL] and learnt(pair.rejected) == ["No idea.<|im_end|>"]
    rows = [calling({"city": "Oslo"}) | {"label": True}, {"prompt": [{"role": "user", "content": "!"}], "output": "b",
                                                          "label": False}]  # yapf: disable
    judged = JudgedDataset(JudgedDataConfig(train_data=[hold_rows(rows)]), field.field_tokenizer())[0]
    assert learnt(judged.answer) == [CALL]


@pytest.mark.parametrize("template, written", [(field.TEMPLATE, CALL), (OF_NULLS, CALL), (
    OF_TEXTS, '<tool_call>get_weather {"city": "Oslo"}</tool_call><|im_end|>')])  # yapf: disable
@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_are_written_in_the_form_that_the_template_takes(template, written, arguments, content):
    """Transformers leaves out a content of null since 5.23, so a template that asks for one drops the call."""
    dropped = template == OF_NULLS and Version(transformers.__version__) >= Version("5.23")
    with pytest.raises(DataError, match=r"leaves out calls of tools \(tool_calls\)") if dropped else nullcontext():
        assert learnt(demonstrations([calling(arguments, **content)], template)[0]) == [written]


@pytest.mark.parametrize("row, told, template", [
    (field.rows("tools_sft")[0], "shows no tools", tiny.CHATML),
    (calling({}), r"leaves out calls of tools \(tool_calls\)", tiny.CHATML),
    (calling({}, content="I look."), r"leaves out calls .* beside a text", OF_NULLS),
    (field.rows("sharegpt_tools")[0], "leaves out the turns of 'tool'",
     field.TEMPLATE.replace("{{ m.content or '' }}", "{{ m.content if m.role != 'tool' }}")),
])
def test_a_template_that_drops_them_is_named(row, told, template):
    with pytest.raises(DataError, match=rf"the chat template of .* {told}.*--chat_template"):
        demonstrations([row], template)


def test_forms_of_calls_and_results():
    value = '{"name": "f", "arguments": {"a": null}}'
    turns = [{"from": "gpt", "value": "x"}, {"from": "function_call", "value": value},
             {"role": "tool_call", "content": value}, {"from": "observation", "value": "1"},
             {"role": "function", "name": "f", "content": "2"}]  # yapf: disable
    said, *results = to_messages(turns, "")
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    assert said == {"role": "assistant", "content": "x", "tool_calls": [call, call]}, "a JSON text keeps its nulls"
    assert results == [{"role": "tool", "content": "1"}, {"role": "tool", "name": "f", "content": "2"}]
    old = to_message({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, "")
    assert old["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize("value", ["look", "[1]", '{"name": "f", "arguments": [1]}', '{"arguments": {}}'])
def test_a_call_of_another_form_is_refused(value):
    with pytest.raises(DataError, match="there: .* call .*(Correct|remove)"):
        to_message({"from": "function_call", "value": value}, "there")


def test_keys_of_other_rows_stay_absent(tmp_path):
    data = demonstrations(str(field.write_padded_arguments(tmp_path / "rows.parquet")))
    written = [json.loads(learnt(one)[0].partition("</tool_call>")[0].removeprefix("<tool_call>")) for one in data]
    assert [call["arguments"] for call in written] == [{"city": "Oslo"}, {"a": 1, "b": 2}]
    content = [{"type": "text", "text": "a", "image": None}]
    turn = {"role": "user", "content": content, "x": {"y": [{"z": None}, None]}, "name": None}
    assert to_message(turn, "") == {"role": "user", "content": [{"type": "text", "text": "a"}], "x": {"y": [{}, None]}}


@pytest.mark.parametrize("mark", [{"loss": False}, {"weight": 0}, {"train": False}, {"trainable": 0},
                                  {"loss_weight": 0.0}, {"loss": False, "weight": 0}])  # yapf: disable
@pytest.mark.parametrize("template", [field.TEMPLATE, MARKED])
def test_a_turn_that_is_marked_is_not_learnt(mark, template):
    turns = [dict(turn) for turn in field.rows("turn_loss_false")[0]["messages"]]
    turns[1] = {"role": "assistant", "content": "5"} | mark
    assert learnt(demonstrations([{"messages": turns}], template)[0]) == ["2<|im_end|>"]


def test_numbers_weigh_the_tokens_of_their_turn():
    (example, ) = demonstrations(field.rows("turn_weight_zero"))
    assert learnt(example) == ["2<|im_end|>"]
    assert {weight for weight, keep in zip(example.weights, example.loss_mask) if keep} == {0.5}
    whole = demonstrations(field.rows("turn_weight_zero"), learning=Learning(whole=True))[0]
    left_out = [token for token, keep in zip(whole.token_ids, whole.loss_mask) if not keep][1:]
    assert field.field_tokenizer().decode(left_out) == "5<|im_end|>" and 0.5 in whole.weights
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}]
    assert demonstrations([{"messages": turns}])[0].weights == []


def test_a_weight_of_a_half_halves_the_gradient_of_its_tokens():
    (example, ) = demonstrations(field.rows("turn_weight_zero"))
    exp = pack_rows([example])
    logprobs = torch.zeros(exp.num_tokens, requires_grad=True)
    GPTLMLoss()(logprobs, exp, Denominators(exp.loss_mask.sum().item(), 1))[0].backward()
    expected = torch.where(exp.loss_mask, -0.5 / exp.loss_mask.sum(), 0.0)
    torch.testing.assert_close(logprobs.grad, expected)


@pytest.mark.parametrize("mark, told", [
    ({"loss": False, "weight": 1}, "contradict"), ({"weight": 0.5, "loss_weight": 2}, "contradict"),
    ({"train": True, "trainable": False}, "contradict"), ({"loss": "no"}, "expected true"), ({"loss": [1]}, "expected"),
    ({"weight": -1}, "from 0 on"), ({"weight": float("nan")}, "from 0 on")])  # yapf: disable
def test_marks_without_a_meaning(mark, told):
    with pytest.raises(DataError, match=f"there: .*{told}"):
        to_message({"role": "assistant", "content": "a"} | mark, "there")
    with pytest.raises(DataError, match="'user' is marked to be learnt"):
        to_message({"role": "user", "content": "a", "loss": True}, "there")
    assert to_message({"role": "user", "content": "a", "weight": 0}, "")["content"] == "a"


def test_marks_of_answers_that_are_compared():
    asked, tail = {"role": "user", "content": "?"}, [{"role": "user", "content": "no"}]
    answers = [[{"role": "assistant", "content": text, "loss": False}, *tail, {"role": "assistant", "content": text}]
               for text in "ab"]  # yapf: disable
    row = {"prompt": [asked], "chosen": answers[0], "rejected": answers[1]}
    pair = PairDataset(PairDataConfig(train_data=[hold_rows([row])]), field.field_tokenizer())[0]
    assert learnt(pair.chosen) == ["a<|im_end|>"] and pair.chosen.loss_mask.count(True) == 2
    for mark in ({"loss": False}, {"weight": 0.5}):
        wrong = row | {"chosen": [{"role": "assistant", "content": "c"} | mark]}
        with pytest.raises(DataError, match="row 1: the mark of turn 2 gives it the weight"):
            PairDataset(PairDataConfig(train_data=[hold_rows([wrong])]), field.field_tokenizer())
        judged = [{"prompt": [asked], "completion": [{"role": "assistant", "content": "c"} | mark], "label": True}]
        with pytest.raises(DataError, match="row 1: the mark of turn 2 gives it the weight"):
            JudgedDataset(JudgedDataConfig(train_data=[hold_rows(judged)]), field.field_tokenizer())
