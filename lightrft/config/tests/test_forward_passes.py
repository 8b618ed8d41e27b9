"""Which passes run between rollout and update."""
import pytest

from lightrft.config.schema import Config

OLD, REF, VALUES = "old_logprobs", "ref", "values"


@pytest.mark.parametrize("values,samples,critic,expected", [
    ({}, 64, False, []),
    ({}, 65, False, [OLD]),
    ({}, 64, True, [VALUES]),
    ({"max_epochs": 2}, 64, True, [OLD, VALUES]),
    ({"init_kl_coef": 0.1}, 64, True, [OLD, REF, VALUES]),
    ({"init_kl_coef": 0.1, "use_kl_loss": True}, 64, False, [REF]),
    ({"use_kl_loss": True}, 64, False, []),
    ({"high_entropy_token_ratio": 0.2}, 64, False, [OLD]),
    ({"high_entropy_token_ratio": 0.2, "max_epochs": 2, "rollout_correction": "bypass"}, 65, False, []),
    ({"init_kl_coef": 0.1, "rollout_correction": "bypass"}, 65, False, [REF]),
])  # yapf: disable
def test_the_passes_that_something_needs(values, samples, critic, expected):
    config = Config()
    for name, value in {"train_batch_size": 64, **values}.items():
        setattr(config.train if hasattr(config.train, name) else config.algorithm, name, value)
    assert config.forward_passes(samples, critic) == expected


def test_entropies_for_the_report_need_a_pass_of_the_policy():
    config = Config()
    config.train.train_batch_size = 64
    config.log.mark_high_entropy_tokens = True
    assert config.forward_passes(64, False) == [OLD]
