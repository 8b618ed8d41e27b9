"""Pairs from rows of every known schema; rows that cannot be compared."""
import pytest

from lightrft.config.offline_schema import PairDataConfig
from lightrft.config.rm_schema import JudgeDataConfig
from lightrft.datasets.judgements import to_judgement
from lightrft.datasets.preferences import find_pairs, PairDataset, PairError, side_rows, to_pair
from lightrft.datasets.rows import DataError, hold_rows, load_rows
from lightrft.tests.support import tiny

ASK, GOOD, BAD = ({"role": role, "content": text}
                  for role, text in (("user", "1+1?"), ("assistant", "2"), ("assistant", "3")))
CHAT = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
FORMS = {
    "TRL, explicit prompt": {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    "TRL, implicit prompt": {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "the prompt twice": {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "UltraFeedback": {"prompt": "1+1?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "ms-swift, response": {"messages": [ASK, GOOD], "rejected_response": "3"},
    "ms-swift, messages": {"messages": [ASK, GOOD], "rejected_messages": [ASK, BAD]},
    "chat and texts": {"prompt": [ASK], "chosen": "2", "rejected": "3"},
    "a chat that asks": {"messages": [ASK], "chosen": "2", "rejected": "3"},
    "Alpaca": {"instruction": "1+1?", "input": "", "output": "2", "chosen": "2", "rejected": "3"},
    "ShareGPT": {"conversations": [{"from": "human", "value": "1+1?"}], "chosen": {"from": "gpt", "value": "2"},
                 "rejected": {"from": "gpt", "value": "3"}},
    "one goes on": {"prompt": [], "chosen": [ASK, BAD, ASK, GOOD], "rejected": [ASK, BAD]},
}  # yapf: disable


@pytest.fixture
def build(write, tokenizer):
    """``build(rows, **options)`` -> PairDataset of those rows."""

    def make(rows, **options):
        return PairDataset(PairDataConfig(train_data=[write(rows)], **({"max_len": 500} | options)), tokenizer)

    return make


def texts(example, tokenizer):
    """The whole sequence, and what of it is in the loss."""
    kept = [token for token, keep in zip(example.token_ids, example.loss_mask) if keep]
    return tokenizer.decode(example.token_ids), tokenizer.decode(kept)


@pytest.mark.parametrize("form", FORMS)
def test_chats_of_every_form(build, tokenizer, form):
    (pair, ) = build([FORMS[form]])
    again = ("3<|im_end|>\n" + CHAT) * (form == "one goes on")
    assert texts(pair.chosen, tokenizer)[0] == CHAT + again + "2<|im_end|>"
    assert texts(pair.chosen, tokenizer)[1] == "3<|im_end|>" * bool(again) + "2<|im_end|>"
    assert texts(pair.rejected, tokenizer) == (CHAT + "3<|im_end|>", "3<|im_end|>")
    assert (pair.uid, pair.margin, pair.tie) == ("0:0", None, False)


@pytest.mark.parametrize("form", [*FORMS, "Orca"])
def test_the_column_system_comes_before_the_prompt_of_every_form(build, tokenizer, form):
    """Once; an empty one makes a chat of a text, too."""
    row = FORMS.get(form, {"question": "1+1?", "chosen": "2", "rejected": "3"})
    own, empty = build([row | {"system": "S"}, row | {"system": ""}])
    start = tokenizer.apply_chat_template([{"role": "system", "content": "S"}], tokenize=False)
    for side in ("chosen", "rejected"):
        found, bare = (texts(getattr(pair, side), tokenizer) for pair in (own, empty))
        assert found == (start + bare[0], bare[1]) and bare[0].startswith(CHAT)
    if form in ("TRL, implicit prompt", "ms-swift, messages"):  # a chat with a turn of the system keeps its own
        spoken = {name: [{"role": "system", "content": "T"}, *turns] for name, turns in row.items()}
        assert build([spoken | {"system": "S"}])[0].chosen == build([spoken])[0].chosen


@pytest.mark.parametrize("row, options", [
    ({"prompt": "1+1? ", "chosen": "It is 2", "rejected": "It is 3"}, {}),
    ({"q": "1+1? ", "good": "It is 2", "bad": "It is 3"
      }, {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad"}),
    ({"question": "1+1? ", "chosen": "It is 2", "rejected": "It is 3"}, {}),
])
def test_texts(build, tokenizer, row, options):
    (pair, ) = build([row], **options)
    assert texts(pair.chosen, tokenizer) == ("1+1? It is 2<|im_end|>", "It is 2<|im_end|>")
    assert texts(pair.rejected, tokenizer) == ("1+1? It is 3<|im_end|>", "It is 3<|im_end|>")
    (pair, ) = build([row], apply_chat_template=True, input_template="Q: {}", system_prompt="S", **options)
    assert texts(pair.chosen, tokenizer)[0].startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ: 1+1? <")


@pytest.mark.parametrize("asked,said", [("Human: 1+1? Assistant: ", ["twenty", "two"]),
                                        ("Human: 1+1?\n\nAssistant:\n", ["2", "3"])])  # yapf: disable
def test_the_prompt_of_texts_without_one_ends_before_a_whole_word(build, tokenizer, asked, said):
    (pair, ) = build([{"chosen": asked + said[0], "rejected": asked + said[1]}])
    assert [texts(side, tokenizer)[1] for side in (pair.chosen, pair.rejected)] == [f"{one}<|im_end|>" for one in said]


def test_margins_and_ties(build):
    row = FORMS["chat and texts"]
    pairs = build([row | {"margin": 0.5, "tie": False}, row | {"margin": 2, "rejected": "2", "tie": True}])
    assert [(pair.margin, pair.tie) for pair in pairs] == [(0.5, False), (2.0, True)]
    assert [pair.tie for tie in (1, 0.0, None) for pair in build([row | {"tie": tie}])] == [True, False, False]


BROKEN = {
    "no rejected": ({"prompt": "a", "chosen": "b"}, "rejected answer is missing or empty .*--rejected_key"),
    "no chosen": ({"prompt": "a", "rejected": "b"}, "chosen answer is missing or empty .*--chosen_key"),
    "an empty answer": ({"prompt": "a", "chosen": "b", "rejected": " "}, "rejected answer is missing or empty"),
    "an empty turn": ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD | {"content": ""}]}, "rejected answer is m"),
    "an empty turn before": ({"prompt": [ASK], "chosen": [BAD | {"content": ""}, ASK, GOOD], "rejected":
                              [BAD]}, "the chosen answer has an empty turn"),
    "a null part": ({"prompt": [ASK], "chosen": [GOOD | {"content": ["4", None]}], "rejected":
                     [BAD]}, "a chat message of 'assistant' has a part without text"),
    "a turn of the user at the end": ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "rejected answer is missing"),
    "no prompt": ({"chosen": "It", "rejected": "That"}, "no prompt .it has chosen, rejected.*--prompt_key"),
    "an empty prompt": ({"prompt": " ", "chosen": "It is 2", "rejected": "It is 3"}, "the row has no prompt"),
    "a null prompt": ({"prompt": None, "chosen": "It is 2", "rejected": "It is 3"}, "the row has no prompt"),
    "no turn before": ({"chosen": [GOOD], "rejected": [BAD]}, "the row has no prompt"),
    "an empty turn that asks": ({"prompt": [ASK | {"content": ""}], "chosen": [GOOD], "rejected": [BAD]}, "no prompt"),
    "answers alone": ({"messages": [GOOD], "rejected_response": "3"}, "no prompt, only empty or assistant messages"),
    "the beginning of the other one":
    ({"chosen": "1+1? Two ", "rejected":
      "1+1? Two or three"}, "the chosen answer has .*nothing after the beginning that both share"),
    "two questions": ({"chosen": [ASK, GOOD], "rejected":
                       [ASK | {"content": "2+2?"},
                        BAD]}, "the chosen answer begins with a turn of 'user', .* answer different questions"),
    "a prompt that chats lack":
    ({"prompt": [{"role": "system", "content": "Be terse."}, ASK], "chosen": [ASK, GOOD], "rejected":
      [ASK, BAD]}, "the answers are whole chats without the turn of 'system' in the column 'prompt'"),
    "an end token alone": ({"prompt": "a", "chosen": "b", "rejected": "<|im_end|>\n"}, "rejected answer is missing"),
    "an end token alone in a chat": ({"prompt": [ASK], "chosen": [GOOD], "rejected":
                                      [BAD | {"content": "<|im_end|>"}]}, "rejected answer is missing or empty"),
    "an end token more": ({"prompt": "a", "chosen": "b<|im_end|>", "rejected":
                           "b"}, "the chosen and the rejected answer are equal"),
    "equal answers": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the chosen and the rejected answer are equal"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rows_that_cannot_be_compared(build, name, capsys):
    row, problem = BROKEN[name]
    plain = name != "answers alone" and any(isinstance(row.get(key), str) for key in ("prompt", "chosen"))
    good = {"prompt": "a", "chosen": "b", "rejected": "c"} if plain else FORMS["TRL, explicit prompt"]
    with pytest.raises(DataError, match="row 2: .*" + problem):
        build([good, row])
    pairs = build([good, row, good], pair_policy="skip")
    assert [pair.uid for pair in pairs] == ["0:0", "0:2"] and pairs.dropped == 1
    assert "1 of 3 rows have answers that cannot be compared" in capsys.readouterr().err
    with pytest.raises(DataError, match="none of 1 pairs can be used"):
        build([row], pair_policy="skip")


def test_a_text_beside_chats_may_be_a_turn_or_all_of_them():
    turns = [{"role": "system", "content": "Be terse."}, ASK, GOOD, {"role": "user", "content": " and 2+2?"}]
    for text in ("and 2+2?", f"Human: {ASK['content']} Assistant: {GOOD['content']} Human: and 2+2?"):
        pair = to_pair({"prompt": text, "chosen": [*turns, GOOD], "rejected": [*turns, BAD]}, PairDataConfig(), "row 1")
        assert pair.prompt == turns


def test_a_prompt_of_a_single_turn_that_chats_lack():
    for asked, lost in ((ASK | {"content": "2+2?"}, "turn of 'user'"), ("2+2?", "text")):
        row = {"prompt": asked, "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
        with pytest.raises(PairError, match=f"row 1: the answers are whole chats without the {lost} in the column"):
            to_pair(row, PairDataConfig(), "row 1")


@pytest.mark.parametrize("option", ["prompt_key", "chosen_key", "rejected_key"])
def test_a_named_column_that_no_row_has(build, option):
    """Also where the answers share words that could be a prompt, and whatever the policy."""
    with pytest.raises(DataError, match=f"--{option} 'typo': no row of .* Its columns: q, chosen, rejected"):
        build([{"q": "1+1?", "chosen": "It is 2", "rejected": "It is 3"}], pair_policy="skip", **{option: "typo"})


def test_what_stops_a_run_under_every_policy(build):
    row = FORMS["chat and texts"]
    for broken, problem in ((row | {"margin": "much"}, "margin 'much' is not a number"),
                            *((row | {"tie": tie}, "column 'tie' is .*: expected true or false")
                              for tie in ("false", "no", -1, [False])),
                            (row | {"prompt": [ASK, GOOD | {"content": None}, ASK]}, "turn 2 of the chat is empty"),
                            (row | {"chosen": [GOOD]}, "one answer is text, the other one messages"),
                            ({"prompt": "a", "chosen": [GOOD], "rejected": [BAD]}, "text prompt with a chat answer")):
        with pytest.raises(DataError, match=problem):
            build([broken], pair_policy="skip")


def test_media_of_the_rejected_answer(tokenizer):
    """They stand for all media of their kind; a row without others for them, or for a judge, is refused."""
    row = {"messages": [ASK, GOOD], "image": "cat", "videos": ["walk"], "rejected_images": ["dog"]}
    rows, cfg = load_rows(hold_rows([row, row | {"rejected_response": "3", "rejected_images": []}])), PairDataConfig()
    pairs = find_pairs(rows, cfg)
    chosen, rejected = ([(own.get("images"), own["image"], own["videos"]) for own in side.rows]
                        for side in side_rows(rows, pairs, cfg))  # yapf: disable
    assert chosen == [(None, "cat", ["walk"])] * 2 and rejected == [(["dog"], None, ["walk"]), chosen[1]]
    assert pairs[0].chosen == pairs[0].rejected == [GOOD] and pairs[0].prompt == [ASK]
    for empty in ({}, {"images": ["dog"], "image": None}):
        with pytest.raises(DataError,
                           match="the chosen and the rejected answer are equal" if empty else "the rejected answer is"):
            to_pair((row if empty else row | {"rejected_images": None}) | empty, cfg, "row 1")
    with pytest.raises(DataError, match="other media for the rejected candidate .*in the column 'images'"):
        to_judgement(FORMS["TRL, explicit prompt"] | {"rejected_images": ["dog"]}, JudgeDataConfig(), False, "row 1")


def test_answers_of_the_same_tokens_are_equal(build, tokenizer, monkeypatch, capsys):
    """As texts they differ: a template trims them, or does not read a key of the message."""
    monkeypatch.setattr(tokenizer, "chat_template", tiny.CHATML.replace("m['content'] +", "m['content'] | trim +"))
    good, rows = FORMS["TRL, explicit prompt"], [{"chosen": "3\n", "rejected": "3"},
                                                 {"rejected": [GOOD | {"name": "x"}]}]  # yapf: disable
    for row in ({"prompt": [ASK], "chosen": [GOOD]} | row for row in rows):
        with pytest.raises(DataError, match="row 1: the chosen answer has the same tokens as the rejected"):
            build([row])
        pairs = build([row | {"tie": True}])
        assert [pair.tie for pair in pairs] == [True] and pairs[0].chosen.token_ids == pairs[0].rejected.token_ids
    row = good | rows[1]
    pairs = build([good, row, good, row], pair_policy="skip")
    assert [pair.uid for pair in pairs] == ["0:0", "0:2"] and pairs.dropped == 2
    assert "2 of 4 rows have answers that are the same tokens" in capsys.readouterr().err


def test_a_pair_with_a_sequence_beyond_the_limit_is_dropped_as_a_whole(build, capsys):
    row = FORMS["chat and texts"]
    pairs = build([row, row | {"rejected": "3" * 100}], max_len=80)
    assert len(pairs) == 1 and pairs.dropped == 1 and "1 of 2 rows are longer" in capsys.readouterr().err
