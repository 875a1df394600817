"""llama-cpp-python on the GGUF file. Variants: plain, ngram (LlamaPromptLookupDecoding).

Options: draft_tokens, if its prompt lookup is to draft another number than the comparison's.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

from engines.protocol import Answer, Prompt, Recorder, Settings, serve


class LlamaCppEngine:
    """`protocol.Engine`."""

    def __init__(self, settings: Settings) -> None:
        if settings.variant not in ("plain", "ngram"):
            raise ValueError(f"variant={settings.variant!r} is not one of plain, ngram")
        self.notes: list[str] = []
        self._settings = settings
        self._lookup: _CountingLookup | None = None
        if settings.variant == "ngram":
            count = int(settings.options.get("draft_tokens", settings.draft_tokens))
            self._lookup = _CountingLookup(count)
            self.notes.append(f"{count} draft tokens, n-grams of up to 2 (its default)")
        self._llama = self._open(logits_all=False)
        self._passes = 0
        self._count_passes()
        self.versions = {
            "llama-cpp-python": llama_cpp.__version__,
            "Python": platform.python_version(),
            "weights": self._llama.metadata.get("general.file_type", "?") + " (GGUF file type)",
        }

    def generate(self, prompt: Prompt) -> Answer:
        llama, eos = self._llama, set() if prompt.ignore_eos else set(self._settings.eos_ids)
        llama.reset()  # else the rows it shares with the prompt before are not computed again
        self._passes = 0
        if self._lookup is not None:
            self._lookup.drafted = 0
        recorder = Recorder()
        # All of a greedy choice: one candidate, no penalty.
        for token_id in llama.generate(prompt.token_ids, top_k=1, temp=0.0, repeat_penalty=1.0):
            recorder.add([token_id])
            if token_id in eos or len(recorder.token_ids) == prompt.max_tokens:
                break
        drafted = None if self._lookup is None else self._lookup.drafted
        return recorder.answer(passes=self._passes, drafted=drafted)

    def score(self, texts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        if not self._llama._logits_all:
            self._llama.close()
            self._llama = self._open(logits_all=True)
        for text in texts:
            self._llama.reset()
            self._llama.eval(text)
            yield self._llama.scores[: len(text), : self._settings.vocab_size].copy()

    def close(self) -> None:
        self._llama.close()

    def _open(self, *, logits_all: bool) -> llama_cpp.Llama:
        return llama_cpp.Llama(
            self._settings.target,
            n_ctx=self._settings.context,
            n_threads=self._settings.threads,
            n_threads_batch=self._settings.threads,
            draft_model=self._lookup,
            logits_all=logits_all,
            verbose=False,
        )

    def _count_passes(self) -> None:
        evaluate = self._llama.eval

        def counted(tokens: Sequence[int]) -> None:
            self._passes += 1
            evaluate(tokens)

        self._llama.eval = counted


class _CountingLookup(LlamaDraftModel):
    """The library's prompt lookup, with its tokens counted."""

    def __init__(self, draft_tokens: int) -> None:
        self._inner = LlamaPromptLookupDecoding(num_pred_tokens=draft_tokens)
        self.drafted = 0

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: object) -> npt.NDArray[np.intc]:
        found: npt.NDArray[np.intc] = self._inner(input_ids, **kwargs)
        self.drafted += len(found)
        return found


if __name__ == "__main__":
    serve(LlamaCppEngine)
