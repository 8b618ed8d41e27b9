"""Boundaries of answers over templates of public models and two kinds of tokenizers: the tokens before an answer are
those of the generation prompt, the rest is learnt, the end token included."""
import pytest

from lightrft.config.offline_schema import PairDataConfig
from lightrft.config.preference_schema import JudgedDataConfig
from lightrft.config.schema import DataConfig
from lightrft.datasets.judged import JudgedDataset
from lightrft.datasets.preferences import PairDataset
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.datasets.sft_dataset import Learning, SFTDataset
from lightrft.models.tokenizer import CHAT_TEMPLATES
from lightrft.tests.support import field, tiny
from lightrft.tests.support.boundary_tokenizers import byte_level, metaspace

_LOOP = "{% for m in messages %}"
_OPENED = "{% endfor %}{% if add_generation_prompt %}"
_INST = "{{ bos_token }}" + _LOOP + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}{% else %}"


def headed(gap, written="m.content", tail=""):
    """A template of turns with a header, a gap behind it, and an end token with a tail; the branch stays open."""
    return (_LOOP + "{{ '<H>' + m.role + '</H>" + gap + "' + " + written + " + '<E>" + tail + "' }}" + _OPENED +
            "{{ '<H>assistant</H>" + gap + "' }}")


TEMPLATES = {
    "chatml": tiny.CHATML,
    "llama3": headed("\n\n", "m.content | trim") + "{% endif %}",
    "llama2": _INST + "{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}" + headed("\n", "m.content | trim", "\n") + "{% endif %}",
    "mistral": _INST + "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
    "phi": headed("\n", tail="\n") + "{% else %}{{ eos_token }}{% endif %}",
    "marked": _LOOP + "{{ '<H>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<E>\n' }}" + _OPENED +
    "{{ '<H>assistant\n' }}{% endif %}",
    "no end": _LOOP + "{{ m.role + ': ' + m.content + '\n' }}" + _OPENED + "{{ 'assistant:' }}{% endif %}",
} | {f"built in {name}": template for name, template in CHAT_TEMPLATES.items()}  # yapf: disable
QWEN3 = (_LOOP + "{% set last = loop.last %}{{ '<H>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
         "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}{% if last %}{{ '<think>\n' + "
         "m.content.split('</think>')[0].split('<think>')[-1].strip('\n') * ('</think>' in m.content) + "
         "'\n</think>\n\n' }}{% endif %}{{ said }}{% else %}{{ m.content }}{% endif %}{{ '<E>\n' }}" + _OPENED +
         "{{ '<H>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
         "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}")
EMPTY_THOUGHT = (headed("\n") + "{% if enable_thinking is defined and not enable_thinking %}"
                 "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}")  # yapf: disable
DEEPSEEK = (_LOOP +
            "{% if m.role == 'user' %}{{ '<U>' + m.content }}{% else %}{{ '<A>' + m.content.split('</think>')[-1]"
            " + eos_token }}{% endif %}" + _OPENED + "{{ '<A><think>\n' }}{% endif %}")


def ask(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def demonstrations(rows, tokenizer, learning=Learning(), **options):
    return SFTDataset(DataConfig(prompt_data=[hold_rows(rows)], **options), tokenizer, 500, learning=learning)


def prompts(rows, tokenizer, **options):
    return PromptsDataset(DataConfig(prompt_data=[hold_rows(rows)], **options), tokenizer, 500, scored=False)


def generation_prompt(chat, tokenizer, **kwargs):
    """The tokens that generation sees before an answer to ``chat``."""
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **kwargs)
    return tokenizer(text, add_special_tokens=False).input_ids


def forms(chat, tokenizer, **columns):
    """The last answer of a chat as a (token ids, mask) of each form of a row, of every trainer."""
    asked, said, bad = chat[:-1], chat[-1:], [{"role": "assistant", "content": chat[-1]["content"] + " not"}]
    yield from demonstrations([columns | row for row in (
        {"messages": chat}, {"prompt": asked, "completion": said}, {"prompt": asked, "response": said[0]["content"]},
        {"conversations": chat})], tokenizer, Learning(every_turn=False))  # yapf: disable
    rows = [columns | {"prompt": asked, "chosen": said, "rejected": bad}]
    pair = PairDataset(PairDataConfig(train_data=[hold_rows(rows)]), tokenizer)[0]
    other = {"prompt": ask("other"), "completion": bad, "label": False}
    rows = [columns | {"prompt": asked, "completion": said, "label": True}, other]
    yield pair.chosen
    yield JudgedDataset(JudgedDataConfig(train_data=[hold_rows(rows)]), tokenizer)[0].answer


def learnt(example):
    """The runs of learnt tokens, and the tokens before each."""
    ids, mask = example.token_ids, [False, *example.loss_mask, False]
    starts = [i for i in range(len(ids)) if mask[i + 1] and not mask[i]]
    ends = [i for i in range(1, len(ids) + 1) if mask[i] and not mask[i + 1]]
    return [(ids[:start], ids[start:end]) for start, end in zip(starts, ends)]


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("answer", ["2", "\n\n2", " 2 and\n2", "a"])
def test_one_rule_for_every_form_of_a_row(make, name, answer, capsys):
    tokenizer = make(TEMPLATES[name])
    letter = tokenizer.convert_tokens_to_ids("a")
    for chat in (ask("1+1?", answer), ask("1+1?", answer, "And 2?", answer)):
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        asked = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
        end = next((token for token in ("<E>", "<|im_end|>", "</s>") if token in text), None)
        for example in forms(chat, tokenizer):
            (before, said), = learnt(example)
            assert before == generation_prompt(chat[:-1], tokenizer)
            assert tokenizer.convert_ids_to_tokens(said[-1:])[0] in (end, "</s>") if end else True
            assert tokenizer.decode(said, skip_special_tokens=True).strip() == answer.strip()
            written = tokenizer.decode([letter, *said])[1:].partition("<")[0]  # Metaspace adds a blank after <E>
            assert text[len(asked):].startswith(written), "what the template writes, with no blank before it"
        first, *_ = learnt(demonstrations([{"messages": chat}], tokenizer)[0])
        assert first[0] == generation_prompt(chat[:1], tokenizer)
        assert len(learnt(demonstrations([{"messages": chat}], tokenizer)[0])) == len(chat) // 2 or not end
    assert "chat template" not in capsys.readouterr().err


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("prompt,answer", [("1+1?", "2"), ("Q: ", "2"), ("Q:", " 2"), ("a\n", "\n2"), ("Q:\n", "a b")])
def test_texts_of_a_pair_are_one_text(make, prompt, answer):
    """No blank is put between them, and the prompt is that of generation."""
    tokenizer = make()
    begun = prompts([{"prompt": prompt, "answer": "2"}], tokenizer)[0].token_ids
    example = demonstrations([{"prompt": prompt, "completion": answer}], tokenizer)[0]
    assert learnt(example) == [(begun, example.token_ids[len(begun):])] and example.token_ids[-1] == 2
    assert tokenizer.decode(example.token_ids[:-1]) == prompt + answer
    whole = demonstrations([{"prompt": prompt, "completion": answer}], tokenizer, Learning(whole=True))[0]
    assert whole.token_ids == [*tokenizer(prompt + answer).input_ids, 2]


def test_a_template_that_forgets_thoughts_is_named_once(capsys):
    """Its earlier answers are learnt as they are written; the last one is learnt as it is generated."""
    tokenizer = byte_level(QWEN3)
    chat = ask("a", "<think>\nb\n</think>\n\nc", "d", "<think>\ne\n</think>\n\nf")
    example, _ = demonstrations([{"messages": chat}] * 2, tokenizer)[:]
    runs = learnt(example)
    assert [tokenizer.decode(said) for _, said in runs] == ["c<E>", "<think>\ne\n</think>\n\nf<E>"]
    assert runs[1][0] == tokenizer(tokenizer.apply_chat_template(chat[:2], tokenize=False).replace(
        "<think>\nb\n</think>\n\n", "") + "<H>user\nd<E>\n<H>assistant\n").input_ids  # yapf: disable
    printed = capsys.readouterr().err
    assert printed.count("the chat template of 'byte-level tokenizer' writes turn 2 of a chat of 4 differently") == 1
    for kwargs, said in (({}, "<think>\n\n</think>\n\nf<E>"), ({"enable_thinking": False}, "f<E>")):
        (_, run), = learnt(demonstrations([{"messages": ask("d", "f"), "chat_template_kwargs": kwargs}], tokenizer)[0])
        assert tokenizer.decode(run) == said
    assert "differently" not in capsys.readouterr().err


OFF = {"enable_thinking": False}


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("template, kwargs, answer, said", [
    (EMPTY_THOUGHT, OFF, "f", "f<E>"),
    (EMPTY_THOUGHT, OFF, "<b>f</b>", "<b>f</b><E>"),
    (EMPTY_THOUGHT, OFF, "<think>\n\n</think>\n\nf", "f<E>"),
    (EMPTY_THOUGHT, OFF, "<think></think>\nf", "f<E>"),
    (EMPTY_THOUGHT, {}, "<think>e</think>f", "<think>e</think>f<E>"),
    (DEEPSEEK, {}, "<think>\ne\n</think>f", "e\n</think>f</s>"),
    (DEEPSEEK, {}, "<think>\n\n e</think>f", "\n e</think>f</s>"),
    (DEEPSEEK, {}, "e\n</think>f", "e\n</think>f</s>"),
    (DEEPSEEK, {}, "<think>2</think>2", "2</think>2</s>"),
    (DEEPSEEK.replace("<think>\\n", "").replace("<think>\n", ""), {}, "<think>e</think>f", "<think>e</think>f</s>"),
])  # yapf: disable
def test_an_answer_follows_the_thought_of_the_generation_prompt(make, template, kwargs, answer, said, capsys):
    """Though the template writes none in a whole chat, or leaves out that of the answer; none is there twice. The same
    holds behind earlier turns, which are as the template writes them."""
    tokenizer = make(template)
    for chat in (ask("d", answer), ask("a", "b", "d", answer)):
        for example in forms(chat, tokenizer, chat_template_kwargs=kwargs):
            (before, run), = learnt(example)
            assert before == generation_prompt(chat[:-1], tokenizer, **kwargs)
            assert tokenizer.decode(run).rstrip() == said
    assert "chat template" not in capsys.readouterr().err


def test_earlier_answers_are_learnt_as_later_turns_see_them(capsys):
    """With a warning, once: without the empty thought, which the generation prompt of the last answer has."""
    row = {"messages": ask("a", "b", "d", "f"), "chat_template_kwargs": OFF}
    tokenizer = byte_level(EMPTY_THOUGHT)
    (first, b), (second, f) = learnt(demonstrations([row], tokenizer)[0])
    assert tokenizer.decode(first) == "<H>user</H>\na<E><H>assistant</H>\n" and tokenizer.decode(b) == "b<E>"
    assert second == generation_prompt(row["messages"][:3], tokenizer, **OFF) and tokenizer.decode(f) == "f<E>"
    assert capsys.readouterr().err.count("writes turn 2 of a chat of 4 differently") == 1
    whole, = demonstrations([row], tokenizer, Learning(whole=True))[:]
    assert "<think>" not in tokenizer.decode(whole.token_ids), "pretraining reads a chat as it is rendered"


@pytest.mark.parametrize("template, kwargs, answer, before, said, told", [
    (EMPTY_THOUGHT, OFF, "<think>e</think>f", "<H>assistant</H>\n", "<think>e</think>f<E>", "writes turn 2 of a chat"),
    (DEEPSEEK, {}, "f", "<A><think>\n", "f</s>", "writes '<think>\\n' before an answer, and an answer has no </think>"),
])  # yapf: disable
def test_an_answer_that_does_not_fit_the_thought_of_the_generation_prompt(template, kwargs, answer, before, said, told,
                                                                          capsys):
    """Another thought than the empty one, and none where one is opened, are learnt with a warning."""
    tokenizer = byte_level(template)
    example = demonstrations([{"messages": ask("d", answer), "chat_template_kwargs": kwargs}], tokenizer)[0]
    (prompt, run), = learnt(example)
    assert tokenizer.decode(prompt).endswith(before) and tokenizer.decode(run) == said
    assert told in capsys.readouterr().err


def test_calls_and_prefills_behind_the_thought_of_the_generation_prompt():
    """A call is learnt as the template writes it; a prefill follows the thought, and what continues it is learnt."""
    tokenizer = field.field_tokenizer()
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    (prompt, run), = learnt(demonstrations([{"messages": [*ask("d"), call], "enable_thinking": False}], tokenizer)[0])
    assert tokenizer.decode(prompt).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(run) == '<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>'
    row = {"prompt": ask("d", "2 i"), "completion": "s it", "enable_thinking": False}
    (prompt, run), = learnt(demonstrations([row], tokenizer)[0])
    assert prompt == prompts([row], tokenizer)[0].token_ids and tokenizer.decode(run) == "s it<|im_end|>"
    assert tokenizer.decode(prompt).endswith("assistant\n<think>\n\n</think>\n\n2 i")
    row = {"prompt": ask("d", "<think>Let me"), "completion": " add.</think>2"}
    (prompt, run), = learnt(demonstrations([row], byte_level(DEEPSEEK))[0])
    assert prompt == prompts([row], byte_level(DEEPSEEK))[0].token_ids
    assert byte_level().decode(run) == " add.</think>2</s>"


# -- prefills ---------------------------------------------------------------------------------------------------------
PREFILL = "<think>Let me"


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_that_ends_with_an_answer_is_continued(make, name):
    """With the generation prompt before it, and the blank of templates that write one there; in every trainer."""
    tokenizer, row = make(TEMPLATES[name]), field.rows("prefill")[0]
    found = prompts([row], tokenizer)[0]
    opened = tokenizer.apply_chat_template(row["prompt"][:1], tokenize=False, add_generation_prompt=True)
    assert found.text.removesuffix(PREFILL).removesuffix(" ") == opened.removesuffix(" ")
    assert found.messages == row["prompt"] and found.token_ids == tokenizer(found.text).input_ids
    said = [{"role": "assistant", "content": " add.</think>2"}]
    bad = [{"role": "assistant", "content": " guess.</think>3"}]
    examples = [*demonstrations([{"prompt": row["prompt"], "completion": said},
                                 {"prompt": row["prompt"], "response": " add.</think>2"}], tokenizer)]  # yapf: disable
    rows = [{"prompt": row["prompt"], "chosen": said, "rejected": bad}]
    pair = PairDataset(PairDataConfig(train_data=[hold_rows(rows)]), tokenizer)[0]
    judged = [{"prompt": row["prompt"], "completion": said, "label": True},
              {"prompt": ask("b"), "completion": bad, "label": False}]  # yapf: disable
    examples += [pair.chosen, JudgedDataset(JudgedDataConfig(train_data=[hold_rows(judged)]), tokenizer)[0].answer]
    for example in examples:
        (before, run), = learnt(example)
        assert before == found.token_ids
        assert tokenizer.decode(run, skip_special_tokens=True).strip() == "add.</think>2"


def test_a_prefill_and_the_thought_that_a_template_opens():
    """The start of a thought is there once; a thought that the template leaves empty does not follow the prefill."""
    row = field.rows("prefill")[0]
    found = prompts([row, row | {"prompt": ask("a", "Let me")}], byte_level(DEEPSEEK))
    assert [each.text for each in found[:]] == ["<U>1+1?<A><think>Let me", "<U>a<A><think>\nLet me"]
    rows = [row, row | {"prompt": ask("a", "2"), "chat_template_kwargs": {"enable_thinking": False}}]
    assert [each.text for each in prompts(rows, byte_level(QWEN3))[:]] == [
        "<H>user\n1+1?<E>\n<H>assistant\n<think>Let me", "<H>user\na<E>\n<H>assistant\n<think>\n\n</think>\n\n2"
    ]


def test_whole_chats_lose_their_answers(caplog):
    """In columns that hold demonstrations; the log counts them, and the prompts with a prefill."""
    tokenizer, text = byte_level(tiny.CHATML), "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    for row in ({"messages": ask("a", "b")}, {"conversations": ask("a", "b")}, {"chosen": ask("a", "b")}):
        caplog.clear()
        found = prompts([row | {"solution": "b"}], tokenizer, input_key=next(iter(row)))
        assert found[0].text == text and "1 of 1 rows end with an answer in a column of whole chats" in caplog.text
    assert prompts([{"prompt": ask("a", "b")}], tokenizer)[0].text == text + "b"
    assert "1 of 1 rows end with an answer that responses continue (a prefill)" in caplog.text
    assert prompts([{"prompt": ask("a", [{"type": "text", "text": "b"}])}], tokenizer)[0].text == text + "b"
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    with pytest.raises(DataError, match="row 1: the prompt ends with an answer that is more than text"):
        prompts([{"prompt": [*ask("a"), call]}], tokenizer)
