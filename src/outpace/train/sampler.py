"""Which windows a pass takes: all of them in a new order each round, the same again for the same seed."""

from __future__ import annotations

import torch

__all__ = ["Sampler"]


class Sampler:
    """Endless; its state is two numbers.

    Args:
        count: windows there are, at least 1.
        seed: of the orders.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._round, self._taken = 0, 0

    @property
    def state(self) -> dict[str, int]:
        """To go on from with `restore`."""
        return {"round": self._round, "taken": self._taken}

    def restore(self, state: dict[str, int]) -> None:
        """Goes on where another sampler of the same count and seed was."""
        self._round, self._taken = state["round"], state["taken"]

    def next(self, count: int) -> torch.Tensor:
        """[count] int64 numbers of the next windows; a round may end and another begin among them."""
        parts: list[torch.Tensor] = []
        while count:
            part = self._order()[self._taken : self._taken + count]
            parts.append(part)
            count -= len(part)
            self._taken += len(part)
            if self._taken == self._count:
                self._round, self._taken = self._round + 1, 0
        return torch.cat(parts)

    def _order(self) -> torch.Tensor:
        # One generator a round, so that any round can be made without those before it.
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + self._round) % 2**63)
        return torch.randperm(self._count, generator=generator, dtype=torch.int64, device="cpu")
