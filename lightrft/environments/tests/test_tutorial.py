"""The tutorial of docs/environments.md, as a new user follows it, with a tiny model in place of a large one."""
import re
import shlex
from pathlib import Path

import pytest

from lightrft.cli import train
from lightrft.tests.support import runs, tool_models
from lightrft.tests.support.launch import flags

no_picture = runs.no_picture
PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="installed without its repository")
TINY = {"max_steps": 2, "rollout_batch_size": 1, "n_samples_per_prompt": 2, "train_batch_size": 2, "engine_kv_mib": 1,
        "prompt_max_len": 128, "generate_max_len": 256, "save_path": "run", "disable_ckpt": True}  # yapf: disable


def blocks(language):
    return re.findall(f"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(name="home", autouse=True)
def fixture_home(tmp_path, monkeypatch):
    """A folder with MODEL, which draws a right number at times, and a call of the tool."""
    pytest.importorskip("renderers", reason="needs Python 3.11")
    monkeypatch.chdir(tmp_path)
    call = ["<tool_call>", '{"name": "add", "arguments": {"a": 1, "b": 2}}', "</tool_call>"]
    tool_models.save_chain("MODEL", [call, *([str(number)] for number in range(1, 16))])
    return tmp_path


def test_a_game_in_fifteen_lines(home, capsys):
    """The dry run plays an episode, and the training has its rewards."""
    game, row = blocks("python")[0], blocks("json")[0]
    (home / "guess.py").write_text(game, encoding="utf-8")
    (home / "guess.jsonl").write_text(row, encoding="utf-8")
    (commands, ) = [block for block in blocks("bash") if "guess.py" in block]
    for command in commands.splitlines():
        _, _, *words = shlex.split(command)
        try:
            train.main([*words, *flags(TINY)])
        except SystemExit as end:
            assert not end.code
        said = capsys.readouterr()
        assert "no row has a reference answer" not in said.err and "unscored" not in said.err, said.err
        if "--dry_run" in words:
            assert re.search(r"environment: a turn .* is answered with '(Higher|Lower)\.'", said.out)
            assert re.search(r"rewards: .*: environment 0 x 1; total 0\n", said.out), "the reward of the turns above"
    lines = runs.read_lines(home / "run" / "metrics.jsonl")
    assert len(lines) == 2 and all(1 <= line["env/turns/mean"] <= 4 and line["env/exception"] == 0 for line in lines)


def test_a_user_that_is_a_model(home, capsys):
    """The dry run plays an episode with it."""
    (user, ) = [block for block in blocks("python") if "USER" in block]
    (home / "user.py").write_text(user, encoding="utf-8")
    (home / "rows.jsonl").write_text(blocks("json")[0], encoding="utf-8")
    (home / "USER").symlink_to(home / "MODEL")
    words = ["--pretrain", "MODEL", "--prompt_data", "rows.jsonl", "--environment", "user.py", "--reward",
             "environment", "--max_turns", "2", "--env_workers", "1", "--dry_run"]  # yapf: disable
    with pytest.raises(SystemExit) as end:
        train.main([*words, *flags(TINY)])
    said = capsys.readouterr()
    assert not end.value.code, said.err
    assert "environment: begins with 'Good evening.'" in said.out
    assert re.search("a turn '' is answered with '.+', reward so far 0\n", said.out), said.out


def test_tools_from_python(monkeypatch, capsys):
    (program, ) = [block for block in blocks("python") if "GRPO" in block]
    exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
    table = capsys.readouterr().out
    assert "env/calls/mean" in table and len(re.findall(r"^[01] +[12]\b", table, re.MULTILINE)) == 2, table
