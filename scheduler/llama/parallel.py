"""Tensor parallelism: what each rank holds and computes of a Llama.

Ranks divide heads, with their keys and values, the width of the MLP, and the vocabulary (Shoeybi
et al. 2019, "Megatron-LM", arXiv:1909.08053). They meet twice in a layer, or four times:

- ``all_reduce``: o_proj and down_proj are divided along their input. Every rank has sums for all of
  the hidden state, which are added in order of rank.
- ``all_gather``: o_proj and down_proj are divided along their output, as all other products are.
  Each number is one rank's sum, as on a single rank. Results have the same bits if the order of
  additions is fixed (CompileOptions.fixed_order): otherwise it may depend on how the compiler cuts
  the work of so many ranks. More is exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megavm.scheduler.llama.config import LlamaConfig
from megavm.vm.config import UNIT_ROWS

if TYPE_CHECKING:
    import torch

Exchange = Literal["all_reduce", "all_gather"]


@dataclass(frozen=True)
class Parallel:
    """The number of ranks, and how they meet. Raises ValueError for another ``exchange``."""

    ranks: int = 1
    exchange: Exchange = "all_gather"

    def __post_init__(self) -> None:
        if self.exchange not in ("all_reduce", "all_gather"):
            raise ValueError(
                f"tensor_parallel_exchange is {self.exchange!r}: expected all_reduce or all_gather"
            )

    def check(self, config: LlamaConfig) -> None:
        """Raise ValueError when a model cannot be divided among the ranks."""
        heads = config.num_kv_heads
        if self.ranks < 1 or heads % self.ranks:
            raise ValueError(
                f"tensor_parallel_size is {self.ranks}: it must divide the model's {heads} KV heads"
            )
        if self.gathers and config.hidden_size % (UNIT_ROWS * self.ranks):
            raise ValueError(
                f"{self.ranks} ranks cannot gather a hidden size of {config.hidden_size}: expected "
                f"a multiple of {UNIT_ROWS * self.ranks}"
            )
        size, width = config.intermediate_size, self.width(config.intermediate_size)
        if self.ranks > 1 and not self.gathers and size <= width:
            raise ValueError(
                f"{self.ranks} ranks cannot divide an intermediate size of {size} with"
                f" tensor_parallel_exchange all_reduce: expected a multiple of {self.ranks}, or"
                f" more than {width}"
            )

    @property
    def gathers(self) -> bool:
        """Whether ranks meet by gathers alone."""
        return self.ranks > 1 and self.exchange == "all_gather"

    def heads(self, heads: int) -> int:
        """Heads of a rank."""
        return heads // self.ranks

    def width(self, intermediate_size: int) -> int:
        """Columns of the MLP of a rank; the last ranks may have columns of zeros."""
        share = -(-intermediate_size // self.ranks)
        return share if intermediate_size % self.ranks == 0 else -(-share // UNIT_ROWS) * UNIT_ROWS

    def divides_vocabulary(self, size: int) -> bool:
        """Whether each rank computes the logits of a part of the vocabulary; else each has all."""
        return self.ranks > 1 and size % self.ranks == 0


ONE_RANK = Parallel()


def shard(weight: torch.Tensor, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """The part of a whole weight that a rank holds as a tensor of ``shape``.

    Of a dimension that is shorter than the whole one, ranks hold consecutive ranges. Elements
    beyond the whole are zeros. The result is a view where it is a contiguous range of the weight.
    """
    import torch

    part = weight
    for dim, size in enumerate(shape):
        if size < weight.shape[dim]:
            begin = min(rank * size, weight.shape[dim])
            part = part.narrow(dim, begin, min(size, weight.shape[dim] - begin))
    if part.shape == shape:
        return part.contiguous()
    padded = torch.zeros(shape, dtype=weight.dtype)
    padded[tuple(slice(size) for size in part.shape)] = part
    return padded
