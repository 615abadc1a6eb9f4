"""KV blocks: allocation, sharing, and the prefix cache.

A KV block is *held* (one or more sequences use it), *cached* (no sequence uses it, but its contents
are known and a new sequence may reuse it) or *free*. A full block is identified by its digest,
which covers every token from the start of the sequence: equal digests mean equal keys and values.
When no free block is left, the least recently used cached block is reused for other contents.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NO_PREFIX = b""


def block_digest(previous: bytes, tokens: npt.NDArray[np.int32]) -> bytes:
    """The digest (16 bytes) of a full block.

    ``previous``: the digest of the block before it in the sequence, NO_PREFIX for the first.
    """
    return hashlib.blake2b(previous + tokens.tobytes(), digest_size=16).digest()


@dataclass
class PrefixCounters:
    """Lookups, hits and evictions of the prefix cache, in blocks."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0


class BlockManager:
    """Allocates the KV blocks 0 .. num_blocks - 1, each in constant time.

    Raises ValueError when a number is not positive. Methods raise ValueError for a block that the
    caller cannot hold; that is a bug in the caller, never the effect of a request.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"{num_blocks} KV blocks of {block_size} tokens: both numbers must be positive"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.counters = PrefixCounters()
        self.reset()

    def reset(self) -> None:
        """Make all blocks free, whoever holds them."""
        self._holders = [0] * self.num_blocks
        self._digest: list[bytes | None] = [None] * self.num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can still return: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence holds and whose contents may be reused."""
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that the keys and values of ``tokens`` tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self) -> int:
        """A block with unknown contents, held once.

        Raises ValueError when every block is held.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self.counters.evictions += 1
        else:
            raise ValueError(f"all {self.num_blocks} KV blocks are held")
        self._holders[block] = 1
        return block

    def release(self, blocks: Iterable[int]) -> None:
        """Release one hold on each block, in reverse: the end of a prefix is evicted first."""
        for block in reversed(list(blocks)):
            holders = self._holders[block]
            if holders < 1:
                raise ValueError(f"KV block {block} is released, but nobody holds it")
            self._holders[block] = holders - 1
            if holders > 1:
                continue
            if self._digest[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of ``digests``. This does not hold them."""
        blocks: list[int] = []
        if self.prefix_caching:
            for digest in digests:
                block = self._block_of.get(digest)
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one hold to each of the blocks, which ``match`` returned."""
        for block in blocks:
            if self._holders[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"KV block {block} is shared, but its contents are unknown")
                del self._cached[block]
            self._holders[block] += 1

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` no sequence holds; ``share`` lowers ``num_free`` by as many."""
        return sum(self._holders[block] == 0 for block in blocks)

    def publish(self, block: int, digest: bytes) -> None:
        """Enter a held block with complete contents into the prefix cache, under its digest.

        If another block has the same digest already, that one stays and this one is not entered.
        """
        if self._holders[block] < 1:
            raise ValueError(f"KV block {block} is published, but nobody holds it")
        if self.prefix_caching and self._digest[block] is None and digest not in self._block_of:
            self._digest[block] = digest
            self._block_of[digest] = block

    def forget_all(self) -> None:
        """Forget the contents of all blocks, as after a fault; holds do not change."""
        self._block_of.clear()
        self._digest = [None] * self.num_blocks
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self) -> None:
        """Check that every block is in exactly one state and that the digests agree.

        Raises ValueError otherwise.
        """
        held = [block for block, holders in enumerate(self._holders) if holders > 0]
        everything = sorted([*held, *self._free, *self._cached])
        if everything != list(range(self.num_blocks)):
            raise ValueError(
                f"KV blocks do not add up: {len(held)} held, {len(self._free)} free and "
                f"{len(self._cached)} cached of {self.num_blocks}"
            )
        known = {digest: block for block, digest in enumerate(self._digest) if digest is not None}
        if known != self._block_of or any(self._digest[b] is not None for b in self._free):
            raise ValueError(f"{len(self._block_of)} digests, {len(known)} blocks that carry one")

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            del self._block_of[digest]
            self._digest[block] = None
