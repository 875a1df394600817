"""Key and value rows of many requests, with memory committed as it is used."""

from __future__ import annotations

import contextlib
import heapq
import mmap
import sys
from collections.abc import Sequence
from itertools import pairwise

import torch

from outpace.types import Segment

__all__ = ["KEY_BLOCK", "KvCache"]

KEY_BLOCK = 128
"""Keys are attended in blocks of this many absolute slots; `outpace.kv.attention` says why it is a constant.

Measured on AVX2: 256 costs a third more at a context of 50 and saves a tenth at 1,000; 64 is the other way round.
"""

_BYTES_PER_NUMBER = 4
_LEAST_PAGES = 8
"""Pages of a head worth a call to the system; fewer are written with zeros."""


class KvCache:
    """Implements `outpace.protocols.Cache` in float32: one pool of keys and one of values a layer.

    A request holds one lane; row i of the request is slot i of the lane, in every layer. Pools are anonymous private
    memory: the system commits a page when it is first written, and `release` hands a lane's pages back. Slots that
    were not written since the lane was allocated read as zero, so nothing of one request can reach another.

    Args:
        num_layers: layers of the model, each with its own rows.
        num_kv_heads: key heads a layer, as many as value heads.
        head_dim: numbers in a head.
        num_lanes: most requests at a time.
        capacity: most rows in a lane.
        max_rows: most rows in all lanes together.

    Raises:
        ValueError: a size is not at least 1.
    """

    def __init__(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, num_lanes: int, capacity: int, max_rows: int
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "num_lanes": num_lanes,
            "capacity": capacity,
            "max_rows": max_rows,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} is not possible: it must be at least 1")
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_lanes = num_lanes
        self.max_rows = max_rows
        self.padded_capacity = -(-capacity // KEY_BLOCK) * KEY_BLOCK
        self._capacity = capacity
        self._free = list(range(num_lanes))
        self._reserved: dict[int, int] = {}
        self._touched: dict[int, int] = {}
        self._used_rows = 0
        shape = (num_lanes * num_kv_heads, self.padded_capacity, head_dim)
        self._keys = tuple(_Pool(shape) for _ in range(num_layers))
        self._values = tuple(_Pool(shape) for _ in range(num_layers))

    @property
    def capacity(self) -> int:
        """Rows in a lane."""
        return self._capacity

    @property
    def free_rows(self) -> int:
        """Rows of the budget that no lane has reserved."""
        return self.max_rows - self._used_rows

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _BYTES_PER_NUMBER

    @property
    def bytes_in_use(self) -> int:
        """Memory committed to reserved rows, in bytes."""
        return self._used_rows * self.bytes_per_row

    def keys(self, layer: int) -> torch.Tensor:
        """The keys of a layer, [num_lanes * num_kv_heads, padded_capacity, head_dim], lane-major, to read and write."""
        return self._keys[layer].rows

    def values(self, layer: int) -> torch.Tensor:
        """The values of a layer, in the same shape as its keys."""
        return self._values[layer].rows

    def allocate(self) -> int | None:
        """The lowest free lane, with no rows, or None when all are taken.

        Lowest first keeps running lanes side by side, where attention can take them in one product.
        """
        if not self._free:
            return None
        lane = heapq.heappop(self._free)
        self._reserved[lane] = 0
        self._touched[lane] = 0
        return lane

    def reserved(self, lane: int) -> int:
        """Rows of a lane that are usable: [0, reserved).

        Raises:
            ValueError: the lane is not allocated.
        """
        rows = self._reserved.get(lane)
        if rows is None:
            raise ValueError(f"lane {lane} is not allocated; allocated: {sorted(self._reserved) or 'none'}")
        return rows

    def require(self, segment: Segment) -> None:
        """Looks whether the rows of a segment, and those of its paths, may be written and read.

        Raises:
            ValueError: the lane is not allocated, a row is not reserved, or a path leaves the segment's slots.
        """
        reserved = self.reserved(segment.lane)
        if segment.length > reserved:
            raise ValueError(f"{segment} ends beyond the {reserved} reserved rows of its lane")
        if not segment.paths:
            return
        own = range(segment.first_slot + segment.num_straight, segment.length)
        if not 0 <= segment.fork <= own.start or len(segment.paths) > len(segment):
            raise ValueError(f"{segment} has its fork behind its first path, or more paths than rows")
        for slot, path in zip(own, segment.paths, strict=True):
            if path[-1:] != (slot,) or path[0] < segment.fork or any(a >= b for a, b in pairwise(path)):
                raise ValueError(f"{segment}: the path of slot {slot} has to ascend from the fork to itself")

    def reserve(self, lane: int, rows: int) -> bool:
        """Makes rows [0, rows) of a lane usable; fewer than it already has is no change.

        Returns:
            False, and no change, if the budget does not allow it.

        Raises:
            ValueError: the lane is not allocated, or has no room for so many rows.
        """
        before = self.reserved(lane)
        if not 0 <= rows <= self._capacity:
            raise ValueError(f"lane {lane} cannot hold {rows} rows: a lane has {self._capacity}")
        if rows <= before:
            return True
        if rows - before > self.free_rows:
            return False
        self._reserved[lane] = rows
        self._touched[lane] = max(rows, self._touched[lane])
        self._used_rows += rows - before
        return True

    def truncate(self, lane: int, rows: int) -> None:
        """Gives back every row from `rows` on, in O(1); the rows below keep their contents.

        Raises:
            ValueError: the lane is not allocated or has fewer rows than that.
        """
        before = self.reserved(lane)
        if not 0 <= rows <= before:
            raise ValueError(f"lane {lane} cannot be truncated to {rows} rows: it has {before}")
        self._reserved[lane] = rows
        self._used_rows -= before - rows

    def trim(self, lane: int) -> None:
        """Makes every slot behind the reserved rows zero again, and gives its memory back to the system.

        Raises:
            ValueError: the lane is not allocated.
        """
        rows, touched = self.reserved(lane), self._touched[lane]
        if touched > rows:
            for pool in (*self._keys, *self._values):
                pool.clear(lane * self.num_kv_heads, (lane + 1) * self.num_kv_heads, rows, touched)
            self._touched[lane] = rows

    def copy(self, source: int, target: int, rows: int) -> None:
        """Writes rows [0, rows) of lane `source`, in every layer, to lane `target`.

        Raises:
            ValueError: a lane is not allocated, or has not reserved so many rows.
        """
        for lane in (source, target):
            if not 0 <= rows <= self.reserved(lane):
                raise ValueError(
                    f"{rows} rows cannot be copied from lane {source} to lane {target}: lane {lane} has "
                    f"{self.reserved(lane)}"
                )
        heads = self.num_kv_heads
        for pool in (*self._keys, *self._values):
            lanes = pool.rows.view(self.num_lanes, heads, self.padded_capacity, self.head_dim)
            lanes[target, :, :rows].copy_(lanes[source, :, :rows])

    def compact(self, lane: int, first: int, slots: Sequence[int]) -> None:
        """Moves rows `slots`, ascending, to first, first + 1, ... of the same lane, in every layer.

        What other rows from `first` on held is gone, or will be with the next truncation.

        Raises:
            ValueError: the lane is not allocated, or a row is not reserved, lies before its new place, or comes twice.
        """
        reserved, ends = self.reserved(lane), [first - 1, *slots, self.reserved(lane)]
        if any(a >= b for a, b in pairwise(ends)):
            raise ValueError(
                f"rows {list(slots)} of lane {lane} cannot move to rows from {first} on: they have to ascend from "
                f"there and stay below its {reserved} reserved ones"
            )
        # Those in front that are where they should be stay.
        moved = next((at for at, slot in enumerate(slots) if slot != first + at), len(slots))
        if moved == len(slots):
            return
        begin, wanted = first + moved, torch.tensor(slots[moved:], dtype=torch.int64, device="cpu")
        for pool in (*self._keys, *self._values):
            heads = pool.rows[lane * self.num_kv_heads : (lane + 1) * self.num_kv_heads]
            heads[:, begin : begin + len(wanted)] = heads.index_select(1, wanted)

    def release(self, lane: int) -> None:
        """Gives the whole lane back, and its memory to the system.

        Raises:
            ValueError: the lane is not allocated.
        """
        self._used_rows -= self.reserved(lane)
        touched = self._touched[lane]
        for pool in (*self._keys, *self._values):
            pool.clear(lane * self.num_kv_heads, (lane + 1) * self.num_kv_heads, 0, touched)
        del self._reserved[lane], self._touched[lane]
        heapq.heappush(self._free, lane)

    def check_integrity(self) -> None:
        """Raises AssertionError if the books do not balance."""
        free, taken = sorted(self._free), sorted(self._reserved)
        if sorted(free + taken) != list(range(self.num_lanes)):
            raise AssertionError(f"free lanes {free} and taken lanes {taken} are not {self.num_lanes} lanes in all")
        total = sum(self._reserved.values())
        if total != self._used_rows:
            raise AssertionError(f"lanes hold {total} rows but {self._used_rows} are booked")
        if not 0 <= total <= self.max_rows:
            raise AssertionError(f"{total} rows are reserved of a budget of {self.max_rows}")
        for lane, rows in self._reserved.items():
            if not 0 <= rows <= self._touched[lane] <= self._capacity:
                raise AssertionError(
                    f"lane {lane} holds {rows} rows, at most {self._touched[lane]} so far, of {self._capacity}"
                )


class _Pool:
    """Rows of one layer, [heads, slots, dim] float32, all zero, on pages that exist once they are written."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        heads, slots, dim = shape
        self._row_bytes = dim * _BYTES_PER_NUMBER
        self._head_bytes = slots * self._row_bytes
        self._map = _anonymous_map(heads * self._head_bytes)
        # Made outside of inference mode, so that the pool can be written in any mode.
        with torch.inference_mode(False):
            self.rows = torch.frombuffer(self._map, dtype=torch.float32).view(shape)

    def clear(self, first_head: int, last_head: int, begin: int, end: int) -> None:
        """Makes slots [begin, end) of heads [first_head, last_head) zero again; none beyond were written."""
        if begin == 0 and self._give_back(first_head * self._head_bytes, last_head * self._head_bytes):
            return
        page, size = mmap.PAGESIZE, self._head_bytes
        if (end - begin) * self._row_bytes < _LEAST_PAGES * page or size % page or sys.platform != "linux":
            self.rows[first_head:last_head, begin:end].zero_()
            return
        first = -(-begin * self._row_bytes // page) * page
        self.rows[first_head:last_head, begin : -(-first // self._row_bytes)].zero_()
        for head in range(first_head, last_head):
            self._give_back(head * size + first, (head + 1) * size)

    def _give_back(self, begin: int, end: int) -> bool:
        """Bytes [begin, end) become zero and take no memory. False, and no change, if that cannot be done."""
        # Only Linux promises zeros after this advice, and it takes whole pages.
        if sys.platform != "linux" or begin % mmap.PAGESIZE or end % mmap.PAGESIZE:
            return False
        self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        return True


def _anonymous_map(num_bytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A huge page would commit 2 MB for the first row of every head. A kernel without them refuses the advice.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
