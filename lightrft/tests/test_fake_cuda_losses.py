"""Every loss on the fake CUDA device: it never makes the host wait, and no micro-batch of a preference trainer does."""
import json

import pytest

from lightrft.algorithms import CORRECTIONS, POLICY_LOSSES
from lightrft.config.schema import AlgorithmConfig
from lightrft.config.tree import extended
from lightrft.models.loss import PolicyLoss
from lightrft.ops import preference
from lightrft.ops.aggregate import Denominators, MODES
from lightrft.ops.tests.test_preference import drawn, OPTIONS
from lightrft.tests.support import preference_runs, runs
from lightrft.tests.support.fake_cuda import fake_cuda, SYNC
from lightrft.tests.support.fake_cuda.ledger import marginal
from lightrft.tests.support.ragged import FIXED, ours, rollout
from lightrft.tests.test_fake_cuda_offline import CASES

no_picture = runs.no_picture
VARIANTS = [{"policy_loss": name} for name in ours(POLICY_LOSSES)]
VARIANTS += [{"rollout_correction": name, "correction_veto": 0.1} for name in ours(CORRECTIONS)]
VARIANTS += [{"loss_agg_mode": mode, "entropy_token_mean": True} for mode in MODES]
VARIANTS += [{"policy_loss": "ppo", "dual_clip": 3.0}, {"policy_loss": "cispo", "cispo_absolute": True},
             {"policy_loss": "dppo_kl", "dppo_ratio_max": 3.0}]  # yapf: disable


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_no_policy_loss_makes_the_host_wait(options):
    """Forward and backward, with a KL in the loss and an entropy bonus."""
    exp, new, entropy = rollout(FIXED, 1)
    exp.selected = exp.loss_mask
    denominators = Denominators(exp.loss_mask.sum().item(), exp.num_seqs, 8.0)
    loss_of = PolicyLoss(extended(AlgorithmConfig)(use_kl_loss=True, entropy_coef=0.1, **options), 8.0)
    with fake_cuda() as ledger:
        given = [each.to("cuda") for each in (new, entropy, exp)]
        ledger.counts.clear()
        given[0].requires_grad_()
        loss_of(*given, denominators, 0.1)[0].backward()
        assert ledger.sites(SYNC) == {}
        assert given[0].grad.abs().sum().item()


@pytest.mark.parametrize("loss", tuple(preference.PAIR_LOSSES))
def test_no_loss_of_a_pair_makes_the_host_wait(loss):
    entry = preference.PAIR_LOSSES.get(loss)
    with fake_cuda() as ledger:
        pairs = preference.Pairs(*(each.to("cuda") for each in drawn(1)[:6]))
        ledger.counts.clear()
        chosen = pairs.chosen.requires_grad_()
        entry.fn(pairs, **{name: OPTIONS[name] for name in entry.reads}).sum().backward()
        assert ledger.sites(SYNC) == {}
        assert chosen.grad.abs().sum().item()


@pytest.fixture(scope="module", name="home")
def home_fixture(tmp_path_factory):
    """Models and four rows of every trainer."""
    home = preference_runs.write_home(tmp_path_factory.mktemp("home"))
    for name, rows in (("pairs", preference_runs.PAIRS), ("judged", preference_runs.JUDGED)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]), encoding="utf-8")
    return home


@pytest.mark.parametrize("case", CASES)
def test_no_micro_batch_of_a_trainer_without_a_rollout_makes_the_host_wait(case, home, tmp_path):
    """Steps of one, one and two micro-batches; the first puts tables on the device that stay there."""
    kind, tree, data, options = CASES[case]
    options = {name: value for name, value in options.items() if not name.endswith("_offload")}
    options |= {"teacher_model": str(home / "other")} if case == "kd" else {}
    sites = []
    with fake_cuda() as ledger:
        trainer = preference_runs.trainer_of(kind, tree, home, tmp_path, data, train_batch_size=4, **options)
        for size in (4, 4, 2):
            trainer.config.train.micro_train_batch_size = size
            ledger.counts.clear()
            trainer.train_step()
            sites.append(ledger.sites(SYNC))
    assert sites[1] and marginal(*sites[1:], 1) == {}
