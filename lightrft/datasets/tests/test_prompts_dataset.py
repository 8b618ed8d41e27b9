import time

import pytest
from transformers import logging as hf_logging

from lightrft.config.schema import DataConfig
from lightrft.datasets.loader import PromptLoader
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rendering import CHUNK
from lightrft.datasets.rows import DataError
from lightrft.tests.support import tiny

CHAT = [{"role": "user", "content": "1+1?"}]
VERL = {"data_source": "src", "prompt": CHAT, "ability": "math", "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0}}  # yapf: disable
LIGHTRFT = VERL | {"extra_info": {"label": "my_rule", "reference": "two", "answer": "#### 2"}}
TRL = {"prompt": CHAT, "solution": "2", "level": 3}
SWIFT = {
    "messages": [{"role": "system", "content": "s"}, *CHAT, {"role": "assistant", "content": "old"}], "solution": "2"
}
PLAIN = {"input": "1+1?", "output": "2", "label": "my_rule"}
RENDERED = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def build(write, tokenizer):
    """``build(rows, **options)`` -> PromptsDataset of those rows."""

    def make(rows, prompt_max_len=500, tokenizer=tokenizer, **options):
        return PromptsDataset(DataConfig(prompt_data=[write(rows)], **options), tokenizer, prompt_max_len)

    return make


@pytest.mark.parametrize("row, text, reference, label, source", [
    (VERL, RENDERED, "2", "", "src"),
    (LIGHTRFT, RENDERED, "2", "my_rule", "src"),
    (TRL, RENDERED, "2", "", ""),
    (SWIFT, "<|im_start|>system\ns<|im_end|>\n" + RENDERED, "2", "", ""),
    (PLAIN, "1+1?", "2", "my_rule", ""),
    ({"prompt": [{"from": "human", "value": "1+1?"}], "answer": "2"}, RENDERED, "2", "", ""),
])  # yapf: disable
def test_schemas_by_shape(build, tokenizer, row, text, reference, label, source):
    prompt = build([row])[0]
    assert (prompt.text, prompt.reference, prompt.label, prompt.data_source) == (text, reference, label, source)
    assert tokenizer.decode(prompt.token_ids) == text and prompt.uid == "0:0"


def test_other_columns_and_messages_reach_the_rewards(build):
    prompt = build([TRL])[0]
    assert prompt.columns == {"solution": "2", "level": 3} and prompt.messages == CHAT
    assert build([VERL])[0].columns["extra_info"] == {"split": "train", "index": 0}
    assert build([PLAIN])[0].messages == []


def test_lookup_order_and_key_options(build):
    row = VERL | {"reference": "top", "target": "t", "kind": "k", "question": "other"}
    assert build([row])[0].reference == "top"
    assert build([row], reference_key="target")[0].reference == "t"
    assert build([row], label_key="kind")[0].label == "k"
    assert build([row], input_key="question")[0].text == "other"
    assert build([LIGHTRFT | {"reward_model": None}])[0].reference == "two"


@pytest.mark.parametrize("option, expected", [("input_key", "prompt, target, extra_info"),
                                              ("reference_key", "prompt, target, extra_info, split"),
                                              ("label_key", "prompt, target, extra_info, split")])
def test_a_named_column_that_no_row_has(build, option, expected):
    rows = [{"prompt": "1+1?", "target": "2", "extra_info": {"split": "a"}, "blank": ""}] * 2
    with pytest.raises(DataError, match=f"--{option} 'quesion': no row of .*rows.jsonl has it. .*: {expected}$"):
        build(rows, **{option: "quesion"})
    assert build([VERL | {"prompt": "p"}], reference_key="ground_truth")[0].reference == "2"
    assert build(rows, label_key="split")[0].label == "a"
    assert build([PLAIN, PLAIN | {"question": "other"}], input_key="question")[0].text == "1+1?"


@pytest.mark.parametrize("row, options, tells", [(PLAIN, {}, 1), (VERL, {}, 0), (PLAIN, {"apply_chat_template": 1}, 0),
                                                 (PLAIN, {"input_template": "Q: {}"}, 0)])  # yapf: disable
def test_an_unused_chat_template_is_reported_once(build, capsys, row, options, tells):
    build([row | {"extra_info": None}] * 3, **options)
    assert capsys.readouterr().err.count("needs --apply_chat_template") == tells


@pytest.mark.parametrize("row", [PLAIN, VERL])
def test_the_tokenizer_does_not_warn_of_its_own_limit(build, caplog, row):
    tokenizer = tiny.tokenizer()
    tokenizer.model_max_length = 2
    hf_logging.add_handler(caplog.handler)
    build([row], tokenizer=tokenizer)
    assert "Token indices" not in caplog.text
    tokenizer("one of ours")
    hf_logging.remove_handler(caplog.handler)
    assert "Token indices" in caplog.text


def test_text_options(build):
    assert build([PLAIN], apply_chat_template=True)[0].text == RENDERED
    assert build([PLAIN], system_prompt="S")[0].text == "S\n\n1+1?"
    assert build([PLAIN], input_template="Q: {} A:")[0].text == "Q: 1+1? A:"


def test_chat_options(build):
    system = "<|im_start|>system\nS<|im_end|>\n"
    assert build([VERL], system_prompt="S")[0].text == build([SWIFT], system_prompt="S")[0].text == system + RENDERED
    assert build([VERL], input_template="Q: {} A:")[0].text == RENDERED.replace("1+1?", "Q: 1+1? A:")
    assert VERL["prompt"][0]["content"] == "1+1?"


@pytest.mark.parametrize("template", ["no place", "{} and \\boxed{}"])
def test_input_template_without_one_place(build, template):
    with pytest.raises(DataError, match="must hold {} once"):
        build([PLAIN], input_template=template)


def test_no_chat_template(build):
    bare = tiny.tokenizer()
    bare.chat_template = None
    with pytest.raises(DataError, match="has no chat template.*--chat_template"):
        build([VERL], tokenizer=bare)
    assert build([PLAIN], tokenizer=bare)[0].text == "1+1?"


def test_template_that_refuses_the_messages(build):
    strict = tiny.tokenizer()
    strict.chat_template = "{{ raise_exception('only user turns') }}"
    with pytest.raises(DataError, match="cannot render the messages: only user turns"):
        build([VERL], tokenizer=strict)


class Wrapping:
    """A tokenizer that puts bos before every text and eos after it, as some do."""
    bos_token, bos_token_id, eos_token_id, chat_template = "<|im_start|>", 2, 3, None

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, texts, add_special_tokens, **options):
        out = self.inner(texts, add_special_tokens=False, **options)
        if add_special_tokens:
            out["input_ids"] = [[2, *ids, 3] for ids in out["input_ids"]]
        return out


def test_special_tokens_are_not_doubled(build, tokenizer):
    wrapping = Wrapping(tokenizer)
    plain = tokenizer("1+1?").input_ids
    for text in ("1+1?", "<|im_start|>1+1?"):
        assert build([PLAIN | {"input": text}], tokenizer=wrapping)[0].token_ids == [2, *plain]


def test_a_bos_that_only_the_text_has_stays(build):
    """The tokenizer of SmolLM2 names a bos and writes none."""
    silent = tiny.tokenizer()
    silent.bos_token, text = "<|im_start|>", "<|im_start|>user\n1+1?"
    assert build([PLAIN | {"input": text}], tokenizer=silent)[0].token_ids == silent(text).input_ids
    assert silent.bos_token_id in silent(text).input_ids and silent.bos_token_id not in silent("1+1?").input_ids


def test_too_long_prompts(build, caplog):
    rows = [PLAIN | {"input": "x" * length} for length in (5, 30, 10, 40)]
    data = build(rows, prompt_max_len=10)
    assert len(data) == 2 and data.dropped == 2 and data.sizes == [2] and [prompt.uid
                                                                           for prompt in data] == ["0:0", "0:2"]
    with pytest.raises(DataError, match="2 of 4 rows are longer than --prompt_max_len 10 .*row 2, 30 tokens.*has 40"):
        build(rows, prompt_max_len=10, overlong_prompt="error")
    with pytest.raises(DataError, match="all 4 prompts are longer than --prompt_max_len 4. Raise it"):
        build(rows, prompt_max_len=4)


@pytest.mark.parametrize("bad", [{"output": "2"}, {"input": "  ", "output": "2"}, {"prompt": [], "output": "2"}])
def test_row_without_prompt(build, bad):
    with pytest.raises(DataError, match="rows.jsonl, row 2: the row has no prompt.*--input_key"):
        build([PLAIN, bad])


def test_chat_without_a_question(build):
    with pytest.raises(DataError, match="row 1: the row has no prompt, only empty or assistant messages"):
        build([{"messages": [{"role": "assistant", "content": "x"}], "solution": "2"}])
    with pytest.raises(DataError, match="row 1: a chat message must have role and content"):
        build([{"messages": [{"text": "x"}], "solution": "2"}])
    with pytest.raises(DataError, match="row 1: a chat message of 'user' has a part without text"):
        build([{"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}], "solution": "2"}])


@pytest.mark.parametrize("rows, number", [([PLAIN, {"input": "x"}], 2), ([{"input": "x", "output": ""}, PLAIN], 1),
                                          ([PLAIN, {"input": "x", "output": float("nan")}], 2)])
def test_row_without_answer(build, rows, number):
    with pytest.raises(DataError, match=f"row {number}: the row has no answer, others have one.*--reference_key"):
        build(rows)


def test_data_without_any_answer_is_allowed(build):
    assert build([{"prompt": "x"}, {"prompt": "y"}])[1].reference is None


def test_mixed_shapes(build):
    with pytest.raises(DataError, match="row 2: mixed schema: text and chat prompts"):
        build([PLAIN, SWIFT])


def test_no_data(tokenizer):
    with pytest.raises(DataError, match="name some with --eval_data"):
        PromptsDataset(DataConfig(), tokenizer, 10, "eval")


def test_limits_splits_and_ids(write, tokenizer):
    first = write([{"input": f"a{i}", "output": "1", "id": f"n{i}"} for i in range(30)], "a.jsonl")
    second = write([{"input": f"b{i}", "output": "1"} for i in range(10)], "b.jsonl")
    cfg = DataConfig(prompt_data=[first, second], max_samples=8, eval_data=[second], max_eval_samples=3)
    train, held_out = PromptsDataset(cfg, tokenizer, 50), PromptsDataset(cfg, tokenizer, 50, "eval")
    assert train.sizes == [6, 2] and len(held_out) == 3
    assert [prompt.uid for prompt in train[4:8]] == ["0:n4", "0:n5", "1:0", "1:1"]
    cfg.max_samples = 0
    assert PromptsDataset(cfg, tokenizer, 50).sizes == [30, 10]


def test_split_options(write, tokenizer, tmp_path):
    write([PLAIN], "both/train.jsonl"), write([PLAIN] * 2, "both/test.jsonl")
    cfg = DataConfig(prompt_data=[str(tmp_path / "both")], eval_data=[str(tmp_path / "both")])
    assert len(PromptsDataset(cfg, tokenizer, 50)) == 1 and len(PromptsDataset(cfg, tokenizer, 50, "eval")) == 2
    cfg.prompt_split, cfg.eval_split = "test", "train"
    assert len(PromptsDataset(cfg, tokenizer, 50)) == 2 and len(PromptsDataset(cfg, tokenizer, 50, "eval")) == 1


def test_mixing_probabilities_reach_the_loader(write, tokenizer):
    paths = [write([PLAIN | {"label": name}] * 20, f"{name}.jsonl") for name in "ab"]
    cfg = DataConfig(prompt_data=paths, prompt_data_probs=[0.75, 0.25])
    batch = next(PromptLoader(PromptsDataset(cfg, tokenizer, 50), 40))
    assert sum(prompt.label == "a" for prompt in batch) == 30
    cfg.prompt_data_probs = [0.5, 0.6]
    with pytest.raises(ValueError, match="need 2 numbers >= 0.*that sum to 1"):
        PromptsDataset(cfg, tokenizer, 50)


def test_ten_thousand_prompts_in_seconds(build):
    """1.4 s of CPU time on an idle core; a step of a second per thousand rows would show."""
    rows = [VERL | {"extra_info": {"index": i}, "prompt": [{"role": "user", "content": f"What is {i}+{i}?"}]}
            for i in range(10_000)]  # yapf: disable
    start = time.process_time()
    assert len(build(rows)) == 10_000
    assert time.process_time() - start < 5


def test_worker_processes_give_the_same_prompts(build):
    rows = [PLAIN | {"input": f"question {i}"} for i in range(2 * CHUNK)]
    alone, spread = build(rows), build(rows, data_workers=2)
    assert alone[:] == spread[:]


def test_the_instruction_of_an_alpaca_row_is_part_of_the_prompt(build):
    """And its output is the reference; a column that is named wins over what is recognised."""
    row = {"instruction": "Add.", "input": "1+1?", "output": "2"}
    prompt = build([row])[0]
    assert prompt.messages == [{"role": "user", "content": "Add.\n1+1?"}] and prompt.reference == "2"
    assert {"instruction", "input"} <= prompt.columns.keys()
    assert build([row], input_key="input")[0].text == "1+1?"
    system = build([{"prompt": text, "system": "S", "answer": "2"} for text in "ab"])
    assert [[turn["content"] for turn in prompt.messages] for prompt in system] == [["S", "a"], ["S", "b"]]
    talk = {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}], "solution": "2"}
    assert build([talk])[0].text == RENDERED


@pytest.mark.parametrize("role, meant", [("gpt", "assistant"), ("usr", "user"), ("User", "user"), ("tools", "tool")])
def test_a_role_that_is_a_typing_error_is_named(build, role, meant):
    with pytest.raises(DataError, match=f"row 1: a chat message has the role '{role}', .* Write '{meant}'"):
        build([{"prompt": [{"role": role, "content": "1+1?"}], "answer": "2"}])
    build([{"prompt": [{"role": "critic", "content": "1+1?"}], "answer": "2"}])


def test_rows_without_a_reference_name_the_options_and_the_columns(build, capsys):
    build([{"prompt": "1+1?", "gold": "2"}])
    said = capsys.readouterr().err
    assert "no row has a reference answer" in said and "the first row has prompt, gold" in said
    assert "--reference_key" in said and "--label_key" in said
