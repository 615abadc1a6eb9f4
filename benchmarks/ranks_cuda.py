"""Decoding and all-reduces on several GPUs, beside torch with NCCL.

    python benchmarks/ranks_cuda.py --ranks 2 --model 1b 8b --batch 1 8 --save
    python benchmarks/ranks_cuda.py --ranks 4 --model 70b --batch 1

- Decoding: microseconds per token of each way in which ranks exchange, beside one GPU, and beside
  the same model in torch: halves of layers compiled, sums by NCCL, the whole step one CUDA graph.
- Chain: float32 all-reduces that depend on each other, as a program of its own, beside NCCL in a
  CUDA graph: small ones of one row (``--columns``), and large ones (``--mib``), also in either form
  (CompileOptions.all_reduce).

Weights are random. torch runs a process for each GPU, megavm one process for all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import multiprocessing
import os
import statistics
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing

from environment import save
from llama_cuda import MODELS, make_runner, measure, weight_bytes
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import AllReduce, CompileOptions, default_options
from megavm.scheduler.llama.parallel import ONE_RANK, Exchange, Parallel
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.program import Program
from megavm.vm.tensors import F32, TensorKind
from read_floor import time_gpu
from torch_baseline import STEPS, Decoder, Layer

LENGTH = 32  # all-reduces of a chain
LARGE_LENGTH = 4  # large all-reduces of a step of megavm's program
LARGE_COLUMNS = 2048
FORMS: tuple[AllReduce, ...] = ("gather", "scatter")
EXCHANGES: tuple[Exchange, ...] = ("all_reduce", "all_gather")


def large_shape(mib: int) -> tuple[int, int]:
    """The shape of a float32 tensor of ``mib`` MiB."""
    return (mib << 20) // (4 * LARGE_COLUMNS), LARGE_COLUMNS


def chain_shapes(args: argparse.Namespace) -> list[tuple[int, int]]:
    """The shapes of all chains."""
    return [(1, columns) for columns in args.columns] + [large_shape(n) for n in args.mib]


def chain_program(
    ranks: int, shape: tuple[int, int], length: int, options: CompileOptions
) -> Program:
    """``length`` all-reduces of ``shape``, each of the sums of the one before."""
    graph = Graph(shape[0], ranks=ranks)
    x = graph.tensor("x", shape, F32, TensorKind.INPUT)
    for number in range(length):
        x = graph.all_reduce(f"sum{number}", x, None, F32)
    graph.output(x, "sum")
    return compile_graph(graph, options)


def chain(
    ranks: int, shape: tuple[int, int], rounds: int, all_reduce: AllReduce = "preferred"
) -> float:
    """Median microseconds of an all-reduce of a chain on megavm. Checks the sums."""
    machine = CudaMachine(range(ranks))
    small = shape[0] == 1
    length = LENGTH if small else LARGE_LENGTH
    options = default_options("cuda", machine.workers, shape[0])
    options = dataclasses.replace(options, all_reduce=all_reduce)
    if small:
        options = dataclasses.replace(options, exchange="tagged")
    program = chain_program(ranks, shape, length, options)
    memory = machine.memory(ranks)
    memory.allocate(program.tensors)
    # Sums of these are whole numbers times powers of the number of ranks: exact for 2 and 4 ranks.
    first = (torch.arange(shape[0] * shape[1]) % 7).reshape(shape)
    for rank, part in enumerate(memory.ranks):
        part.write("x", first + float(rank))
    executable = machine.load(program, memory)
    # So many all-reduces that the launch counts for nothing: it takes some 100 us on four GPUs.
    steps = 20 if small else 32
    time = time_gpu(lambda: executable.launch(steps), rounds)
    executable.finish()
    want = (ranks * first + sum(range(ranks))) * float(ranks) ** (length - 1)
    for part in memory.ranks:
        torch.testing.assert_close(part["sum"].cpu(), want)
    return time / steps / length


def fits_one_gpu(model: str) -> bool:
    """Whether the weights of a model fit a GPU, with some room for all else."""
    memory = torch.cuda.get_device_properties(0).total_memory
    return weight_bytes(MODELS[model]) < 0.85 * memory


def decode(model: str, batch: int, parallel: Parallel, context: int, rounds: int) -> float:
    """Median microseconds per token on megavm."""
    machine = CudaMachine(range(parallel.ranks))
    runner = make_runner(MODELS[model], machine, context + 64, batch, parallel)
    return float(measure(runner, batch, context, 8, rounds)["us_per_step"])


# torch, a process for each rank.


class RankDecoder(Decoder):
    """The share of a rank: heads, width of the MLP and vocabulary are divided."""

    def __init__(self, config: Any, batch: int, length: int, ranks: int) -> None:
        share = dataclasses.replace(
            config,
            num_heads=config.num_heads // ranks,
            num_kv_heads=config.num_kv_heads // ranks,
            intermediate_size=config.intermediate_size // ranks,
            vocab_size=config.vocab_size // ranks,
        )
        super().__init__(share, batch, length, "sdpa")
        self.ranks = ranks
        self._attend = torch.compile(Layer.attend)
        self._widen = torch.compile(Layer.widen)
        self._head = torch.compile(self.peaks)

    def peaks(self, x: torch.Tensor) -> torch.Tensor:
        """The largest logit of this rank's vocabulary and its number: float32 [batch, 2]."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        value, number = (((wide * scale).to(x.dtype) * self.gain) @ self.head.T).max(-1)
        return torch.stack([value.float(), number.float()], -1)

    def forward(self) -> None:
        x = torch.nn.functional.embedding(self.token, self.embeddings)
        rope, mask = self.rope[self.position][0], self.places <= self.position
        for module in self.layers:
            layer = cast(Layer, module)
            added = self._attend(layer, x, rope, self.position, mask)
            dist.all_reduce(added)
            x = x + added
            added = self._widen(layer, x)
            dist.all_reduce(added)
            x = x + added
        mine = self._head(x)
        every = mine.new_empty(self.ranks, *mine.shape)
        dist.all_gather_into_tensor(every, mine)
        self.token.copy_(every[every[..., 0].argmax(0), torch.arange(len(x)), 1].long())
        self.position.add_(1)


def graph_of(step: Any) -> torch.cuda.CUDAGraph:
    """Run ``step`` a few times and capture it."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def replay(graph: torch.cuda.CUDAGraph, count: int, rounds: int, begin: Any = None) -> float:
    """Median microseconds of a replay, of ``rounds`` rounds of ``count``."""
    times = []
    for _ in range(rounds + 3):
        if begin is not None:
            begin()
        new_event: Any = torch.cuda.Event
        first, last = (new_event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(1e3 * float(first.elapsed_time(last)) / count)
    return statistics.median(times[3:])


@torch.no_grad()
def torch_rank(rank: int, args: argparse.Namespace, found: Any) -> None:
    """One of torch's processes; rank 0 puts its times into ``found``."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port)}
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=args.ranks, device_id=device)
    times: dict[Any, float] = {}
    for shape in chain_shapes(args):
        x = torch.zeros(shape, device=device)

        def sums(x: torch.Tensor = x) -> None:
            for _ in range(LENGTH):
                dist.all_reduce(x)

        times["chain", shape] = replay(graph_of(sums), 5, args.rounds) / LENGTH
    for model in args.model:
        for batch in args.batch:
            torch.manual_seed(0)
            length = -(-(args.context + STEPS) // 8) * 8
            with torch.device(device):
                decoder = RankDecoder(MODELS[model], batch, length, args.ranks)

                def begin(decoder: RankDecoder = decoder) -> None:
                    decoder.position.fill_(args.context)

                begin()
                graph = graph_of(decoder)
                times[model, batch] = replay(graph, STEPS, args.rounds, begin)
            del graph, decoder
            gc.collect()
            torch.cuda.empty_cache()
    if rank == 0:
        found.update(times)
    dist.barrier()
    # A graph that holds NCCL's kernels keeps the group from ending in order.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, nargs="*", default=["1b", "8b"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--columns", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--mib", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--port", type=int, default=29511, help="of torch's processes")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    with multiprocessing.Manager() as manager:
        found = manager.dict()
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(torch_rank, (args, found), nprocs=args.ranks)
        torch_times = dict(found)
    results: dict[str, Any] = {"ranks": args.ranks, "context": args.context, "chain": []}
    for shape in chain_shapes(args):
        size = 4 * shape[0] * shape[1]
        time = chain(args.ranks, shape, args.rounds)
        others = {"nccl": torch_times["chain", shape]}
        if shape[0] > 1:
            others |= {form: chain(args.ranks, shape, args.rounds, form) for form in FORMS}
        named = {f"{name}_us": us for name, us in others.items()}
        results["chain"].append({"shape": shape, "us": time} | named)
        texts = (f"{name} {us:.2f}" for name, us in others.items())
        print(f"all-reduce of {size} bytes: {time:.2f} us,", *texts, flush=True)
    results["decode"] = []
    for model in args.model:
        for batch in args.batch:
            ways = {"one GPU": ONE_RANK} if fits_one_gpu(model) else {}
            ways |= {e: Parallel(args.ranks, e) for e in EXCHANGES}
            us = {
                name: decode(model, batch, parallel, args.context, args.rounds)
                for name, parallel in ways.items()
            }
            us["torch"] = torch_times[model, batch]
            results["decode"].append({"model": model, "batch": batch, "us": us})
            text = ", ".join(f"{name} {time:.1f}" for name, time in us.items())
            print(f"{model} batch {batch}, us per token: {text}", flush=True)
    if args.save:
        print(f"saved {save(f'ranks_cuda_{args.ranks}', results)}")


if __name__ == "__main__":
    main()
