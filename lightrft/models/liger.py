"""Liger's fused kernels in a Hugging Face model, on CUDA."""
import torch
from transformers import PreTrainedModel

from lightrft.ops.rounding import has_experts
from lightrft.utils.errors import first_line, install_command, UserError
from lightrft.utils.logging import warn_of_all


def apply_liger(hf: PreTrainedModel) -> None:
    """Let ``hf`` compute its norms, rotary positions and MLPs with Liger's kernels.

    The experts of a mixture keep transformers' products: Liger's wait for the device in every layer, so that no decode
    step could be captured, and sum the gradients of routing weights in bfloat16.

    Raises:
        UserError: there is no GPU, or the kernels cannot be imported.
    """
    if not torch.cuda.is_available():
        raise UserError("--use_liger needs a CUDA device: Liger's kernels are written in Triton; leave it out on CPU")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as families
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:  # of a broken wheel
        raise UserError(
            f"--use_liger: Liger's kernels cannot be imported ({type(error).__name__}: {first_line(error)});"
            f" reinstall them with {install_command('liger')}, or --use_liger false") from error
    if (family := hf.config.model_type) not in families:
        warn_of_all(f"Liger has no kernels for {family}: the model's own code is used")
        return
    wanted = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    if has_experts(hf):
        wanted["swiglu"] = False
    try:
        _apply_liger_kernel_to_instance(hf, **wanted)
    except TypeError:  # Liger knows the decoder of Gemma-3, and not its classifier
        _apply_liger_kernel_to_instance(hf.base_model, **wanted)
    for module in hf.modules():  # a norm before a sum (GLM-4V) would overwrite the gradient that the residual gets too
        if hasattr(module, "in_place"):
            module.in_place = False  # type: ignore[assignment]
