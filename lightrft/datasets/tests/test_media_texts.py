"""Texts beside media: words and media tokens in them, and which of their tokens are learnt."""
import pytest

from lightrft.config.offline_schema import PairDataConfig
from lightrft.config.preference_schema import JudgedDataConfig
from lightrft.config.rm_schema import StepDataConfig
from lightrft.config.schema import DataConfig
from lightrft.config.sft_schema import SFTDataConfig
from lightrft.datasets.judged import JudgedDataset
from lightrft.datasets.media import MediaError
from lightrft.datasets.media_store import open_store
from lightrft.datasets.preferences import PairDataset
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.datasets.sft_dataset import ALL_TURNS, Learning, SFTDataset
from lightrft.datasets.steps import StepDataset
from lightrft.datasets.tests.test_media_prompts import ask, picture, png, prompts, TEMPLATE
from lightrft.models.tokenizer import load_tokenizer
from lightrft.tests.support import field, tiny_vision

pytest.importorskip("torchvision")


@pytest.fixture(name="tokenizer", scope="module")
def fixture_tokenizer(tmp_path_factory):
    tokenizer = load_tokenizer(str(tiny_vision.save_model(tmp_path_factory.mktemp("m"), "qwen2_5_vl", True)))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(name="store")
def fixture_store(tokenizer):
    return open_store(tokenizer.name_or_path, tokenizer, DataConfig())


def test_words_are_text_and_written_media_tokens_are_refused(tokenizer, store):
    """In rows with media and without; a media token that a row writes would take the features of a picture."""
    words = {"prompt": [{"role": "user", "content": "is <image> a tag?"}], "answer": "1"}
    found = prompts([words], tokenizer, store)[0]
    assert "is <image> a tag?" in tokenizer.decode(found.token_ids) and found.media == ()
    rows = [
        ask("<image>?", png(0)),
        ask("<image><|image_pad|>", png(0)),
        {"prompt": [{"role": "user", "content": "a <|video_pad|>"}], "answer": "1"},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a <|image_pad|>"}]}], "answer": "1"},
        ask("<|vision_start|><image><|vision_end|>?", png(0))  # which the template writes too
    ]
    for row, token in zip(rows[1:], ("image_pad", "video_pad", "image_pad", "vision_start")):
        with pytest.raises(MediaError, match=f"row 1: a text holds <.{token}.>, which this model reads as a picture"):
            prompts([row], tokenizer, store)
    left = prompts(rows, tokenizer, store, media_policy="skip")
    assert len(left) == 1 and left.dropped == 4


def test_words_beside_parts_are_text(tokenizer, store):
    """In a question, an answer and a pair of answers, one of which shows a picture."""
    row = field.rows("literal_image_word")[0] | {"images": [png(0)]}
    example = demonstrations([row], tokenizer, store)[0]
    text = tokenizer.decode(example.token_ids)
    assert len(example.media) == 1 and text.count("<|vision_start|>") == 1
    assert "What does the <image> tag mean?" in text and "It embeds a picture: use <image>." in text
    asked, said = row["messages"]
    prompt = prompts([{"prompt": [asked], "images": [png(0)], "answer": "1"}], tokenizer, store)[0]
    assert len(prompt.media) == 1 and "the <image> tag" in prompt.text
    shown = [said | {"content": [{"type": "image"}]}]
    pair = pairs([{"prompt": [asked], "chosen": [said], "rejected": shown, "images": [png(0), png(1)]}],
                 tokenizer, store)[0]  # yapf: disable
    assert [len(side.media) for side in (pair.chosen, pair.rejected)] == [1, 2]


def demonstrations(rows, tokenizer, store, learning=ALL_TURNS, **options):
    cfg = SFTDataConfig(train_data=[hold_rows(rows)], **options).as_data_config()
    return SFTDataset(cfg, tokenizer, 500, media=store, learning=learning)


def pairs(rows, tokenizer, store, **options):
    return PairDataset(PairDataConfig(train_data=[hold_rows(rows)], **options), tokenizer, media=store)


def judged(rows, tokenizer, store, **options):
    return JudgedDataset(JudgedDataConfig(train_data=[hold_rows(rows)], **options), tokenizer, media=store)


def solutions(rows, tokenizer, store, **options):
    form = {"placeholder_token": "#", "reward_tokens": ["+", "-"]}
    return StepDataset(StepDataConfig(train_data=[hold_rows(rows)], **form, **options), tokenizer, media=store)


@pytest.mark.parametrize("read, row", [
    (demonstrations, {"prompt": "a", "response": "b"}),
    (pairs, {"prompt": "a", "chosen": "b", "rejected": "c"}),
    (judged, {"prompt": "a", "completion": "b", "label": True}),
    (solutions, {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}),
    (solutions, {"input": "a#", "label": ["+"]}),
])  # yapf: disable
def test_texts_without_a_chat_hold_no_media_token_either(read, row, tokenizer, store):
    good = [row, row | {next(iter(row)): "other" if "input" not in row else "other#"}]
    for name in (one for one in row if one not in ("label", "labels")):
        value = row[name]
        bad = row | {name: f"<|image_pad|>{value}" if isinstance(value, str) else [value[0], "<|image_pad|>"]}
        with pytest.raises(MediaError, match="row 3: a text holds <.image_pad.>, which this model reads as a picture"):
            read([*good, bad], tokenizer, store)
        assert len(read([*good, bad], tokenizer, store, media_policy="skip")) == 2


def test_demonstrations_learn_the_answer_alone(tokenizer, store):
    rows = [{
        "messages": [{"role": "user", "content": "<image>How <image>?"}, {"role": "assistant", "content": "two"},
                     {"role": "user", "content": "and<image>"}, {"role": "assistant", "content": "six"}], "images":
        [png(0), png(1, (112, 56)), png(2)]
    }, {"messages": [{"role": "user", "content": "plain"}, {"role": "assistant", "content": "yes"}]}]
    cfg = SFTDataConfig(train_data=[hold_rows(rows)]).as_data_config()
    found = SFTDataset(cfg, tokenizer, 500, media=store)
    for example, learnt in ((found[0], ["two<|im_end|>", "six<|im_end|>"]), (found[1], ["yes<|im_end|>"])):
        kept = [token for token, keep in zip(example.token_ids, example.loss_mask) if keep]
        assert tokenizer.decode(kept) == "".join(learnt)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How "}, {"type": "image"},
                                      {"type": "text", "text": "?"}]}, rows[0]["messages"][1],
         {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "image"}]}, rows[0]["messages"][3]],
        tokenize=False)  # yapf: disable
    pictures = [picture(0), picture(1, (112, 56)), picture(2)]
    assert found[0].token_ids == list(store.processor(text=[text], images=pictures)["input_ids"][0])
    assert len(found[0].media) == 3 and found[1].media == ()


def test_media_in_an_answer_are_not_learnt(tokenizer, store):
    """Nor what is around them, also where all tokens of a chat are. Other prompts cannot be answered with them."""
    chat = [{"role": "user", "content": "<image>How?"}, {"role": "assistant", "content": "a <image> two"}]
    rows = [{"messages": chat, "images": [png(0), png(1)]}]
    for learning, learnt in ((ALL_TURNS, "a  two<|im_end|>"),
                             (Learning(whole=True), "user How?<|im_end|>\n<|im_start|>assistant a  two<|im_end|>\n")):
        example = demonstrations(rows, tokenizer, store, learning)[0]
        assert tokenizer.decode([token for token, keep in zip(example.token_ids, example.loss_mask) if keep]) == learnt
    with pytest.raises(DataError, match="row 1: its answer holds media, which a policy of texts cannot write"):
        judged([rows[0] | {"label": True}], tokenizer, store)
