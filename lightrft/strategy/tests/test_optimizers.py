"""The registry of optimizers: its facts, what is refused, and registrations that do not say what the optimizer does."""
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightrft.cli import doctor
from lightrft.config.options import ConfigError
from lightrft.config.plugins import import_plugins
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.schema import StrategyConfig
from lightrft.config.tree import build
from lightrft.preflight.hardware import Device
from lightrft.preflight.memory import memory
from lightrft.preflight.validate import validate
from lightrft.strategy.memory import ModelSize
from lightrft.strategy.optimizer import LocalOptimizer, OptimSpec
from lightrft.strategy.optimizers import OPTIMIZERS, optimizer
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support.other_optimizers import plugin
from lightrft.tests.support.packages import needs_deepspeed

GOOD = {"pretrain": "org/model", "train_data": ["org/data"]}
GPU = Device("cuda:0", 80 << 30, 80 << 30)


class SignOfMean(torch.optim.Optimizer):
    """Steps by the sign of a mean of gradients, in ``dtype``, which begins as the first one, or as ``zeros``.

    ``rate`` is its own.
    """

    def __init__(self, groups, defaults, zeros=False, rate=None, dtype=torch.float32):
        super().__init__(groups, defaults)
        self.zeros, self.rate, self.dtype = zeros, rate, dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                begun = (torch.zeros_like(weight) if self.zeros else weight.grad.clone()).to(self.dtype)
                mean = self.state[weight].setdefault("mean", begun)
                mean.lerp_(weight.grad.to(mean.dtype), 0.1)
                weight -= (self.rate or group["lr"]) * mean.sign()


class Normalized(torch.optim.Optimizer):
    """Steps of the length of the rate, along the gradient of a whole parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data -= group["lr"] * param.grad / param.grad.norm()


@pytest.fixture
def register():
    """Registers an optimizer under the name "other" until the end of the test."""
    with mock.patch.dict(OPTIMIZERS._entries):
        yield lambda build, **facts: optimizer("other", **facts)(build)


def trained(name: str, **options: Any) -> LocalOptimizer:
    train = build(SFTConfig, {"optim": name, **options}).train
    return LocalOptimizer(nn.Linear(4, 2).named_parameters(), OptimSpec(0.1, train))


@pytest.mark.parametrize("options, nbytes", [({"optim": "adamw"}, 8), ({"optim": "adamw_8bit"}, 2 * (1 + 4 / 256)),
                                             ({"optim": "sgd"}, 0), ({"optim": "sgd", "sgd_momentum": 0.5}, 4)])
def test_the_plan_of_memory_has_its_bytes_of_state(options, nbytes):
    plan = memory(build(SFTConfig, GOOD | options), 1, ModelSize(1000, 100, 200), GPU)
    state = next((held for name, held in plan.items() if name.startswith("optimizer state, ")), (0, 0))
    assert state[1] == nbytes * 1000
    if options["optim"] != "adamw_8bit":
        moments = trained(**{"name" if key == "optim" else key: value for key, value in options.items()}).moments()
        assert sum(value.nbytes for _, key, value in moments if key != "step") == nbytes * 10


@pytest.mark.parametrize("given, words", [
    ({"optim": "muon"}, "--optim muon: unknown .an update needs whole matrices.*; known: adamw, adamw_8bit, sgd"),
    ({"optim": "adamw_torch"}, "here: --optim adamw"),
    ({"optim": "sgd", "adam_betas": [0.8, 0.9]}, "--adam_betas 0.8,0.9: sgd does not use it; .* --optim adamw or"),
    ({"sgd_momentum": 0.5}, "--sgd_momentum 0.5: adamw does not use it; drop it, or use --optim sgd"),
    ({"optim": "adamw_8bit", "strategy": "deepspeed"}, "--optim adamw_8bit: --strategy deepspeed manages its own"),
])
def test_what_options_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        validate(build(SFTConfig, GOOD | given), 2)


def test_a_name_that_is_registered_trains_and_no_other():
    with pytest.raises(ValueError, match="unknown optimizer 'muon'"):
        trained("muon")
    with plugin():
        validate(build(SFTConfig, GOOD | {"optim": "adagrad", "adagrad_decay": 0.1}), 2)
        assert isinstance(trained("adagrad", adagrad_decay=0.1).rule, torch.optim.Adagrad)
    with pytest.raises(ConfigError, match="--optim adagrad: unknown"):
        validate(build(SFTConfig, GOOD | {"optim": "adagrad"}), 2)


@pytest.mark.parametrize("make, facts, words", [
    (torch.optim.AdamW, {"moments": ("exp_avg", )}, "its state has exp_avg_sq; every entry"),
    (torch.optim.NAdam, {"moments": ("exp_avg", "exp_avg_sq")}, "its state has mu_product; every entry"),
    (lambda groups: SignOfMean(groups, {}, zeros=True, dtype=torch.float64), {"moments": ("mean", )},
     "its state has mean; every entry but step must be a float32 tensor"),
    (torch.optim.AdamW, {"moments": ("exp_avg", "exp_avg_sq", "max")}, "its moments max stay 0; drop them"),
    (lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=1.0), {"moments": ("sum", )},
     "differ when its state begins as zeros"),
    (lambda groups: SignOfMean(groups, {}), {"moments": ("mean", )}, "differ when its state begins as zeros"),
    (lambda groups: SignOfMean(groups, {}, zeros=True, rate=1e-4), {"moments": ("mean", )}, "do not depend on the lr"),
    (lambda groups: Normalized(groups, {}), {"moments": ()}, "register it with needs_whole=True"),
    (lambda groups: None, {"moments": ()}, "its builder returns None; return a torch.optim.Optimizer"),
])
def test_a_registration_that_is_not_true_is_refused(register, make, facts, words):
    register(lambda groups, cfg: make(groups), **facts)
    with pytest.raises(ValueError, match=f"--optim other: .*{words}"):
        trained("other")


def test_moments_are_names_not_a_text(register):
    with pytest.raises(ValueError, match=r"moments='exp_avg' is a text; write moments=\('exp_avg', \)"):
        register(torch.optim.AdamW, moments="exp_avg")


@needs_deepspeed
def test_whole_parameters_and_8_bits_are_refused_where_a_strategy_has_none(register):
    """By the rules of options, and by a strategy that a script sets up."""
    register(lambda groups, cfg: Normalized(groups, {}), moments=(), needs_whole=True)
    trained("other")
    single, whole = build(SFTConfig, GOOD | {"optim": "other"}), "updates whole parameters, which --strategy"
    validate(single, 1)
    validate(build(SFTConfig, GOOD | {"optim": "other", "strategy": "deepspeed", "zero_stage": 0}), 2)
    for given, ranks in (({}, 2), ({"strategy": "deepspeed", "zero_stage": 1}, 2)):
        with pytest.raises(ConfigError, match=f"--optim other: {whole}"):
            validate(build(SFTConfig, GOOD | {"optim": "other"} | given), ranks)
    for strategy, name, words in (("fsdp", "other", whole), ("deepspeed", "adamw_8bit", ".* manages its own")):
        spec = OptimSpec(0.1, build(SFTConfig, {"optim": name}).train)
        with pytest.raises(ValueError, match=f"--optim {name}: {words}"):
            get_strategy(StrategyConfig(strategy=strategy)).prepare(nn.Linear(4, 2), spec)


def test_an_option_of_its_own_that_a_trainer_has_is_refused(tmp_path):
    path = tmp_path / "clash.py"
    path.write_text("from dataclasses import dataclass\nfrom lightrft.config.options import option\n"
                    "from lightrft.config.shared_schema import OptimConfig\n"
                    "from lightrft.strategy.optimizers import optimizer\n\n@dataclass\nclass Mine(OptimConfig):\n"
                    "    max_epochs: int = option(1, 'mine', within='[1, inf)')\n\n"
                    "optimizer('mine', moments=(), options=Mine)(print)\n", encoding="utf-8")  # yapf: disable
    words = "--max_epochs is declared twice, by .*OfflineTrainConfig and clash.Mine; rename one"
    with plugin(), pytest.raises(ConfigError, match=words):
        import_plugins([str(path)], SFTConfig)


def test_the_doctor_names_an_unknown_one(capsys):
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--optim", "muon"])
    assert "--optim muon: unknown (an update needs whole matrices" in capsys.readouterr().err
