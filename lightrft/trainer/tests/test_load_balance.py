"""The load-balancing loss is that of transformers on the padded batch, however the batch is cut, in SFT and in RL."""
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lightrft.config.cli import parse_config
from lightrft.config.sft_schema import SFTConfig
from lightrft.models.tokenizer import load_tokenizer
from lightrft.tests.support import preference_runs, runs, tiny
from lightrft.tests.support.invariants import build, gradients, largest_gap, make_rollout
from lightrft.trainer.offline.sft_trainer import SFTTrainer
from lightrft.utils.errors import UserError

COEF = 0.7


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Prompts, a dense model in ``dense``, and a mixture of four experts, two of which a token takes, in ``model``."""
    folder = runs.write_home(tmp_path_factory.mktemp("home"))
    (folder / "model").rename(folder / "dense")
    tiny.save_model(folder / "model", "mixtral", initializer_range=0.5)
    return folder


def sft(home, folder, **options):
    """A trainer on texts of several lengths; every token is learnt."""
    given = {"pretrain": str(home / "model"), "train_data": [str(home / "train.jsonl")], "save_path": str(folder),
             "train_batch_size": 5, "max_steps": 1, "pretrain_mode": True, "aux_loss_coef": COEF}  # yapf: disable
    config = parse_config([], defaults=given | options, tree=SFTConfig).config
    strategy, tokenizer = runs.strategy_of(config), load_tokenizer(config.model.pretrain)
    rows = SFTTrainer.read(config, tokenizer, "train", None)
    return SFTTrainer(config, strategy, partial(SFTTrainer.load, config), tokenizer, rows, rows)


def stepped(trainer):
    """Metrics and gradients of one step."""
    found, original = {}, trainer.strategy.optimizer_step

    def spy(prepared, max_norm):
        found.update({name: p.grad.clone() for name, p in prepared.model.named_parameters()})
        return original(prepared, max_norm)

    trainer.strategy.optimizer_step = spy
    return trainer.train_step(), found


def plain(home, rows):
    """NLL and load-balancing loss of a stock model on the padded batch."""
    model, longest = AutoModelForCausalLM.from_pretrained(home / "model"), max(len(row.token_ids) for row in rows)
    ids = torch.tensor([row.token_ids + [0] * (longest - len(row.token_ids)) for row in rows])
    mask = torch.tensor([[1] * len(row.token_ids) + [0] * (longest - len(row.token_ids)) for row in rows])
    out = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    logprobs = out.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    aux = load_balancing_loss_func(out.router_logits, 4, 2, mask)
    (-logprobs[mask[:, 1:] > 0].mean() + COEF * aux).backward()
    return aux.item(), {f"model.{name}": p.grad for name, p in model.named_parameters()}


def test_sft_has_the_loss_of_the_padded_batch(home, tmp_path):
    aux, expected = plain(home, sft(home, tmp_path).loader.ahead())
    for rows in (5, 2, 1):
        trainer = sft(home, tmp_path, micro_train_batch_size=rows)
        metrics, grads = stepped(trainer)
        assert metrics["sft/aux_loss"] == pytest.approx(aux, rel=1e-5), rows
        assert largest_gap(grads, expected) < 1e-4, rows
    assert set(trainer.evaluate()) == {"eval/loss"}, "held-out rows are judged by their NLL"
    assert trainer.actor.model.routing is None or not trainer.actor.model.routing.probs.requires_grad


def test_rl_has_the_same_loss_in_every_cut_and_with_shared_prompts(home, tmp_path):
    found = []
    for options in ({}, {"micro_train_batch_size": 1}, {"share_prompts": False}):
        trainer = build(home, tmp_path, **{"aux_loss_coef": COEF, "micro_train_batch_size": 0, "zero_spread": 10.0,
                                           "bf16": False} | options)  # yapf: disable
        rollout = make_rollout(trainer)
        found.append(gradients(trainer, rollout))
        trainer.maker.rewards.shutdown()
    (metrics, grads), *others = found
    assert metrics["rollout/dropped_samples"] == 0, "a sample without an advantage has a load"
    router = next(name for name in grads if "gate" in name)
    assert grads[router].abs().max() > 1e-3, "no advantage: the gradient is that of the balance"
    for other in others:
        assert other[0]["policy/aux_loss"] == pytest.approx(metrics["policy/aux_loss"], rel=1e-5)
        assert largest_gap(other[1], grads) < 1e-4
    exp = rollout.exp
    logits = AutoModelForCausalLM.from_pretrained(home / "model")
    one = [logits(input_ids=exp.select([i]).token_ids[None], output_router_logits=True).router_logits for i in range(8)]
    whole = load_balancing_loss_func(tuple(torch.cat(layer) for layer in zip(*one)), 4, 2)
    assert metrics["policy/aux_loss"] == pytest.approx(whole.item(), rel=1e-5)


OTHERS = {"dpo": ("pairs", {}), "kto": ("judged", {}), "rm": ("pairs", {}), "kd": ("judged", {"kd_top_k": 3}),
          "prm": ("steps", {"placeholder_token": "#", "reward_tokens": ["+", "-"]})}  # yapf: disable


@pytest.mark.parametrize("command", OTHERS)
def test_every_other_trainer_has_the_same_loss_in_every_cut(command, home, tmp_path):
    """Equal to that of transformers for the sequences one by one; those of a reference or of the KL do not count."""
    preference_runs.write_rows(home)
    data, options = OTHERS[command]
    options = options | ({"teacher_model": str(home / "dense")} if command == "kd" else {})
    model, found = AutoModelForCausalLM.from_pretrained(home / "model"), []
    for rows in (0, 1):
        trainer = preference_runs.Rig(command, data).trainer_of(home, tmp_path, aux_loss_coef=COEF, eval_steps=0,
                                                                micro_train_batch_size=rows, **options)
        exp = trainer.pack(trainer.loader.ahead()).exp
        found.append(stepped(trainer))
    (metrics, grads), (again, others) = found
    one = [model(input_ids=exp.select([i]).token_ids[None], output_router_logits=True).router_logits
           for i in range(exp.num_seqs)]  # yapf: disable
    whole = load_balancing_loss_func(tuple(torch.cat(layer) for layer in zip(*one)), 4, 2).item()
    assert metrics[f"{command}/aux_loss"] == pytest.approx(whole, rel=1e-5)
    assert again[f"{command}/aux_loss"] == pytest.approx(whole, rel=1e-5) and largest_gap(grads, others) < 1e-4


def test_a_dense_model_is_refused(home, tmp_path):
    with pytest.raises(UserError, match="--aux_loss_coef 0.7: Qwen2ForCausalLM is no mixture of experts"):
        sft(home, tmp_path, pretrain=str(home / "dense"))
    with pytest.raises(UserError, match="is no mixture of experts"):
        build(home, tmp_path, pretrain=str(home / "dense"), aux_loss_coef=0.1)
