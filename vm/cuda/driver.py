"""The CUDA driver calls that launches need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megavm.vm.config import SHARED_BYTES
from megavm.vm.cuda.compiler import KERNEL_NAME


class CudaError(RuntimeError):
    """A call of the CUDA driver failed. ``name`` is the name of the error."""

    def __init__(self, name: str, call: str) -> None:
        super().__init__(f"{call} failed with {name}")
        self.name = name


class Driver:
    """The driver's calls on torch's context of one GPU."""

    def __init__(self, device: int) -> None:
        from cuda.bindings import driver

        self.api: Any = driver
        self.device = device
        self.memory_device = f"cuda:{device}"
        torch.zeros(1, device=self.memory_device)  # torch creates the context with its own flags
        self.context = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", device))
        self._handle = int(self.context)

    def call(self, name: str, *arguments: Any) -> Any:
        """The call's one result, or None. Raises CudaError."""
        result, *values = getattr(self.api, name)(*arguments)
        if result != self.api.CUresult.CUDA_SUCCESS:
            raise CudaError(result.name, name)
        return values[0] if values else None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on this thread inside a ``with`` block."""
        if int(self.call("cuCtxGetCurrent")) == self._handle:
            yield
            return
        self.call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            self.api.cuCtxPopCurrent()

    def stream(self) -> int:
        """Torch's current stream."""
        return int(torch.cuda.current_stream(self.memory_device).cuda_stream)

    def host_word(self) -> torch.Tensor:
        """An int32 word on the host that copies from the GPU do not wait for."""
        return torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def upload(self, data: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU, made behind the work on torch's current stream; does not wait for it."""
        return data.pin_memory().to(self.memory_device, non_blocking=True)

    def function(self, cubin: bytes, name: str = KERNEL_NAME, shared: int = SHARED_BYTES) -> Any:
        """Load a kernel of a cubin and allow it so many bytes of shared memory (all of an SM's)."""
        with self.current():
            module = self.call("cuModuleLoadData", cubin)
            function = self.call("cuModuleGetFunction", module, name.encode())
            attribute = (
                self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            )
            self.call("cuFuncSetAttribute", function, attribute, shared)
        return function
