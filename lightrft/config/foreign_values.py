"""Values of options in the words of other trainers, and names of the field that no value here has."""
from collections.abc import Iterable, Mapping
from itertools import groupby
from os.path import commonprefix

from lightrft.utils.errors import did_you_mean
from lightrft.utils.registry import foreign_name

# one algorithm has the same name as an advantage estimator and as a recipe
_REINFORCE = {"reinforce_plus_plus": "reinforce++", "reinforce_plus_plus_baseline": "reinforce_baseline",
              "reinforce++_baseline": "reinforce_baseline",
              "reinforce++-baseline": "reinforce_baseline"}  # yapf: disable
# option -> value of another trainer -> the value here that means the same
SYNONYMS: dict[str, dict[str, str]] = {
    "advantage_estimator": _REINFORCE | {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
    "policy_loss": {"vanilla": "ppo", "geo_mean": "gmpo"},
    "rollout_correction": {
        "token": "tis", "sequence": "seq_tis", "token_truncate": "tis", "token_mask": "mis",
        "sequence_truncate": "seq_tis", "sequence_mask": "seq_mis"},
    "kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "mse+": "k2", "low_var_kl+": "k3+"},
    "recipe": _REINFORCE | {"drgrpo": "dr_grpo"},
    "strategy": {"fsdp2": "fsdp", "zero": "deepspeed"},
    "engine_type": {"transformers": "hf", "huggingface": "hf"},
    "top_k": {"-1": "0"},
    "lr_scheduler": {"cosine": "cosine_with_min_lr", "constant_with_warmup": "constant"},
}  # yapf: disable

_OWN_COMMAND = "the command lightrft"
_ABSENT = "not part of this release; docs/algorithms.md lists what is, docs/contributing.md shows how to add a loss"
_ALGORITHMS: dict[str, str] = {
    # a remedy -> names of the algorithms of the field that it is for
    "--recipe dapo":
    "dapo",
    "--recipe grpo":
    "grpo",
    "--recipe dr_grpo":
    "dr_grpo drgrpo grpo_done_right",
    "--recipe gspo":
    "gspo",
    "--recipe gmpo":
    "gmpo geo_mean",
    "--recipe cispo":
    "cispo",
    "--recipe cpgd":
    "cpgd",
    "--recipe reinforce++":
    "reinforce++ reinforce_plus_plus reinforcepp",
    "--recipe reinforce_baseline":
    "reinforce_baseline reinforce++_baseline reinforce++-baseline "
    "reinforce_plus_plus_baseline",
    "--recipe rloo":
    "rloo",
    "--recipe remax":
    "remax",
    "--recipe opo":
    "opo",
    "--recipe magic":
    "magic",
    "--recipe ppo, which trains a critic":
    "ppo",
    "--policy_loss sapo":
    "sapo",
    "--policy_loss clip_cov":
    "clip_cov",
    "--policy_loss kl_cov":
    "kl_cov",
    "--policy_loss dppo_tv or dppo_kl":
    "dppo",
    "--policy_loss ppo":
    "vanilla ppo_clip",
    "--policy_loss ppo with --dual_clip 3":
    "dual_clip dualclip",
    "--policy_loss ppo with --eps_clip_high 0.28":
    "clip_higher",
    "--advantage_estimator gdpo":
    "gdpo",
    "--advantage_estimator maxrl":
    "maxrl",
    "--advantage_estimator grpo_passk":
    "grpo_passk pass_at_k pkpo",
    "--advantage_estimator gpg with --policy_loss reinforce":
    "gpg",
    "--advantage_estimator gae":
    "gae",
    "--advantage_estimator reinforce":
    "reinforce pg vpg policy_gradient",
    "--teacher_model MODEL, which takes the place of a teacher's server":
    "on_policy_distillation opd",
    "--rollout_correction tis":
    "tis",
    "--rollout_correction mis":
    "mis",
    "--rollout_correction icepop":
    "icepop",
    "--loss_agg_mode token-mean":
    "bnpo",
    f"{_OWN_COMMAND} dpo":
    "dpo",
    f"{_OWN_COMMAND} dpo --label_smoothing E":
    "cdpo",
    f"{_OWN_COMMAND} dpo --loss orpo":
    "orpo",
    f"{_OWN_COMMAND} dpo --loss simpo":
    "simpo",
    f"{_OWN_COMMAND} dpo --loss ipo_mean":
    "ipo",
    f"{_OWN_COMMAND} dpo --loss sppo":
    "sppo",
    f"{_OWN_COMMAND} kto":
    "kto",
    f"{_OWN_COMMAND} kd --divergence js":
    "gkd",
    f"{_OWN_COMMAND} kd --divergence reverse":
    "minillm",
    f"{_OWN_COMMAND} sft":
    "sft",
    "examples of rejection sampling, docs/generate.md (--post_processor rs)":
    "raft rft star best_of_n",
    "PRIME trains a reward model of its own beside the policy, and is not part of this release; a process reward "
    "model that is trained already scores steps: --reward_pretrain (docs/coming_from.md)":
    "prime",
    _ABSENT:
    "vapo vc_ppo reinforce_rej lite_ppo gfpo gtpo luspo vespo dro optimal_token_baseline otb "
    "tir_optimal_token_baseline spo treepo arpo gigpo rpo srpo papo step_grpo s_grpo gvpo opmd topr a2po aspo gppo "
    "bapo dcpo soft_grpo seed_grpo cppo vineppo trpo a2c online_dpo nash_md xpo spin geometric_mean f_grpo pf_ppo "
    "reinforce_ada srft aot exo sac dgpo dgrpo sspo apo cpo dpop grpo_s bco dft iw_sft nca raft++ mgpo sgpo "
    "qae minirl luffy step_dpo rebel awr ttrl rlaif",
}
ALGORITHMS: dict[str, str] = {name: remedy for remedy, names in _ALGORITHMS.items() for name in names.split()}
"""Names of algorithms of the field -> what means them here, or why nothing does."""

_RULE = "answers are compared with the references by --reward math, exact or answer"
_PER_RESPONSE = f"a function compute_score is --reward path.py:compute_score, in worker processes; {_RULE}"
MANAGERS: dict[str, str] = {
    "naive": _PER_RESPONSE,
    "dapo": f"{_PER_RESPONSE}; the penalty on its length is --overlong_buffer",
    "prime": f"{_PER_RESPONSE}; --reward_workers sets how many",
    "batch": f"a function of lists is --reward path.py:compute_score too, told by its parameters; {_RULE}",
    "yr": "--reward math, in worker processes; for programs a function of yours, --reward path.py:compute_score",
    "remote": f"--remote_rm_url; {_RULE}",
    "limited": f"{_PER_RESPONSE}; an async function limits its own requests",
    "gdpo": f"--advantage_estimator gdpo with several parts of --reward; {_PER_RESPONSE}",
}
"""Reward managers of verl and Skywork-OR1 -> what does their work here."""

# option -> value that no option here has -> what to use instead
_REFUSED: dict[str, dict[str, str]] = {
    "strategy": {
        "megatron": "parameters are sharded, not layers: --strategy fsdp, or deepspeed with --zero_stage 3",
        "ddp": "--strategy deepspeed with --zero_stage 0 keeps whole parameters on each rank",
        "ray": "there is no Ray; torchrun starts the processes, and --strategy fsdp or deepspeed shards the models",
        "pipeline": "parameters are sharded, not layers: --strategy fsdp, or deepspeed with --zero_stage 3",
        "fsdp1": "--strategy fsdp is FSDP2",
        "veomni": "--strategy fsdp",
        "torchtitan": "--strategy fsdp",
    } | {f"zero{stage}": f"--strategy deepspeed with --zero_stage {stage}" for stage in (1, 2, 3)},
    "loss": {"liger": "--use_liger; a loss is always fused with the head"} | dict.fromkeys(
        ("sigmoid_norm", "bco_pair", "nca_pair", "discopop", "rso"), _ABSENT),
    "engine_type": {"trtllm": "--engine_type vllm or sglang"},
    "optim": {
        "muon": "an update needs whole matrices, which no strategy gathers yet; --optim adamw, adamw_8bit or sgd",
        "adafactor": "its moments are no tensors of the parameter's shape; --optim adamw_8bit saves memory",
    } | dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "--optim adamw")
      | dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit"), "--optim adamw_8bit"),
    "kl_estimator": {"abs": "it has no counterpart; --kl_estimator k1, or k3, which is never negative"},
    "overlong_prompt": dict.fromkeys(
        ("left", "right", "middle"), "prompts are never cut; filter drops and counts them"),
}  # yapf: disable
_NAMES = ("advantage_estimator", "policy_loss", "rollout_correction", "recipe", "loss_agg_mode", "loss")


def synonym(option: str, value: str) -> str:
    """Return the value of ``option`` that ``value``, a word of another trainer, means; or ``value`` itself."""
    return SYNONYMS.get(option, {}).get(value, value)


def remedies(option: str) -> Mapping[str, str]:
    """Return the words of other trainers that no value of ``option`` has: word -> what means it here."""
    return _REFUSED.get(option, {}) | (ALGORITHMS if option in _NAMES else MANAGERS if option == "reward" else {})


def nearest_value(option: str, value: str, known: Iterable[str]) -> str:
    """Return what to add to the error for an unknown ``value``: what a word of the field means here, else the nearest
    of ``known``; an empty string if there is none.

    A name of the field is never answered with another one, which would train something else.
    """
    words, values, asked = remedies(option), list(known), value.lower().replace("-", "_")
    if option in _NAMES:
        words = {name: words[name] for name in words if _may_be_meant(name, asked)}
        values = [name for name in values if _may_be_meant(name, asked)]
    if theirs := foreign_name(asked, words, values):
        return f" ({'' if theirs == asked else f'{theirs}: '}{_here(words[theirs])})"
    return did_you_mean(asked, values)


def _may_be_meant(name: str, asked: str) -> bool:
    """Return True if ``asked`` may be a typing error of the algorithm ``name``. Most names end in PO and differ by a
    letter, so a word with these two must have the letters of the name, in another order or doubled; a word without
    them may differ from such a name in one letter. A name of less than half the letters is another word."""
    if 2 * len(name) < len(asked):
        return False
    same = any(sorted(form(name)) == sorted(form(asked)) for form in (str, _undoubled))
    if same or "po" in asked or "po" not in name:
        return same or "po" not in asked
    ends = len(commonprefix((name, asked))) + len(commonprefix((name[::-1], asked[::-1])))
    return max(len(name), len(asked)) - ends <= 1


def _undoubled(word: str) -> str:
    return "".join(letter for letter, _ in groupby(word))


def _here(remedy: str) -> str:
    return f"here: {remedy}" if remedy.startswith(("--", _OWN_COMMAND)) else remedy
