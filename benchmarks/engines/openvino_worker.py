"""OpenVINO GenAI on the GGUF file, which it reads itself. Variants: plain, ngram (prompt lookup), draft.

It is saved once in OpenVINO's own form (by OpenVINO), because draft models are only taken in that.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from engines.protocol import Answer, NotExposed, Prompt, Recorder, Settings, serve

_CACHE_GIB = 1


class OpenVinoEngine:
    """`protocol.Engine`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = _saved_folder(settings.target, settings.scratch)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIB
        scheduler.enable_prefix_caching = False  # rows shared with the prompt before are to be computed again
        options = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": settings.threads}
        if settings.variant == "ngram":
            options["prompt_lookup"] = True
        elif settings.variant == "draft":
            assert settings.draft is not None
            folder = _saved_folder(settings.draft, settings.scratch)
            options["draft_model"] = openvino_genai.draft_model(
                str(folder), "CPU", INFERENCE_NUM_THREADS=settings.threads
            )
        elif settings.variant != "plain":
            raise ValueError(f"variant={settings.variant!r} is not one of plain, ngram, draft")
        self._pipeline = openvino_genai.LLMPipeline(str(self._folder), "CPU", **options)
        self.notes = ["the GGUF file as OpenVINO stores it; keys and values in 8 bits (its default)"]
        self.versions = {
            "openvino-genai": openvino_genai.get_version(),
            "openvino": version("openvino"),
            "Python": platform.python_version(),
            "weights": "as read from GGUF",
        }

    def generate(self, prompt: Prompt) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = prompt.max_tokens
        config.do_sample = False
        config.apply_chat_template = False
        config.ignore_eos = prompt.ignore_eos
        if not prompt.ignore_eos:
            config.stop_token_ids = set(self._settings.eos_ids)
        if self._settings.variant != "plain":
            config.num_assistant_tokens = self._settings.draft_tokens
        if self._settings.variant == "ngram":
            config.max_ngram_size = 3
        ids = openvino.Tensor(np.array([prompt.token_ids], dtype=np.int64))
        streamer = _Streamer()
        streamer.recorder = recorder = Recorder()
        result = self._pipeline.generate(ids, config, streamer)
        recorder.add(result.tokens[0][len(recorder.token_ids) :])  # an end token is not streamed
        metrics = result.extended_perf_metrics
        if metrics is None:
            return recorder.answer()
        accepted, drafted = metrics.get_num_accepted_tokens(), metrics.get_num_draft_tokens()
        return recorder.answer(drafted=int(drafted), accepted=int(accepted))

    def score(self, texts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        model = openvino.Core().compile_model(
            str(self._folder / "openvino_model.xml"), "CPU", {"INFERENCE_NUM_THREADS": self._settings.threads}
        )
        if "logits" not in {output.get_any_name() for output in model.outputs}:
            raise NotExposed("the saved model has no output named logits")
        names = {item.get_any_name() for item in model.inputs}
        request = model.create_infer_request()
        for text in texts:
            ids = np.array([text], dtype=np.int64)
            feed = {
                "input_ids": ids,
                "attention_mask": np.ones_like(ids),
                "position_ids": np.arange(len(text), dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
            request.reset_state()
            logits = request.infer({name: value for name, value in feed.items() if name in names})["logits"]
            yield logits[0, :, : self._settings.vocab_size].astype(np.float32)

    def close(self) -> None:
        """Nothing runs beside this process."""


class _Streamer(openvino_genai.StreamerBase):
    """Books tokens as they come. The base class takes no arguments."""

    recorder: Recorder

    def write(self, token: int | Sequence[int]) -> openvino_genai.StreamingStatus:
        self.recorder.add([token] if isinstance(token, int) else token)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is held back."""


def _saved_folder(path: str, scratch: str) -> Path:
    """The folder of a GGUF file saved in OpenVINO's form; made in another process, whose memory is not this one's."""
    folder = Path(scratch) / f"{Path(path).stem}-openvino-{version('openvino-genai')}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        start = Path(__file__).with_name("start.py")
        subprocess.run([sys.executable, str(start), "engines.openvino_worker", path, str(folder)], check=True)
        (folder / "done").touch()
    return folder


def _save(path: str, folder: str) -> None:
    """OpenVINO writes beside the file it reads, so that is a link in the folder."""
    link = Path(folder) / "model.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(path).resolve())
    openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _save(*sys.argv[1:])
    else:
        serve(OpenVinoEngine)
