"""Heads of reward models: pooling, depth, scale, several standards, their names, adapters."""
import json
import math
from statistics import mean

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from lightrft.cli.export import export
from lightrft.cli.merge_lora import merge
from lightrft.config.options import ConfigError
from lightrft.config.rm_schema import RewardModelConfig
from lightrft.datasets.rows import hold_rows
from lightrft.models.loader import load_reward_model, load_scorer
from lightrft.models.tokenizer import load_tokenizer
from lightrft.preflight.validate import validate
from lightrft.tests.support import reward_model_runs, runs
from lightrft.tests.support.preference_runs import metrics
from lightrft.tests.support.reward_model_runs import alone, config_of, PACK, ROWS, trainer_of
from lightrft.trainer.offline.rm_trainer import RMTrainer
from lightrft.types import Experience
from lightrft.utils.errors import UserError

no_picture, base = runs.no_picture, reward_model_runs.base


def with_head(base, **options):
    """A reward model whose new head is not zero."""
    model = load_reward_model(RewardModelConfig(pretrain=str(base), **options))
    draw = torch.Generator().manual_seed(0)
    for module in (model.hf_model.score, *([model.hf_model.pool] if model.head.pooling == "attn" else [])):
        module.weight.data.normal_(generator=draw)
    return model


def test_attention_pooling_is_a_softmax_over_the_tokens_of_a_sequence(base, tmp_path):
    model = with_head(base, pooling_method="attn").eval()
    found = model(PACK)
    for i, exp in enumerate(PACK.split([[0], [1], [2]])):
        hidden = model.hidden_states(exp)
        weights = (hidden @ model.hf_model.pool.weight[0]).softmax(0)
        wanted = model.hf_model.score((weights[:, None] * hidden).sum(0))
        torch.testing.assert_close(found[i], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer, kept", [(0, 0), (1, 1), (2, 2), (-1, 2), (-2, 1)])
def test_probing_layer_cuts_the_layers_above(base, layer, kept):
    model = with_head(base, probing_layer=layer).eval()
    assert len(model.hf_model.model.layers) == kept == model.config.num_hidden_layers
    whole = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    states = whole.model(PACK.token_ids[None, :3], output_hidden_states=True).hidden_states
    normed = states[kept] if kept == 2 else whole.model.norm(states[kept])  # the last one is normed already
    torch.testing.assert_close(model.hidden_states(PACK)[:3], normed[0], rtol=1e-4, atol=1e-5)


def test_layers_that_the_model_does_not_have(base):
    for layer in (3, -4):
        with pytest.raises(UserError, match=rf"--probing_layer {layer}: the model has 2 layers; give 0 .* to 2, or -1"):
            with_head(base, probing_layer=layer)


def test_the_scale_is_learnt_and_only_of_training(base, tmp_path):
    model = with_head(base, scale_for_train=True)
    scaled, plain = model.train()(PACK), model.eval()(PACK)
    torch.testing.assert_close(scaled, plain / 0.07, rtol=1e-4, atol=1e-4)
    trainer = trainer_of(config_of(base, tmp_path, scale_for_train=True, max_steps=3))
    trainer.fit()
    assert trainer.scorer.scale.log.item() != pytest.approx(2.6593, abs=1e-4)
    assert not any("scale" in name for name in load_file(tmp_path / "hf" / "model.safetensors"))


def two_head_loss(trainer):
    """The mean over pairs of the mean over their known heads, one head of one pair at a time."""
    with torch.no_grad():
        gaps = trainer.scorer.eval()(trainer.pack(trainer.eval_rows).exp).unflatten(0, (-1, 2)).diff(dim=1)[:, 0].neg()
    losses, default = [], trainer.config.train.margin
    for pair, gap in zip(trainer.eval_rows, gaps.tolist(), strict=True):
        one = [(gap[0], 0.5, 0.0) if pair.tie else (gap[0], 1.0, pair.margin or default)]
        if "short" in pair.heads:
            known = pair.heads["short"]  # the margin of a row is of the first head
            one += [(gap[1], known, 0.0 if known == 0.5 else default)]
        losses += [mean(-p * log_sigmoid(d - m) - (1 - p) * log_sigmoid(-d - m) for d, p, m in one)]
    return mean(losses)


def log_sigmoid(number):
    return -math.log1p(math.exp(-number))


def test_several_heads_learn_from_their_labels(base, tmp_path):
    trainer = trainer_of(
        config_of(base, tmp_path, heads_types=["preference", "short"], value_head_prefix="value_head", margin=0.25))
    labels = trainer.pack(trainer.eval_rows).exp.labels[::2]
    assert labels[:4, 1].nan_to_num(9.0).tolist() == [1.0, 0.0, 0.5, 9.0] and labels[5].tolist()[0] == 0.5
    trainer.fit()
    assert "eval/accuracy_short" in metrics(tmp_path)[-1]
    assert trainer.evaluate()["eval/loss"] == pytest.approx(two_head_loss(trainer), rel=1e-4)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights["value_head.weight"].shape == (2, 32) and weights["value_head.weight"].equal(weights["score.weight"])
    scorer = load_scorer(str(tmp_path / "hf"))
    assert scorer.head.names == ["preference", "short"]
    torch.testing.assert_close(scorer(PACK), trainer.scorer.eval()(PACK))
    hf = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert hf.config.id2label == {0: "preference", 1: "short"}
    answers = [trainer.eval_rows[0].chosen, trainer.eval_rows[1].rejected]
    wanted = scorer(Experience.pack([answer.token_ids for answer in answers]))
    torch.testing.assert_close(alone(hf, answers), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("names,reason", [
    ([], "--heads_types is empty: .* at least one"), (["short", "short"], "'short' is there twice"),
    (["preference", "shrt"], "row 1 of training data 1: the column 'heads' has 'short', .* learn from it are 'shrt'"),
    (["preference", "short", "kind"], "no row of the training data labels 'kind' .labelled: 'short'.*drop the score"),
])  # yapf: disable
def test_heads_that_would_learn_nothing_are_refused(names, reason, base, tmp_path):
    config = config_of(base, tmp_path, heads_types=names)
    with pytest.raises(UserError, match=reason):
        RMTrainer.read(config, load_tokenizer(str(base)), "train", None)


def test_held_out_pairs_need_no_label_of_every_head_and_what_none_has_is_no_metric(base, tmp_path):
    """Nor a preference: of ties there is no accuracy, also in training; zero would say that each is wrong."""
    ties = [{**row, "tie": True, "heads": None} for row in ROWS[:8]]
    names = ["preference", "short"]
    trainer = trainer_of(config_of(base, tmp_path, heads_types=names, eval_data=[hold_rows(ties)], max_steps=1))
    got = trainer.evaluate()
    assert got["eval/loss"] > 0 and not [name for name in got if "accuracy" in name]
    assert trainer_of(config_of(base, tmp_path, train_data=[hold_rows(ties)])).train_step().get("rm/accuracy") is None
    for wrong, said in (({"heads": {"shrt": "chosen"}}, "the column 'heads' has 'shrt'"), ({"margin":
                                                                                            -1}, "the margin -1 is")):
        with pytest.raises(UserError, match=f"row 1 of evaluation data 1: {said}"):
            trainer_of(config_of(base, tmp_path, heads_types=names, eval_data=[hold_rows([ROWS[0] | wrong])]))


@pytest.mark.parametrize("flag,given,typed", [("heads_types", ["short", "preference"], "short,preference"),
                                              ("pooling_method", "last", "last"),
                                              ("value_head_prefix", "score", "score")])  # yapf: disable
def test_a_reward_model_is_trained_further_with_the_head_that_it_has(flag, given, typed, base, tmp_path):
    """A head of another name would start from zeros, one in another order would take each standard for another."""
    has = {"heads_types": ["preference", "short"], "pooling_method": "attn", "value_head_prefix": "value_head"}
    load_reward_model(RewardModelConfig(pretrain=str(base), **has)).hf_model.config.save_pretrained(tmp_path)
    kept = {"heads_types": "preference,short"}.get(flag, has[flag])
    with pytest.raises(UserError, match=f"--{flag} {typed}: the reward model .* has {kept}, .* give --{flag} {kept}"):
        load_reward_model(RewardModelConfig(pretrain=str(tmp_path), **has | {flag: given}))


@pytest.mark.parametrize("prefix", ["", "model", "lm_head", "score.weight", "a b", "score."])
def test_what_cannot_be_the_name_of_a_head_is_refused(prefix, base, tmp_path):
    with pytest.raises(ConfigError, match="--value_head_prefix .*: must be the name of a module other than"):
        validate(config_of(base, tmp_path, value_head_prefix=prefix), 1)
    validate(config_of(base, tmp_path, value_head_prefix="v_head.summary"), 1)


def test_a_classifier_of_another_program_keeps_its_head_or_is_refused(base, tmp_path):
    """Its own ``score`` is found whatever the head is called from then on; one of another name has to be named."""
    labels = {0: "short", 1: "preference"}
    AutoModelForSequenceClassification.from_pretrained(base, id2label=labels).save_pretrained(tmp_path)
    load = lambda **given: load_reward_model(RewardModelConfig(pretrain=str(tmp_path), **given))  # noqa: E731
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    heads = {"heads_types": ["short", "preference"]}
    assert load(**heads, value_head_prefix="v").hf_model.score.weight.equal(weights["score.weight"])
    for names in (["preference", "short"], ["preference"]):
        with pytest.raises(UserError, match=f"--heads_types {','.join(names)}: .* has the scores short,preference"):
            load(heads_types=names)
    save_file({name.replace("score", "v_head.summary"): one for name, one in weights.items()}, file, {"format": "pt"})
    with pytest.raises(UserError, match="has no score.weight, but v_head.summary.weight,.*_prefix v_head.s"):
        load(**heads)
    found = load(**heads, value_head_prefix="v_head.summary")
    assert found.hf_model.score.weight.equal(weights["score.weight"])


@pytest.mark.parametrize("head", [{}, {"pooling_method": "attn", "heads_types": ["preference", "short"],
                                       "value_head_prefix": "value_head", "probing_layer": 1}])  # yapf: disable
def test_lora_trains_its_head_and_exports_merged_weights_and_an_adapter_with_the_head(base, tmp_path, head):
    trainer = trainer_of(config_of(base, tmp_path, lora_rank=2, max_steps=3, eval_steps=3, disable_ckpt=False, **head))
    trained = {name for name, param in trainer.scorer.named_parameters() if param.requires_grad}
    adapters, whole = (14, 2) if head else (28, 1)
    assert sum("lora_" in name for name in trained) == adapters and len(trained) == adapters + whole, "and the head"
    trainer.fit()
    scorer = load_scorer(str(tmp_path / "hf"))
    assert scorer.hf_model.score.weight.abs().max() > 0
    torch.testing.assert_close(scorer(PACK), trainer.scorer.eval()(PACK), rtol=1e-4, atol=1e-4)
    export(tmp_path, tmp_path / "again")
    merge(str(base), tmp_path / "hf" / "adapter", tmp_path / "merged", is_rm=True)
    own, found = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "merged"))
    assert own.keys() == found.keys()
    for name, weight in own.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
    written = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("hf", "again")]
    torch.testing.assert_close(*written)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "merged")]
    assert configs[0] == configs[1] and configs[0]["reward_model"]["std"] > 0
    with pytest.raises(UserError, match="is the adapter of a reward model; add --is_rm"):
        merge(str(base), tmp_path / "hf" / "adapter", tmp_path / "other")
    if head:  # a classifier of Hugging Face would read the last token
        assert "import load_scorer\n" in (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
        for labels in ({}, {"num_labels": 1}, {"num_labels": 2}, {"num_labels": 3}):
            with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
                AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", **labels)
    else:
        answer = trainer.eval_rows[0].chosen
        classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        alike = PeftModel.from_pretrained(classifier, tmp_path / "hf" / "adapter")
        torch.testing.assert_close(alone(alike, [answer]), trainer.scorer(Experience.pack([answer.token_ids])),
                                   rtol=1e-4, atol=1e-4)  # yapf: disable
