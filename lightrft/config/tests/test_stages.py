from typing import Any

import pytest

from lightrft.config.cli import parse_config
from lightrft.config.options import ConfigError
from lightrft.config.schema import Config
from lightrft.config.stages import Stages, check_total, length_problems
from lightrft.config.tree import build


def test_every_step_has_its_length() -> None:
    stages = Stages(["8k:2", "512:1", "16K"])
    assert [stages.length(step) for step in range(5)] == [8192, 8192, 512, 16384, 16384]
    assert (stages.longest, stages.end) == (16384, None)
    told = {step: stages.boundary(step) for step in range(5)}
    assert [step for step, text in told.items() if text] == [0, 2, 3]
    assert "stage 2 of 3" in str(told[2]) and "512 tokens to step 3" in str(told[2]) and "the end" in str(told[3])


def test_a_counted_last_stage_ends_the_run() -> None:
    stages = Stages(["4:2", "8:3"])
    assert stages.end == 5 and [stages.length(step) for step in range(7)] == [4, 4, 8, 8, 8, 8, 8]
    assert stages.boundary(5) is None


def test_without_stages_nothing_changes() -> None:
    stages = Stages([], 77)
    assert {stages.length(step) for step in range(9)} == {77} and stages.end is None
    assert not any(stages.boundary(step) for step in range(9))


@pytest.mark.parametrize("text,item,why", [
    ("8k:200,16q:200,32k", "item 2 of 3, '16q:200'", "does not parse"),
    ("8k,16k", "item 1 of 2, '8k'", "no number of steps"),
    ("0k:5", "item 1 of 1, '0k:5'", "does not parse"),
    ("8k:0,4", "item 1 of 2, '8k:0'", "does not parse"),
    ("8k:2:3", "item 1 of 1", "does not parse"),
    ("1.5k:2", "item 1 of 1", "does not parse"),
])
def test_a_list_that_does_not_parse(text: str, item: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--stages", text], "prog")
    told = capsys.readouterr().err
    assert item in told and why in told and "e.g. 8k:200,16k:200,32k" in told, told
    assert item in next(length_problems(build(Config, {"stages": text.split(",")})))


@pytest.mark.parametrize("argv,length,steps", [
    (["--stages", "8k:200,16k:200,32k"], 32768, 0),
    (["--stages", "8:2", "4:3"], 8, 5),
    (["--stages", "8:2,4", "--max_steps", "9"], 8, 9),
])
def test_what_follows_from_the_list(argv: list[str], length: int, steps: int) -> None:
    parsed = parse_config(argv, defaults={"generate_max_len": 48, "max_steps": 0})
    assert (parsed.config.rollout.generate_max_len, parsed.config.train.max_steps) == (length, steps)
    assert parsed.provenance["generate_max_len"] == "stages" and not list(length_problems(parsed.config))


@pytest.mark.parametrize("argv,parts", [
    (["--generate_max_len", "100"], ["--generate_max_len 100", "nearest valid value: 16"]),
    (["--max_steps", "4"], ["--max_steps 4", "last stage", "begins after 4", "nearest valid value: 5"]),
    (["--stages", "8:4,16:2", "--max_steps", "7"], ["--max_steps 7", "6 steps", "nearest valid value: 6"]),
    (["--overlong_buffer", "--overlong_buffer_len", "8"], ["--overlong_buffer_len 8", "nearest valid value: 7"]),
])
def test_contradictions(argv: list[str], parts: list[str]) -> None:
    stages = [] if "--stages" in argv else ["--stages", "8:4,16"]
    found = list(length_problems(parse_config([*stages, *argv]).config))
    assert len(found) == 1 and all(part in found[0] for part in parts), found


@pytest.mark.parametrize("entries,total,fine", [([], 1, True), (["4:2", "8"], 3, True), (["4:2", "8"], 2, False),
                                                (["4:2", "8:1"], 3, True)])
def test_the_data_must_reach_the_last_stage(entries: list[str], total: int, fine: bool) -> None:
    config = build(Config, {"stages": entries})
    if fine:
        return check_total(config, total)
    with pytest.raises(ConfigError, match="begins after 2 steps, and the data gives 2; raise --num_episodes"):
        check_total(config, total)


def test_the_preset_can_be_in_a_file(tmp_path: Any) -> None:
    (tmp_path / "c.yaml").write_text("rollout: {stages: '8:2,16'}\n")
    assert parse_config(["--config", str(tmp_path / "c.yaml")]).config.rollout.generate_max_len == 16
