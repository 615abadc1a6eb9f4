"""The KV block manager never loses, doubles or mixes up a block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavm.scheduler.engine.blocks import NO_PREFIX, BlockManager, block_digest


def digest(*tokens: int, previous: bytes = NO_PREFIX) -> bytes:
    return block_digest(previous, np.array(tokens, dtype=np.int32))


def test_every_block_is_handed_out_once_and_then_no_more() -> None:
    blocks = BlockManager(5, 16)
    assert sorted(blocks.allocate() for _ in range(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="all 5 KV blocks are held"):
        blocks.allocate()


def test_a_shared_block_is_free_when_its_last_holder_releases_it() -> None:
    blocks = BlockManager(1, 16)
    block = blocks.allocate()
    blocks.share([block])
    blocks.release([block])
    assert blocks.num_free == 0
    blocks.release([block])
    assert blocks.num_free == 1


def test_releasing_what_nobody_holds_is_an_error() -> None:
    blocks = BlockManager(2, 16)
    with pytest.raises(ValueError, match="KV block 1 is released, but nobody holds it"):
        blocks.release([1])


def test_sharing_and_publishing_what_nobody_holds_are_errors() -> None:
    blocks = BlockManager(2, 16)
    with pytest.raises(ValueError, match="KV block 0 is shared, but its contents are unknown"):
        blocks.share([0])
    with pytest.raises(ValueError, match="KV block 0 is published, but nobody holds it"):
        blocks.publish(0, digest(1))


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 1)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="both numbers must be positive"):
        BlockManager(num_blocks, block_size)


def test_a_released_prefix_is_found_again_until_its_blocks_are_needed() -> None:
    blocks = BlockManager(3, 2)
    first, second = blocks.allocate(), blocks.allocate()
    one = digest(1, 2)
    two = digest(3, 4, previous=one)
    blocks.publish(first, one)
    blocks.publish(second, two)
    blocks.release([first, second])
    assert (blocks.num_free, blocks.num_cached) == (3, 2)
    assert blocks.match([one, two]) == [first, second]
    assert blocks.match([two]) == [second]
    blocks.allocate()  # the block that was never used
    blocks.allocate()  # evicts the end of the prefix first
    assert blocks.match([one, two]) == [first]
    assert blocks.counters.evictions == 1
    blocks.share([first])
    assert blocks.num_free == 0
    blocks.check()


def test_the_first_of_two_equal_blocks_stays_known() -> None:
    blocks = BlockManager(2, 2)
    first, second = blocks.allocate(), blocks.allocate()
    blocks.publish(first, digest(1, 2))
    blocks.publish(second, digest(1, 2))
    assert blocks.match([digest(1, 2)]) == [first]
    blocks.release([first, second])
    assert blocks.num_cached == 1
    blocks.check()


def test_a_digest_depends_on_the_blocks_before() -> None:
    assert digest(3, 4, previous=digest(1, 2)) != digest(3, 4)
    assert digest(3, 4, previous=digest(1, 2)) == digest(3, 4, previous=digest(1, 2))


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = BlockManager(2, 2, prefix_caching=False)
    block = blocks.allocate()
    blocks.publish(block, digest(1, 2))
    assert blocks.match([digest(1, 2)]) == []
    blocks.release([block])
    assert blocks.num_cached == 0


def test_forgetting_all_keeps_the_holds() -> None:
    blocks = BlockManager(3, 2)
    held, cached = blocks.allocate(), blocks.allocate()
    blocks.publish(held, digest(1, 2))
    blocks.publish(cached, digest(3, 4))
    blocks.release([cached])
    blocks.forget_all()
    assert blocks.match([digest(1, 2)]) == []
    assert (blocks.num_free, blocks.num_cached) == (2, 0)
    blocks.release([held])
    blocks.check()
    assert blocks.num_free == 3


@given(
    num_blocks=st.integers(1, 12),
    caching=st.booleans(),
    moves=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 5)), max_size=80
    ),
)
def test_random_use_never_loses_a_block(
    num_blocks: int, caching: bool, moves: list[tuple[int, int, int]]
) -> None:
    blocks = BlockManager(num_blocks, 2, prefix_caching=caching)
    held: list[int] = []  # one entry per hold
    for move, which, content in moves:
        if move == 0 and blocks.num_free:
            block = blocks.allocate()
            assert block not in held
            held.append(block)
        elif move == 1 and held:
            blocks.release([held.pop(which % len(held))])
        elif move == 2 and held:
            blocks.publish(held[which % len(held)], digest(content, content))
        elif move == 3:
            found = blocks.match([digest(content, content)])
            idle = blocks.num_idle(found)
            free = blocks.num_free
            blocks.share(found)
            assert blocks.num_free == free - idle
            held += found
        assert blocks.num_held == len(set(held))
        blocks.check()
    blocks.release(held)
    assert blocks.num_free == num_blocks
    blocks.check()
