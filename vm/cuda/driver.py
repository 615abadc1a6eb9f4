"""The CUDA driver calls that launches need."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Any, Final

import torch

from megavm.vm.config import SHARED_BYTES
from megavm.vm.cuda.compiler import KERNEL_NAME

# Calls of every launch: their names in the library, and their arguments. They do not wait for the GPU, so they
# keep Python's interpreter. The bindings give it up in every call, and a thread that takes it then may keep
# it for a switch interval, which is longer than all calls of a launch take.
_POINTER, _WORD, _SIZE = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
_KEEPING: Final[dict[str, tuple[str, list[Any]]]] = {
    "cuCtxGetCurrent": ("cuCtxGetCurrent", [_POINTER]),
    "cuCtxPushCurrent": ("cuCtxPushCurrent_v2", [_POINTER]),
    "cuCtxPopCurrent": ("cuCtxPopCurrent_v2", [_POINTER]),
    "cuEventElapsedTime": ("cuEventElapsedTime", [_POINTER] * 3),
    "cuEventQuery": ("cuEventQuery", [_POINTER]),
    "cuEventRecord": ("cuEventRecord", [_POINTER] * 2),
    "cuLaunchKernel": ("cuLaunchKernel", [_POINTER, *[_WORD] * 7, *[_POINTER] * 3]),
    "cuMemcpyDtoHAsync": ("cuMemcpyDtoHAsync_v2", [_POINTER, _POINTER, _SIZE, _POINTER]),
    "cuMemcpyHtoDAsync": ("cuMemcpyHtoDAsync_v2", [_POINTER, _POINTER, _SIZE, _POINTER]),
    "cuMemsetD32Async": ("cuMemsetD32Async", [_POINTER, _WORD, _SIZE, _POINTER]),
}


class CudaError(RuntimeError):
    """A call of the CUDA driver failed. ``name`` is the name of the error."""

    def __init__(self, name: str, call: str) -> None:
        super().__init__(f"{call} failed with {name}")
        self.name = name


def current_stream(device: int) -> int:
    """Torch's current stream on a GPU; ``torch.cuda.current_stream`` makes an object of it in 10 us."""
    return torch._C._cuda_getCurrentRawStream(device)


class Driver:
    """The driver's calls on torch's context of one GPU."""

    def __init__(self, device: int) -> None:
        from cuda.bindings import driver

        self.api: Any = driver
        waits = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        library = (ctypes.CDLL if waits else ctypes.PyDLL)("libcuda.so.1")
        self._keeping: dict[str, Any] = {}
        for name, (symbol, arguments) in _KEEPING.items():
            self._keeping[name] = function = library[symbol]
            function.argtypes = arguments
        self.maps: dict[tuple[Any, ...], Any] = {}  # see vm/cuda/boxes.py
        self._events: list[int] = []  # that nobody uses now
        self.device = device
        self.memory_device = f"cuda:{device}"
        torch.zeros(1, device=self.memory_device)  # torch creates the context with its own flags
        context = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", device))
        self._handle = int(context)

    def call(self, name: str, *arguments: Any) -> Any:
        """The call's one result, or None. Raises CudaError."""
        if (keeping := self._keeping.get(name)) is not None:
            if code := keeping(*arguments):
                raise CudaError(self.api.CUresult(code).name, name)
            return None
        result, *values = getattr(self.api, name)(*arguments)
        if result != self.api.CUresult.CUDA_SUCCESS:
            raise CudaError(result.name, name)
        return values[0] if values else None

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make the context current on this thread inside a ``with`` block."""
        return _Current(self, self._handle)

    def stream(self) -> int:
        """Torch's current stream."""
        return current_stream(self.device)

    def host_word(self) -> torch.Tensor:
        """An int32 word on the host that copies from the GPU do not wait for."""
        return torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def upload(self, data: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU, made behind the work on torch's current stream; does not wait for it."""
        return data.pin_memory().to(self.memory_device, non_blocking=True)

    def zeros(self, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """So many zeros on the GPU."""
        return torch.zeros(count, dtype=dtype, device=self.memory_device)

    def mark(self) -> Callable[[], None]:
        """Note the work on torch's current stream; the result waits for it. Both raise CudaError."""
        with self.current():
            try:
                event = self._events.pop()
            except IndexError:
                flags = self.api.CUevent_flags.CU_EVENT_DISABLE_TIMING
                event = int(self.call("cuEventCreate", flags))
            mark = _Mark(self, event, self._events)
            self.call("cuEventRecord", event, self.stream())
        return mark

    def is_over(self, event: int) -> bool:
        """Whether the work before an event has ended. Raises CudaError."""
        try:
            self.call("cuEventQuery", event)
        except CudaError as error:
            if error.name != "CUDA_ERROR_NOT_READY":
                raise
            return False
        return True

    def seconds(self, begin: int, end: int) -> float:
        """From one event to another; both are over and know their time. Raises CudaError."""
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.addressof(milliseconds), begin, end)
        return 1e-3 * milliseconds.value

    def function(self, cubin: bytes, name: str = KERNEL_NAME, shared: int = SHARED_BYTES) -> Any:
        """Load a kernel of a cubin and allow it so many bytes of shared memory (all of an SM's)."""
        with self.current():
            module = self.call("cuModuleLoadData", cubin)
            function = self.call("cuModuleGetFunction", module, name.encode())
            attribute = (
                self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            )
            self.call("cuFuncSetAttribute", function, attribute, shared)
        return int(function)


class _Current(contextlib.AbstractContextManager[None]):
    """A context of the driver, current inside a ``with`` block; most often it is so already."""

    __slots__ = ("_driver", "_handle", "_pushed")

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver = driver
        self._handle = handle
        self._pushed = False

    def __enter__(self) -> None:
        context = ctypes.c_void_p()
        self._driver.call("cuCtxGetCurrent", ctypes.byref(context))
        if context.value != self._handle:
            self._driver.call("cuCtxPushCurrent", self._handle)
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:  # not checked: an error here would hide the one that ended the block
            self._driver._keeping["cuCtxPopCurrent"](ctypes.byref(ctypes.c_void_p()))


class _Mark:
    """Waits for the work before an event, which it gives back when nobody needs it any more."""

    def __init__(self, driver: Driver, event: int, unused: list[int]) -> None:
        self._driver = driver
        self._event = event
        self._unused = unused

    def __call__(self) -> None:
        with self._driver.current():
            if not self._driver.is_over(self._event):  # else keep the interpreter
                self._driver.call("cuEventSynchronize", self._event)

    def __del__(self) -> None:
        self._unused.append(self._event)
