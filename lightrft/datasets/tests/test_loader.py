from collections import Counter

import pytest

from lightrft.datasets.loader import Blend, MixedDataset, PromptLoader, apportion
from lightrft.datasets.rows import DataError


class Mixed(MixedDataset[int]):
    """Row i is the number i."""

    def __init__(self, sizes, probs=()):
        self.sizes, self.probs = list(sizes), list(probs)

    def __len__(self):
        return sum(self.sizes)

    def item(self, index):
        return index


def take(loader, count):
    return [next(loader) for _ in range(count)]


def test_no_row_is_lost_or_repeated_across_episodes():
    loader = PromptLoader(range(10), 4, seed=1)
    assert len(loader) == 2 and loader.steps(2) == 5
    drawn = [row for batch in take(loader, 5) for row in batch]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:] and loader.episode == 2


def test_shuffle_and_seed():
    order = [
        PromptLoader(range(50), 50, shuffle, seed) for shuffle, seed in ((False, 0), (True, 0), (True, 0), (True, 1))
    ]
    plain, first, again, other = (next(loader) for loader in order)
    assert plain == list(range(50)) and first == again and len({tuple(plain), tuple(first), tuple(other)}) == 3


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("probs", [[], [0.7, 0.3]])
def test_resume_gives_the_same_batches(shuffle, probs):
    data = Mixed([13, 6], probs)
    straight = PromptLoader(data, 4, shuffle, seed=3)
    for _ in range(11):
        state = straight.state_dict()
        resumed = PromptLoader(data, 4, shuffle, seed=3)
        resumed.load_state_dict(state)
        assert take(resumed, 6) == take(straight, 6)
        straight.load_state_dict(state)
        next(straight)


def test_resume_with_another_batch_size_goes_on_at_the_same_row():
    loader = PromptLoader(range(20), 4, seed=3)
    rows = [row for batch in take(PromptLoader(range(20), 4, seed=3), 5) for row in batch]
    take(loader, 2)
    other = PromptLoader(range(20), 6, seed=3)
    other.load_state_dict(loader.state_dict())
    assert next(other) == rows[8:14]


def test_resume_keeps_the_order_of_the_checkpoint_and_says_so(capsys):
    loader = PromptLoader(range(20), 4, seed=3)
    other = PromptLoader(range(20), 4, seed=4)
    other.load_state_dict(loader.state_dict())
    assert next(other) == next(loader)
    assert "continues as in the checkpoint: seed 3, shuffle True" in capsys.readouterr().err


@pytest.mark.parametrize("count", [5, 64, 65, 200])
def test_resume_with_other_rows_is_told(count, capsys):
    data, other = list(range(count)), list(range(count))
    PromptLoader(other, 4).load_state_dict(PromptLoader(data, 4).state_dict())
    assert capsys.readouterr().err == ""
    other[0] = -1
    PromptLoader(other, 4).load_state_dict(PromptLoader(data, 4).state_dict())
    assert "has the same number of rows as the checkpoint's, but other rows" in capsys.readouterr().err


def test_resume_with_other_data_is_refused():
    with pytest.raises(DataError, match=r"data sets of \[20\] rows, now they have \[21\]"):
        PromptLoader(range(21), 4).load_state_dict(PromptLoader(range(20), 4).state_dict())


@pytest.mark.parametrize("size, rows, said", [
    (11, 10, "--batch 11: a batch cannot be filled, the data has 10 rows; give at most that, e.g. --batch 10"),
    (128, 60, "--batch 128: .* e.g. --batch 48"),
    (0, 10, "--batch 0: .* nearest valid value: 1"),
    (-3, 10, "--batch -3: .* nearest valid value: 1"),
])
def test_batch_that_cannot_be_filled(size, rows, said):
    with pytest.raises(DataError, match=said):
        PromptLoader(range(rows), size, option="batch")


@pytest.mark.parametrize("shuffle", [True, False])
def test_mixing_probabilities(shuffle):
    blend = Blend([100, 20], [0.5, 0.5], shuffle, seed=0)
    drawn = Counter(int(row) for episode in range(5) for row in blend.episode(episode))
    first, second = [drawn[i] for i in range(100)], [drawn[i] for i in range(100, 120)]
    assert sum(first) == sum(second) == 300
    assert set(first) == {3} and set(second) == {15}
    halves = [sum(row < 100 for row in blend.episode(0)[part]) for part in (slice(0, 60), slice(60, 120))]
    assert all(20 <= half <= 40 for half in halves)


def test_zero_probability_and_empty_source():
    assert all(row < 4 for row in Blend([4, 3], [1.0, 0.0], seed=0).episode(2))
    with pytest.raises(ValueError, match="has no rows"):
        Blend([4, 0], [0.5, 0.5])


def test_apportion():
    assert apportion(10, [1, 1, 1]) == [4, 3, 3] and apportion(7, [0.5, 0.5]) == [4, 3] and apportion(3,
                                                                                                      [5, 0]) == [3, 0]
