"""A GGUF file as a folder of plain weights for engines that read no GGUF: the very values its blocks stand for.

    python benchmarks/engines/dequantised.py MODEL.gguf FOLDER

Read by outpace (`LoadedFiles`, `Checkpoint.get`), written as float16 safetensors, which transformers and vLLM load as
float32 or bfloat16. Rounding a dequantised 4-bit value to float16 moves it by at most 1 part in 2,000 of itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from outpace.models.config import expected_tensors
from outpace.models.load import load_files

__all__ = ["write_dequantised"]

_SHARD_BYTES = 512 << 20
_COPIED = ("tokenizer.json", "tokenizer_config.json")


def write_dequantised(source: Path, folder: Path, notify: Callable[[str], None] = print) -> None:
    """Writes the folder unless it is there already; it appears only when it is complete.

    Args:
        source: a GGUF file.
        folder: where to; 2 bytes a weight.
        notify: told in a line what is written.
    """
    if (folder / "config.json").is_file():
        return
    files = load_files(str(source), notify=notify)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    notify(f"writing the dequantised weights of {source.name} to {folder}")
    names = list(expected_tensors(files.checked_shape()))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(files.checkpoint.get, names), 1):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, str(partial / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = {**files.config, "torch_dtype": "float16", "dtype": "float16"}
    (partial / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    eos = {"eos_token_id": sorted(files.eos_ids)}
    (partial / "generation_config.json").write_text(json.dumps(eos), encoding="utf-8")
    for name in _COPIED:
        if (files.folder / name).is_file():
            shutil.copyfile(files.folder / name, partial / name)
    partial.rename(folder)


def _shards(get: Callable[[str], torch.Tensor], names: list[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors in float16 by name, in parts that fit into memory."""
    shard: dict[str, torch.Tensor] = {}
    room = _SHARD_BYTES
    for name in names:
        tensor = get(name).to(torch.float16).contiguous().clone()
        if not torch.isfinite(tensor).all():
            raise ValueError(f"tensor {name} holds values beyond float16 ({get(name).abs().max():.3g})")
        if tensor.nbytes > room and shard:
            yield shard
            shard, room = {}, _SHARD_BYTES
        shard[name] = tensor
        room -= tensor.nbytes
    yield shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write_dequantised(args.source, args.folder)


if __name__ == "__main__":
    main()
