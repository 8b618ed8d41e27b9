"""Rows with media that the model does not take: refused with row, place and remedy, or left out and counted."""
import pytest

from lightrft.config.offline_schema import PairDataConfig
from lightrft.config.preference_schema import JudgedDataConfig
from lightrft.config.schema import DataConfig
from lightrft.config.sft_schema import SFTDataConfig
from lightrft.datasets.judged import JudgedDataset
from lightrft.datasets.media import MediaError
from lightrft.datasets.media_rows import find_row_media, MediaRules
from lightrft.datasets.preferences import PairDataset
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.datasets.sft_dataset import SFTDataset

ANSWER = {"role": "assistant", "content": "2"}
MEDIA = {
    "column": ("1+1?", {"images": [b"x"]}, "the column 'images' holds media of kind image"),
    "another column": ("1+1?", {"audio_path": "a.wav"}, "the column 'audio_path' holds media of kind audio"),
    "part": ([{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "1+1?"}], {},
             "a part of a message holds media of kind video"),
    "address": ([{"type": "image_url", "image_url": {"url": "https://host/a.png"}}], {},
                "a part of a message holds media of kind image"),
}  # yapf: disable


def user(content):
    return {"role": "user", "content": content}


def prompts(rows, tokenizer, **options):
    return PromptsDataset(DataConfig(prompt_data=[hold_rows(rows)], **options), tokenizer, 500)


def demonstrations(rows, tokenizer, **options):
    cfg = SFTDataConfig(train_data=[hold_rows(rows)], **options).as_data_config()
    return SFTDataset(cfg, tokenizer, 500)


def pairs(rows, tokenizer, **options):
    return PairDataset(PairDataConfig(train_data=[hold_rows(rows)], **options), tokenizer)


def judged(rows, tokenizer, **options):
    return JudgedDataset(JudgedDataConfig(train_data=[hold_rows(rows)], **options), tokenizer)


DATA = {
    prompts: lambda content: {"prompt": [user(content)], "answer": "2"},
    demonstrations: lambda content: {"messages": [user(content), ANSWER]},
    pairs: lambda content: {"prompt": [user(content)], "chosen": "2", "rejected": "3"},
    judged: lambda content: {"prompt": [user(content)], "completion": "2", "label": True},
}  # yapf: disable


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("form", MEDIA)
def test_a_text_model_gets_no_row_without_its_media(data, form, tokenizer, capsys):
    content, columns, told = MEDIA[form]
    rows = [DATA[data]("1+1?"), DATA[data]("2+2?"), DATA[data](content) | columns]
    with pytest.raises(MediaError, match=f"row 3: {told}, and this model takes text only. .*--media_policy skip"):
        data(rows, tokenizer)
    left = data(rows, tokenizer, media_policy="skip")
    assert len(left) == 2 and left.dropped == 1 and "1 of 3 rows have media" in capsys.readouterr().err


def test_what_is_no_medium_reaches_a_text_model(tokenizer):
    """Words, empty columns, texts in parts, and contents of tools that a template renders."""
    rows = [{"prompt": [user("is <image> a tag?")], "answer": "1"},
            {"prompt": [user("2+2?")], "images": None, "audio": [], "answer": "1"}]  # yapf: disable
    found = prompts(rows, tokenizer)
    assert len(found) == 2 and "is <image> a tag?" in found[0].text
    for content in ({"sum": 4}, [{"type": "text", "text": "2+2?"}]):
        chat = [{"role": "tool", "content": content}]
        assert find_row_media({}, DataConfig(), chat, MediaRules(), "row 1", ()) == (chat, [])


def test_a_prompt_of_text_has_no_place_for_media(tokenizer):
    rows = [{"prompt": "1+1?", "response": "2", "images": [b"x"]}]
    with pytest.raises(DataError, match="row 1: the column 'images' .* takes text only"):
        demonstrations(rows, tokenizer)
    with pytest.raises(MediaError, match="row 1: the column 'images' .* cannot hold them. Write the row as messages"):
        find_row_media(rows[0], DataConfig(), [], MediaRules(), "row 1")


@pytest.mark.parametrize("takes, row, told", [
    (("image", ), {"videos": [[b"x"]]}, "kind video, and this model takes image only. Choose a model that takes video"),
    (("audio", ), {"images": [b"x"]}, "kind image, and this model takes audio only"),
    (("image", "video"), {"audios": ["a.wav"]}, "kind audio, and this model takes image, video only"),
])  # yapf: disable
def test_kinds_that_a_model_lacks(takes, row, told):
    """None of them is opened: the path and the bytes of these rows could not be."""
    with pytest.raises(MediaError, match=f"row 1: the column .* holds media of {told}"):
        find_row_media(row, DataConfig(), [user("?")], MediaRules(), "row 1", takes)
