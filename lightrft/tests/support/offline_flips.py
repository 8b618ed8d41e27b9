"""For every option of the trainers on fixed data: a run that shows what flipping it changes."""
from lightrft.tests.support.option_flips import (_D, _T, files, Flip, forwards, FOUR, keys, LORA, metric, TWO, weights)
from lightrft.tests.support.own_options import OPTIM, own_options

_O = "lightrft/trainer/offline/tests/"

# supervised fine-tuning: what its own trainer reads; files, sinks, models and strategies are read by shared code
CHECKPOINTS = {"disable_ckpt": False, "save_steps": 1, "max_steps": 3, "async_save": False}
TEXTS = {"train_data": ["@scored_pairs"], "output_key": "chosen"}
SFT_FLIPS: dict[str, Flip] = {
    "pretrain": Flip("@other", weights),
    "bf16": Flip(True, weights),
    "lora_rank": Flip(2, files),
    "lora_dropout": Flip(0.5, weights, LORA | TWO),
    "freeze_prefix": Flip(["model.embed_tokens"], weights),
    "train_data": Flip(["@chats", "@chats"], lambda seen: len(seen.run.lines), {"train_batch_size": 6, "max_steps": 0}),
    "train_data_probs": Flip([0.1, 0.9], metric("sft/tokens"), {"train_data": ["@chats", "@turns"], "max_len": 300}),
    "eval_data": Flip(["@chats"], keys),
    "max_len": Flip(60, weights),
    "max_samples": Flip(4, weights),
    "system_prompt": Flip("Be brief.", weights),
    "shuffle": Flip(False, weights),
    "input_key": Flip("other", metric("sft/tokens"), TEXTS),
    "output_key": Flip("other", metric("sft/tokens"), TEXTS),
    "apply_chat_template": Flip(True, metric("sft/tokens"), TEXTS),
    "input_template": Flip("Q: {}", metric("sft/tokens")),
    "multiturn": Flip(False, metric("sft/loss_tokens"), {"train_data": ["@turns"], "max_len": 300}),
    "pretrain_mode": Flip(True, metric("sft/loss_tokens")),
    "train_batch_size": Flip(2, metric("sft/tokens")),
    "micro_train_batch_size": Flip(1, forwards),
    "max_tokens_per_micro_batch": Flip(40, forwards),
    "max_steps": Flip(2, lambda seen: len(seen.run.lines)),
    "max_epochs": Flip(2, lambda seen: len(seen.run.lines), {"max_steps": 0}),
    "lr_scheduler": Flip("linear", metric("sft/lr"), FOUR),
    "lr_warmup_ratio": Flip(0.9, metric("sft/lr", 0), FOUR),
    "lr_min_ratio": Flip(0.5, metric("sft/lr"), FOUR | {"lr_scheduler": "cosine_with_min_lr"}),
    "optim": Flip("adamw_8bit", weights, TWO),
    "adam_betas": Flip([0.5, 0.6], weights, TWO),
    **{name: Flip(value, weights, base | {"learning_rate": 1e-2}) for name, value, base in own_options(OPTIM)},
    "l2": Flip(0.5, weights),
    "max_norm": Flip(0.01, weights, TWO),
    "seed": Flip(1, weights),
    "learning_rate": Flip(1e-2, weights),
    "eval_steps": Flip(1, lambda seen: ["eval/loss" in line for line in seen.run.lines],
                       TWO | {"eval_data": ["@chats"]}),
    "save_steps": Flip(2, files, CHECKPOINTS),
    "save_hf_ckpt": Flip(True, files, CHECKPOINTS),
    "disable_ckpt": Flip(True, files, {"disable_ckpt": False}),
}  # yapf: disable
SFT_SHOWN: dict[str, str] = {
    "aux_loss_coef": _T + "test_load_balance.py::test_sft_has_the_loss_of_the_padded_batch",
    "train_split": _D + "test_prompts_dataset.py::test_split_options",
    "max_bad_steps": _T + "test_optimizer_step.py::test_one_process",
}

# reward models: what differs from supervised fine-tuning; pairs with margins and heads
RM_FLIPS: dict[str, Flip] = {
    "loss": Flip("logexp", metric("rm/loss")),
    "margin": Flip(0.5, metric("rm/loss"), {"heads_types": ["preference", "short"]}),
    "heads_types": Flip(["preference", "short"], weights),
    "pooling_method": Flip("attn", weights),
    "probing_layer": Flip(0, weights),
    "scale_for_train": Flip(True, metric("rm/grad_norm")),
    "prompt_key": Flip("other", metric("rm/tokens")),
    "chosen_key": Flip("other", metric("rm/tokens")),
    "rejected_key": Flip("other", metric("rm/tokens")),
    "apply_chat_template": Flip(True, metric("rm/tokens")),
    "input_template": Flip("Q: {}", metric("rm/tokens")),
}  # yapf: disable
RM_SHOWN: dict[str, str] = {
    "value_head_prefix": _O + "test_rm_heads.py::test_several_heads_learn_from_their_labels",
    "pair_policy": _D + "test_preferences.py::test_rows_that_cannot_be_compared",
}

DPO_FLIPS: dict[str, Flip] = {
    "loss": Flip("hinge", metric("dpo/loss")),
    "ipo": Flip(True, metric("dpo/loss")),
    "beta": Flip(1.0, metric("dpo/loss"), {"loss": "ipo_sum"}),
    "label_smoothing": Flip(0.1, weights, TWO),
    "simpo_gamma": Flip(2.0, metric("dpo/loss"), {"loss": "simpo"}),
    "nll_loss_coef": Flip(1.0, metric("dpo/loss")),
    "nll_token_mean": Flip(True, metric("dpo/nll"), {"nll_loss_coef": 1.0}),
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
    "teacher_cache_dir": Flip("@run/teacher", files, {"kd_top_k": 2}),
}
PRM_FLIPS: dict[str, Flip] = {
    "input_key": Flip("again", metric("prm/tokens")),
    "label_key": Flip("flipped", metric("prm/base_rate")),
    "placeholder_token": Flip("~", metric("prm/loss"), {"train_data": ["@completions"]}),
    "reward_tokens": Flip(["-", "+"], metric("prm/base_rate")),
    "step_separator": Flip("; ", metric("prm/tokens"), {"train_data": ["@completions"]}),
    "apply_chat_template": Flip(True, metric("prm/tokens"), {"train_data": ["@completions"]}),
}
PRM_SHOWN: dict[str, str] = {
    "step_policy": "lightrft/datasets/tests/test_steps.py::"
    "test_steps_without_a_label_each_stop_the_run_or_are_counted",
}
