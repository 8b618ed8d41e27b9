"""With LoRA, an export holds the merged weights and, in ``adapter/``, what PEFT loads onto the base model; what an
engine that takes adapters is sent is what the proof of the weight sync reads."""
from pathlib import Path

import torch
from peft import PeftModel
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightrft.config.schema import StrategyConfig
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.lora import add_lora
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.strategy import get_strategy


def test_merged_and_adapter_agree(tmp_path: Path) -> None:
    for name in ("single", "fsdp"):
        strategy = get_strategy(StrategyConfig(strategy=name))
        strategy.setup()
        hf = Qwen2ForCausalLM(
            Qwen2Config(vocab_size=65, hidden_size=32, intermediate_size=51, num_hidden_layers=2, num_attention_heads=2,
                        num_key_value_heads=1))
        hf.save_pretrained(tmp_path / "base")
        prepared = strategy.prepare(ActorLanguage(add_lora(hf, 4, 8, 0.0, ["all-linear"])), OptimSpec(1e-3))
        for key, param in prepared.optimizer.owners.items():
            if "lora_B" in key:
                torch.nn.init.constant_(param, 0.05)
        apart = {one: tensor.clone() for one, tensor in strategy.full_params(prepared.model, 1 << 20, False)}
        parts = {one: part.pieces[0].tensor.view(part.shape) for one, part in strategy.own_slices(prepared.model)}
        assert list(parts) == list(apart) and all(torch.equal(parts[one], apart[one]) for one in apart)
        strategy.save_model(prepared, tmp_path / name)
        strategy.teardown()
        assert len({file.stat().st_mode for file in (tmp_path / name / "adapter").iterdir()}) == 1, "that of the umask"
        merged = Qwen2ForCausalLM.from_pretrained(tmp_path / name)
        base = PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained(tmp_path / "base"),
                                         tmp_path / name / "adapter")
        ids = torch.arange(10)[None]
        with torch.no_grad():
            assert torch.allclose(merged(ids).logits, base(ids).logits, atol=1e-6)
            with base.disable_adapter():
                assert (merged(ids).logits - base(ids).logits).abs().max() > 1e-2
