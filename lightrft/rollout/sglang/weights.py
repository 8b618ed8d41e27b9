"""Transfer of the trainer's weights to SGLang's schedulers, bucket by bucket, through shared memory."""
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lightrft.rollout.sglang.client import SGLangNative

_ALIGN = 16


def buckets(named_tensors: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, torch.dtype],
            most: int) -> Iterator[tuple[Tensor, list[tuple[str, Tensor, int]]]]:
    """Yield flat memory uint8 [bytes] and the (name, view, offset in bytes) of each weight in it, in the dtype of
    ``dtypes`` (or its own). The next bucket reuses the memory, which holds ``most`` bytes or one weight."""
    flat, end = torch.empty(0, dtype=torch.uint8), 0
    inside: list[tuple[str, Tensor, int]] = []
    for name, tensor in named_tensors:
        dtype = dtypes.get(name, tensor.dtype)
        size = tensor.numel() * dtype.itemsize
        if inside and end + size > len(flat):
            yield flat, inside
            inside, end = [], 0
        if size > len(flat):
            flat = _shared(max(size, most), tensor.device)
        view = flat[end:end + size].view(dtype).view(tensor.shape)
        inside.append((name, view.copy_(tensor), end))
        end += -(-size // _ALIGN) * _ALIGN
    if inside:
        yield flat, inside


def _shared(size: int, device: torch.device) -> Tensor:
    """Allocate memory that other processes can map; on a CPU it occupies only what was written."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device)
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))


def load(native: SGLangNative, named_tensors: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, torch.dtype],
         most: int) -> None:
    """Fill SGLang's model with full weights under HF names, and drop every cached prefix.

    Raises:
        RuntimeError: SGLang refuses.
    """
    from sglang.srt.managers import io_struct
    manager = native.manager
    native.come_to_rest()  # while it works, SGLang keeps the prefixes, which is an error after the first bucket
    _check(native.run(lambda: manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput())))
    try:
        for flat, inside in buckets(named_tensors, dtypes, most):
            request = io_struct.UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[_payload(flat, inside) for _ in native.processes],
                load_format="flattened_bucket", flush_cache=True)
            _check(native.run(lambda: manager.update_weights_from_tensor(request)))
    finally:  # after a stream that broke off too, or the next update could not begin
        _check(native.run(lambda: manager.end_weight_update(io_struct.EndWeightUpdateReqInput())))


def _check(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise RuntimeError(f"SGLang did not load the weights: {message}")


def _payload(flat: Tensor, inside: list[tuple[str, Tensor, int]]) -> bytes:
    """Serialize what a scheduler needs to find the weights; the memory itself does not move."""
    from sglang.srt.utils.common import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata
    if flat.is_cuda:
        monkey_patch_torch_reductions()
    metadata = [
        FlattenedTensorMetadata(name, view.shape, view.dtype, start, start + view.nbytes, view.nbytes)
        for name, view, start in inside
    ]
    return MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": metadata})
