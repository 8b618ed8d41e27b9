"""Merge a LoRA adapter into its model: ``lightrft merge_lora --model_path M --lora_path ADAPTER --output_path OUT``."""
import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TYPE_CHECKING

from lightrft.cli.export import check_empty
from lightrft.config.cli import exit_on_config_error
from lightrft.utils.errors import first_line, meant_path, UserError
from lightrft.utils.hub import MORE_THAN_TENSORS, model_folder, read_pretrained

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

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
    parser.add_argument("--param_dtype", "--ds.param_dtype", choices=["bf16"], help="bf16: the same as --bf16")
    words = parser.parse_args(argv)
    with exit_on_config_error(PROG):
        merge(words.model_path, words.lora_path, words.output_path, words.is_rm, words.bf16 or bool(words.param_dtype))
    print(f"model written: {words.output_path}")


def merge(model: str, adapter: Path, out: Path, is_rm: bool = False, bf16: bool = False) -> None:
    """Write ``model`` with ``adapter`` merged, in float32 before it is rounded, to ``out``, with its tokenizer.

    Raises:
        UserError: a folder is none of these, the adapter does not fit the model, a head would be left untrained, or
            ``out`` is not empty.
    """
    import torch

    from lightrft.models.adapter_folder import without_adapter
    check_empty(out)
    if not (adapter / "adapter_config.json").is_file():
        near = "" if adapter.exists() else meant_path(adapter)
        raise UserError(f"--lora_path {adapter}: no adapter_config.json is there{near}; give the folder of an adapter")
    from lightrft.utils.file_mode import give_modes
    with without_adapter(model) as base:
        _merge(base, adapter, out, is_rm, torch.bfloat16 if bf16 else torch.float32)
    give_modes(out)


def _merge(model: str, adapter: Path, out: Path, is_rm: bool, dtype: "torch.dtype") -> None:
    """Write the merged model, whose folder ``model`` holds no adapter."""
    import torch
    from transformers import AutoConfig

    from lightrft.models.config_json import takes_media
    from lightrft.models.loader import load_exported
    from lightrft.models.reward_model import JUDGE, SCORES, STEPS
    from lightrft.models.tokenizer import load_tokenizer, save_tokenizer
    from lightrft.strategy.export import MODEL_CONFIG
    from lightrft.strategy.mtp import dropped_weights
    trained = _read(adapter / MODEL_CONFIG) if (adapter / MODEL_CONFIG).is_file() else {}
    if SCORES in trained:
        if not is_rm:
            raise UserError(f"--lora_path {adapter} is the adapter of a reward model; add --is_rm")
        _merge_trained(model, adapter, AutoConfig.for_model(**trained), out, dtype)
    elif is_rm and takes_media(model):
        _merge_trained(model, adapter, _with_one_score(model, adapter), out, dtype)
    else:
        base = _classifier(model, adapter) if is_rm else load_exported(model, dtype=torch.float32)
        merged: Any = _merged(base, model, adapter)
        for key in {STEPS, JUDGE} & trained.keys():
            setattr(merged.config, key, trained[key])
        merged.to(dtype)
        dropped = {name: tensor.to(dtype) for name, tensor in dropped_weights(merged)}
        merged.save_pretrained(out, state_dict=merged.state_dict() | dropped)
    save_tokenizer(load_tokenizer(model), out, model)


def _merged(base: "PreTrainedModel", model: str, adapter: Path) -> "PreTrainedModel":
    """Merge ``adapter`` into ``base``, the model at ``model``."""
    from peft import PeftModel
    _untie(base, adapter)
    try:
        joined: Any = PeftModel.from_pretrained(base, adapter)
        merged: PreTrainedModel = joined.merge_and_unload()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"--lora_path {adapter}: cannot be merged into {model}: {first_line(error)}") from error
    return merged


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _untie(base: "PreTrainedModel", adapter: Path) -> None:
    """Untie the head of ``base`` from the embedding if ``adapter`` changes one of the two: PEFT computes with it alone.

    Raises:
        UserError: one LoRA is for both.
    """
    from torch import nn
    embedding: Any = base.get_input_embeddings()
    head: Any = base.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    ends = [name for name, module in base.named_modules() if module is head or module is embedding]
    brought = [name for name in _brought(adapter) for end in ends if name.startswith((f"{end}.weight", f"{end}.lora_"))]
    if _read(adapter / "adapter_config.json").get("ensure_weight_tying") and any(".lora_" in name for name in brought):
        raise UserError(f"--lora_path {adapter}: one LoRA is for {' and '.join(ends)} (ensure_weight_tying), and PEFT "
                        "merges it wrongly. Use the adapter as it is, or train one with modules_to_save for them")
    if brought:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
        for config in (base.config, base.config.get_text_config()):
            config.tie_word_embeddings = False


def _brought(adapter: Path) -> "dict[str, torch.Tensor]":
    """Return the tensors of an adapter, by the names of PEFT without those of its wrappers."""
    from peft.utils.save_and_load import load_peft_weights
    try:
        tensors = load_peft_weights(str(adapter), device="cpu")
    except UnpicklingError as error:
        raise UserError(f"--lora_path {adapter}: adapter_model.bin is no plain pickle of tensors: "
                        f"{MORE_THAN_TENSORS}") \
            from error
    return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}


def _with_one_score(model: str, adapter: Path) -> "PretrainedConfig":
    """Return the config of the reward model that the ``adapter`` of another program makes of ``model``, which takes
    media, and for whose family transformers has no sequence classifier.

    Raises:
        UserError: the adapter has another head than one matrix for one score.
    """
    from lightrft.models.config_json import read_config
    from lightrft.models.reward_model import RewardHead
    head = {name: [*tensor.shape] for name, tensor in _brought(adapter).items() if ".lora_" not in name}
    if [*head] != ["score.weight"] or head["score.weight"][0] != 1:
        raise UserError(
            f"--lora_path {adapter}: besides LoRA it has {head or 'no head'}. For a vision or audio reward model, an "
            "adapter can be merged only if lightrft rm made it, or if its head is score.weight with one score. Merge "
            "others with the program that trained them, or train again with lightrft rm")
    config = read_config(model)
    RewardHead().write(config)
    return config


def _merge_trained(model: str, adapter: Path, config: "PretrainedConfig", out: Path, dtype: "torch.dtype") -> None:
    """Write the reward model with ``config`` that ``adapter`` makes of ``model``."""
    from lightrft.config.rm_schema import RewardModelConfig
    from lightrft.models.loader import load_reward_model
    from lightrft.models.reward_model import RewardHead
    from lightrft.strategy.export import write_model
    head = RewardHead.of(config, str(adapter))
    scorer = load_reward_model(
        RewardModelConfig(pretrain=model, heads_types=head.names, pooling_method=head.pooling,
                          value_head_prefix=head.prefix, probing_layer=config.get_text_config().num_hidden_layers))
    scorer.model = _merged(scorer.hf_model, model, adapter)
    scorer.model.config = config
    write_model(scorer, scorer.export_params(scorer.named_parameters()), out, dtype)


def _classifier(model: str, adapter: Path) -> "PreTrainedModel":
    """Load ``model`` as a sequence classifier; a head that it lacks has to be in ``adapter``.

    Raises:
        UserError: it is of no such family, or neither has a head.
    """
    import torch
    from transformers import AutoModelForSequenceClassification as Family
    brought = _brought(adapter)
    count = {"num_labels": len(brought["score.weight"])} if "score.weight" in brought else {}
    try:
        hf, info = read_pretrained(Family,
                                   model_folder(model) or model, dtype=torch.float32, output_loading_info=True, **count)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"--model_path {model}: cannot be loaded as a sequence classifier with the head of {adapter}: "
                        f"{first_line(error)}") from error
    if absent := sorted(set(info["missing_keys"]) - brought.keys()):
        raise UserError(f"--is_rm: neither {model} nor {adapter} has {absent[0]}, so the scores would be random. Give "
                        "--model_path a model with its trained head. After a run of lightrft rm, SAVE_PATH/hf is the "
                        "merged model already")
    loaded: PreTrainedModel = hf
    return loaded


if __name__ == "__main__":
    main()
