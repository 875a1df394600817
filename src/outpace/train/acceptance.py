"""How much of a drafter's chains the target keeps, from row by row comparisons with it.

A *chain* begins after a row (the last committed token's) and has k tokens. Greedy: a token is kept iff it is the
target's likeliest. Sampled: token j is kept with probability alpha_j, given those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Acceptance", "Chains", "Tally", "chains_of_rows", "texts_of"]


@dataclass(frozen=True, slots=True)
class Chains:
    """One chain for every row that a step may start behind.

    Args:
        agrees: [N, k] bool, whether token j is the target's likeliest, those before it being what stands in the text.
        alpha: [N, k] float, the chance that token j is kept when it is drawn.
        exists: [N, k] bool, whether the text goes on that far; True first, then False.
        follows: [N] bool, whether the row is the one behind the row before it, in the same text.
    """

    agrees: torch.Tensor
    alpha: torch.Tensor
    exists: torch.Tensor
    follows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What was measured.

    Args:
        chain: draft length k.
        rows: chains looked at.
        greedy: [k] chance that token j is kept if those before it are, over all rows; 0 where that was never seen.
        sampled: the same for tokens drawn from the drafter's distribution.
        greedy_length: tokens a step brings, the bonus token included, at temperature 0, steps following each other as
            they do while serving.
        sampled_length: the same when drawn, over all rows alike.
        rate: kept tokens over drafted ones at temperature 0, steps following each other.
    """

    chain: int
    rows: int
    greedy: tuple[float, ...]
    sampled: tuple[float, ...]
    greedy_length: float
    sampled_length: float
    rate: float


@dataclass
class Tally:
    """Sums over many rows, from which `result` makes rates.

    Args:
        chain: draft length k.
    """

    chain: int
    rows: int = 0
    steps: int = 0
    drafted: int = 0
    kept: int = 0
    reached: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached = [[0.0] * self.chain for _ in range(4)]

    def add(self, chains: Chains) -> None:
        """Counts some rows; texts must not be split between two calls."""
        self.rows += len(chains.follows)
        for number, kept in enumerate((chains.agrees.double(), chains.alpha.double())):
            before = torch.ones(len(kept), dtype=torch.float64, device="cpu")
            for j in range(self.chain):
                there = before * chains.exists[:, j]
                before = there * kept[:, j]
                self.reached[2 * number][j] += float(there.sum())
                self.reached[2 * number + 1][j] += float(before.sum())
        runs = _runs(chains)
        lengths = chains.exists.sum(1).tolist()
        for begin, end in texts_of(chains.follows):
            row = begin
            while row < end:
                self.steps += 1
                self.drafted += lengths[row]
                self.kept += runs[row]
                row += runs[row] + 1

    def result(self) -> Acceptance:
        """The rates."""
        there, kept, drawn_there, drawn = self.reached
        rows = max(1, self.rows)
        return Acceptance(
            chain=self.chain,
            rows=self.rows,
            greedy=tuple(k / t if t else 0.0 for k, t in zip(kept, there, strict=True)),
            sampled=tuple(k / t if t else 0.0 for k, t in zip(drawn, drawn_there, strict=True)),
            greedy_length=1 + self.kept / max(1, self.steps),
            sampled_length=1 + sum(drawn) / rows,
            rate=self.kept / max(1, self.drafted),
        )


def chains_of_rows(agrees: torch.Tensor, alpha: torch.Tensor, follows: torch.Tensor, chain: int) -> Chains:
    """Chains of a drafter that judges row after row alike, however far it has drafted.

    Token j of the chain behind row t is what it says at row t + j.

    Args:
        agrees: [N] bool.
        alpha: [N] float.
        follows: [N] bool, as in `Chains`.
        chain: k.
    """
    count = len(agrees)
    rows = torch.arange(count, dtype=torch.int64, device="cpu").unsqueeze(1) + torch.arange(
        chain, dtype=torch.int64, device="cpu"
    )
    ends = torch.empty(count, dtype=torch.int64, device="cpu")
    for begin, end in texts_of(follows):
        ends[begin:end] = end
    exists = rows < ends.unsqueeze(1)
    rows = rows.clamp_max(max(0, count - 1))
    return Chains(agrees[rows] & exists, alpha[rows] * exists, exists, follows)


def _runs(chains: Chains) -> Sequence[int]:
    """[N] tokens of each chain that are kept when the likeliest are drafted."""
    runs: list[int] = (chains.agrees & chains.exists).long().cumprod(1).sum(1).tolist()
    return runs


def texts_of(follows: torch.Tensor) -> list[tuple[int, int]]:
    """Rows [begin, end) of each text."""
    begins = [row for row, goes_on in enumerate(follows.tolist()) if not goes_on]
    return list(zip(begins, [*begins[1:], len(follows)], strict=True))
