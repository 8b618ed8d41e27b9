"""``--train_data_probs``: the trainers on fixed data mix their sources as the RL trainer does."""
import json

import pytest

from lightrft.cli.offline import OFFLINE
from lightrft.config.cli import parse_config
from lightrft.config.options import ConfigError
from lightrft.datasets.loader import Blend
from lightrft.preflight.validate import validate
from lightrft.tests.support import preference_runs as runs

home = runs.home
ROWS = {name: runs.EVERY[name] for name in OFFLINE if name in runs.EVERY} | {"rm": ("pairs", {})}
MIX = {"train_data_probs": [0.75, 0.25]}


def trainer_of(name, home, save, **options):
    """A trainer on the rows of its command and on four of them again."""
    data, own = ROWS[name]
    whole, part = home / f"{data}.jsonl", home / f"few_{data}.jsonl"
    part.write_text("".join(line + "\n" for line in whole.read_text().splitlines()[-4:]))
    own = {option: value.replace("{home}", str(home)) if isinstance(value, str) else value
           for option, value in own.items() if option != "pretrain"}  # yapf: disable
    command = OFFLINE[name]
    sources = {"train_data": [str(part), str(whole)]}
    return runs.trainer_of(command.trainer_class(), command.tree, home, save, data, **sources | own | MIX | options)


@pytest.mark.parametrize("name", OFFLINE)
def test_every_trainer_draws_the_shares_of_its_sources(name, home, tmp_path):
    """Three quarters of the rows are of the source of four rows, which start over."""
    loader = trainer_of(name, home, tmp_path, seed=5).loader
    rows = loader.blend.rows
    assert loader.blend.sizes[0] == 4 and rows > 20
    drawn = [loader._row(number) for number in range(rows)]
    assert sum(row < 4 for row in drawn) == pytest.approx(0.75 * rows, abs=1)
    assert drawn == Blend([4, rows - 4], MIX["train_data_probs"], True, 5).episode(0).tolist()


def test_ties_that_are_left_out_change_no_other_source(home, tmp_path):
    tied = [row | {"chosen": row["rejected"]} if i == 1 else row for i, row in enumerate(runs.PAIRS[:3])]
    (home / "tied.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tied))
    sources = [str(home / "tied.jsonl"), str(home / "pairs.jsonl")]
    loader = trainer_of("dpo", home, tmp_path, train_data=sources, pair_policy="skip").loader
    assert loader.blend.sizes == [2, 20] and len(loader.dataset) == 22


@pytest.mark.parametrize("name", OFFLINE)
@pytest.mark.parametrize("probs,said", [
    ("0.5,0.2,0.3", "3 values for 2 --train_data entries; give 2"),
    ("0.5,0.7", r"must add up to 1, not 1.2; nearest valid value: 0.416667,0.583333"),
    ("1.5,-0.5", r"--train_data_probs .*-0.5.* \(0, 1\]"),
    ("1.0", "1 values for 2 --train_data entries; give 2"),
])
def test_probabilities_that_mix_nothing_are_refused(name, probs, said):
    words = f"--pretrain org/m --dataset org/a,org/b --dataset_probs {probs}".split()
    with pytest.raises(ConfigError, match=said):
        validate(parse_config(words, tree=OFFLINE[name].tree).config, 1)
