"""Every strategy trains the same: policy, critic and reference, adapters, and a run that changes the strategy."""
import json

import pytest

from lightrft.tests.support import runs, strategy_ranks, tiny
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.packages import needs_deepspeed
from lightrft.tests.support.runs import no_picture

no_picture = no_picture  # the module draws no curve
pytestmark = needs_deepspeed


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = runs.write_home(tmp_path_factory.mktemp("home"))
    tiny.save_model(folder / "experts", "mixtral", num_hidden_layers=1, initializer_range=0.5)
    return folder


@pytest.fixture(scope="module")
def lines(home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("strategies")
    torchrun(strategy_ranks.__name__, home, folder)
    return json.loads((folder / "lines.json").read_text(encoding="utf-8"))


def numbers(line):
    """The metrics that do not depend on time or memory."""
    aside = ("time/", "perf/", "rollout/tokens_per_s", "rollout/mismatch", "rollout/canary")
    return {key: value for key, value in line.items() if not key.startswith(aside)}


@pytest.mark.dist
@pytest.mark.parametrize("name", ["zero2", "zero3"])
@pytest.mark.parametrize("kind", list(strategy_ranks.KINDS))
def test_zero_learns_what_fsdp_learns(kind, name, lines):
    ours, theirs = lines[f"{kind} {name}"], lines[f"{kind} fsdp"]
    assert len(ours) == len(theirs) == 3
    for one, other in zip(ours, theirs):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-5, abs=1e-5)
        assert one["rollout/mismatch/abs_logp_mean"] < 1e-5, "the engine did not get the new weights"


@pytest.mark.dist
def test_a_run_goes_on_with_another_strategy(lines):
    straight, resumed = lines["models fsdp"], lines["resumed"]
    assert [line["step"] for line in resumed] == [1, 2, 3]
    assert numbers(resumed[-1]) == pytest.approx(numbers(straight[-1]), rel=1e-5, abs=1e-5)


@pytest.mark.dist
def test_the_balance_of_experts_over_two_ranks_is_that_of_one_process(home, lines, tmp_path):
    alone = runs.run(home, tmp_path, max_steps=2, report=False, **strategy_ranks.options_of("models", home)).lines
    for one, other in zip(alone, lines["models fsdp"]):
        for key in ("policy/aux_loss", "policy/loss", "policy/grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key
