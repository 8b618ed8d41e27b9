"""The tensor of the fake device, and the rules by which it meets the host.

To autograd a tensor is on torch's "lazy" device, whose backward passes run in the thread that asks for them; to the
program it is on ``cuda:0``. Every operator runs on the CPU data inside.
"""
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing, TorchDispatchMode

from lightrft.tests.support.fake_cuda import ledger
from lightrft.tests.support.fake_cuda.kernels import EMULATED
from lightrft.tests.support.fake_cuda.ledger import DOWNLOAD, KERNEL, Ledger, SYNC, UPLOAD

CUDA, LAZY, CPU = torch.device("cuda", 0), torch.device("lazy", 0), torch.device("cpu")
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXED = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default,
           aten._index_put_impl_.default}  # yapf: disable
SIZED = {aten._local_scalar_dense.default, aten.nonzero.default, aten._unique2.default, aten.unique_consecutive.default,
         aten.masked_select.default, aten.equal.default}  # yapf: disable
NO_KERNEL = {aten.detach.default, aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
             aten.new_empty.default, aten.new_empty_strided.default, aten._local_scalar_dense.default,
             aten.lift_fresh.default, aten.set_.source_Tensor, aten.resize_.default}  # yapf: disable


class Traits(NamedTuple):
    """What the device has to know of an operator."""
    copies: bool
    indexed: bool
    sized: bool
    launches: bool  # a kernel
    aliases: bool  # a result may share memory with an argument, or be one
    call: Callable[..., Any]  # on the content


@lru_cache(maxsize=None)
def traits(func: Any) -> Traits:
    """Return the traits of an operator, whose hash takes as long as a small kernel."""
    aliases = any(spec.alias_info is not None for spec in func._schema.arguments)
    return Traits(func in COPIES, func in INDEXED, func in SIZED, not func.is_view and func not in NO_KERNEL, aliases,
                  EMULATED.get(func, func))


class DeviceMismatch(RuntimeError):
    """Tensors of the device and of the host met in one operator."""


class CudaTensor(Tensor):
    """A tensor on ``cuda:0``; ``data_on_host`` is its content."""
    data_on_host: Tensor

    @staticmethod
    def __new__(cls, content: Tensor, requires_grad: bool = False) -> "CudaTensor":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, content.shape, strides=content.stride(), storage_offset=content.storage_offset(), dtype=content.dtype,
            layout=content.layout, device=LAZY, requires_grad=requires_grad)
        made.data_on_host = content
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_on_host"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> "CudaTensor":
        return CudaTensor(inner["data_on_host"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return execute(func, args, kwargs or {})

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({self.data_on_host})"

    def data_ptr(self) -> int:
        """Address of the content."""
        return self.data_on_host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage of the content, which FSDP resizes."""
        return self.data_on_host.untyped_storage()

    def tolist(self) -> Any:
        """Copy to the host, which waits."""
        wait()
        return self.data_on_host.tolist()

    def numpy(self, **kwargs: Any) -> Any:  # type: ignore[override]
        """Refuse, as CUDA does."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")


class Device:
    """State of the fake device."""
    ledger: Ledger | None = None
    downloads: list[tuple[Tensor, Tensor]] = []  # copies to the host that have not arrived: target, content


class Capture(threading.local):
    """Capture of a thread: what records its operators, if anything; others compute and wait meanwhile."""
    recorder: Callable[..., Any] | None = None


CAPTURE = Capture()


def current() -> Ledger:
    """Return the ledger in use."""
    assert Device.ledger is not None, "a tensor of the fake device was used outside of fake_cuda()"
    return Device.ledger


def wait() -> None:
    """Count a sync; it is an error while a graph records, as on CUDA."""
    if CAPTURE.recorder is not None:
        raise RuntimeError("operation not permitted when stream is capturing")
    current().add(SYNC)
    _arrive()


def _arrive() -> None:
    """End the copies to the host."""
    for target, content in Device.downloads:
        target.copy_(content)
    Device.downloads.clear()


def on_device(device: Any) -> bool:
    """Return True if ``device`` (or None) is the fake one."""
    return device is not None and torch.device(device).type in ("lazy", "cuda")


def _collect(values: Iterable[Any], tensors: list[Tensor]) -> list[Tensor]:
    """Append the tensors in nested lists and tuples to ``tensors``: torch's pytrees take longer than a small kernel."""
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, tensors)
    return tensors


def _inside(tree: Any) -> Any:
    """Replace tensors and names of the device by the content and the CPU."""
    kind = type(tree)
    if kind is CudaTensor:
        return tree.data_on_host
    if kind is tuple or kind is list or issubclass(kind, (list, tuple)):
        return kind([_inside(value) for value in tree])
    return CPU if kind is torch.device and on_device(tree) else tree


def _wrapped(tree: Any) -> Any:
    """Put the tensors of a result on the device."""
    if isinstance(tree, Tensor):
        return CudaTensor(tree)
    return type(tree)(map(_wrapped, tree)) if isinstance(tree, (list, tuple)) else tree


def _check_mix(func: Any, known: Traits, args: Any, tensors: list[Tensor]) -> None:
    """Refuse an operator on tensors of both sides; copies, and index tensors of the host, are allowed as on CUDA."""
    host = [x for x in tensors if not isinstance(x, CudaTensor) and x.ndim and x.device.type == "cpu"]
    if host and not known.copies and not (known.indexed and isinstance(args[0], CudaTensor)):
        shapes = [f"{'cpu' if any(x is h for h in host) else 'cuda:0'} {list(x.shape)}" for x in tensors]
        raise DeviceMismatch(f"{func} at {ledger.line()} got tensors on cuda:0 and cpu: {', '.join(shapes)}")


def _waits(known: Traits, args: Any, kwargs: Any) -> bool:
    """Return True if the host waits for the device, for a number or a size, or to copy an index from the host."""
    if known.call is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if not known.indexed:
        return known.sized
    reads = any(x is not None and (x.dtype == torch.bool or not isinstance(x, CudaTensor)) for x in args[1])
    return reads and not (len(args) > 2 and args[2].numel() == 1)  # a single value is a masked fill


def _count(known: Traits, args: Any, kwargs: Any) -> None:
    if known.launches:
        current().add(KERNEL)
    if _waits(known, args, kwargs):
        wait()


def _count_copy(up: bool, non_blocking: bool) -> None:
    if not non_blocking:
        wait()
    else:
        current().add(UPLOAD if up else DOWNLOAD)


def _move(func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    """Finish a copy between the sides, or within one."""
    if func is aten.copy_.default:
        target, source = args[:2]
        if isinstance(target, CudaTensor) != isinstance(source, CudaTensor):
            queued = bool(args[2:] and args[2] or kwargs.get("non_blocking"))
            _count_copy(isinstance(target, CudaTensor), queued)
            if queued and not isinstance(target, CudaTensor):  # its content is unknown to the host until it waits
                Device.downloads.append((target, target.clone()))
                target.fill_(torch.nan if target.is_floating_point() else 0)
        return target
    asked, was = kwargs.get("device"), isinstance(args[0], CudaTensor)
    becomes = was if asked is None else on_device(asked)
    if was != becomes:
        _count_copy(becomes, bool(kwargs.get("non_blocking")))
        out = out.clone() if out is _inside(args[0]) else out
    return CudaTensor(out) if becomes else out


def execute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operator of torch on the content of its tensors, count it, and wrap what belongs to the device."""
    tensors, known, asked = _collect(kwargs.values(), _collect(args, [])), traits(func), kwargs.get("device")
    cuda, becomes = CudaTensor in map(type, tensors), on_device(asked)
    if known.copies and (cuda or becomes) and not isinstance(tensors[-1], CudaTensor):
        _arrive()  # the device runs one copy after the other
    if cuda:
        _check_mix(func, known, args, tensors)
        _count(known, args, kwargs)
    inner = {name: _inside(value) for name, value in kwargs.items() if name != "pin_memory"}
    if CAPTURE.recorder is not None and (cuda or becomes):
        out = CAPTURE.recorder(func, known.call, _inside(args), inner)
    else:
        out = known.call(*_inside(args), **inner)
    if known.copies:
        return _move(func, args, kwargs, out)
    if not (cuda and asked is None or becomes):
        return out
    return return_and_correct_aliasing(func, args, kwargs, _wrapped(out)) if known.aliases else _wrapped(out)


class Operators(TorchDispatchMode):
    """Sends every operator through :func:`execute`, also those without a tensor of the device among its arguments."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would enter and leave its compiler for each operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes back with its local part
        return execute(func, args, kwargs or {})


def _lazy(value: Any) -> Any:
    if isinstance(value, torch.device):
        return LAZY if value.type == "cuda" else value
    return "lazy" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def _replace(target: Tensor, value: Tensor) -> None:
    """Assign ``target.data`` from the other side; CUDA allows it, torch does not for tensors of two classes."""
    made = value.detach().requires_grad_(target.requires_grad)
    torch.utils.swap_tensors(target, torch.nn.Parameter(made) if isinstance(target, torch.nn.Parameter) else made)


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """Attend with the kernel that a CPU tensor would get; torch itself would take the operators one by one."""
    if query.shape[1] != key.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale)[0]


def _to(*args: Any, **kwargs: Any) -> Any:
    return Tensor.to(args[0], *map(_lazy, args[1:]), **kwargs)


def _attend(*args: Any, **kwargs: Any) -> Any:
    return (_attention if isinstance(args[0], CudaTensor) else F.scaled_dot_product_attention)(*args, **kwargs)


def _rms_norm(*args: Any, **kwargs: Any) -> Any:
    """As CUDA does without gradients; a CPU takes several operators."""
    if isinstance(args[0], CudaTensor) and not torch.is_grad_enabled():
        return execute(aten._fused_rms_norm.default, args, kwargs)[0]
    return F.rms_norm(*args, **kwargs)


def _set_data(target: Tensor, value: Tensor) -> None:
    """Assign ``target.data``."""
    if isinstance(target, CudaTensor) != isinstance(value, CudaTensor):
        _replace(target, value)
    elif isinstance(target, CudaTensor):
        target.data_on_host = value.data_on_host  # type: ignore[attr-defined]
    else:
        SET_DATA(target, value)


def _tensor(*args: Any, **kwargs: Any) -> Tensor:
    """Copy numbers to a tensor of the device, which waits, or make one of the host."""
    if not (on_device(kwargs.get("device")) or args and isinstance(args[0], CudaTensor)):
        return torch.tensor(*args, **kwargs)
    wait()
    return CudaTensor(torch.tensor(args[0], **{name: value for name, value in kwargs.items() if name != "device"}))


def _new_tensor(like: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not (on_device(kwargs.get("device")) or isinstance(like, CudaTensor)):
        return like.new_tensor(*args, **kwargs)
    return _tensor(*args, **{"dtype": like.dtype, **kwargs, "device": LAZY})


SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
REPLACED: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to, F.scaled_dot_product_attention: _attend, F.rms_norm: _rms_norm,
    Tensor.cuda: lambda x, *args, **kwargs: x.to(LAZY), SET_DATA: _set_data, torch.tensor: _tensor,
    Tensor.new_tensor: _new_tensor
}  # yapf: disable


class Calls(TorchFunctionMode):
    """Says "lazy" to torch where the program says "cuda"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return torch.device(*args, **kwargs or {})
        if kwargs:
            kwargs = {key: _lazy(value) if key == "device" else value for key, value in kwargs.items()
                      if key != "pin_memory"}  # yapf: disable
        if torch.device in map(type, args):
            args = tuple(_lazy(x) if isinstance(x, torch.device) else x for x in args)
        return REPLACED.get(func, func)(*args, **kwargs or {})
