"""A server's side of a GPU by the CUDA driver alone: memory and streams, through ctypes.

Works on a GPU and on the stand-in of tests/standin-cuda, whichever `libcuda.so.1` this process finds.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CUDA = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Calls the driver; raises where it reports an error."""
    status = getattr(CUDA, name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name}: CUDA error {status}")


class Gpu:
    """One GPU's primary context, made current in this thread."""

    def __init__(self, ordinal: int = 0) -> None:
        self.name = f"cuda:{ordinal}"
        device, context = ctypes.c_int(), ctypes.c_void_p()
        call("cuInit", 0)
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)

    def tensor(self, values: Any) -> Tensor:
        """A copy of a numpy array in the GPU's memory."""
        return Tensor(self, np.ascontiguousarray(values))

    def stream(self) -> Stream:
        """A stream that does not wait for the default stream."""
        return Stream()


class Stream:
    """A stream as torch has it: by `cuda_stream`."""

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(handle), 1)
        self.cuda_stream: int = handle.value or 0

    def synchronize(self) -> None:
        """Waits for all that was given to it."""
        call("cuStreamSynchronize", ctypes.c_void_p(self.cuda_stream))


class Tensor:
    """GPU memory with those methods of a torch tensor that say where it lies."""

    def __init__(self, gpu: Gpu, values: Any) -> None:
        self.device, self.dtype, self.shape = gpu.name, values.dtype.name, values.shape
        self._values = values
        pointer = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(values.nbytes))
        self._pointer = pointer
        self.write(values)

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self._pointer.value

    def element_size(self) -> int:
        """Bytes of one element."""
        return int(self._values.itemsize)

    def stride(self) -> tuple[int, ...]:
        """Elements from one index to the next, for each dimension."""
        return tuple(s // self._values.itemsize for s in self._values.strides)

    def write(self, values: Any) -> None:
        """Overwrites it; blocks."""
        source = np.ascontiguousarray(values, self._values.dtype)
        call("cuMemcpyHtoD_v2", self._pointer, ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(source.nbytes))

    def write_on(self, stream: Stream, source: Any) -> None:
        """Overwrites it in the order of a stream; `source` must live until then."""
        pointer, size = ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(source.nbytes)
        call("cuMemcpyHtoDAsync_v2", self._pointer, pointer, size, ctypes.c_void_p(stream.cuda_stream))

    def read(self) -> Any:
        """A copy in host memory; blocks."""
        target = np.empty_like(self._values)
        call("cuMemcpyDtoH_v2", ctypes.c_void_p(target.ctypes.data), self._pointer, ctypes.c_size_t(target.nbytes))
        return target

    def read_on(self, stream: Stream) -> Any:
        """A copy in host memory that is there when the stream has come so far."""
        target = np.empty_like(self._values)
        pointer, size = ctypes.c_void_p(target.ctypes.data), ctypes.c_size_t(target.nbytes)
        call("cuMemcpyDtoHAsync_v2", pointer, self._pointer, size, ctypes.c_void_p(stream.cuda_stream))
        return target
