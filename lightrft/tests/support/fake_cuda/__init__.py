"""A CUDA device without a GPU, for tests: tensors that say ``cuda:0``, hold CPU data and refuse to meet CPU tensors."""
from lightrft.tests.support.fake_cuda.ledger import DOWNLOAD, GRAPH, KERNEL, Ledger, SYNC, UPLOAD
from lightrft.tests.support.fake_cuda.runtime import fake_cuda
from lightrft.tests.support.fake_cuda.tensor import CudaTensor, DeviceMismatch

__all__ = ["CudaTensor", "DeviceMismatch", "DOWNLOAD", "fake_cuda", "GRAPH", "KERNEL", "Ledger", "SYNC", "UPLOAD"]
