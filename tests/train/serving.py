"""What a target says, and how a drafter fares in the engine while it says it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outpace import LLM, SamplingParams
from outpace.train.data.document import Document
from outpace.train.data.packing import Windows, pack_documents
from tests.train.tiny import ENGINE, World


def own_words(world: World, folder: Path, count: int, length: int) -> Windows:
    """What the target says at temperature 0 to prompts of three tokens, a window each; in the world's precision."""
    llm = LLM(str(folder), "none", **{**ENGINE, "quantization": world.engine.quantization})
    prompts = [[7 * n + 20, 3 * n + 40, 11 * n + 60] for n in range(count)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
    documents = [Document.answer(p, o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    return pack_documents(documents, length + 3)


def served(
    folder: Path, config: dict[str, Any], windows: Windows, chain: int, quantization: str = "none"
) -> tuple[int, int, int]:
    """Draft tokens, accepted ones and drafts of an engine that says the same texts with the drafter."""
    drafter = {**config, "num_speculative_tokens": chain}
    engine = {**ENGINE, "quantization": quantization}
    llm = LLM(str(folder), drafter, speculative_control="fixed", **engine)
    params = SamplingParams(temperature=0, max_tokens=windows.width - 3, ignore_eos=True)
    drafted = accepted = drafts = 0
    for output, ids in zip(llm.generate(windows.ids[:, :3].tolist(), params), windows.ids.tolist(), strict=True):
        assert output.outputs[0].token_ids == ids[3:]
        drafted += output.stats.draft_tokens
        accepted += output.stats.accepted_tokens
        drafts += output.stats.drafts
    return drafted, accepted, drafts
