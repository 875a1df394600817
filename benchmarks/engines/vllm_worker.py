"""vLLM's CPU build on a folder of plain weights. Variants: plain, ngram, draft, eagle3.

Options: dtype; eager, if there is one, has nothing compiled.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from typing import Any

# Read when vllm is imported. In one process, so that its model can be asked for logits.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import numpy as np
import torch
import vllm
from vllm.sampling_params import RequestOutputKind

from engines.protocol import Answer, NotExposed, Prompt, Recorder, Settings, serve


class VllmEngine:
    """`protocol.Engine`."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        eager = "eager" in settings.options
        how = "nothing compiled" if eager else "compiled before the first request"
        self.notes = [f"weights dequantised from the GGUF file; {how}"]
        self._settings = settings
        self._number = 0
        self._llm = vllm.LLM(
            settings.target,
            dtype=settings.options["dtype"],
            max_model_len=settings.context,
            max_num_seqs=1,
            enable_prefix_caching=False,
            enforce_eager=eager,
            disable_log_stats=False,
            speculative_config=_speculation(settings),
        )
        self.versions = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "weights": settings.options["dtype"],
        }

    def generate(self, prompt: Prompt) -> Answer:
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=prompt.max_tokens,
            ignore_eos=prompt.ignore_eos,
            stop_token_ids=None if prompt.ignore_eos else self._settings.eos_ids,
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
        )
        before, passes = self._draft_counts(), 0
        self._number += 1
        engine, recorder = self._llm.llm_engine, Recorder()
        engine.add_request(str(self._number), {"prompt_token_ids": prompt.token_ids}, params)
        while engine.has_unfinished_requests():
            passes += 1
            for output in engine.step():
                recorder.add(output.outputs[0].token_ids)
        answer_counts = {name: count - before[name] for name, count in self._draft_counts().items()}
        return recorder.answer(passes=passes, **answer_counts)

    def score(self, texts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        model = self._model()
        compute, seen = model.compute_logits, []

        def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits: torch.Tensor = compute(*args, **kwargs)
            seen.append(logits.float().cpu().numpy())
            return logits

        model.compute_logits = noted
        try:
            for text in texts:
                seen.clear()
                params = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
                self._llm.generate([{"prompt_token_ids": list(text)}], params, use_tqdm=False)
                yield _prompt_rows(seen, len(text))[:, : self._settings.vocab_size]
        finally:
            model.compute_logits = compute

    def close(self) -> None:
        """Nothing runs beside this process."""

    def _model(self) -> Any:
        try:
            return self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        except AttributeError as error:
            raise NotExposed(f"this version keeps its model elsewhere ({error})") from error

    def _draft_counts(self) -> dict[str, int]:
        if self._settings.variant == "plain":
            return {}
        names = {"vllm:spec_decode_num_draft_tokens": "drafted", "vllm:spec_decode_num_accepted_tokens": "accepted"}
        counts = dict.fromkeys(names.values(), 0)
        for metric in self._llm.get_metrics():
            if metric.name in names:
                counts[names[metric.name]] += int(metric.value)
        return counts


def _speculation(settings: Settings) -> dict[str, Any] | None:
    count = {"num_speculative_tokens": settings.draft_tokens}
    if settings.variant == "plain":
        return None
    if settings.variant == "ngram":
        return {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, **count}
    if settings.variant == "draft":
        return {"method": "draft_model", "model": settings.draft, **count}
    if settings.variant == "eagle3":
        return {"method": "eagle3", "model": settings.draft, **count}
    raise ValueError(f"variant={settings.variant!r} is not one of plain, ngram, draft, eagle3")


def _prompt_rows(seen: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Logits of all prompt rows from what was computed: first the last row, for sampling, then those before it."""
    rows = np.concatenate([*seen[1:], seen[0]])
    if len(seen[0]) != 1 or len(rows) != count:
        raise NotExposed(f"this version computes {[len(part) for part in seen]} rows of logits for {count} tokens")
    return rows


if __name__ == "__main__":
    serve(VllmEngine)
