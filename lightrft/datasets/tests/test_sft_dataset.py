import pytest

from lightrft.config.schema import DataConfig
from lightrft.datasets.loader import PromptLoader
from lightrft.datasets.prompt_rows import text_of, to_message
from lightrft.datasets.rendering import unended
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.datasets.sft_dataset import Learning, PretrainingDataset, SFTDataset
from lightrft.tests.support import field, tiny

TURNS = [("system", "s"), ("user", "1+1?"), ("assistant", "It is 2."), ("user", "2+2?"), ("assistant", "4")]
MESSAGES = [{"role": role, "content": text} for role, text in TURNS]
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
FORGETFUL = ("{% for m in messages %}{{ m['role'] + ':' }}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}"
             "{% endif %}<|im_end|>{% endfor %}")


@pytest.fixture
def build(write, tokenizer):
    """``build(rows, **options)`` -> SFTDataset of those rows."""

    def make(rows, max_len=500, tokenizer=tokenizer, learning=Learning(), **options):
        return SFTDataset(DataConfig(prompt_data=[write(rows)], **options), tokenizer, max_len, learning=learning)

    return make


def with_template(template):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def learnt(example, tokenizer):
    """The masked runs of an example, decoded."""
    runs, last = [], False
    for token, keep in zip(example.token_ids, example.loss_mask):
        if keep:
            runs = runs + [[]] if not last else runs
            runs[-1].append(token)
        last = keep
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [tiny.CHATML, MARKED])
def test_loss_on_assistant_turns_and_their_end_only(build, template):
    tokenizer = with_template(template)
    example = build([{"messages": MESSAGES}], tokenizer=tokenizer)[0]
    assert learnt(example, tokenizer) == ["It is 2.<|im_end|>", "4<|im_end|>"]
    assert tokenizer.decode(example.token_ids) == tokenizer.apply_chat_template(MESSAGES, tokenize=False)


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("template", [tiny.CHATML, MARKED])
def test_a_chat_that_begins_with_an_answer(build, template, system):
    """What the template writes before it is not learnt, nor a system turn of its own."""
    tokenizer = with_template("{{ '<|im_start|>system\nBe.<|im_end|>\n' }}" * system + template)
    example = build([{"messages": MESSAGES[2:]}], tokenizer=tokenizer)[0]
    assert learnt(example, tokenizer) == ["It is 2.<|im_end|>", "4<|im_end|>"]


@pytest.mark.parametrize("template", [tiny.CHATML, MARKED])
def test_prompt_and_completion_learns_the_completion_only(build, template):
    tokenizer = with_template(template)
    row = {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}
    whole = build([{"messages": MESSAGES}], tokenizer=tokenizer)[0]
    example = build([row], tokenizer=tokenizer)[0]
    assert learnt(example, tokenizer) == ["4<|im_end|>"] and example.token_ids == whole.token_ids
    assert build([{"prompt": MESSAGES[:4], "response": "4"}], tokenizer=tokenizer)[0].loss_mask == example.loss_mask


@pytest.mark.parametrize("row", [{"prompt": "1+1?", "response": "2"}, {"input": "1+1?", "output": "2"}])
def test_text_pairs(build, tokenizer, row):
    example = build([row])[0]
    assert tokenizer.decode(example.token_ids) == "1+1?2<|im_end|>" and learnt(example, tokenizer) == ["2<|im_end|>"]
    chat = build([row], apply_chat_template=True, system_prompt="S", input_template="Q{}")[0]
    assert learnt(chat, tokenizer) == ["2<|im_end|>"]
    assert tokenizer.decode(chat.token_ids).startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ1+1?")


@pytest.mark.parametrize("template", [tiny.CHATML, MARKED])
@pytest.mark.parametrize("tail", ["<|im_end|>", " <|im_end|>\n", "<|im_end|><|im_end|>"])
def test_an_answer_that_ends_already_gets_no_second_end(build, template, tail):
    tokenizer, said_text = with_template(template), "4" + " " * tail.startswith(" ")
    said, ended = (build([{"messages": MESSAGES[:4] + [{"role": "assistant", "content": content}]},
                          {"prompt": MESSAGES[:4], "response": content}], tokenizer=tokenizer)
                   for content in (said_text, "4" + tail))  # yapf: disable
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "4" + tail}]}]
    assert text_of(unended(parts, ("<|im_end|>", ))[0]["content"]) == said_text
    plain = build([{"prompt": "1+1?", "response": "2" + tail}], tokenizer=tokenizer)[0]
    assert plain.token_ids.count(tokenizer.eos_token_id) == 1 == tokenizer.decode(plain.token_ids).count("<|im_end|>")
    text = build([{"text": "a text" + tail}], tokenizer=tokenizer, learning=Learning(whole=True))[0]
    assert text.token_ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("row", [{"messages": [MESSAGES[1], {"role": "assistant", "content": "<|im_end|>\n"}]},
                                 {"prompt": "1+1?", "response": "<|im_end|>"}])  # yapf: disable
def test_an_end_token_alone_is_no_answer(build, row):
    with pytest.raises(DataError, match="row 1.*the answer.*is empty"):
        build([row])


def test_the_end_of_a_turn_may_be_another_token_than_the_end_of_a_text(build):
    tokenizer = with_template(tiny.CHATML.replace("<|im_end|>", "<turn|>"))
    example = build([{"messages": MESSAGES[:2] + [{"role": "assistant", "content": "2<turn|>"}]}], tokenizer=tokenizer)
    assert tokenizer.decode(example[0].token_ids).count("2<turn|>") == 1
    assert "<turn|><turn|>" not in tokenizer.decode(example[0].token_ids)


def test_template_that_leaves_out_earlier_answers(build, capsys):
    """It is named, once; what is there is learnt."""
    tokenizer = with_template(FORGETFUL)
    examples = build([{"messages": MESSAGES}] * 2, tokenizer=tokenizer)
    assert [learnt(example, tokenizer) for example in examples] == [["assistant:4<|im_end|>"]] * 2
    assert capsys.readouterr().err.count("writes turn 3 of a chat of 5 differently") == 1
    build([{"messages": MESSAGES[1:3]}], tokenizer=tokenizer)
    assert "WARNING" not in capsys.readouterr().err


def test_template_without_answers(build):
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="no token of the row is the assistant's.*--chat_template"):
        build([{"messages": MESSAGES}], tokenizer=with_template(silent))


@pytest.mark.parametrize("row",
                         [{"messages": MESSAGES[:2]}, {"prompt": "x", "response": " "}, {"input": "x"},
                          {"prompt": "x", "completion": "", "response": "y"}, {"prompt": MESSAGES, "answer": ""}])
def test_row_without_answer(build, row):
    with pytest.raises(DataError, match="rows.jsonl, row 1: the row has no answer to train on"):
        build([row])


def said(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}


@pytest.mark.parametrize("row,turn,found", [
    ({"messages": said("a", "")}, 2, "''"),
    ({"messages": said("a", " \n")}, 2, ".*"),
    ({"messages": said("a", None)}, 2, "None"),
    ({"messages": said("a", "", "b", "c")}, 2, "''"),
    ({"messages": said("a", [{"type": "text", "text": ""}])}, 2, ".*"),
    ({"prompt": said("a"), "completion": said("", "")[1:]}, 2, "''"),
    ({"instruction": "a", "output": "b", "history": [["c", ""]]}, 2, "''"),
    ({"messages": [*said("a"), CALL | {"tool_calls": []}]}, 2, "None"),
])  # yapf: disable
def test_an_empty_answer_among_turns_is_refused(build, row, turn, found):
    with pytest.raises(DataError, match=rf"rows.jsonl, row 1: the answer in turn {turn} of the chat is empty .{found}"):
        build([row])


def test_turns_that_are_not_learnt_or_that_call_a_tool_may_be_empty(build):
    tokenizer = with_template(
        tiny.CHATML.replace("m['content'] +", "(m['content'] or m['tool_calls'][0].function | tojson) +"))
    example = build([{"messages": [*said("a"), CALL]}], tokenizer=tokenizer)[0]
    assert learnt(example, tokenizer) == ['{"name": "f", "arguments": {}}<|im_end|>']
    rows = [{"messages": said("a", "", "b", "c")}]
    assert learnt(build(rows, learning=Learning(every_turn=False))[0], tokenizer) == ["c<|im_end|>"]


def test_null_in_place_of_a_question_names_its_row(build):
    for rows in (said(None, "b"), said("a", "b", None, "c")):
        with pytest.raises(DataError, match="row 2: a chat message of 'user' has null as its content"):
            build([{"messages": said("a", "b")}, {"messages": rows}])


@pytest.mark.parametrize("content", [5, 2.5, True, {"type": "text", "text": "b"}, [5], ["b", {"text": 5}], [["b"]]])
def test_a_content_that_is_no_text_names_its_row(build, content):
    with pytest.raises(DataError, match="row 2: a chat message of 'assistant' has the content .*expected a text, or a"):
        build([{"messages": said("a", "b")}, {"messages": said("a", content)}])


NULL = {"type": "text", "text": None}


@pytest.mark.parametrize("content", [[None], [NULL], [{"type": "text", "text": "b"}, NULL], [{"type": None}]])
@pytest.mark.parametrize("turn,role", [(0, "user"), (1, "assistant")])
def test_null_in_place_of_a_part_names_its_row(build, content, turn, role):
    turns = said("a", "b")
    turns[turn] = turns[turn] | {"content": content}
    for row in ({"messages": turns}, {"prompt": turns[:1], "completion": turns[1:]}):
        with pytest.raises(DataError, match=f"row 1: a chat message of '{role}' has a part without text"):
            build([row])


def test_a_part_that_is_no_text_may_have_a_null_text():
    """As tables write it, in which all parts have the same columns."""
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "a", "image": None}]
    assert text_of(to_message({"role": "user", "content": parts}, "row 1")["content"]) == "<image>a"


@pytest.mark.parametrize("template", [tiny.CHATML, "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"])
def test_parts_of_text_are_joined_for_a_template_of_texts(build, template):
    tokenizer = with_template(template)
    row = field.rows("text_parts")[0]
    for system in ([], [{"role": "system", "content": ["a", {"text": " b"}]}]):
        example = build([{"messages": system + row["messages"]}], tokenizer=tokenizer, input_template="Q {}")[0]
        chat = [{"role": "system", "content": "a b"}] * bool(system) + said("Q 1+1?", "2")
        assert tokenizer.decode(example.token_ids) == tokenizer.apply_chat_template(chat, tokenize=False)


def test_row_without_prompt(build):
    with pytest.raises(DataError,
                       match="the row has no demonstration .it has response.*messages, .*completion.*--input_key"):
        build([{"response": "x"}])


def test_too_long(build):
    rows = [{"prompt": "x" * size, "response": "y"} for size in (3, 30)]
    assert len(build(rows, max_len=10)) == 1 and build(rows, max_len=10).dropped == 1
    with pytest.raises(DataError, match="1 of 2 rows are longer"):
        build(rows, max_len=10, overlong_prompt="error")
    with pytest.raises(DataError, match="none of 2 demonstrations .* longer than --max_len 2 tokens"):
        build(rows, max_len=2)


def test_batches_come_from_the_prompt_loader(build):
    data = build([{"prompt": f"{i}", "response": "y"} for i in range(6)])
    loader = PromptLoader(data, 4, seed=1)
    next(loader)
    again = PromptLoader(data, 4, seed=1)
    again.load_state_dict(loader.state_dict())
    assert next(again) == next(loader)
    assert sum(len(example.token_ids) for example in data[:]) == 18


ALPACA = {"instruction": "Add.", "input": "1+1?", "output": "2", "history": [["Hi", "Hello"]], "system": "S"}
SHAREGPT = {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}], "system": "S"}


@pytest.mark.parametrize("row,turns", [
    (ALPACA, [("system", "S"), ("user", "Hi"), ("assistant", "Hello"), ("user", "Add.\n1+1?"), ("assistant", "2")]),
    ({"instruction": "Add 1+1.", "input": "", "output": "2"}, [("user", "Add 1+1."), ("assistant", "2")]),
    (SHAREGPT, [("system", "S"), ("user", "1+1?"), ("assistant", "2")]),
    ({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
     [("user", "a"), ("assistant", "b")]),
    ({"system": "S", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
     [("system", "S"), ("user", "a"), ("assistant", "b")]),
])  # yapf: disable
def test_alpaca_and_sharegpt_are_chats(build, tokenizer, row, turns):
    """Detected by their keys, rendered with the chat template; every assistant turn is learnt."""
    example = build([row])[0]
    chat = [{"role": role, "content": text} for role, text in turns]
    assert tokenizer.decode(example.token_ids) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert learnt(example, tokenizer) == [f"{text}<|im_end|>" for role, text in turns if role == "assistant"]


@pytest.mark.parametrize("system", [["S"], ["S", {}], []])
def test_a_text_beside_a_system_column_is_a_turn(build, tokenizer, system):
    """After the pairs of its history; only the answer is learnt."""
    row = {"system": "".join(system[:1]), "prompt": "1+1?", "response": "2"}
    before = [("user", "Hi"), ("assistant", "Hello")] * (len(system) > 1)
    example = build([row | ({"history": [["Hi", "Hello"]]} if before else {})])[0]
    turns = [*(("system", text) for text in system[:1]), *before, ("user", "1+1?"), ("assistant", "2")]
    chat = [{"role": role, "content": text} for role, text in turns]
    assert tokenizer.decode(example.token_ids) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert learnt(example, tokenizer) == ["2<|im_end|>"]


@pytest.mark.parametrize("history", [5, "a", ["ab"], [["a"]], [["a", "b", "c"]], {"a": "b"}])
@pytest.mark.parametrize("row", [{"instruction": "a", "output": "b"}, {"prompt": "a", "response": "b", "system": "S"}])
def test_a_history_of_another_form_is_refused(build, row, history):
    with pytest.raises(DataError, match="row 1: the column 'history' is .*: expected a list of pairs"):
        build([row | {"history": history}])


@pytest.mark.parametrize("row",
                         [{"instruction": "Add.", "input": "1+1?"}, {"conversations": SHAREGPT["conversations"][:1]}])
def test_a_chat_without_an_answer_is_refused(build, row):
    with pytest.raises(DataError, match="no answer to train on"):
        build([row])


def test_the_column_of_the_answer(build, tokenizer):
    row = {"q": "1+1?", "a": "2", "output": "3"}
    example = build([row], input_key="q", learning=Learning("a"))[0]
    assert tokenizer.decode(example.token_ids) == "1+1?2<|im_end|>"
    with pytest.raises(DataError, match="row 2: .* no answer to train on .* in b\\). .* --output_key"):
        build([row | {"b": "4"}, row], input_key="q", learning=Learning("b"))
    for options, said in (({"learning": Learning("b")}, "--output_key 'b'"), ({"input_key": "p"}, "--input_key 'p'")):
        with pytest.raises(DataError, match=f"{said}: no row of .* has it. Its columns: q, a, output"):
            build([row], **options)
    for chat in ({"messages": MESSAGES[:3]}, ALPACA):  # whose own answer it replaces
        example = build([chat | {"a": "two"}], learning=Learning("a"))[0]
        assert learnt(example, tokenizer) == ["two<|im_end|>"]
        assert tokenizer.decode(example.token_ids).count("<|im_start|>assistant") == 1 + (chat is ALPACA)
    assert learnt(build([{"prompt": "x", "completion": None, "response": "y"}])[0], tokenizer) == ["y<|im_end|>"]


@pytest.mark.parametrize("template", [tiny.CHATML, MARKED])
def test_only_the_last_turn(build, template):
    tokenizer = with_template(template)
    example = build([{"messages": MESSAGES}], tokenizer=tokenizer, learning=Learning(every_turn=False))[0]
    assert learnt(example, tokenizer) == ["4<|im_end|>"]


@pytest.mark.parametrize("row,text", [
    ({"text": "Once upon a time."}, "Once upon a time.<|im_end|>"),
    ({"prompt": "1+1?", "response": "2"}, "1+1?2<|im_end|>"),
    ({"prompt": "1+1=2"}, "1+1=2<|im_end|>"),
])  # yapf: disable
def test_every_token_of_a_text(build, tokenizer, row, text):
    example = build([row], learning=Learning(whole=True))[0]
    assert example.token_ids == tokenizer(text).input_ids, "prompt and answer are one text"
    assert example.loss_mask == [False] + [True] * (len(example.token_ids) - 1), "nothing predicts the first"
    data = DataConfig(prompt_data=[hold_rows([row])], input_key="question")  # of the policy's prompts
    assert PretrainingDataset(data, tokenizer, 500, learning=Learning(whole=True))[0] == example
    if "response" not in row:
        with pytest.raises(DataError, match="no demonstration|no answer to train on"):
            build([row])


def test_every_token_of_a_chat(build, tokenizer):
    example = build([{"messages": MESSAGES}], learning=Learning(whole=True))[0]
    assert example.token_ids == build([{"messages": MESSAGES}])[0].token_ids
    assert example.loss_mask == [False] + [True] * (len(example.token_ids) - 1)
