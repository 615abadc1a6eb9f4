"""What an engine has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineCounters:
    """Totals since the engine was made.

    ``plan_seconds`` and ``collect_seconds`` are of the host's clock, so they include its
    waits for a core and the interpreter. ``run_seconds`` are those in which the machine ran steps
    (``StepRunner.machine_seconds``). ``late_launches``: see ``StepRunner.late_launches``.
    """

    launches: int = 0
    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    faults: int = 0
    late_launches: int = 0
    plan_seconds: float = 0.0
    run_seconds: float = 0.0
    collect_seconds: float = 0.0
