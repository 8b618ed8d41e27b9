"""Nothing of an earlier run is lost."""
from lightrft.strategy.checkpoint_folders import back_up
from lightrft.utils.sinks import backup_path


def test_files_and_folders_move_to_the_first_free_name(tmp_path, capsys):
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(str(number))
        assert backup_path(tmp_path / "metrics.jsonl") == tmp_path / f"metrics.{number}.jsonl"
        (tmp_path / "rollouts").mkdir()
        (tmp_path / "rollouts" / "x").write_text(str(number))
        assert backup_path(tmp_path / "rollouts") == tmp_path / f"rollouts.{number}"
    assert (tmp_path / "metrics.1.jsonl").read_text() == "1" and (tmp_path / "rollouts.2" / "x").read_text() == "2"
    assert backup_path(tmp_path / "metrics.jsonl") is None
    (tmp_path / "metrics.jsonl").touch()  # of a run that ended before its first step
    assert backup_path(tmp_path / "metrics.jsonl") is None
    said = capsys.readouterr().err
    assert f"{tmp_path / 'metrics.jsonl'} is of an earlier run and was renamed to metrics.2.jsonl" in said
    assert said.count("earlier run") == 4


def test_checkpoints_that_move_are_said_once(tmp_path, caplog, capsys):
    (tmp_path / "checkpoints" / "step_000005").mkdir(parents=True)
    assert back_up(tmp_path / "checkpoints") == tmp_path / "checkpoints.1"
    said = caplog.text + capsys.readouterr().err
    assert "were moved to" in said and "earlier run" not in said
