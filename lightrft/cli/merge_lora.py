"""Merge a LoRA adapter into its model: ``lightrft merge_lora --model_path M --lora_path ADAPTER --output_path OUT``."""
import argparse
from collections.abc import Sequence
from pathlib import Path

from lightrft.cli.export import check_empty
from lightrft.config.cli import exit_on_config_error
from lightrft.utils.errors import first_line, UserError

PROG = "lightrft merge_lora"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=PROG, description="Merge a LoRA adapter into its model.")
    parser.add_argument("--model_path", required=True, metavar="MODEL", help="the model that the adapter was made for")
    parser.add_argument(
        "--lora_path", required=True, type=Path, metavar="ADAPTER",
        help="folder of the adapter, with adapter_config.json; a run of this library has it in "
        "SAVE_PATH/hf/adapter")
    parser.add_argument("--output_path", required=True, type=Path, metavar="OUT",
                        help="folder of the merged model; it must not exist or be empty")
    parser.add_argument("--is_rm", action="store_true", help="the model is a reward model, a sequence classifier")
    parser.add_argument("--bf16", action="store_true", help="write bfloat16 (default: float32)")
    words = parser.parse_args(argv)
    with exit_on_config_error(PROG):
        merge(words.model_path, words.lora_path, words.output_path, words.is_rm, words.bf16)
    print(f"model written: {words.output_path}")


def merge(model: str, adapter: Path, out: Path, is_rm: bool = False, bf16: bool = False) -> None:
    """Write ``model`` with ``adapter`` merged, in float32 before it is rounded, to ``out``, with its tokenizer.

    Raises:
        UserError: a folder is none of these, the adapter does not fit the model, or ``out`` is not empty.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    from lightrft.models.loader import load_exported
    from lightrft.models.tokenizer import load_tokenizer, save_tokenizer
    check_empty(out)
    if not (adapter / "adapter_config.json").is_file():
        raise UserError(f"--lora_path {adapter}: no adapter_config.json is there; give the folder of an adapter")
    load = AutoModelForSequenceClassification.from_pretrained if is_rm else load_exported
    base = load(model, dtype=torch.float32)
    try:
        joined = PeftModel.from_pretrained(base, adapter)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"--lora_path {adapter}: does not fit {model}: {first_line(error)}") from error
    merged = joined.merge_and_unload()
    merged.to(torch.bfloat16 if bf16 else torch.float32).save_pretrained(out)
    save_tokenizer(load_tokenizer(model), out, model)


if __name__ == "__main__":
    main()
