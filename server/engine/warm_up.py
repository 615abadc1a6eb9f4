"""The programs that a server compiles before requests come, and behind its start."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megavm.scheduler.run.stand_ins import STAND_IN_FACTOR, STAND_IN_ROWS

if TYPE_CHECKING:
    from megavm.llm import LLM
    from megavm.scheduler.llama.graph import Bucket
    from megavm.scheduler.run.runner import Progress, Runner


def warm_up(llm: LLM, report: Progress) -> None:
    """Compile programs of usual sizes, so that requests need not wait.

    They are of the kind that the default parameters need. Programs that sample run greedy steps as
    well. Requests that sample wait for the first that can run them all. So do those with
    log-probabilities where several ranks divide the logits, which no other program gathers.
    """
    report("reading the tokenizer for grammars", 0, 1)
    llm.restrictions.prepare()
    report("reading the texts of tokens", 0, 1)
    llm.tokenizer.remember_texts()
    runner, sampled = llm.runner, llm.samples_by_default
    buckets = _first_programs(runner, sampled)
    for done, bucket in enumerate(buckets):
        report("compiling programs", done, len(buckets))
        runner.programs.program(bucket)
    others = _other_programs(runner, not sampled)
    first, last = ([], others) if sampled else (others[:1], others[1:])
    if not runner.programs.options(1).fixed_order:  # else nothing stands in
        first += [*_larger_stand_ins(runner, sampled), *_stand_ins(runner, sampled)]
    runner.programs.compile_ahead(first, sampled=sampled)
    runner.programs.prepare(last, last=True)


def _stand_ins(runner: Runner, sampled: bool) -> list[Bucket]:
    """Programs that can run all steps of a kind and so many rows until those have their own.

    The first has the most rows: it runs all smaller steps, and larger ones in parts. It is slowest
    for the fewest, whose programs come next.
    """
    *fewer, most = _usual_rows(runner.max_num_batched_tokens)
    return [runner.programs.stand_in(rows, sampled=sampled) for rows in (most, *fewer)]


def _larger_stand_ins(runner: Runner, sampled: bool) -> list[Bucket]:
    """Programs that can run all steps of more rows than the others, most rows first."""
    found, rows = [], runner.max_num_batched_tokens
    while rows > STAND_IN_ROWS:
        found.append(runner.programs.stand_in(rows, sampled=sampled))
        rows //= STAND_IN_FACTOR
    return found


def _other_programs(runner: Runner, sampled: bool) -> list[Bucket]:
    """Programs of the kind that the default parameters do not need, on a GPU for most kernels.

    The first can run all steps of this kind.
    """
    most = runner.max_num_batched_tokens
    usual = _usual_rows(most)
    rows = dict.fromkeys((usual[-1], *usual, min(2 * usual[-1], most), most))
    return [runner.programs.stand_in(count, sampled=sampled) for count in rows]


def _first_programs(runner: Runner, sampled: bool) -> list[Bucket]:
    """Programs that are compiled before the server is ready.

    With those that sample no step waits for its program. With the others no greedy one does, unless
    the host reads logits that several ranks divide.
    """
    bucket = partial(runner.programs.bucket, sampled=sampled)
    found = [bucket(rows, 1, 1) for rows in _usual_rows(runner.max_num_batched_tokens)]
    for rows in _usual_rows(runner.max_num_seqs):
        found.append(bucket(rows, rows, 1, decode=True))
    return found + _stand_ins(runner, sampled)[:2]


def _usual_rows(most: int) -> list[int]:
    """1, 2, 4, ... up to `most` and STAND_IN_ROWS. Larger steps are compiled on first use."""
    most = min(most, STAND_IN_ROWS)
    return [*(1 << i for i in range((most - 1).bit_length())), most]
