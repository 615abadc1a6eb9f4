"""Makes what supports these tests importable (tests are no package), and what reads machine code."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent / "support"), str(ROOT / "benchmarks")]
