"""Random sequences, and packs of their rows, for the tests of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outpace.kv.attention import AttentionPlan, attend
from outpace.kv.cache import KvCache
from outpace.types import Segment

NUM_LANES = 10
LAYER = 1
LAYOUTS = ((9, 3, 64), (12, 2, 128), (14, 2, 64), (4, 4, 32), (8, 1, 16))


@dataclass(frozen=True)
class Part:
    """Rows [first, first + count) of a sequence, to be computed in a lane."""

    lane: int
    sequence: int
    first: int
    count: int


class Sequences:
    """Queries, keys and values of a few sequences, and a cache to attend over them."""

    def __init__(
        self, layout: tuple[int, int, int], *, length: int, num_sequences: int = 2, sliding_window: int | None = None
    ) -> None:
        heads, kv_heads, dim = layout
        self.layout, self.length, self.sliding_window = layout, length, sliding_window
        generator = torch.Generator().manual_seed(heads * dim)
        self.query = torch.randn(num_sequences, length, heads, dim, generator=generator) * 2 * dim**-0.5
        self.key = torch.randn(num_sequences, length, kv_heads, dim, generator=generator)
        self.value = torch.randn(num_sequences, length, kv_heads, dim, generator=generator)
        self.cache = KvCache(
            num_layers=2,
            num_kv_heads=kv_heads,
            head_dim=dim,
            num_lanes=NUM_LANES,
            capacity=length,
            max_rows=NUM_LANES * length,
        )
        for lane in range(NUM_LANES):
            assert self.cache.allocate() == lane
            assert self.cache.reserve(lane, length)

    def plan(self, parts: Sequence[Part], *, row_by_row: bool = False) -> AttentionPlan:
        segments, begin = [], 0
        for part in parts:
            segments.append(Segment(part.lane, begin, begin + part.count, part.first))
            begin += part.count
        heads, kv_heads, dim = self.layout
        return AttentionPlan(
            segments,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            sliding_window=self.sliding_window,
            row_by_row=row_by_row,
        )

    def fill(self, parts: Sequence[Part], stale: float = 0.0) -> None:
        """Puts the rows before each part into its lane, and `stale` into every slot from there on."""
        for part in parts:
            for pool, rows in ((self.cache.keys(LAYER), self.key), (self.cache.values(LAYER), self.value)):
                lane = pool.view(NUM_LANES, self.layout[1], -1, self.layout[2])[part.lane]
                lane[:, : part.first] = rows[part.sequence, : part.first].transpose(0, 1)
                lane[:, part.first :] = stale

    def attend(self, parts: Sequence[Part], *, row_by_row: bool = False) -> torch.Tensor:
        """Computes the parts in one pack over what the lanes hold; [R, num_heads * head_dim]."""

        def rows(of: torch.Tensor) -> torch.Tensor:
            return torch.cat([of[part.sequence, part.first : part.first + part.count] for part in parts])

        plan = self.plan(parts, row_by_row=row_by_row)
        return attend(plan, self.cache, LAYER, rows(self.query), rows(self.key), rows(self.value))

    def alone(self, *, row_by_row: bool = False) -> torch.Tensor:
        """Every row of every sequence computed in a pack of its own, [num_sequences, length, num_heads * head_dim]."""
        return torch.stack(
            [
                torch.cat([self.attend([Part(0, s, i, 1)], row_by_row=row_by_row) for i in range(self.length)])
                for s in range(len(self.query))
            ]
        )

    def exact(self) -> torch.Tensor:
        """The same in float64 from the definition."""
        heads, kv_heads, _ = self.layout
        slots = torch.arange(self.length)
        seen = slots <= slots[:, None]
        if self.sliding_window is not None:
            seen &= slots > slots[:, None] - self.sliding_window
        key = self.key.double().repeat_interleave(heads // kv_heads, 2)
        value = self.value.double().repeat_interleave(heads // kv_heads, 2)
        scores = torch.einsum("sihd,sjhd->shij", self.query.double(), key).masked_fill(~seen, float("-inf"))
        return torch.einsum("shij,sjhd->sihd", scores.softmax(-1), value).flatten(2)


def of_parts(rows: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """The rows of some parts out of the rows of all sequences."""
    return torch.cat([rows[part.sequence, part.first : part.first + part.count] for part in parts])
