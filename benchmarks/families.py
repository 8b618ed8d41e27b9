"""Every text family of the installed transformers: packed as alone, or refused at load by name.

    python -m benchmarks.families [MODEL_TYPE ...]

A small copy of the default config of each family is asked for the log-probs of two sequences, in one row and one by one
(:mod:`lightrft.models.packing_check`), on the CPU, without a download. The table is that of ``docs/families.md``.
"""
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, logging as hf_logging, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightrft.models.architectures import modality_of
from lightrft.models.packing_check import NoCopy, packing_gap
from lightrft.utils.errors import UserError

DECODER = {"is_decoder": True, "is_encoder_decoder": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}
DECODERS = """bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart bert bert-generation
big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer
xlm-roberta xlm-roberta-xl xmod""".split()
CAUSES = {
    "KeyError: 'packed'": "its attention cannot be replaced",
    " called packed attention ": "not all layers are attention that can be replaced",
    "got no packing": "its layers keep keyword arguments from attention",
}
VALUES: dict[str, dict[str, Any]] = {  # of families whose default config is no decoder, or not one that runs
    **dict.fromkeys(DECODERS, DECODER),
    **dict.fromkeys(("nemotron", "ministral", "hunyuan_v1_dense", "hunyuan_v1_moe"), HEADS),
}


@dataclass(frozen=True)
class Family:
    """What is known of a family: ``gap`` in nats, or why there is none."""
    name: str
    gap: float | None = None
    refused: str = ""
    untried: str = ""

    @classmethod
    def of(cls, name: str) -> "Family":
        """Try the family of the model type ``name``."""
        try:
            config = AutoConfig.for_model(name, **VALUES.get(name, {})).get_text_config()
        except Exception as error:  # whatever a config raises
            return cls(name, untried=f"no default config ({type(error).__name__})")
        try:
            modality_of(config, name)
            return cls(name, gap=packing_gap(config))
        except UserError as error:
            return cls(name, refused=_reason(str(error), config))
        except NoCopy:
            return cls(name, untried="no small copy of the default config runs")

    @property
    def row(self) -> str:
        """Its row of the table."""
        verdict = f"equal ({self.gap:.0e})" if self.gap is not None else self.refused and f"refused: {self.refused}"
        return f"| `{self.name}` | {verdict or f'not tried: {self.untried}'} |"


def _reason(text: str, config: PretrainedConfig) -> str:
    """Shorten the error of a family to its cause."""
    cause = text.split(f"model type {config.model_type!r} ")[-1].split("; give a ")[0]
    for words, short in CAUSES.items():
        if words in cause:
            return short
    return cause.split("(by ")[0].strip().removeprefix("cannot run on packed sequences: ").replace("|", "/")[:110]


def main(names: list[str]) -> int:
    """Print the table; return the number of families that are neither equal to 1e-5, refused nor untried."""
    warnings.simplefilter("ignore")
    hf_logging.set_verbosity(logging.CRITICAL)
    print("| model type | two packed sequences against each alone |\n|---|---|")
    wrong = 0
    for name in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        family = Family.of(name)
        wrong += family.gap is not None and not family.gap <= 1e-5
        print(family.row, flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
