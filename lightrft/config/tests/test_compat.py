"""Names of other trainers on the command line: answered with ours, accepted with a notice, or refused."""
import argparse
import re
from pathlib import Path

import pytest

from lightrft.cli.offline import OFFLINE
from lightrft.config.cli import parse_config, parse_keywords
from lightrft.config.compat import REFUSED
from lightrft.config.counterparts import ELSEWHERE
from lightrft.config.evaluate_schema import EvaluateConfig
from lightrft.config.files import convert_options, to_yaml
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.options import ConfigError
from lightrft.config.preference_schema import DPOConfig, KTOConfig
from lightrft.config.rm_schema import RMConfig
from lightrft.config.schema import Config
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.tests.test_cli import fails
from lightrft.config.tree import options, RESERVED
from lightrft.utils.cli_args import add_arguments


def test_names_of_other_trainers_take_the_place_of_no_option() -> None:
    others = (GenerateConfig, *(command.tree for command in OFFLINE.values()))
    known, offline = options(Config), {name for tree in others for name in options(tree)}
    for name, text in ELSEWHERE.items():
        assert name not in known and name not in REFUSED
        for flag in re.findall(r"--(\w+)", text):
            assert flag in known or flag in offline or flag in ("nproc", "nnodes", *RESERVED), f"{name}: {flag}"


@pytest.mark.parametrize("tree,words,said", [
    (Config, "--num_generations 8", "num_generations is an option of another trainer; here: --n_samples_per_prompt"),
    (Config, "--num-generations 8", "here: --n_samples_per_prompt"),
    (Config, "--beta 0.04", "here: --init_kl_coef, with --use_kl_loss for a KL in the loss"),
    (Config, "--learning_rate 1e-6", "here: --actor_learning_rate"),
    (Config, "--actor_lr 1e-6", "here: --actor_learning_rate"),
    (Config, "--steps 10", "here: --max_steps"),
    (Config, "--env game.py --max_assistant_turns 4", "here: --environment FILE"),
    (Config, "--wandb_mode offline", "the environment variable WANDB_MODE has it"),
    (Config, "--use-gspo", "use --policy_loss gspo"),
    (Config, "actor_rollout_ref.rollout.n=8",
     "rollout.n is an option of another trainer; here: --n_samples_per_prompt"),
    (Config, "--prompt_data a actor_rollout_ref.rollout.n=8", "rollout.n is an option of another trainer; here: --n_s"),
    (Config, "+actor_rollout_ref.model.path=x", "here: --pretrain"),
    (Config, "--actor_rollout_ref.actor.optim.lr 1", "here: --actor_learning_rate"),
    (Config, "data.train_files=a", "here: --prompt_data"),
    (Config, "actor_rollout_ref.model.enable_gradient_checkpointing=True", "here: --gradient_checkpointing"),
    (Config, "--actor_rollout_ref.actor.fsdp_config.optimizer_offload True", "here: --adam_offload"),
    (Config, "data.filter_overlong_prompts=True", "here: --overlong_prompt filter"),
    (Config, "actor_rollout_ref.model.use_remove_padding=True", "batches are always packed, without padding"),
    (Config, "trainer.critic_warmup=5", "here: --freezing_actor_steps"),
    (Config, "--disable_dropout false", "dropout is off in every model, but for --lora_dropout; drop the flag"),
    (Config, "--gradient_checkpoint", "did you mean --gradient_checkpointing?"),
    (Config, "--vllm_importance_sampling_cap 2", "here: --correction_high"),
    (Config, "trainer.nothing=8", "trainer.nothing is an option of verl without a counterpart here; drop it"),
    (Config, "word", "unexpected value 'word': options are given as --name value\n"),
    (Config, "-max_steps 10",
     "unknown flag -max_steps (did you mean --max_steps?); an option begins with two hyphens\n"),
    (Config, "-max_step=10", "unknown flag -max_step (did you mean --max_steps?)"),
    (Config, "-lr 10", "unknown flag -lr; lr is an option of another trainer; here: --actor_learning_rate"),
    (Config, "--reward exact \u2014max_steps 10",
     "\u2014max_steps: begins with a dash of typeset text; write --max_st"),
    (Config, "\u2013max_steps=1x", "\u2013max_steps: begins with a dash of typeset text; write --max_steps, with two"),
    (Config, "--data.label_key answer", "data.label_key is an option of another trainer; here: --reference_key"),
    (KTOConfig, "--data.label_key good", "here: --label_key"),
    (SFTConfig, "--num_train_epochs 2", "here: --max_epochs"),
    (SFTConfig, "--dataset_name a", "here: --train_data"),
    (SFTConfig, "--interleave_prob 0.4,0.6", "here: --train_data_probs"),
    (SFTConfig, "--num_generations 8", "unknown flag --num_generations"),
    (SFTConfig, "--prompt_data a", "prompt_data is an option of another command; here: --train_data"),
    (EvaluateConfig, "--reward math", "here: --score"),
    (GenerateConfig, "--zero_stage x", "here: --engine_tp_size"),
    (GenerateConfig, "--remote_rm_url f.py", "here: --score"),
    (SFTConfig, "--full_determinism", "--seed fixes data"),
    (Config, "--use_icepop", "here: --rollout_correction icepop"),
    (Config, "--opd.topk 8", "the teacher gives the log-prob of each token that the student has drawn; drop"),
    (SFTConfig, "--dcp_checkpoint_from_path a", "here: --load_checkpoint"),
    (KTOConfig, "--vanilla_loss", "always comes from mismatched pairs"),
])
def test_an_option_of_another_trainer_is_answered_with_ours(tree: type, words: str, said: str,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    """Where the tree has one."""
    assert said in fails(capsys, words.split(), tree=tree)


def test_options_that_ask_for_what_always_holds_are_accepted(tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line, in a YAML file and by any other parser; never in place of an option."""
    words = "--seed 5 --packing_samples --attn_implementation flash_attention_2 --unpaired_preference true".split()
    (tmp_path / "a.yaml").write_text("flash_attn: true\ntrain: {seed: 4}\n", encoding="utf-8")
    parsed = parse_config(["--config", str(tmp_path / "a.yaml"), *words], tree=KTOConfig)
    said = capsys.readouterr().err
    assert parsed.config.train.seed == 5 and said.count("has no effect") == 4, said
    assert add_arguments(argparse.ArgumentParser()).parse_args(words).seed == 5
    (tmp_path / "a.yaml").write_text("attn_implementation: eager\n", encoding="utf-8")
    err = fails(capsys, ["--config", str(tmp_path / "a.yaml")])
    assert "a.yaml: --attn_implementation is not an option here: packed attention" in err


def test_words_without_effect_share_a_line_and_come_once(capsys: pytest.CaptureFixture[str]) -> None:
    roles = [f"--{role}_num_{unit}" for role in ("ref", "actor") for unit in ("nodes", "gpus_per_node")]
    parse_config([word for flag in [*roles, *roles] for word in (flag, "8")] + ["--use_mp_opt", "--colocate_all"])
    shared, alone = capsys.readouterr().err.splitlines()
    assert f"{', '.join([*roles, '--colocate_all'])} have no effect: all models share" in shared
    assert "--use_mp_opt has no effect: " in alone


@pytest.mark.parametrize("names,said", [
    ("kl_coeff kl", "here: --init_kl_coef"),
    ("reward_func", "here: --reward\n"),
    ("save_dir output", "here: --save_path"),
    ("tp tensor_parallel_size", "here: --engine_tp_size"),
    ("model_path base_model", "here: --pretrain"),
    ("grad_clip actor_rollout_ref.actor.grad_clip", "here: --max_norm"),
    ("use_lora peft_config", "here: --lora_rank for LoRA"),
    ("n_samples group_size", "here: --n_samples_per_prompt"),
    ("max_tokens max_response_len", "here: --generate_max_len"),
    ("gpus", "here: torchrun: --nproc-per-node"),
    ("lr", "here: --actor_learning_rate"),
    ("resume", "here: --load_checkpoint"),
    ("critic.model.path", "here: --critic_pretrain"),
    ("algorithm.filter_groups.enable", "here: --dynamic_sampling"),
    ("reward_model.reward_kwargs.overlong_buffer_cfg.len", "here: --overlong_buffer_len"),
    ("actor_rollout_ref.rollout.max_num_seqs", "here: --engine_max_seqs"),
    ("actor_rollout_ref.model.trust_remote_code", "here: nothing, code of a model's folder is never run"),
    ("use_rslora hub_strategy disable_tqdm neftune_noise_alpha config-name algorithm.use_pf_ppo", "here: nothing, "),
    ("critic.use_dynamic_bsz data.gen_batch_size wandb", "here: --"),
    ("actor_rollout_ref.rollout.multi_turn.max_turns", "--environment FILE, which answers the model"),
    ("real_tau", "unknown flag --{}\n"),
])
def test_short_names_and_those_of_standard_scripts_are_answered(names: str, said: str,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    """Or have no hint, where nothing here is meant."""
    for name in names.split():
        assert said.format(name) in fails(capsys, [f"--{name}", "1"]), name


def test_flags_that_trl_names_otherwise_set_ours() -> None:
    loss = parse_config(["--desirable_weight", "2", "--undesirable_weight=3"], tree=KTOConfig).config.preference
    assert (loss.desirable_loss_weight, loss.undesirable_loss_weight) == (2.0, 3.0)


@pytest.mark.parametrize("tree", [RMConfig, DPOConfig])
def test_the_prompt_of_a_pair_has_the_name_of_other_trainers(tree: type) -> None:
    assert parse_config(["--input_key", "q"], tree=tree).config.data.prompt_key == "q"


@pytest.mark.parametrize("words", ["--rpo_alpha 0.5", "--cpo_alpha=0.5"])
def test_the_nll_of_trl_is_a_mean_over_tokens(words: str) -> None:
    set_ = parse_config(["--pretrain", "m", "--train_data", "d", *words.split()], tree=DPOConfig).config.preference
    assert (set_.nll_loss_coef, set_.nll_token_mean) == (0.5, True)
    with pytest.raises(ConfigError, match="here: --nll_loss_coef with --nll_token_mean"):
        convert_options({"rpo_alpha": 0.5}, DPOConfig)


@pytest.mark.parametrize("words", ["--rpo_alpha 0", "--cpo_alpha=0.0", "--rpo_alpha 0 --beta 0.1"])
def test_a_weight_of_nothing_asks_for_no_mean_of_it(words: str) -> None:
    config = parse_config(["--pretrain", "m", "--train_data", "d", *words.split()], tree=DPOConfig).config
    assert config.preference == DPOConfig().preference
    with_engines = parse_config(["--vllm_num_engines", "0"]).config.rollout
    assert with_engines.engine_type == Config().rollout.engine_type


def test_the_page_for_newcomers_and_the_answers_agree() -> None:
    page = (Path(__file__).parents[3] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    tables = page.split("## TRL")[1].split("## Differences")[0]
    for row in re.findall(r"^\| (`.+?) \| (.+?) \|", tables, re.MULTILINE):
        for name in re.findall(r"`(\w[\w.]+)[`=]", row[0]) if "no counterpart" not in row[1] else ():
            assert name in ELSEWHERE or name in options(Config) or name == "sequence", name


def test_the_weights_of_sources_have_the_name_of_openrlhf() -> None:
    for tree in (SFTConfig, KTOConfig):
        assert parse_config(["--dataset_probs", "0.3,0.7"], tree=tree).config.data.train_data_probs == [0.3, 0.7]
    assert parse_config(["--dataset_probs", "1.0"], tree=GenerateConfig).config.data.prompt_data_probs == [1.0]


@pytest.mark.parametrize("typed,read", [("", None), (r"User: {}\nAssistant: ", "User: {}\nAssistant: "),
                                        ("User: {}\nA", "User: {}\nA"), ("none", None)])
def test_a_template_of_another_manual_is_read_as_it_is_typed(typed: str, read: str | None, tmp_path: Path) -> None:
    """An empty one is none; the two characters of a line break are one, in every tree and in its YAML."""
    for tree in (SFTConfig, KTOConfig, Config, GenerateConfig, EvaluateConfig):
        parsed = parse_config(["--input_template", typed], tree=tree)
        (tmp_path / "c.yaml").write_text(to_yaml(parsed.config))
        again = parse_config(["--config", str(tmp_path / "c.yaml")], tree=tree)
        assert parsed.config.data.input_template == again.config.data.input_template == read


def test_the_folder_of_a_run_is_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every option that names models; a model, a hub id and an unfinished run are left as they are."""
    for name in ("run/hf", "model", "model/hf"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "unfinished").mkdir()
    run, model, unfinished = (str(tmp_path / name) for name in ("run", "model", "unfinished"))
    words = f"--pretrain {run} --ref_pretrain {model} --teacher_model {unfinished} --reward_pretrain a={run} org/b"
    config = parse_config(words.split()).config
    assert (config.model.pretrain, config.model.ref_pretrain) == (f"{run}/hf", model)
    assert config.model.teacher_model == unfinished and config.reward.reward_pretrain == [f"a={run}/hf", "org/b"]
    assert f"--pretrain {run}: the folder of a run; its model in {run}/hf is read" in capsys.readouterr().err
    given = parse_config(["--pretrain", run, model, "--score", f"{run}=0.5", f"b={run}=0.5"],
                         tree=EvaluateConfig).config
    rewards = given.score.as_reward_config()
    assert given.model.pretrain == [f"{run}/hf", model] and rewards.reward_pretrain == [f"{run}/hf", f"b={run}/hf"]
    assert parse_keywords({"pretrain": run}, KTOConfig).config.model.pretrain == f"{run}/hf"
