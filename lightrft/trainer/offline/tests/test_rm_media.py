"""Reward models that see: pairs with pictures go through the same trainer."""
import io

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lightrft.config.cli import parse_config
from lightrft.config.preference_schema import DPOConfig
from lightrft.config.rm_schema import PRMConfig, RMConfig
from lightrft.config.sft_schema import SFTConfig
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.models.loader import load_scorer
from lightrft.models.tokenizer import load_tokenizer
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import media_runs, runs, tiny_vision
from lightrft.tests.support.preference_runs import metrics
from lightrft.tests.support.tiny_vision import VIDEO
from lightrft.trainer.offline.dpo_trainer import DPOTrainer
from lightrft.trainer.model_media import open_media
from lightrft.trainer.offline.prm_trainer import PRMTrainer
from lightrft.trainer.offline.rm_trainer import RMTrainer
from lightrft.trainer.offline.sft_trainer import SFTTrainer

no_picture = runs.no_picture

pytest.importorskip("torchvision")
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{% if p.type == 'image' %}" + tiny_vision.PICTURE +
            "{% elif p.type == 'video' %}" + VIDEO +
            "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}")


def picture(seed):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def trained(folder, tree, kind, rows, **options):
    """A trainer after two steps on rows with pictures, and the source of these."""
    tiny_vision.save_model(folder / "m", "qwen2_5_vl", True)
    (folder / "template").write_text(TEMPLATE, encoding="utf-8")
    given = {"pretrain": str(folder / "m"), "train_data": [hold_rows(rows)], "eval_data": [hold_rows(rows)],
             "chat_template": str(folder / "template"), "save_path": str(folder / "run"), "max_steps": 2,
             "train_batch_size": 4, "learning_rate": 1e-2, "lr_warmup_ratio": 0.0,
             "disable_ckpt": True}  # yapf: disable
    config = parse_config([], defaults=given | options, tree=tree).config
    strategy = get_strategy(config.strategy)
    strategy.setup()
    tokenizer = load_tokenizer(config.model.pretrain, config.data.chat_template)
    media = open_media(config.model.pretrain, tokenizer, config.data.as_data_config())
    train, held_out = (kind.read(config, tokenizer, split, media) for split in ("train", "eval"))
    trainer = kind(config, strategy, lambda: kind.load(config), tokenizer, train, held_out, media=media)
    trainer.fit()
    return trainer, media


def test_pairs_with_pictures(tmp_path):
    """Rewards depend on the picture, of the prompt or the answer itself, not on what shares a pass; the exported model
    gives the same ones."""
    rows = [{"prompt": [{"role": "user", "content": "<image>What?"}], "images": [picture(i)], "chosen": "a",
             "rejected": "b" * (1 + i)} for i in range(4)]  # yapf: disable
    drawn = {"chosen": "<image>", "rejected": "<image>"}
    rows += [{"prompt": rows[0]["prompt"], "images": [picture(i) for i in (0, 5, 6)], **drawn}]
    chats = [[*rows[0]["prompt"], {"role": "assistant", "content": said}] for said in "ab"]
    swift = [{"messages": chats[0], "images": [picture(0)], "rejected_images": [picture(5)]} | said
             for said in ({"rejected_messages": chats[1]}, {"rejected_response": "b"}, {})]  # yapf: disable
    trainer, media = trained(tmp_path, RMConfig, RMTrainer, rows + swift)
    with pytest.raises(DataError, match="row 5 of training data 1: its answers hold different media"):
        DPOTrainer.read(trainer.config, trainer.tokenizer, "train", media)
    trainer.config.data.train_data = [hold_rows(swift)]
    for pairs in (trainer.eval_rows[5:], DPOTrainer.read(trainer.config, trainer.tokenizer, "train", media)):
        assert [pair.chosen.media for pair in pairs] == [trainer.eval_rows[0].chosen.media] * 3
        assert [pair.rejected.media for pair in pairs] == [trainer.eval_rows[4].chosen.media[1:]] * 3
        assert [pair.chosen.token_ids == pair.rejected.token_ids for pair in pairs] == [False, False, True]
    exp = trainer.pack(trainer.eval_rows).exp
    pair = trainer.eval_rows[4]
    assert pair.chosen.media[0] == pair.rejected.media[0] != pair.chosen.media[1] != pair.rejected.media[1]
    assert pair.chosen.token_ids == pair.rejected.token_ids and pair.chosen.token_ids[-1] == exp.token_ids[-1]
    image = trainer.scorer.config.image_token_id
    assert not any(kept for token, kept in zip(pair.chosen.token_ids, pair.chosen.loss_mask) if token == image)
    model = trainer.scorer.eval()
    with torch.no_grad():
        together = model(exp)
        alone = torch.cat([model(exp.select([i])) for i in range(exp.num_seqs)])
        other = exp.select([0, 1])
        other.media = exp.media[2:4]
        scorer = load_scorer(str(tmp_path / "run" / "hf")).eval()
        scorer.modality.media = media
        torch.testing.assert_close(scorer(exp), together, rtol=1e-4, atol=1e-5)
        assert (model(other) - together[:2]).abs().min() > 1e-4
        assert ((together[8::2] - together[9::2]).abs() > 1e-4).all()
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert together.abs().min() > 0


def test_cached_log_probs_are_those_of_pictures_processed_alike(tmp_path):
    """The option changes what the pictures are to the model, and not the number of their tokens."""
    rows = [{"prompt": [{"role": "user", "content": "<image>What?"}], "images": [picture(i)], "chosen": "a",
             "rejected": "b" * (1 + i)} for i in range(4)]  # yapf: disable
    margins, tokens, cache = [], [], {"ref_cache_dir": str(tmp_path / "cache")}
    for i, options in enumerate([cache, cache | {"max_pixels": 4200}, {"max_pixels": 4200}]):
        trainer, _ = trained(tmp_path / str(i), DPOConfig, DPOTrainer, rows, max_steps=1, **options)
        margins.append(metrics(tmp_path / str(i) / "run")[0]["dpo/rewards/margin"])
        tokens.append(trainer.pack(trainer.eval_rows).exp.num_tokens)
    assert len({*tokens}) == 1 and margins == pytest.approx([0, 0, 0], abs=1e-6), "the reference is the policy"


def test_steps_after_a_picture(tmp_path):
    """Judgements of steps depend on the picture, not on what shares a pass."""
    rows = [{"prompt": [{"role": "user", "content": "<image>What?"}], "images": [picture(i)], "completions": ["a", "b"],
             "labels": [True, i > 1]} for i in range(4)]  # yapf: disable
    trainer, _ = trained(tmp_path, PRMConfig, PRMTrainer, rows, placeholder_token="#", reward_tokens=["+", "-"])
    exp = trainer.pack(trainer.eval_rows).exp

    def judged(exp):
        return trainer.actor.model.eval()(exp, read=lambda logprobs, part: (logprobs, ))[0]

    with torch.no_grad():
        together = judged(exp)
        alone = torch.cat([judged(exp.select([i])) for i in range(4)])
        other = exp.select([0])
        other.media = exp.media[1:2]
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
        assert (judged(other) - together[:2]).abs().min() > 1e-4


@pytest.mark.parametrize("family, kind, tower", [("qwen2_5_vl", "image", "visual"),
                                                 ("qwen2_audio", "audio", "audio_tower")])  # yapf: disable
def test_sft_teaches_the_tower_that_sees_or_hears(family, kind, tower, tmp_path):
    """The loss of the answers reaches every matrix of the tower of their prompts."""
    options, made = media_runs.write_home(tmp_path, family), {"image": media_runs.picture, "audio": media_runs.sound}
    rows = [{"prompt": [{"role": "user", "content": f"<{kind}>?"}], f"{kind}s": [made[kind](i)], "completion": "ab"[i]}
            for i in (0, 1)] * 2  # yapf: disable
    trained(tmp_path, SFTConfig, SFTTrainer, rows, pretrain=str(tmp_path / "model"), max_steps=1, l2=0.0,
            chat_template=options["chat_template"])
    before, after = ({
        name.rpartition(f"{tower}.")[2]: weight for name, weight in load_file(file).items() if tower in name
    } for file in (tmp_path / "model/model.safetensors", tmp_path / "run/hf/model.safetensors"))
    matrices = [name for name, weight in before.items() if weight.dim() > 1]
    taught = [name for name in matrices if not torch.equal(before[name], after[name])]
    assert before.keys() == after.keys() and len(matrices) > 4, "the tower is not exported"
    assert len(taught) >= 0.9 * len(matrices), {*matrices} - {*taught}


@pytest.mark.parametrize("tree, kind", [(SFTConfig, SFTTrainer), (DPOConfig, DPOTrainer), (RMConfig, RMTrainer)])
def test_videos(tree, kind, tmp_path):
    """Two steps change the tower."""
    answers = {"output": "a"} if kind is SFTTrainer else {"chosen": "a", "rejected": "bb"}
    rows = [{"prompt": [{"role": "user", "content": "<video>What?"}], "videos": [media_runs.video(i)], **answers}
            for i in range(4)]  # yapf: disable
    trainer, media = trained(tmp_path, tree, kind, rows)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "run/hf"))
    name = "visual.blocks.1.attn.qkv.weight"
    assert not torch.equal(after[name], before[name]) and media.most == {"video": 1}
