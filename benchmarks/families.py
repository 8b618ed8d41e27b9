"""Every text family of the installed transformers: packed as alone, or refused at load by name.

    python -m benchmarks.families [MODEL_TYPE ...]

A small copy of the default config of each family is asked for the log-probs of three sequences, in one row and one by
one (:mod:`lightrft.models.packing_check`), on the CPU, without a download. The table is that of ``docs/families.md``.
"""
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, logging as hf_logging, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightrft.models.architectures import modality_of
from lightrft.models.packing_check import Gap, packing_gap
from lightrft.utils.errors import UserError

DECODER = {"is_decoder": True, "is_encoder_decoder": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}
DECODERS = """bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart bert bert-generation
big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer
xlm-roberta xlm-roberta-xl xmod reformer""".split()
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "topk_group": 1, "n_group": 1}
SOUND = (("text_encoder", "t5"), ("audio_encoder", "encodec"))  # configs take their model types out of these
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CAUSES = {
    "KeyError: 'packed'": "its attention cannot be replaced",
    " called packed attention ": "not all layers are attention that can be replaced",
    "got no packing": "its layers keep keyword arguments from attention",
    "cannot be checked": "no small copy of its default config runs",
}
VALUES: dict[str, dict[str, Any]] = {  # of families whose default config is no decoder, or not one that runs
    **dict.fromkeys(DECODERS, DECODER),
    **dict.fromkeys(("nemotron", "ministral", "hunyuan_v1_dense", "hunyuan_v1_moe"), HEADS),
    **dict.fromkeys(("deepseek_v2", "dots1"), EXPERTS),
    **{name: {part: {"model_type": kind} for part, kind in (*SOUND, ("decoder", f"{name}_decoder"))}
       for name in ("musicgen", "musicgen_melody")},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8}},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
                                         "vocab_size_per_layer_input": 0}},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "xmod": DECODER | {"default_language": "en_XX"},
}


@dataclass(frozen=True)
class Family:
    """What the check says of a family: its ``gap``, or why it is refused."""
    name: str
    gap: Gap | None = None
    refused: str = ""

    @classmethod
    def of(cls, name: str) -> "Family":
        """Try the family of the model type ``name``."""
        config = AutoConfig.for_model(name, **VALUES.get(name, {}))
        if not config.is_encoder_decoder:
            config = config.get_text_config()
        try:
            modality_of(config, name)
            return cls(name, gap=packing_gap(config))
        except UserError as error:
            return cls(name, refused=_reason(str(error), config))

    @property
    def row(self) -> str:
        """Its row of the table; a gap above 1e-5 comes with the rounding of the family's own code."""
        verdict = f"refused: {self.refused}"
        if self.gap is not None:
            packed, rounding = (f"{nats:.0e}" for nats in self.gap)
            verdict = f"equal ({packed})" if self.gap.packed <= 1e-5 else \
                f"equal to rounding ({packed}; alone, float32 differs from float64 by {rounding})"
        return f"| `{self.name}` | {verdict} |"


def _reason(text: str, config: PretrainedConfig) -> str:
    """Shorten the error of a family to its cause."""
    cause = text.split(f"model type {config.model_type!r} ")[-1].split("; give a ")[0]
    for words, short in CAUSES.items():
        if words in cause:
            return short
    return cause.split("(by ")[0].strip().removeprefix("cannot run on packed sequences: ").replace("|", "/")[:110]


def main(names: list[str]) -> int:
    """Print the table; return the number of families that are neither equal nor refused."""
    warnings.simplefilter("ignore")
    hf_logging.set_verbosity(logging.CRITICAL)
    print("| model type | packed sequences against each alone |\n|---|---|")
    wrong = 0
    for name in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        family = Family.of(name)
        wrong += family.gap is not None and not family.gap.is_rounding
        print(family.row, flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
