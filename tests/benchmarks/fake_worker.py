"""A worker whose engine counts: `fake_worker.py` answers [1, 2, ...]. What it is told to do wrong is in its options."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np
from engines.protocol import Answer, NotExposed, Prompt, Recorder, Settings, serve


class CountingEngine:
    """`protocol.Engine`."""

    def __init__(self, settings: Settings) -> None:
        self._options = settings.options
        if "refuse" in self._options:
            raise ValueError("this model\nhas two lines to say")
        print("an engine's own words on standard output", flush=True)
        beside = [name for name in ("compare", "protocol", "machine") if importlib.util.find_spec(name)]
        self.versions = {"counting": "1.0", "neighbours": ", ".join(beside) or "none"}
        self.notes = ["it counts"]

    def generate(self, prompt: Prompt) -> Answer:
        if "die" in self._options:
            os.write(2, b"out of luck\n")
            os._exit(3)
        if "sleep" in self._options:
            time.sleep(60)
        recorder = Recorder()
        recorder.add(range(1, prompt.max_tokens + 1))
        return recorder.answer(passes=1)

    def score(self, texts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        if "silent" in self._options:
            raise NotExposed("no logits here")
        for text in texts:
            yield np.eye(8, dtype=np.float32)[list(text)]

    def close(self) -> None:
        """Nothing was started."""


if __name__ == "__main__":
    serve(CountingEngine)
