"""transformers on a folder of dequantised weights. Variants: plain, ngram (prompt lookup), draft (assistant).

Options: dtype, float32 or bfloat16.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from engines.protocol import Answer, Prompt, Recorder, Settings, serve


class TransformersEngine:
    """`protocol.Engine`."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self.notes = ["weights dequantised from the GGUF file"]
        self._model = _load(settings.target, settings.options["dtype"])
        self._model.generation_config.eos_token_id = None  # said with each request
        self._passes = 0
        self._model.register_forward_pre_hook(self._count_pass)
        self._extra: dict[str, Any] = {}
        if settings.variant == "ngram":
            self._extra = {"prompt_lookup_num_tokens": settings.draft_tokens}
        elif settings.variant == "draft":
            assert settings.draft is not None
            assistant = _load(settings.draft, settings.options["dtype"])
            # Its own defaults (20 tokens, cut by confidence and adapted) are what its users get.
            self._extra = {"assistant_model": assistant}
        elif settings.variant != "plain":
            raise ValueError(f"variant={settings.variant!r} is not one of plain, ngram, draft")
        self._eos_ids = settings.eos_ids
        self.versions = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "weights": settings.options["dtype"],
        }

    @torch.inference_mode()
    def generate(self, prompt: Prompt) -> Answer:
        ids = torch.tensor([prompt.token_ids])
        self._passes = 0
        recorder = Recorder()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=prompt.max_tokens,
            do_sample=False,
            pad_token_id=self._eos_ids[0],
            streamer=_Streamer(recorder),
            **self._extra,
            **({} if prompt.ignore_eos else {"eos_token_id": self._eos_ids}),
        )
        return recorder.answer(passes=self._passes)

    @torch.inference_mode()
    def score(self, texts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        for text in texts:
            yield self._model(torch.tensor([text]), use_cache=False).logits[0].float().numpy()

    def close(self) -> None:
        """Nothing runs beside this process."""

    def _count_pass(self, *_: object) -> None:
        self._passes += 1


class _Streamer(BaseStreamer):
    """Books what `generate` hands out; the first thing is the prompt."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._recorder.add(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def _load(folder: str, dtype: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.eval()


if __name__ == "__main__":
    serve(TransformersEngine)
