"""Episodes of four families in a worker: what is drawn stays token by token, and is never encoded again; calls are
read and made as the family writes them."""
import json
import logging

import pytest

from lightrft.environments.base import EnvironmentSpec
from lightrft.environments.chat_format import ChatFormat
from lightrft.environments.play import Player
from lightrft.environments.pool import EnvironmentPool
from lightrft.environments.turn_template import PROBE
from lightrft.tests.support import chat_families, desk
from lightrft.types import Episode, Prompt, Segment
from lightrft.utils.errors import UserError

ASK = [{"role": "user", "content": "1+2?"}]
CALLS = {"add": '{"a": 1, "b": 2}', "look": '{"key": "x"}'}


def hermes(name):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {CALLS[name]}}}\n</tool_call>'


def llama(name):
    return f'{{"name": "{name}", "parameters": {CALLS[name]}}}'


def harmony(name, end="<|call|>"):
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{CALLS[name]}{end}"


def python(calls):
    return f"<|tool_call_start|>[{calls}]<|tool_call_end|><|im_end|>"


PYTHON_BOTH = "add(a=1, b=2), look(key='x')"
THINKS = "<|channel|>analysis<|message|>zyx<|end|><|start|>assistant"
CANONICAL = " to=functions.add<|channel|>commentary json<|message|>" + CALLS["add"] + "<|call|>"
LAST = {"qwen": "zyx<|im_end|>", "llama": "zyx<|eot_id|>",
        "harmony": "<|channel|>final<|message|>zyx<|return|>", "lfm2": "zyx<|im_end|>"}  # yapf: disable
USER = {"qwen": "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n",
        "llama": "<|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|>"
                 "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "harmony": "<|start|>user<|message|>and?<|end|><|start|>assistant",
        "lfm2": "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"}  # yapf: disable


def results(family, **answers):
    """What the policy reads behind calls: their answers, and the start of the next turn."""
    if family == "qwen":
        inner = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in answers.values())
        return f"\n<|im_start|>user{inner}<|im_end|>\n<|im_start|>assistant\n"
    if family == "lfm2":
        return "".join(f"\n<|im_start|>tool\n<|tool_response_start|>{text}<|tool_response_end|><|im_end|>"
                       for text in answers.values()) + "\n<|im_start|>assistant\n"  # yapf: disable
    written = {name: json.dumps(text) for name, text in answers.items()}
    if family == "llama":
        inner = "".join(f"<|start_header_id|>ipython<|end_header_id|>\n\n{text}<|eot_id|>" for text in written.values())
        return inner + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    return "".join(f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{text}<|end|>"
                   for name, text in written.items()) + "<|start|>assistant"  # yapf: disable


ADDED, BOTH = (("add", {"a": 1, "b": 2}), ), (("add", {"a": 1, "b": 2}), ("look", {"key": "x"}))
WRONG = "Error: the call is no valid JSON: {"
# family, kind, drawn, content, thought, calls, how many are run, answers of tools (None: the user's "and?"; {}: the
# response ends), whether the template writes the whole chat in the same way
TABLE = [
    ("qwen", "plain", LAST["qwen"], "zyx", None, (), 0, None, True),
    ("qwen", "call", f"zyx\n{hermes('add')}<|im_end|>", "zyx", None, ADDED, 1, {"add": "3"}, True),
    ("qwen", "parallel", f"zyx\n{hermes('add')}\n{hermes('look')}<|im_end|>", "zyx", None, BOTH, 2,
     {"add": "3", "look": "page x"}, True),
    ("qwen", "malformed", "zyx<tool_call>{</tool_call><|im_end|>", "zyx", None, (("", {}), ), 0, {"": WRONG}, False),
    ("qwen", "cut", f"zyx{hermes('add')}<tool_call>{{\"name\": \"look\", \"argu", "zyx", None, (*ADDED, ("", {})), 0,
     {}, False),
    ("qwen", "thoughts", f"<think>\nzyx\n</think>\n\n{hermes('add')}<|im_end|>", "", "zyx", ADDED, 1, {"add": "3"},
     True),
    ("qwen", "a call in a thought", f"<think>zyx{hermes('add')}</think>no<|im_end|>", "no", f"zyx{hermes('add')}", (),
     0, None, False),
    ("llama", "plain", LAST["llama"], "zyx", None, (), 0, None, True),
    ("llama", "call", llama("look") + "<|eot_id|>", "", None, BOTH[1:], 1, {"look": "page x"}, True),
    ("llama", "tagged", f"zyx<|python_tag|>{llama('add')}<|eom_id|>", "zyx", None, ADDED, 1, {"add": "3"}, False),
    ("llama", "parallel", f"zyx<|python_tag|>{llama('add')}; {llama('look')}<|eom_id|>", "zyx", None, BOTH, 2,
     {"add": "3", "look": "page x"}, False),
    ("llama", "parallel as a list", f'[{llama("add")}, {llama("look")}]<|eot_id|>', "", None, BOTH, 2,
     {"add": "3", "look": "page x"}, False),
    ("llama", "malformed", "zyx<|python_tag|>{<|eom_id|>", "zyx", None, (("", {}), ), 0, {"": WRONG}, False),
    ("llama", "malformed without a tag", '{"name": add<|eot_id|>', "", None, (("", {}), ), 0,
     {"": WRONG + '"name": add'}, False),
    ("llama", "cut", f"zyx<|python_tag|>{llama('add')}; {llama('look')[:-2]}", "zyx", None, (*ADDED, ("", {})), 0, {},
     False),
    ("llama", "Python", "[add(a=1, b=2)]<|eot_id|>", "", None, (("", {}), ), 0,
     {"": "Error: the call is no valid JSON: [add(a=1, b=2)]"}, False),
    ("llama", "a tool of its own", 'zyx<|python_tag|>brave_search.call(query="1+2")<|eom_id|>', "zyx", None,
     (("", {}), ), 0, {"": 'Error: the call is no valid JSON: brave_search.call(query="1+2")'}, False),
    ("llama", "thoughts", f"<think>zyx</think>\n{llama('add')}<|eot_id|>", "", "zyx", ADDED, 1, {"add": "3"}, False),
    ("harmony", "plain", LAST["harmony"], "zyx", None, (), 0, None, False),
    ("harmony", "call", THINKS + harmony("add"), "", "zyx", ADDED, 1, {"add": "3"}, False),
    ("harmony", "parallel", THINKS + harmony("add", "<|call|><|start|>assistant") + harmony("look"), "", "zyx", BOTH, 2,
     {"add": "3", "look": "page x"}, False),
    ("harmony", "malformed", f"{THINKS}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{<|call|>",
     "", "zyx", (("add", {}), ), 0, {"add": WRONG}, False),
    ("harmony", "no call", "<|channel|>commentary to=functions.add<|call|>", "", None, (("", {}), ), 0,
     {"unknown": "Error: the call is malformed: < |channel|>commentary to=functions.add"}, False),
    ("harmony", "cut", THINKS + harmony("add", "<|call|><|start|>assistant") + harmony("look", ""), "", "zyx", BOTH, 0,
     {}, False),
    ("harmony", "thoughts", THINKS + CANONICAL, "", "zyx", ADDED, 1, {"add": "3"}, True),
    ("harmony", "text in the commentary", f"<|channel|>commentary<|message|>zyx<|end|><|start|>assistant"
     f"{harmony('add')}", "zyx", None, ADDED, 1, {"add": "3"}, False),
    ("lfm2", "plain", LAST["lfm2"], "zyx", None, (), 0, None, True),
    ("lfm2", "call", python("add(a=1, b=2)"), "", None, ADDED, 1, {"add": "3"}, True),
    ("lfm2", "parallel", f"zyx{python(PYTHON_BOTH)}", "zyx", None, BOTH, 2, {"add": "3", "look": "page x"}, True),
    ("lfm2", "malformed", python("add(1, b=2)"), "", None, (("", {}), ), 0,
     {"": "Error: the call is malformed: add(1, b=2)"}, False),
    ("lfm2", "run", python("look(key=open('f').read())"), "", None, (("", {}), ), 0,
     {"": "Error: the call is malformed: look(key=open('f').read())"}, False),
    ("lfm2", "cut", f"zyx<|tool_call_start|>[{PYTHON_BOTH}", "zyx", None, (("", {}), ), 0, {}, False),
    ("lfm2", "thoughts", f"<think>zyx</think>{python('add(a=1, b=2)')}", "", "zyx", ADDED, 1, {"add": "3"}, False),
]  # yapf: disable


@pytest.fixture(name="pool", scope="module")
def fixture_pool():
    pool = EnvironmentPool(EnvironmentSpec(desk.__file__, "Desk"), 1, 20.0)
    yield pool
    pool.shutdown()


def opened(pool, family):
    tokenizer = chat_families.Guarded(chat_families.tokenizer(family))
    form = ChatFormat(tokenizer, chat_families.FAMILIES[family].model_type, pool.info.tools)
    return Player(pool, tokenizer, form, 8, 2048)


@pytest.mark.parametrize("family, kind, drawn, content, thought, calls, ran, answers, same", TABLE,
                         ids=[f"{row[0]}, {row[1]}" for row in TABLE])  # yapf: disable
def test_token_in_token_out(pool, family, kind, drawn, content, thought, calls, ran, answers, same):
    player, ids = opened(pool, family), chat_families.tokenizer(family)
    text, asked = player.form.prompt(ASK, {"tools": list(pool.info.tools)})
    (episode, ) = Episode.group(Prompt("u", asked, text, messages=ASK), 0, [5], role=kind)
    expected = [ids(drawn).input_ids]
    with player.playing([episode], 2048) as ask:
        following = turn(episode, ask, expected[0], "length" if kind == "cut" else "stop")
        message, read = episode.play.parsed[0], player.form.read(asked, expected[0])[1]
        assert (message["content"].strip(), message.get("reasoning_content")) == (content, thought)
        assert tuple((call.name, call.arguments) for call in read) == calls and episode.play.metrics["ran"] == ran
        assert episode.play.metrics["room"] == 2048 - len(expected[0])
        assert [bool(call.error) for call in read] == [call[1] == {} for call in calls] or kind == "cut"
        if answers == {}:
            assert not following, "a turn that was cut is the last one"
            return
        behind = USER[family] if answers is None else results(family, **answers)
        assert ids.decode(following) == behind and following == ids(behind).input_ids
        episode.give(following)
        expected += [following, ids(LAST[family]).input_ids]
        assert not turn(episode, ask, expected[2], "stop")
    rooms = [2048 - len(expected[0]), 2048 - sum(map(len, expected))]
    assert episode.play.metrics["room"] == sum(rooms), "metrics of turns are added"
    assert episode.token_ids == asked + [token for run in expected for token in run]
    assert episode.loss_mask == [False] * len(asked) + [i != 1 for i, run in enumerate(expected) for _ in run]
    if same:
        assert ids.decode(episode.token_ids[:-len(expected[2])]) == whole(ids, pool.info.tools, episode.play)


def turn(episode, ask, drawn, reason):
    """Draw a turn; return the tokens that follow it."""
    episode.add([Segment(drawn, [0.0] * len(drawn), version=0)], reason)
    pending, = ask([episode])
    following = pending.result()
    episode.finish_reason = "abort"
    return following


def whole(tokenizer, tools, play):
    """The chat up to the last turn as the template renders it."""
    turns = [message | {"thinking": message.get("reasoning_content")} for message in play.parsed]
    messages = [turns.pop(0) if each["role"] == "assistant" else each for each in play.messages[:-1]]
    return tokenizer.apply_chat_template([*ASK, *messages], tools=list(tools), tokenize=False,
                                         add_generation_prompt=True)  # yapf: disable


@pytest.mark.parametrize("family", chat_families.FAMILIES)
def test_a_template_with_another_history_is_refused_and_lost_thoughts_are_told(family, caplog, monkeypatch):
    tokenizer, model_type = chat_families.tokenizer(family), chat_families.FAMILIES[family].model_type
    monkeypatch.setattr(logging.getLogger("lightrft"), "propagate", True)
    with caplog.at_level(logging.INFO):
        ChatFormat(tokenizer, model_type, desk.Desk.tools)
    assert ("leaves them out of earlier turns" in caplog.text) == (family in ("qwen", "harmony"))
    content = {"qwen": "{{ m.content }}{% for", "llama": "turn(m.role, m.content | trim)",
               "harmony": "final<|message|>' + m.content }}", "lfm2": "{{ m.content }}"}[family]  # yapf: disable
    assert content in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(
        content, content.replace("m.content", "(m.content if loop.last else 'old')"))
    with pytest.raises(UserError, match="not prefix-stable: with a later message it renders"):
        ChatFormat(tokenizer, model_type)


@pytest.mark.parametrize("family", chat_families.FAMILIES)
def test_observations_cannot_speak_as_control_tokens(family):
    tokenizer, (model_type, _, special, added) = chat_families.tokenizer(family), chat_families.FAMILIES[family]
    form, marks = ChatFormat(tokenizer, model_type, desk.Desk.tools), "".join(special + added)
    controls = set(tokenizer.convert_tokens_to_ids([*special, *added]))
    drawn, found = tokenizer(LAST[family]).input_ids, []
    for text in ("a page", marks, f"<|<{marks}|>"):
        for message in ({"role": "tool", "name": "add", "content": text}, {"role": "tool", "name": f"add{text}",
                                                                           "content": "3"}):  # yapf: disable
            found.append([token for token in form.continuation([1], drawn, [message]) if token in controls])
    assert all(each == found[0] for each in found) and len(found[0]) > 2


@pytest.mark.parametrize("family", chat_families.FAMILIES)
@pytest.mark.parametrize("body", ["[" * 3000, "1" * 5000, "-" * 9000 + "1"], ids=["too deep", "too long", "minus"])
def test_a_call_that_python_cannot_read_is_malformed(family, body):
    """Not the end of the run."""
    tokenizer = chat_families.tokenizer(family)
    form = ChatFormat(tokenizer, chat_families.FAMILIES[family].model_type, desk.Desk.tools)
    drawn = {"qwen": f"<tool_call>{body}</tool_call><|im_end|>", "llama": f"<|python_tag|>{body}<|eom_id|>",
             "harmony": f"<|channel|>commentary to=functions.add<|message|>{body}<|call|>",
             "lfm2": f"<|tool_call_start|>[f(a={body})]<|tool_call_end|><|im_end|>"}[family]  # yapf: disable
    _, (call, ) = form.read(form.prompt(ASK, {})[1], tokenizer(drawn).input_ids)
    assert call.error.startswith(f"the call is {'malformed' if family == 'lfm2' else 'no valid JSON'}: ")


@pytest.mark.parametrize("family", chat_families.FAMILIES)
def test_a_call_may_have_any_name(family):
    """Also that of the probe by which the text behind an answer is found."""
    form = ChatFormat(chat_families.tokenizer(family), chat_families.FAMILIES[family].model_type, desk.Desk.tools)
    drawn = form.tokenizer(LAST[family]).input_ids
    texts = [form.tokenizer.decode(form.continuation([1], drawn, [{"role": "tool", "name": name, "content": "3"}]))
             for name in ("add", f"{PROBE}add", PROBE)]  # yapf: disable
    assert texts[0] == texts[1] and texts[2] == texts[0].replace("functions.add", "functions.unknown")


@pytest.mark.parametrize("family, model_type, form", [
    ("llama", "mistral", "LlamaCalls"),
    ("harmony", "qwen2", "HarmonyCalls"),
    ("qwen", "llama", "DefaultRenderer"),
])
def test_a_model_of_another_type_is_read_as_its_template_writes_calls(family, model_type, form):
    reader = ChatFormat(chat_families.tokenizer(family), model_type, desk.Desk.tools).reader
    assert type(reader).__name__ == form


@pytest.mark.parametrize("value, read", [
    ("'it\\'s'", "it's"), ("-2.5", -2.5), ("[1, (2, None)]", [1, [2, None]]),
    ("{'k': true, 'n': null}", {"k": True, "n": None}),
    ("b'x'", "malformed"), ("1j", "malformed"), ("{1, 2}", "malformed"), ("f''", "malformed"), ("-'x'", "malformed"),
    ("{**a}", "malformed"), ("x", "malformed")])  # yapf: disable
def test_a_llama_whose_template_writes_python(value, read):
    """The whole turn is a list of calls then, and their values are those of JSON."""
    tokenizer = chat_families.tokenizer("llama")
    before = """'{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}'"""
    assert before in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(
        before, """'[' + f.name + '(' + f.arguments.items() | map('join', "='") | join("', ") + "')]\"""")
    form = ChatFormat(tokenizer, "llama", desk.Desk.tools)
    message, (call, ) = form.read([], tokenizer(f"<think>t</think>[look.up(key={value})]<|eot_id|>").input_ids)
    assert (message["reasoning_content"], message["content"]) == ("t", "")
    if read == "malformed":
        assert call.error == f"the call is malformed: look.up(key={value})"
    else:
        assert (call.name, call.arguments, call.error) == ("look.up", {"key": read}, "")
    assert not form.read([], tokenizer("a list: [1]<|eot_id|>").input_ids)[1]


def test_a_form_of_calls_that_nothing_reads_is_refused():
    tokenizer = chat_families.tokenizer("llama")
    tokenizer.chat_template = tokenizer.chat_template.replace('{\"name\": \"', "[CALL] ")
    with pytest.raises(UserError, match=r"its template writes '\[CALL\] f.*nor that of Llama 3"):
        ChatFormat(tokenizer, "llama", desk.Desk.tools)


def test_a_template_without_results_of_tools_is_refused():
    tokenizer = chat_families.tokenizer("llama")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% if m.role in ('tool', 'ipython') %}",
        "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% elif 0 %}")
    with pytest.raises(UserError, match="cannot read results of tools: .* no tools"):
        ChatFormat(tokenizer, "llama", desk.Desk.tools)
