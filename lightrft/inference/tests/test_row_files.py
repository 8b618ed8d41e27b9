"""Files of a run in progress: what a killed process has left, and rows of another run."""
import pytest

from lightrft.config.schema import StrategyConfig
from lightrft.inference.row_files import RowFiles, write_rows
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support.runs import read_lines
from lightrft.utils.errors import UserError


@pytest.fixture(name="opened")
def fixture_opened(tmp_path):
    """Open files in a folder, as one of several runs does."""
    strategy = get_strategy(StrategyConfig(strategy="single"))
    return lambda rank=0, **identity: _as_rank(rank, strategy, tmp_path / "parts", identity)


def _as_rank(rank, strategy, folder, identity):
    strategy.rank = rank
    try:
        return RowFiles(folder, identity, strategy)
    finally:
        strategy.rank = 0


def test_a_line_that_was_cut_is_written_again(opened, tmp_path):
    files = opened(a=1)
    files.add(3, [{"x": 1}])
    files.add(1, [{"x": 2}, {"x": 3}])
    files.close()
    path = tmp_path / "parts" / "rank_00000.jsonl"
    path.write_bytes(path.read_bytes() + b'{"number": 0, "rows": [{"x"')  # kill -9 while it was written
    files = opened(a=1)
    assert files.done == {1, 3}
    files.add(0, [{"x": 0}])
    files.close()
    assert files.rows() == [{"x": 0}, {"x": 2}, {"x": 3}, {"x": 1}], "in the order of the groups"
    write_rows(tmp_path / "out.jsonl", files.rows())
    files.finish()
    assert len(read_lines(tmp_path / "out.jsonl")) == 4 and not (tmp_path / "parts").exists()


def test_rows_of_another_run_are_refused(opened, tmp_path):
    opened(**{"--temperature": 2.0}).close()  # it has no rows
    files = opened(**{"--temperature": 1.0, "the data": "3 rows"})
    files.add(0, [{"x": 1}])
    files.close()
    with pytest.raises(UserError, match="--temperature 0.5 .was 1.*Finish it with those, or remove the folder"):
        opened(**{"--temperature": 0.5, "the data": "3 rows"})
    (tmp_path / "parts" / "identity.json").write_text('{"--temp', encoding="utf-8")
    with pytest.raises(UserError, match="identity.json: is damaged .*Remove the folder"):
        opened(**{"--temperature": 1.0, "the data": "3 rows"})


def test_a_folder_without_an_identity_does_not_count(opened, tmp_path):
    """It is what is left of a run whose output is complete."""
    files = opened(a=1)
    files.add(0, [{"x": 1}])
    files.close()
    (tmp_path / "parts" / "identity.json").unlink()
    files = opened(a=2)
    assert not files.done and files.rows() == []
    files.close()
