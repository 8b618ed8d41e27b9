"""Rows of verl, LightRFT, TRL and ms-swift become messages with parts, and their media in order."""
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lightrft.config.prompt_schema import MediaConfig
from lightrft.config.schema import DataConfig
from lightrft.datasets.media import MediaError, MediaRules
from lightrft.datasets.media_rows import find_media, find_row_media, part_media
from lightrft.datasets.prompt_rows import to_prompts
from lightrft.datasets.rows import DataError, load_rows, Rows
from lightrft.datasets.waveform import write_wav

IMAGE, VIDEO, AUDIO = ({"type": kind} for kind in ("image", "video", "audio"))


def png(colour):
    file = io.BytesIO()
    Image.new("RGB", (2, 2), colour).save(file, "PNG")
    return file.getvalue()


RED, BLUE, TONE = png("red"), png("blue"), write_wav(np.full(9, 0.5, np.float32), 16_000)


def text(value):
    return {"type": "text", "text": value}


def user(*content):
    return {"role": "user", "content": list(content)}


def find(row, rules=MediaRules(), **options):
    """Contents of the turns after the system turn, and the sources of the media."""
    messages, media = find_row_media(row, MediaConfig(**options), row["prompt"], rules, "rows.jsonl, row 3")
    return messages, [medium.source for medium in media]


def ask(content, **columns):
    return {"prompt": [{"role": "user", "content": content}], **columns}


# -- words that look like placeholders --------------------------------------------------------------------------------
def test_placeholders_of_kinds_without_a_column_are_words():
    row = ask("Is <image> a tag, and <video>?")
    assert find(row) == (row["prompt"], [])
    messages, media = find(ask("<image> of <video>", images=[RED]))
    assert messages == [user(IMAGE, text(" of <video>"))] and media == [RED]
    for empty in (None, []):
        with pytest.raises(MediaError, match="0 images for 1 placeholders"):
            find(ask("Is <image> a tag?", images=empty))


def test_placeholders_beside_parts_are_words():
    """Of the kind of the parts in every turn, and of other kinds whose column is empty, as tables write it."""
    words = "<image> and <video>"
    row = ask([IMAGE, text(words)], images=[RED], videos=None)
    row["prompt"] = [{"role": "system", "content": words}, *row["prompt"], {"role": "assistant", "content": words}]
    messages, media = find(row)
    assert [messages[0]["content"], messages[2]["content"]] == [words, words] and media == [RED]
    assert messages[1] == user(IMAGE, text(words))
    messages, media = find(ask([IMAGE, text("of <audio>, not <image>")], images=[RED], audios=[TONE]))
    assert messages == [user(IMAGE, text("of "), AUDIO, text(", not <image>"))] and media == [RED, TONE]
    with pytest.raises(MediaError, match="1 images for 0 placeholders"):
        find(ask([{"type": "image", "image": BLUE}, text("<image>")], images=[RED]))


def test_words_beside_parts_part_no_column():
    contents = [[[IMAGE, text("<image>?")]], ["a <image>"], [[IMAGE]]]
    assert part_media({"images": [RED, BLUE]}, MediaConfig(), contents) == {"images": [[RED], [], [BLUE]]}
    assert part_media({"images": [RED, BLUE]}, MediaConfig(), [["<image>"], ["<image>"]]) == {"images": [[RED], [BLUE]]}


def test_placeholders_of_media_in_a_column_of_an_unknown_name(capsys):
    """The run does not fail, because they may be words; it says which column to name."""
    chats = [ask("<image>Q")["prompt"], ask([{"type": "image", "image": RED}])["prompt"], ask("Q")["prompt"]]
    rows = Rows([{"prompt": chat, "picture": RED} for chat in chats], [("memory:1", i) for i in (1, 2, 3)])
    find_media(rows, chats, MediaConfig())
    printed = capsys.readouterr().err
    assert "memory:1, row 1: <image> in 1 of 3 rows is read as plain words, because the row has no column" in printed
    assert "column images or image (it has prompt, picture)" in printed and "with --images_key" in printed
    find_media(rows, chats, MediaConfig(images_key="picture"))
    find_media(rows.pick([0, 2]), chats[::2], MediaConfig(), takes=())
    assert capsys.readouterr().err == ""


# -- rows that are known ----------------------------------------------------------------------------------------------
def test_verl_placeholders_in_several_turns_and_a_system_prompt():
    row = {
        "prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "<image>\nWhat?"},
                   {"role": "assistant", "content": "Red."}, {"role": "user", "content": "And <image>or<image>?"}],
        "images": [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": "x.png"}, {"bytes": RED, "path": None}]
    }
    messages, media = find(row)
    assert messages == [
        row["prompt"][0],
        user(IMAGE, text("\nWhat?")), row["prompt"][2],
        user(text("And "), IMAGE, text("or"), IMAGE, text("?"))
    ]
    assert media == [RED, BLUE, RED]
    assert row["prompt"][1]["content"] == "<image>\nWhat?", "the row stays as it is"


def test_media_without_placeholders_come_first_in_the_first_user_turn():
    row = {
        "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"},
                   {"role": "assistant", "content": "A"}, {"role": "user", "content": "R"}], "audios": [TONE], "images":
        [RED, BLUE]
    }
    messages, media = find(row)
    assert messages[1] == user(IMAGE, IMAGE, AUDIO, text("Q")) and messages[3]["content"] == "R"
    assert media == [RED, BLUE, TONE]


def test_trl_content_lists_and_a_single_picture():
    messages, media = find(ask([{"type": "image"}, {"type": "text", "text": "Q"}], image=RED))
    assert messages == [user(IMAGE, text("Q"))] and media == [RED]
    picture = Image.new("RGB", (2, 2), "red")
    assert find(ask("Q", image=picture))[0] == [user(IMAGE, text("Q"))]


def test_parts_of_parquet_hold_every_key():
    content = [{"type": "image", "text": None, "image": None}, {"type": "text", "text": "Q", "image": None},
               {"type": "image", "text": None, "image": {"bytes": BLUE, "path": None}}]
    messages, media = find(ask(content, images=[RED], videos=None, audios=[]))
    assert messages == [user(IMAGE, text("Q"), IMAGE)] and media == [RED, BLUE]


@pytest.mark.parametrize("part", [
    {"type": "image", "image": RED}, {"type": "image", "bytes": RED}, {"image": RED},
    {"type": "image_url", "image_url": {"url": "red.png"}}, {"type": "image", "url": "red.png"},
    {"type": "image", "path": "red.png"}, {"type": "image_url", "image_url": "red.png"},
    {"type": "input_image", "image_url": "red.png"},
])  # yapf: disable
def test_media_inside_of_parts(part, tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    messages, media = find(ask([part, "Q"]), MediaRules(root=tmp_path))
    assert messages == [user(IMAGE, text("Q"))] and media in ([RED], [tmp_path / "red.png"])


def test_lightrft_sounds_that_the_column_repeats(tmp_path):
    (tmp_path / "a.wav").write_bytes(TONE)
    (tmp_path / "b.wav").write_bytes(TONE[:-4])
    content = [{"type": "audio", "audio_url": "a.wav"}, {"type": "text", "text": "Q"}]
    rules = MediaRules(root=tmp_path)
    messages, media = find(ask(content, audio_path="a.wav"), rules)
    assert messages == [user(AUDIO, text("Q"))] and media == [tmp_path / "a.wav"]
    with pytest.raises(MediaError, match="1 audios for 0 placeholders"):
        find(ask(content, audio_path="b.wav"), rules)


def test_folders_of_lightrfts_recipe_for_sounds(tmp_path):
    """As its two scripts write them: parts of one schema, the sound again in two columns, and a report of what was left
    out, which is no file of rows."""
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "0.wav").write_bytes(TONE)
    for path in (str(tmp_path / "all" / "0.wav"), "0.wav"):
        parts = [{"type": "audio", "audio_url": path}, {"type": "text", "text": "Which? Answer in <answer> </answer>."}]
        row = ask(
            parts, data_source="r1-aqa-avqa", reference="a", label="avqa_rule", audio_path=path,
            reward_model={"ground_truth": "a"}, extra_info={
                "label": "avqa_rule", "reference": "a", "index": 0, "solution": " <answer>a</answer> ", "multi_choice":
                ["a", "b"], "answer_idx": 0, "audio_path": path
            })
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
        (tmp_path / "train.dropped.jsonl").write_text('{"index": 1, "audio_path": "gone.wav"}\n')
        rows, rules = load_rows(str(tmp_path), "train"), MediaRules(root=tmp_path / "all")
        (record, ) = to_prompts(rows, DataConfig(input_key="prompt", label_key="label", reference_key="reference"))
        assert (record.reference, record.label, record.data_source) == ("a", "avqa_rule", "r1-aqa-avqa")
        messages, media = find(rows.rows[0], rules, images_key="audio_path")
        assert messages == [user(AUDIO, text("Which? Answer in <answer> </answer>."))]
        assert media == [tmp_path / "all" / "0.wav"]


def test_swift_rows_of_all_kinds():
    row = ask("<audio><video> and <image>?", images=[RED], videos=[[RED, BLUE]], audios=[TONE])
    messages, media = find(row)
    assert messages == [user(AUDIO, VIDEO, text(" and "), IMAGE, text("?"))]
    assert media[0] == TONE and media[2] == RED and [frame.source for frame in media[1]] == [RED, BLUE]


def test_a_list_that_went_through_pandas_is_a_list():
    several = np.empty(2, object)
    several[:] = [RED, BLUE]
    assert find(ask("<image> or <image>?", images=several)) == find(ask("<image> or <image>?", images=[RED, BLUE]))
    assert find(ask("Q", images=several[:0]))[1] == []


def test_text_rows_are_unchanged():
    for row in (ask("Q"), ask([{"type": "text", "text": "Q"}], images=None, audios=[]), ask("a <b> image"),
                {"prompt": [{"role": "assistant", "content": None, "tool_calls": []}]}):
        messages, media = find(row)
        assert messages is row["prompt"] and media == []


def test_other_keys_of_a_turn_stay():
    row = {
        "prompt": [{"role": "user", "content": "Q", "name": "x"}, {"role": "assistant", "content": None}], "image": RED
    }
    assert find(row)[0] == [{**user(IMAGE, text("Q")), "name": "x"}, {"role": "assistant", "content": None}]


# -- refused ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row, message", [
    (ask([{"type": "image"}, "Q"]), "0 images for 1 placeholders"),
    (ask("<image> Q", images=[]), "0 images for 1 placeholders"),
    (ask("<image><image> Q", images=[RED]), "1 images for 2 placeholders"),
    (ask("<image> Q", images=[RED, BLUE]), "2 images for 1 placeholders.*puts them first$"),
    (ask("<video> Q", videos=[RED, BLUE]), "2 videos for 1 placeholders.*frames of one video are a list in the list"),
    (ask("<video> Q", images=[RED], videos=None), "0 videos for 1 placeholders"),
    (ask([{"type": "image"}, "<image>"], images=[RED, BLUE]), "2 images for 1 placeholders"),
    (ask([{"type": "image", "image": BLUE}], images=[RED]), "1 images for 0 placeholders"),
    (ask("<image>", images=[None]), "image None: it is empty"),
    (ask("<image>", images=[[RED]]), "image list: list is not a known form"),
    (ask("<image>", images=[b"x", 7]), "2 images for 1 placeholders"),
    (ask([{"type": "img", "img": RED}]), "which is no text, image, video, audio"),
    (ask([{"type": "text", "text": 7}], image=RED), "which is no text"),
    (ask([["Q"]], image=RED), "a message holds list"),
    (ask([{"type": ["image"]}]), "object of type, which is no text"),
    (ask(7, image=RED), "a message holds 7"),
    (ask("<image>Find <ref-object>: <bbox>", images=[RED], objects={"ref": ["cat"], "bbox": [[1, 2, 3, 4]]}),
     "<ref-object> in a text .* the column 'objects', which is not read.* Write them in the text"),
])  # yapf: disable
def test_rows_that_do_not_fit(row, message):
    with pytest.raises(MediaError, match=f"^rows.jsonl, row 3: .*{message}"):
        find(row)


# -- options ----------------------------------------------------------------------------------------------------------
def test_the_named_columns_come_before_the_known_ones():
    row = ask("Q", pics=[RED], clips=[[RED]], noise=[TONE], images=[BLUE])
    assert find(row)[1] == [BLUE]
    assert find(row, images_key="pics")[1] == [RED]
    assert find(row, videos_key="clips")[0] == [user(IMAGE, VIDEO, text("Q"))]
    assert find(row, audios_key="noise")[0] == [user(IMAGE, AUDIO, text("Q"))]


def test_two_columns_of_one_kind():
    """The same media are read once; of different ones an option names those to read."""
    assert find(ask("Q", images=[RED], image=RED))[1] == [RED]
    row = ask("Q", images=[RED], image=BLUE, audio=TONE, audio_path="gone.wav")
    with pytest.raises(MediaError, match="'images' and 'image' hold different images. .*--images_key, or remove"):
        find(row)
    with pytest.raises(MediaError, match="'audio' and 'audio_path' hold different audios. .*--audios_key"):
        find(row, images_key="image")
    assert find(row, images_key="image", audios_key="audio")[1] == [BLUE, TONE]


def test_an_option_that_names_a_column_of_another_kind(capsys):
    """LightRFT's recipe for sounds names their column with --images_key. They are read as sounds, with a notice."""
    lightrft = {"images_key": "audio_path"}
    assert find(ask("Q", audio_path=TONE), **lightrft) == ([user(AUDIO, text("Q"))], [TONE])
    other = write_wav(np.full(9, 0.25, np.float32), 16_000)
    row = ask("Q", audio=other, audio_path=TONE, images=[RED])
    assert find(row, **lightrft)[1] == [RED, TONE], "as if --audios_key had named it"
    assert find(row, **lightrft, audios_key="audio")[1] == [RED, other]
    find_media(Rows([row], [("memory:1", 1)]), [row["prompt"]], MediaConfig(**lightrft))
    told = "--images_key audio_path: the column 'audio_path' holds media of kind audio, and is read as --audios_key"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("kind, values", [("image", [RED, BLUE]), ("video", [[RED], [BLUE]]), ("audio", [TONE, TONE])])
def test_the_most_media_of_a_row(kind, values):
    row = ask("Q", **{f"{kind}s": values})
    for limit in (-1, 0, 2):
        assert len(find(row, **{f"limit_mm_{kind}_per_prompt": limit})[1]) == 2
    with pytest.raises(MediaError, match=f"2 {kind}s are more than --limit_mm_{kind}_per_prompt 1"):
        find(row, **{f"limit_mm_{kind}_per_prompt": 1})


def test_the_rules_are_the_options(tmp_path):
    rules = MediaRules.of(
        MediaConfig(media_root=str(tmp_path), media_urls=True, media_policy="skip", fps=3.0, media_timeout_s=7.0))
    assert (rules.root, rules.urls, rules.policy, rules.fps, rules.decode_timeout_s) == (tmp_path, True, "skip", 3.0,
                                                                                         7.0)
    with pytest.raises(DataError, match="--media_root .*none: no such folder"):
        MediaRules.of(MediaConfig(media_root=str(tmp_path / "none")))


@pytest.fixture
def data(tmp_path):
    """A data file of four rows: a picture beside it, two that cannot be used, and text."""
    (tmp_path / "red.png").write_bytes(RED)
    prompts = [[{"role": "user", "content": "Q"}]] * 4
    images = [["red.png"], ["gone.png"], ["red.png", "../red.png"], None]
    pq.write_table(pa.table({"prompt": prompts, "images": images}), tmp_path / "rows.parquet")
    return load_rows(str(tmp_path / "rows.parquet"))


def test_a_row_that_cannot_be_used_stops_the_run_or_is_left_out(data, tmp_path, capsys):
    chats = [row["prompt"] for row in data.rows]
    with pytest.raises(MediaError, match="rows.parquet, row 2: image 'gone.png': no such file"):
        find_media(data, chats, MediaConfig())
    found = find_media(data, chats, MediaConfig(media_policy="skip"))
    assert found[0][1][0].source == tmp_path / "red.png" and found[1:3] == [None, None]
    assert found[3] == (chats[3], [])
    told = capsys.readouterr().err
    assert "2 of 4 rows have media that cannot be used (the first: " in told and "row 2: image 'gone.png'" in told
    with pytest.raises(DataError, match="2 of 2 rows .* nothing is left"):
        find_media(data.pick([1, 2]), chats[1:3], MediaConfig(media_policy="skip"))


def test_paths_start_at_the_media_root(data, tmp_path):
    (tmp_path / "media").mkdir()
    chats = [data.rows[0]["prompt"]]
    with pytest.raises(MediaError, match="no such file in .*media"):
        find_media(data.pick([0]), chats, MediaConfig(media_root=str(tmp_path / "media")))
    held = Rows(data.rows[:1], [("memory:1", 1)])
    with pytest.raises(MediaError, match="from no file"):
        find_media(held, chats, MediaConfig())
    assert find_media(held, chats, MediaConfig(media_root=str(tmp_path)))[0][1]
