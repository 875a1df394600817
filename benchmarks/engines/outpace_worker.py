"""outpace itself. Variants: plain, ngram, draft, self. Options: quantization."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engines.protocol import Answer, Prompt, Recorder, Settings, serve
from outpace import LLM, SamplingParams, SpeculativeConfig, __version__
from outpace.types import Pack, Segment

_ROWS = 64  # of logits at a time


class OutpaceEngine:
    """`protocol.Engine`."""

    def __init__(self, settings: Settings) -> None:
        self.notes: list[str] = []
        self._llm = LLM(
            settings.target,
            _speculation(settings),
            quantization=settings.options["quantization"],
            threads=settings.threads,
            max_num_seqs=1,
            max_model_len=settings.context,
            notify=self._note,
        )
        self.versions = {
            "outpace": __version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "weights": self._llm.describe()["linear_layers"],
        }

    def generate(self, prompt: Prompt) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens, ignore_eos=prompt.ignore_eos)
        recorder, stats = Recorder(), None
        for chunk in self._llm.stream(prompt.token_ids, params):
            if chunk.output is None:
                recorder.add(chunk.token_ids)
            else:
                # What a last chunk holds beside its pieces (an id without text) is in the output alone.
                recorder.add(chunk.output.outputs[0].token_ids[len(recorder.token_ids) :])
                stats = chunk.output.stats
        assert stats is not None
        return recorder.answer(passes=stats.steps, drafted=stats.draft_tokens, accepted=stats.accepted_tokens)

    def score(self, texts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        model, cache = self._llm._engine.model, self._llm._engine.cache
        for text in texts:
            lane = cache.allocate()
            assert lane is not None and cache.reserve(lane, len(text))
            pieces = []
            for begin in range(0, len(text), _ROWS):
                ids = torch.tensor(text[begin : begin + _ROWS])
                rows = torch.arange(len(ids))
                pack = Pack(ids, begin + rows, (Segment(lane, 0, len(ids), begin),), logits_rows=rows)
                pieces.append(model.forward(pack, cache).logits.numpy())
            cache.release(lane)
            yield np.concatenate(pieces)

    def close(self) -> None:
        """Nothing runs beside this process."""

    def _note(self, line: str) -> None:
        if line.startswith("early exit"):
            self.notes.append(line)


def _speculation(settings: Settings) -> SpeculativeConfig:
    count = settings.draft_tokens
    if settings.variant == "plain":
        return SpeculativeConfig(method="none")
    if settings.variant == "ngram":
        return SpeculativeConfig(method="ngram", num_speculative_tokens=count)
    if settings.variant == "draft":
        return SpeculativeConfig(method="draft_model", model=settings.draft, num_speculative_tokens=count)
    if settings.variant == "self":
        return SpeculativeConfig(method="early_exit", num_speculative_tokens=count)
    raise ValueError(f"variant={settings.variant!r} is not one of plain, ngram, draft, self")


if __name__ == "__main__":
    serve(OutpaceEngine)
