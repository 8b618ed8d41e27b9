"""For every option of training on preferences, of process rewards and of distillation: a run that shows what flipping
it changes."""
from lightrft.tests.support.option_flips import files, Flip, metric, TWO, weights

DPO_FLIPS: dict[str, Flip] = {
    "loss": Flip("hinge", metric("dpo/loss")),
    "ipo": Flip(True, metric("dpo/loss")),
    "beta": Flip(1.0, metric("dpo/loss"), {"loss": "ipo_sum"}),
    "label_smoothing": Flip(0.1, weights, TWO),
    "simpo_gamma": Flip(2.0, metric("dpo/loss"), {"loss": "simpo"}),
    "nll_loss_coef": Flip(1.0, metric("dpo/loss")),
    "ref_pretrain": Flip("@other", metric("dpo/rewards/margin")),
    "ref_offload": Flip(True, lambda seen: [name for name, *_ in seen.calls]),
    "ref_cache_dir": Flip("@run/reference", files),
    "learning_rate": Flip(1e-2, weights),
}
KTO_FLIPS: dict[str, Flip] = {
    "beta": Flip(2.0, metric("kto/loss"), TWO),
    "desirable_loss_weight": Flip(2.0, metric("kto/loss")),
    "undesirable_loss_weight": Flip(2.0, metric("kto/loss")),
    "input_key": Flip("asked", metric("kto/tokens")),
    "output_key": Flip("instead", metric("kto/tokens")),
    "label_key": Flip("reverse", metric("kto/logps/chosen")),
    "apply_chat_template": Flip(True, metric("kto/tokens")),
    "ref_pretrain": Flip("@other", metric("kto/rewards/chosen")),
    "ref_offload": Flip(True, lambda seen: [name for name, *_ in seen.calls]),
    "ref_cache_dir": Flip("@run/reference", files),
    "learning_rate": Flip(1e-2, weights),
}
KD_FLIPS: dict[str, Flip] = {
    "teacher_model": Flip("@teacher", metric("kd/divergence")),
    "teacher_offload": Flip(True, lambda seen: [name for name, *_ in seen.calls]),
    "kd_coef": Flip(0.9, metric("kd/loss")),
    "divergence": Flip("reverse", metric("kd/divergence")),
    "js_mix": Flip(0.2, metric("kd/divergence"), {"divergence": "js"}),
    "kd_top_k": Flip(2, metric("kd/divergence")),
}
PRM_FLIPS: dict[str, Flip] = {
    "input_key": Flip("again", metric("prm/tokens")),
    "label_key": Flip("flipped", metric("prm/base_rate")),
    "placeholder_token": Flip("~", metric("prm/loss"), {"input_key": "none"}),
    "reward_tokens": Flip(["-", "+"], metric("prm/base_rate")),
    "step_separator": Flip("; ", metric("prm/tokens"), {"input_key": "none"}),
    "apply_chat_template": Flip(True, metric("prm/tokens"), {"input_key": "none"}),
}
PRM_SHOWN: dict[str, str] = {
    "step_policy": "lightrft/datasets/tests/test_steps.py::"
    "test_steps_without_a_label_each_stop_the_run_or_are_counted",
}
