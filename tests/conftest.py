"""Fixtures that every test folder shares; makes what supports them importable."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before torch is imported, here and in processes that tests start. The threads of its operations
# spin while they wait for each other: where others use the cores too, a test takes much longer.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests compile what they test, and some change what compiles.
os.environ.setdefault("MEGAVM_PROGRAM_CACHE", "0")
# Started in the background, by a shell without job control, this process ignores SIGINT and so do
# all that it starts: those that are told to end by one would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parent / "support"))

from megavm.vm.machine import Machine

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from megavm.vm.cuda.machine import CudaMachine

MACHINES = ("reference", "cpu", "cuda")
EMULATED_TIMEOUT = 3.0  # seconds that a wait on the emulated GPU may take at least


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    """Every machine there is, one after the other; its memory must be on its ``memory_device``."""
    if request.param == "cuda":
        return cast(Machine, request.getfixturevalue("cuda_machine"))
    from megavm.scheduler.run.machines import make_machine

    return make_machine(request.param)[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "seconds that a wait on the GPU may take (more under a sanitizer)"
    parser.addoption("--cuda-timeout", type=float, default=10.0, help=text)
    parser.addoption("--cuda-root", type=Path, help="folder of other kernel sources")
    text = "run the tests of the GPU on a GPU that is emulated (slow)"
    parser.addoption("--emulate-gpu", action="store_true", help=text)


@pytest.fixture(scope="session")
def make_cuda_machine(pytestconfig: pytest.Config) -> Callable[..., CudaMachine]:
    """Makes machines of the GPU, with options of CudaMachine; skips where there is none."""
    from megavm.vm.cuda import compiler as cuda_compiler
    from megavm.vm.cuda.emulated import EmulatedMachine
    from megavm.vm.cuda.machine import CudaMachine, reason_unavailable

    given: dict[str, Any] = {"root": pytestconfig.getoption("--cuda-root") or cuda_compiler.ROOT}
    if pytestconfig.getoption("--emulate-gpu"):

        def emulated(**options: Any) -> CudaMachine:
            options["timeout"] = max(options.get("timeout", 60.0), EMULATED_TIMEOUT)
            return EmulatedMachine(**given | options)

        return emulated
    reason = reason_unavailable()
    if reason is not None:
        pytest.skip(f"machine cuda is not available: {reason}")
    given["timeout"] = pytestconfig.getoption("--cuda-timeout")
    return lambda **options: CudaMachine(**given | options)


@pytest.fixture(scope="session")
def cuda_machine(make_cuda_machine: Callable[..., CudaMachine]) -> CudaMachine:
    """The GPU; tests that need it are skipped where there is none."""
    return make_cuda_machine()


@pytest.fixture(scope="session")
def real_gpu(cuda_machine: CudaMachine) -> None:
    """Tests that need more of a GPU than its kernel are skipped where it is emulated."""
    if cuda_machine.memory_device == "cpu":
        pytest.skip("the GPU is emulated")


@pytest.fixture(scope="session")
def cuda_ranks(
    make_cuda_machine: Callable[..., CudaMachine], real_gpu: None
) -> Callable[..., CudaMachine]:
    """cuda_ranks(ranks, **options): ranks share GPUs if there are fewer."""
    import torch

    def make(ranks: int, **options: Any) -> CudaMachine:
        devices = [rank % torch.cuda.device_count() for rank in range(ranks)]
        return make_cuda_machine(device=devices, **options)

    return make


@pytest.fixture
def compiler() -> None:
    """Tests that compile kernels are skipped where there is no compiler for them."""
    from megavm.vm.cuda.compiler import reason_unavailable

    reason = reason_unavailable()
    if reason is not None:
        pytest.skip(f"kernels cannot be compiled: {reason}")


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """make_llama(seed=0, dtype="float32", **config) -> (directory, random transformers model).

    Norm gains and biases are random too, so that one that is left out shows.
    """
    import torch
    import transformers

    def make(seed: int = 0, dtype: str = "float32", **config: Any) -> tuple[Path, Any]:
        torch.manual_seed(seed)
        made = transformers.LlamaConfig(**config)
        model = transformers.LlamaForCausalLM(made).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.normal_(1.0, 0.3)
            else:
                parameter.data.normal_(0.0, parameter.shape[1] ** -0.5)
        model = model.to(getattr(torch, dtype))
        directory = tmp_path_factory.mktemp("llama")
        model.save_pretrained(directory)
        return directory, model

    return make


def find_chromium() -> str | None:
    """The browser to test in: $MEGAVM_CHROMIUM, else the system's."""
    named = os.environ.get("MEGAVM_CHROMIUM")
    names = ("chromium", "chromium-browser", "google-chrome")
    return named or next(filter(None, map(shutil.which, names)), None)


# NOTE: while Playwright is open the main thread has a running event loop, and asyncio.run() of
# other tests would fail; so it is open for the tests of a page alone.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium: run scripts/install-chromium")
    with api.sync_playwright() as playwright:
        # Root may not use the sandbox, and containers have a small /dev/shm.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go: $MEGAVM_SCREENSHOTS, else a temporary directory."""
    named = os.environ.get("MEGAVM_SCREENSHOTS")
    directory = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    directory.mkdir(parents=True, exist_ok=True)
    return directory
