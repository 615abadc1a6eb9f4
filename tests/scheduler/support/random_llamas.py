"""Small Llamas of random shape, compiled in random ways, run with fewer live rows than they have.

A case is a program and a step for it. ``run`` executes some decode steps of it in one launch and
gives what they leave behind. The reference machine says what that should be, by the same model
compiled in the plainest way: it executes one instruction after the other and knows of no order
between workers.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace

import torch

from megavm.instructions.sample import INTEGER_COLUMNS, REAL_COLUMNS, Integer, Real
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph, rope_table, step_tensors
from megavm.vm.machine import Machine
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import F32, TensorKind, TensorSpec

TOLERANCE = 1e-3
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One program and the step that it runs."""

    seed: int
    config: LlamaConfig
    limits: Limits
    bucket: Bucket
    options: CompileOptions
    program: Program
    plain: Program  # of the same model and step, for one worker
    rows: int  # that are live
    logit_rows: int  # likewise
    steps: int

    def __str__(self) -> str:
        c, o = self.config, self.options
        return (
            f"seed {self.seed}: vocabulary {c.vocab_size}, hidden {c.hidden_size}, "
            f"{c.num_layers} layers, {c.num_heads}/{c.num_kv_heads} heads of {c.head_dim}; "
            f"{self.rows} of {self.bucket.rows} rows, {self.logit_rows} of "
            f"{self.bucket.logit_rows} logit rows, decode {self.bucket.decode}, "
            f"context {self.bucket.context}; "
            f"{o.workers} workers, {o.assignment}, {o.exchange}, part_of_k {o.part_of_k}, "
            f"waves {o.waves}, column_unit {o.column_unit}, min_chunk {o.min_chunk}"
        )


@dataclass(frozen=True)
class Outcome:
    """What a launch leaves behind: logits of live rows, tokens and caches."""

    logits: torch.Tensor  # float32 [logit rows, vocabulary]
    tokens: torch.Tensor  # int32 [sequences, length]
    caches: torch.Tensor  # float32 [elements]

    def differs(self, other: Outcome) -> str:
        """The first difference beyond TOLERANCE, in words; "" when there is none."""
        for name in ("logits", "caches"):
            mine, theirs = getattr(self, name), getattr(other, name)
            apart = (mine - theirs).abs().nan_to_num(nan=float("inf"))
            if bool((apart > TOLERANCE).any()):
                return f"{name} differ by {apart.max().item():g}"
        if not torch.equal(self.tokens, other.tokens):
            return "other tokens"
        return ""


def random_case(seed: int, *, most_workers: int = 132) -> Case:
    """A case made from ``seed``: any shape, exchange, assignment and number of live rows."""
    pick = random.Random(seed)
    head_dim = pick.choice([8, 16, 16, 32])
    kv_heads = pick.choice([1, 1, 2, 4])
    heads = kv_heads * pick.choice([1, 2, 4])
    config = LlamaConfig(
        vocab_size=pick.randint(32, 512),
        hidden_size=pick.choice([32, 64, 64, 96, 128]),
        intermediate_size=pick.choice([48, 64, 128, 192]),
        num_layers=pick.randint(1, 3),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=pick.random() < 0.3,
        attention_bias=pick.random() < 0.2,
    )
    rows = pick.choice([1, 2, 4, 8, 16, 16])
    logit_rows = pick.choice([rows, rows, 1])
    length = pick.choice([64, 512])
    blocks = -(-length // BLOCK_SIZE)
    limits = Limits(rows, length, rows, logit_rows, rows * blocks, BLOCK_SIZE)
    decode = pick.random() < 0.8
    # Drawn by itself, so that what a seed makes besides does not change.
    sampled = random.Random(f"sampled {seed}").random() < 0.5
    bucket = Bucket(rows, logit_rows, length, decode, sampled)
    workers = pick.choice([pick.randint(1, 12), pick.randint(1, most_workers), most_workers])
    options = CompileOptions(
        workers,
        assignment=pick.choice(["balanced", "balanced", "round_robin", "dynamic"]),
        exchange=pick.choice(["preferred", "preferred", "tagged", "tagged", "barrier"]),
        waves=pick.choice([1, 1, 2]),
        column_unit=pick.choice([8, 8, 16]),
        min_chunk=pick.choice([16, 256]),
        part_of_k=pick.choice([0, 0, 64]),
        fuse_norm=pick.random() < 0.8,
    )
    graph = llama_graph(config, limits, bucket, F32)
    program = compile_graph(graph, options)
    live = pick.randint(1, rows)
    live_logits = pick.randint(0, min(live, logit_rows)) if pick.random() < 0.3 else None
    return Case(
        seed=seed,
        config=config,
        limits=limits,
        bucket=bucket,
        options=options,
        program=program,
        plain=compile_graph(graph, CompileOptions(1)),
        rows=live,
        logit_rows=min(live, logit_rows) if live_logits is None else live_logits,
        steps=6,
    )


def with_rows(case: Case, rows: int) -> Case:
    """The same program with other live rows."""
    return replace(case, rows=rows, logit_rows=min(rows, case.bucket.logit_rows))


def fresh_memory(case: Case, program: Program, device: str = "cpu") -> Memory:
    """Random weights and caches; sequences of random lengths, every live row one of its own."""

    def generator(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(case.seed << 32 | zlib.crc32(name.encode()))

    memory = Memory(device)
    limits, config = case.limits, case.config
    logits = (limits.max_logit_rows, config.vocab_size)
    memory.allocate([TensorSpec("logits", logits, F32, TensorKind.ACTIVATION)])
    memory.allocate(step_tensors(limits, config.vocab_size).values())
    memory.allocate(program.tensors)
    for spec in program.tensors:
        if spec.name == "rope":
            memory.write("rope", rope_table(config, limits.max_model_len))
        elif spec.kind is TensorKind.WEIGHT or "_cache" in spec.name:
            width = spec.shape[-1] if len(spec.shape) > 1 else 1
            values = torch.randn(spec.shape, generator=generator(spec.name)) * width**-0.5
            memory.write(spec.name, values if width > 1 else 1 + 0.1 * values)
    rows = torch.arange(limits.max_num_batched_tokens, dtype=torch.int32)
    last = limits.max_model_len - case.steps
    chosen = generator("step")
    positions = torch.randint(0, last, rows.shape, generator=chosen, dtype=torch.int32)
    per_sequence = limits.blocks_per_sequence
    blocks = torch.randperm(limits.num_blocks, generator=chosen)
    real = torch.zeros(limits.max_num_seqs, REAL_COLUMNS)
    real[:, Real.REPETITION_PENALTY] = real[:, Real.TOP_P] = 1.0
    integer = torch.zeros(limits.max_num_seqs, INTEGER_COLUMNS, dtype=torch.int32)
    integer[:, Integer.ENABLED] = 1
    arrays = {
        "row_sequence": rows,
        "row_position": positions,
        "row_count": torch.tensor([case.rows], dtype=torch.int32),
        "logit_row": torch.arange(limits.max_logit_rows, dtype=torch.int32),
        "logit_count": torch.tensor([case.logit_rows], dtype=torch.int32),
        "block_table": blocks.to(torch.int32).reshape(limits.max_num_seqs, per_sequence),
        "sampling_real": real,
        "sampling_integer": integer,
        "tokens": torch.randint(
            0,
            config.vocab_size,
            (limits.max_num_seqs, limits.max_model_len + 1),
            generator=chosen,
            dtype=torch.int32,
        ),
    }
    for name, value in arrays.items():
        memory.write(f"step.{name}", value)
    return memory


def outcome(case: Case, memory: Memory) -> Outcome:
    """What ``memory`` holds after a launch."""
    caches = [memory[name].cpu().float().flatten() for name in sorted(memory) if "_cache" in name]
    return Outcome(
        memory["logits"][: case.logit_rows].cpu().clone(),
        memory["step.tokens"].cpu().clone(),
        torch.cat(caches),
    )


def run(case: Case, program: Program, machine: Machine) -> Outcome:
    """All steps of a case in one launch of ``program`` on ``machine``."""
    memory = fresh_memory(case, program, machine.memory_device)
    machine.load(program, memory, verify=False).run(case.steps)
    return outcome(case, memory)


def is_a_tie(case: Case) -> bool:
    """Whether the reference has two logits in a step that rounding may put in either order."""
    memory = fresh_memory(case, case.plain)
    executable = ReferenceMachine().load(case.plain, memory, verify=False)
    for _ in range(case.steps):
        executable.run(1)
        best = memory["logits"][: case.logit_rows].topk(2).values
        if bool(((best[:, 0] - best[:, 1]) < TOLERANCE).any()):
            return True
        memory.write("step.row_position", memory["step.row_position"] + 1)
    return False


def check(case: Case, machine: Machine, runs: int = 1) -> str:
    """Runs a case several times; what was wrong, or ""."""
    want = run(case, case.plain, ReferenceMachine())
    for _ in range(runs):
        try:
            difference = run(case, case.program, machine).differs(want)
        except RuntimeError as error:
            return f"{case}: {error}"
        if difference and not is_a_tie(case):
            return f"{case}: {difference}"
    return ""
