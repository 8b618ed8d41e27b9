"""A run whose response length changes on the way."""
import pytest

from lightrft.tests.support import runs

no_picture = runs.no_picture
STAGED = {
    "stages": ["4:2", "9:1", "12"],
    "generate_max_len": 12,
    "max_steps": 4,
    "stop": [],
    "advantage_estimator": "reinforce",
    "loss_agg_mode": "seq-mean-token-sum-norm",
    "overlong_buffer": True,
    "lr_scheduler": "linear",
    "async_save": False,
}


@pytest.fixture(name="done", scope="module")
def done_fixture(home, tmp_path_factory):
    return runs.run(home, tmp_path_factory.mktemp("staged"), **STAGED)


def test_lengths_penalty_and_constant_follow_the_stage(done):
    lines = done.lines
    assert [line["rollout/generate_max_len"] for line in lines] == [4, 4, 9, 12]
    assert [line["rollout/response_len/max"] for line in lines] == [4, 4, 9, 12]
    for line in lines:  # a response at the limit has the whole penalty, whatever the limit is
        assert line["reward/overlong_penalty"] <= -line["rollout/truncated_frac"] < -0.5
    assert done.trainer.update.norm == done.trainer.update.policy_loss.norm == 12
    rates = [line["policy/lr"] for line in lines]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3]), "one schedule over all stages"


def test_the_constant_divides_the_gradient(done, home, tmp_path):
    """The first step of a staged run is that of a run of the stage's length, not of the longest."""
    one = STAGED | {"max_steps": 1, "stages": [], "generate_max_len": 4}
    short = runs.run(home, tmp_path / "short", **one)
    wrong = runs.run(home, tmp_path / "wrong", **(one | {"loss_agg_norm": 12}))
    assert done.lines[0]["policy/grad_norm"] == pytest.approx(short.metrics["policy/grad_norm"], rel=1e-6)
    assert wrong.metrics["policy/grad_norm"] == pytest.approx(short.metrics["policy/grad_norm"] / 3, rel=1e-4)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resuming_inside_and_between_stages(stop, done, home, tmp_path):
    options = STAGED | {"disable_ckpt": False, "save_steps": 1}
    trainer = runs.build(home, tmp_path / "cut", **options)
    trainer.strategy.any_rank = lambda value: trainer.step == stop or value
    trainer.fit()
    resumed = runs.run(home, tmp_path / "cut", **options, load_checkpoint=True)
    assert [line["rollout/generate_max_len"] for line in resumed.lines] == [4, 4, 9, 12]
    for name, value in done.weights.items():
        assert (resumed.weights[name] == value).all(), name
