"""Words of verl and Skywork-OR1: values are read as theirs, and no name of an algorithm is answered with another."""
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass

import pytest

from lightrft.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from lightrft.config.cli import parse_config
from lightrft.config.foreign_values import ALGORITHMS, MANAGERS, nearest_value, synonym, SYNONYMS
from lightrft.config.presets import RECIPES
from lightrft.config.schema import Config
from lightrft.config.tree import options
from lightrft.config.verl_words import refusal_of_verl
from lightrft.datasets.rows import DataError, load_rows
from lightrft.ops.preference import PAIR_LOSSES
from lightrft.rewards.base import REWARDS
from lightrft.utils.errors import UserError

ENTRIES = {
    "advantage_estimator": [*ADVANTAGES], "policy_loss": [*POLICY_LOSSES], "rollout_correction": [*CORRECTIONS],
    **{name: [*option.choices] for name, option in options(Config).items() if option.choices}, "top_k": ["0"]
}
# the names in which verl 0.9.1 registers its estimators and losses, and Skywork-OR1 its reward manager
VERL = {"advantage_estimator": "gae grpo grpo_vectorized gdpo grpo_passk reinforce_plus_plus_baseline rloo opo "
        "reinforce_plus_plus remax gpg rloo_vectorized optimal_token_baseline tir_optimal_token_baseline",
        "policy_loss": "vanilla dppo_tv dppo_kl gspo sapo gpg clip_cov kl_cov geo_mean dro cispo",
        "loss_agg_mode": "token-mean token-sum seq-mean-token-sum seq-mean-token-mean seq-mean-token-sum-norm",
        "kl_estimator": "kl k1 mse k2 low_var_kl k3 low_var_kl+",
        "reward": "naive dapo prime batch yr"}  # yapf: disable


@pytest.mark.parametrize("option,word,value",
                         [(name, *pair) for name, words in SYNONYMS.items() for pair in words.items()])
def test_a_word_of_another_trainer_is_read_as_the_value_here(option, word, value):
    assert value in ENTRIES[option] and word not in ENTRIES[option]
    assert str(vars(parse_one(option, word))[option]) == value


# what the words of verl mean, apart from our table of them
MEANINGS = {"advantage_estimator": {"reinforce_plus_plus": "reinforce++",
                                    "reinforce_plus_plus_baseline": "reinforce_baseline"},
            "policy_loss": {"vanilla": "ppo", "geo_mean": "gmpo"}, "loss_agg_mode": {"token-sum": "token-sum"},
            "kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"},
            "strategy": {"fsdp": "fsdp", "fsdp2": "fsdp"}}  # yapf: disable


def test_the_words_of_verl_mean_what_they_mean_there():
    for option, words in MEANINGS.items():
        assert {word: synonym(option, word) for word in words} == words and {*words.values()} <= {*ENTRIES[option]}


def parse_one(option, word):
    """Parse ``word`` for ``option``; return its group of the tree, or the recipe that it chose."""
    needed = ["--init_kl_coef", "0.1"] if option == "kl_estimator" else []
    if option == "recipe":
        return RecipeOnly(parse_config(["--recipe", word]).provenance["policy_loss"].removeprefix("recipe "))
    return vars(parse_config([f"--{option}", word, *needed]).config)[options(Config)[option].group]


@dataclass
class RecipeOnly:
    """Name of the recipe that has set the options."""
    recipe: str


@pytest.mark.parametrize("option,names", VERL.items())
def test_the_names_that_verl_registers_are_read_or_explained(option, names):
    for name in names.split():
        known = [*REWARDS] if option == "reward" else [*ENTRIES[option], *SYNONYMS.get(option, ())]
        assert name in known or re.fullmatch(r" \((?!did you mean).+\)", nearest_value(option, name, known)), name


@pytest.mark.parametrize("option", ["advantage_estimator", "policy_loss", "recipe", "loss_agg_mode", "loss"])
def test_no_algorithm_is_answered_with_another(option):
    known = [*PAIR_LOSSES] if option == "loss" else ENTRIES[option]
    for name, remedy in ALGORITHMS.items():
        said = nearest_value(option, name, known)
        assert name in known or (remedy in said and "did you mean" not in said), (name, said)


# name of the field -> what its answer has to name, apart from our table of them
ANSWERS = {"dapo": "here: --recipe dapo", "gspo": "here: --recipe gspo", "cispo": "here: --recipe cispo",
           "reinforce_plus_plus": "here: --recipe reinforce++", "drgrpo": "here: --recipe dr_grpo",
           "simpo": "lightrft dpo --loss simpo", "kto": "lightrft kto", "gkd": "lightrft kd --divergence js",
           "raft": "--post_processor rs", "vapo": "not part of this release", "gfpo": "not part of this release",
           "cdpo": "here: the command lightrft dpo --label_smoothing E",
           **dict.fromkeys(("dft", "bco", "mgpo", "raft++", "luffy"), "not part of this release"),
           "vpg": "--advantage_estimator reinforce", "dual_clip": "--policy_loss ppo with --dual_clip",
           "prime": "PRIME trains a reward model of its own"}  # yapf: disable


@pytest.mark.parametrize("option", ["advantage_estimator", "policy_loss", "recipe"])
def test_an_unlisted_name_of_the_field_is_not_a_typing_error(option):
    for name in ("gepo fipo gcpo empo cmpo hapo ghpo mdpo vppo qpo avapo dra_grpo ppo_kl gspo++ reinforce-ada "
                 "apo").split():
        said = nearest_value(option, name, ENTRIES[option])
        assert said == "" or said.startswith(" (not part of this release"), (name, said)


@pytest.mark.parametrize("option", ["advantage_estimator", "policy_loss"])
def test_a_name_of_the_field_gets_its_recipe_or_its_command(option):
    for name, answer in ANSWERS.items():
        assert name in ENTRIES[option] or answer in nearest_value(option, name, ENTRIES[option]), name


@pytest.mark.parametrize("option,typed,meant", [("advantage_estimator", "group_nrm", "group_norm"),
                                                ("policy_loss", "kl_cv", "kl_cov"), ("recipe", "dr_grp", "dr_grpo"),
                                                ("recipe", "GRPO", "grpo"), ("recipe", "grop", "grpo"),
                                                ("policy_loss", "gsspo", "gspo"), ("policy_loss", "gspp", "gspo")])
def test_a_typing_error_gets_its_nearest_name(option, typed, meant):
    assert f"did you mean {meant}?" in nearest_value(option, typed, ENTRIES[option])


def test_a_loss_of_pairs_in_the_words_of_others_is_explained():
    for word, answer in (("liger", "here: --use_liger"), ("sigmoid_norm", "not part of this release")):
        assert nearest_value("loss", word, PAIR_LOSSES).startswith(f" ({answer}")


def test_a_typing_error_of_a_foreign_name_gets_what_that_means():
    assert nearest_value("policy_loss", "squared", ENTRIES["policy_loss"]) == "", "no typing error of qae"
    near = nearest_value("advantage_estimator", "gspp", ENTRIES["advantage_estimator"])
    assert near == " (gspo: here: --recipe gspo)"
    assert nearest_value("policy_loss", "vesspo",
                         ENTRIES["policy_loss"]).startswith(" (vespo: not part of this release")


def test_the_remedies_are_options_and_values_here():
    for text in {*ALGORITHMS.values(), *MANAGERS.values()}:
        for flag, value in re.findall(r"--(\w+)(?: ([\w+-]+))?", text):
            assert flag in options(Config) or flag in ("loss", "label_smoothing", "post_processor", "divergence"), flag
            assert flag != "recipe" or value in RECIPES, value
            assert flag not in ENTRIES or value in ENTRIES[flag], (flag, value)


def test_registries_read_and_explain_them_too():
    assert POLICY_LOSSES.get("vanilla") is POLICY_LOSSES.get("ppo")
    with pytest.raises(UserError, match=r"unknown advantage estimator 'dapo' \(here: --recipe dapo\)"):
        ADVANTAGES.get("dapo")
    with pytest.raises(UserError, match="unknown reward 'yr' .here: --reward math, in worker processes"):
        REWARDS.get("yr")
    with pytest.raises(ValueError, match="policy loss 'vanilla' means 'ppo'; register another name"):
        POLICY_LOSSES.register("vanilla")(POLICY_LOSSES.get("kl_cov"))


TREE = """
data: {train_batch_size: 256, max_prompt_length: 512, prompt_max_len: 7}
algorithm: {adv_estimator: reinforce_plus_plus, kl_ctrl: {kl_coef: 0.001}, gamma: 0.9, gama: 3}
actor_rollout_ref:
  actor: {policy_loss: {loss_mode: geo_mean}, strategy: fsdp2, adaptive_entropy: {enabled: true, target_entropy: 0.2}}
  rollout: {n_val: 4, val_temperature: 0.6}
trainer: {stats_path: x, rejection_sample: true, weird: 2}
reward_model: {reward_manager: yr}
"""
SAID = """
data.train_batch_size is an option of another trainer; here: --rollout_batch_size 256
data.max_prompt_length is an option of another trainer; here: --prompt_max_len 512
data.prompt_max_len: prompt_max_len belongs to the group rollout
algorithm.adv_estimator is an option of another trainer; here: --advantage_estimator reinforce++
algorithm.kl_ctrl.kl_coef is an option of another trainer; here: --init_kl_coef
unknown key algorithm.gama (did you mean gamma?)
actor_rollout_ref.actor.policy_loss.loss_mode is an option of another trainer; here: --policy_loss gmpo
actor_rollout_ref.actor.strategy is an option of another trainer; here: --strategy fsdp
actor_rollout_ref.actor.adaptive_entropy.enabled is an option of another trainer; here: --entropy_target, which
actor_rollout_ref.actor.adaptive_entropy.target_entropy is an option of another trainer; here: --entropy_target 0.2
actor_rollout_ref.rollout.n_val is an option of another trainer; here: --eval_n_samples 4
actor_rollout_ref.rollout.val_temperature is an option of another trainer; here: --eval_temperature 0.6
trainer.stats_path is an option of another trainer; here: --save_trajectories
trainer.rejection_sample is an option of another trainer; here: --dynamic_sampling
trainer.weird is an option of verl without a counterpart here; drop it
reward_model.reward_manager is an option of another trainer; here: --reward math
"""


def test_a_tree_of_verl_is_answered_as_its_dotted_words(tmp_path, capsys):
    (tmp_path / "verl.yaml").write_text(TREE, encoding="utf-8")
    with pytest.raises(SystemExit):
        parse_config(["--config", str(tmp_path / "verl.yaml")])
    said = capsys.readouterr().err
    lines = [line.partition("verl.yaml: ")[2] for line in said.splitlines() if "verl.yaml: " in line]
    assert [line[:len(want)] for line, want in zip(lines, SAID.split("\n")[1:])] == SAID.strip().split("\n"), said
    dotted = refusal_of_verl("actor_rollout_ref.rollout.n_val", "4", options(Config))
    assert dotted in lines and len(lines) == 16


# leaves of verl's own file whose values mean something else here, or nothing
LEAVES = """
actor_rollout_ref.actor.use_dynamic_bsz=False --max_tokens_per_micro_batch
actor_rollout_ref.actor.use_kl_loss=True --use_kl_loss true
actor_rollout_ref.actor.fsdp_config.param_offload=False --offload_during_rollout false
actor_rollout_ref.rollout.dtype=bfloat16 --bf16
actor_rollout_ref.rollout.name=trtllm --engine_type (here: --engine_type vllm or sglang)
actor_rollout_ref.rollout.do_sample=True --temperature; 0 is greedy
actor_rollout_ref.rollout.n=8 --n_samples_per_prompt 8
actor_rollout_ref.rollout.pipeline_model_parallel_size=2 nothing, an engine is divided within layers
reward_model.enable=False --reward_pretrain
reward_model.model.path=org/rm --reward_pretrain org/rm
algorithm.adv_estimator=prime --advantage_estimator (PRIME trains a reward model of its own beside the policy, and \
is not part of this release; a process reward model that is trained already scores steps: --reward_pretrain \
(docs/coming_from.md))
algorithm.adv_estimator=grpo --advantage_estimator grpo
algorithm.filter_groups.metric=acc --dynamic_sampling
algorithm.filter_groups.enable=True --dynamic_sampling true
trainer.resume_mode=auto --load_checkpoint
trainer.total_epochs=30 --num_episodes 30
trainer.save_freq=-1 --disable_ckpt, which means never
trainer.save_freq=20 --save_steps 20
trainer.test_freq=-1 --eval_steps 0, which means never
"""


def test_values_that_an_option_does_not_take_are_not_named_with_it():
    for line in LEAVES.strip().split("\n"):
        word, _, remedy = line.partition(" ")
        name, _, value = word.partition("=")
        said = refusal_of_verl(name, value, options(Config))
        assert said.startswith(f"{name} is an option of another trainer; here: {remedy}"), said
        assert said.endswith(remedy) or remedy.startswith("nothing"), said


NOT_HERE = ["ray_kwargs.ray_init.num_cpus", "ray_kwargs.timeline_json_file",
            "actor_rollout_ref.actor.megatron.dtype", "reward_model.enable_resource_pool"]  # yapf: disable


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_is_not_here_is_refused_by_name(name):
    said = refusal_of_verl(name, "true", options(Config))
    assert said.startswith(f"{name} is") and re.search("Ray|torchrun|layers|share the GPUs", said), said


@pytest.mark.parametrize("word", ["megatron", "ray", "ddp", "pipeline", "zero3"])
def test_other_strategies_are_refused_by_name(word, capsys):
    with pytest.raises(SystemExit):
        parse_config(["--strategy", word])
    assert re.search(rf"got '{word}' \(.*--strategy (fsdp|deepspeed)", capsys.readouterr().err)


def test_layers_that_are_not_divided_are_granted_and_others_refused(capsys, caplog):
    with caplog.at_level("INFO"):
        parse_config(["--pipeline_model_parallel_size", "1"])
    assert "pipeline_model_parallel_size" in caplog.text + capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_config(["--pipeline_model_parallel_size", "2"])
    assert "use --strategy fsdp, or deepspeed with --zero_stage 3" in capsys.readouterr().err


def test_a_pickle_is_refused_with_the_line_that_converts_it(tmp_path, python_line):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame([{"prompt": "1+1?", "answer": "2"}]).to_pickle(tmp_path / "rows.pkl")
    with pytest.raises(DataError, match="unknown kind of file '.pkl'; .*runs code that is in it") as caught:
        load_rows(str(tmp_path / "rows.pkl"))
    python_line(str(caught.value).partition("convert it: ")[2])
    assert [row["answer"] for row in load_rows(str(tmp_path / "rows.parquet")).rows] == ["2"]


@pytest.fixture(name="python_line")
def fixture_python_line():
    """Run a shell line that begins with ``python -c``."""

    def run(line):
        program, *words = shlex.split(line)
        assert program == "python"
        subprocess.run([sys.executable, *words], check=True, timeout=60)

    return run
