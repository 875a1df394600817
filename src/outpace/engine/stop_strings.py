"""Finding stop strings in a text that grows, at a cost that depends on neither their number nor the text so far.

An automaton of Aho and Corasick: its state is the longest end of the text that begins a stop string. So it knows at
every character whether a stop string ends there, and how much of the text a stop string may still claim.
"""

from __future__ import annotations

import functools
from collections import deque

from outpace.errors import InvalidParameter

__all__ = ["MAX_STOP_CHARACTERS", "StopStrings", "stop_strings"]

MAX_STOP_CHARACTERS = 2**16
"""Most characters in all stop strings of a request. Each takes some 300 bytes, all of them a tenth of a second."""


class StopStrings:
    """The automaton of some stop strings. It does not change, so requests share one and keep a state each, 0 at first.

    Args:
        strings: none of them empty.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._found: list[str | None] = [None]
        self._claim = [0]
        for string in strings:
            self._add(string)
        self._connect()

    def claim(self, state: int) -> int:
        """How many characters at the end of the text may still become (part of) a stop string that ends later."""
        return self._claim[state]

    def scan(self, state: int, text: str, *, armed: bool = True) -> tuple[int, int, str | None]:
        """Reads on, to the first end of a stop string if `armed`, else to the end of the text.

        Returns:
            The state, how many characters were read, and the stop string that ends there: the longest, if several do.
        """
        following, fallback, found = self._next, self._fallback, self._found
        for index, letter in enumerate(text):
            while (node := following[state].get(letter)) is None and state:
                state = fallback[state]
            state = node or 0
            if armed and found[state] is not None:
                return state, index + 1, found[state]
        return state, len(text), None

    def _add(self, string: str) -> None:
        node = 0
        for depth, letter in enumerate(string, start=1):
            child = self._next[node].get(letter)
            if child is None:
                child = self._next[node][letter] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._found.append(None)
                self._claim.append(depth)
            node = child
        self._found[node] = string

    def _connect(self) -> None:
        """Gives every node the node of its longest proper end, nodes nearer to the root first."""
        waiting = deque(self._next[0].values())
        while waiting:
            node = waiting.popleft()
            behind = self._fallback[node]
            if self._found[node] is None:
                self._found[node] = self._found[behind]
            if not self._next[node]:  # complete, and begins nothing longer: only its own end may go on
                self._claim[node] = self._claim[behind]
            for letter, child in self._next[node].items():
                state = behind
                while letter not in self._next[state] and state:
                    state = self._fallback[state]
                self._fallback[child] = self._next[state].get(letter, 0) if node else 0
                waiting.append(child)


@functools.lru_cache(maxsize=4)  # the choices of one request come one after the other
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton of these strings.

    Raises:
        InvalidParameter: they are too long, all together.
    """
    total = sum(map(len, strings))
    if total > MAX_STOP_CHARACTERS:
        raise InvalidParameter(
            f"stop has {total} characters in {len(strings)} strings: {MAX_STOP_CHARACTERS} in all are possible"
        )
    return StopStrings(strings)
