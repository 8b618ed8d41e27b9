"""Reward models that see: pairs with pictures go through the same trainer."""
import io

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft.config.cli import parse_config
from lightrft.config.prm_schema import PRMConfig
from lightrft.config.rm_schema import RMConfig
from lightrft.datasets.rows import DataError, hold_rows
from lightrft.models.loader import load_scorer
from lightrft.models.tokenizer import load_tokenizer
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import runs, tiny_vision
from lightrft.trainer.dpo_trainer import DPOTrainer
from lightrft.trainer.model_media import open_media
from lightrft.trainer.prm_trainer import PRMTrainer
from lightrft.trainer.rm_trainer import RMTrainer

no_picture = runs.no_picture

pytest.importorskip("torchvision")
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{% if p.type == 'image' %}" + tiny_vision.PICTURE +
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
    trainer, media = trained(tmp_path, RMConfig, RMTrainer, rows)
    with pytest.raises(DataError, match="row 0:4: its answers have different media"):
        DPOTrainer.read(trainer.config, trainer.tokenizer, "train", media)
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
        assert (together[8] - together[9]).abs() > 1e-4
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert together.abs().min() > 0


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
