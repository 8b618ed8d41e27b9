"""Public pairs of pictures, videos and sounds: tiny files of their layouts become pairs, for both kinds of models."""
import csv
import json
import wave

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lightrft.config.offline_schema import PairDataConfig
from lightrft.config.rm_schema import JudgeDataConfig
from lightrft.datasets.judgements import to_judgement
from lightrft.datasets.media import MediaRules
from lightrft.datasets.media_rows import find_row_media
from lightrft.datasets.pair_sources import load_entry, PAIR_SOURCES, parse_source
from lightrft.datasets.preferences import find_pairs, side_rows
from lightrft.datasets.rows import DataError
from lightrft.utils.errors import UserError
from lightrft.preflight.paths import sources


def files(folder, *names):
    """Files that hold their own names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())


def parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def jsonish(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))
    return path


def hpdv3(home):
    files(home, "images/a.jpg", "images/b.jpg")
    return jsonish(home / "train.json", [{
        "prompt": "a cat", "path1": "images/a.jpg", "path2": "images/b.jpg", "model1": "x", "model2": "y",
        "choice_dist": [12, 7], "confidence": 0.9
    }])


def imagerewarddb(home):
    files(home, *(f"images/train/train_1/{name}.webp" for name in "abcd"))
    rows = [{"prompt_id": prompt, "prompt": f"a {prompt}", "image_path": f"images/train/train_1/{name}.webp",
             "rank": rank} for name, prompt, rank in (("a", "cat", 2), ("b", "cat", 1), ("c", "cat", 2),
                                                      ("d", "dog", 1))]  # yapf: disable
    jsonish(home / "images/train/train_1/train_1.json", rows)
    return home / "images/train"


def omni(kind, columns=("response1_path", "response2_path")):

    def made(home):
        files(home, f"media_data/{kind}/a", f"media_data/{kind}/b")
        rows = [{"prompt": "a cat", **dict(zip(columns, (f"{kind}/a", f"{kind}/b"))), "criteria": "fur",
                 "criteria_preference": choice, "id": str(i)}
                for i, choice in enumerate(("response2", "tie"))]  # yapf: disable
        return parquet(home / "data" / "test.parquet", rows)

    return made


def rapidata(home, **more):
    files(home, "videos/a.mp4", "videos/sora/b.mp4")
    scores = {f"weighted_results{i}_{name}": score for name, both in
              {"Preference": (0.2, 0.8), "Coherence": (0.7, 0.3), "Alignment": (0.5, 0.5)}.items()
              for i, score in zip((1, 2), both)}  # yapf: disable
    rows = [{"prompt": "a cat", "file_name1": "a.mp4", "file_name2": "https://host/x/sora/b.mp4", **scores, **more}]
    return parquet(home / "data" / "train-0.parquet", rows)


def videogen(home):
    files(home, "videos/a.mp4", "videos/b.mp4")
    with (home / "test.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path_A", "path_B", "prompt", "VQ", "Overall"])
        table.writerows([["videos/a.mp4", "videos/b.mp4", "a cat", "A", choice] for choice in ("B", "", "same", "A")])
    return home / "test.csv"


def alpaca(home):
    home.mkdir()
    for name in "ab":
        with wave.open(str(home / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(name.encode() * 800)
    sounds = {side: {"bytes": (home / f"{name}.wav").read_bytes(), "path": None}
              for side, name in zip(("chosen", "rejected"), "ab")}  # yapf: disable
    return parquet(home / "train.parquet", [{"prompt": "a cat", **sounds, "strategy": "x"}])


def with_first_picture(home):
    home.mkdir()
    Image.new("RGB", (28, 28)).save(home / "first.png")
    return rapidata(home, prompt_asset={"bytes": (home / "first.png").read_bytes(), "path": "x.png"})


def imagegen(home):
    """Two judged pairs; the second picture is better in the second one."""
    files(home, "images/a.png", "images/b.png")
    said = "<think>Image 1 is sharp, Image 2 is not; see Image 12.</think>\n<answer>Image {} is better</answer>"
    return jsonish(home / "train.json", [{
        "images": ["images/a.png", "images/b.png"], "conversations": [
            {"from": "human", "value": "<image><image>\nWhich one is a cat"},
            {"from": "gpt", "value": said.format(better)}]} for better in (1, 2)])  # yapf: disable


LAYOUTS = {
    "imagegen-cot-reward-5k": (imagegen, ["ab", "ba"], "images"),
    "hpdv3": (hpdv3, ["ab"], "images"),
    "imagerewarddb": (imagerewarddb, ["ba", "bc"], "images"),
    "omnirewardbench-t2i": (omni("image"), ["ba", "tie"], "images"),
    "omnirewardbench-t2v": (omni("video", ("response1", "response2")), ["ba", "tie"], "videos"),
    "omnirewardbench-t2a": (omni("audio"), ["ba", "tie"], "audios"),
    "rapidata-t2v": (rapidata, ["ba"], "videos"),
    "rapidata-i2v": (with_first_picture, ["ba"], "videos"),
    "videogen-rewardbench": (videogen, ["ba", "tie", "ab"], "videos"),
    "audio-alpaca": (alpaca, ["ab"], "audios"),
}


def test_a_judgement_names_the_candidates_in_the_order_of_the_request(tmp_path):
    """The pictures are drawn in both orders, and the text follows."""
    rows = load_entry(f"imagegen-cot-reward-5k:{imagegen(tmp_path)}")
    cfg = JudgeDataConfig(task_instruction="{prompt}: {first} or {second}?")
    for row, sharp in zip(rows.rows, (True, False)):
        for second in (False, True):
            found = to_judgement(row, cfg, second, "row 1")
            one, other = (2, 1) if second == sharp else (1, 2)
            assert found.text == (f"<think>Response {one} is sharp, Response {other} is not; see Image 12.</think>\n"
                                  f"<answer>Response {1 + second} is better</answer>")
            assert found.request == "Which one is a cat: <image> or <image>?"
    (tmp_path / "train.json").write_text((tmp_path / "train.json").read_text().replace("is better", "wins"))
    with pytest.raises(DataError, match="row 1: imagegen-cot-reward-5k: the judgement ends with .*Image 1 wins"):
        load_entry(f"imagegen-cot-reward-5k:{tmp_path / 'train.json'}")


def named(medium):
    """The name of a file, from its path or from what it holds."""
    if isinstance(medium.source, bytes):
        return chr(medium.source[-1])
    return medium.source.stem


@pytest.mark.parametrize("source", LAYOUTS)
def test_a_layout_is_read_as_pairs(source, tmp_path):
    """Every pair has the better medium first; each side has its own, which is found; judges get both in one request."""
    make, wanted, column = LAYOUTS[source]
    rows = load_entry(f"{source}:{make(tmp_path / 'home')}")
    cfg = PairDataConfig()
    pairs = find_pairs(rows, cfg)
    assert len(pairs) == len(wanted)
    found = ["", ""]
    for side, own in enumerate(side_rows(rows, pairs, cfg)):
        for i, pair in enumerate(pairs.values()):
            chat = [*pair.prompt, *(pair.chosen, pair.rejected)[side]]
            rules = MediaRules().for_rows_of(own.media_home(i))
            messages, media = find_row_media(own.rows[i], cfg.as_data_config(), chat, rules, own.where(i))
            assert messages[-1]["content"] == [{"type": column[:-1]}] and pair.prompt[0]["content"].endswith("a cat")
            assert [medium.kind for medium in media][-1:] == [column[:-1]]
            assert len(media) == 1 + (source == "rapidata-i2v")
            found[side] += named(media[-1])
    ties = [pair.tie for pair in pairs.values()]
    assert ties == [each == "tie" for each in wanted]
    assert [pair for pair, tie in zip(map("".join, zip(*found)), ties) if not tie] == [w for w in wanted if w != "tie"]
    for row in rows.rows:
        both = [to_judgement(row, JudgeDataConfig(), second, "row 1") for second in (False, True)]
        assert both[0].media[column] == both[1].media[column][::-1] == row[column]
        assert both[0].request.count(f"<{column[:-1]}>") == 2 and "a cat" in both[0].request


def test_other_standards_are_heads(tmp_path):
    (row, ) = load_entry(f"rapidata-t2v:{rapidata(tmp_path)}").rows
    assert row["heads"] == {"coherence": "rejected", "alignment": "tie"} and not row["tie"]


def test_rows_that_are_not_of_the_source_are_refused(tmp_path, capsys):
    """The message names the source, the row and the column; rows without a label are counted."""
    rows = [{"prompt": "a", "path1": "b", "path2": "c"}, {"prompt": "a", "path1": "b", "path2": ""}]
    file = jsonish(tmp_path / "some.json", rows)
    with pytest.raises(DataError, match=r"some.json, row 2: hpdv3: the row has no path2 \(it has prompt"):
        load_entry(f"hpdv3:{file}")
    with pytest.raises(DataError, match="imagerewarddb: a row has no prompt_id"):
        load_entry(f"imagerewarddb:{file}")
    (tmp_path / "x.csv").write_text("prompt,path_A,path_B,Overall\na,b,c,C\n")
    with pytest.raises(DataError, match="row 1: videogen-rewardbench: Overall is 'C'"):
        load_entry(f"videogen-rewardbench:{tmp_path / 'x.csv'}")
    (tmp_path / "x.csv").write_text("prompt,path_A,path_B,Overall\na,b,c,\n")
    with pytest.raises(DataError, match="none of 1 rows says which candidate is better"):
        load_entry(f"videogen-rewardbench:{tmp_path / 'x.csv'}")
    load_entry(f"videogen-rewardbench:{videogen(tmp_path)}")
    assert "1 of 4 rows do not say which one is better" in capsys.readouterr().err


def test_entries_and_sources(tmp_path, monkeypatch):
    """An unknown source lists the known ones, also before a run; other entries stay what they are."""
    with pytest.raises(UserError, match=r"unknown source of rows 'hpdv2' .did you mean hpdv3.*: audio-alpaca, hpdv3"):
        parse_source("hpdv2:some.json")
    assert parse_source("hpdv3:some.json") == ("hpdv3", "some.json")
    with pytest.raises(UserError, match=r"'bare': what is registered takes row; register a function without arguments"):
        monkeypatch.setattr(PAIR_SOURCES, "_entries", {"bare": lambda row: row})
        load_entry("bare:some.json")
    monkeypatch.undo()
    (tmp_path / "a:b").write_text("")
    for entry in ("some.json", "owner/name@folder", "memory:0123", "s3://a/b", str(tmp_path / "a:b")):
        assert parse_source(entry) == ("", entry)
    assert set(LAYOUTS) == set(PAIR_SOURCES)
    problems = [*sources("train_data", ["hpdv2:x.json", f"hpdv3:{tmp_path}/none.json", f"hpdv3:{tmp_path}/a:b"])]
    assert len(problems) == 2 and "unknown source" in problems[0] and "no such file or folder" in problems[1]
