"""How much memory a model will take and how much there is, asked before loading: the system kills without asking."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

from outpace.errors import OutOfMemory
from outpace.models.checkpoint import Checkpoint
from outpace.models.files import format_bytes
from outpace.models.native.matrix import format_of, is_read_in_place, packed_bytes, source_of
from outpace.models.precision import Precision

__all__ = ["RESERVE_BYTES", "available_bytes", "estimate_bytes", "require_fit"]

RESERVE_BYTES = 256 << 20
"""Left free for activations, the interpreter and everybody else."""

_TORCH_BYTES = {"int8": 1, "none": 4}
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory this process may still take: what the system has free, or less if a control group allows less.

    Args:
        root: where /proc and /sys are; another one in tests.

    Returns:
        Bytes, or None on a system that tells neither.
    """
    found = [_system_bytes(root), *_group_bytes(root)]
    return min((count for count in found if count is not None), default=None)


def estimate_bytes(checkpoint: Checkpoint, precision: Precision) -> int:
    """Most memory that loading a checkpoint takes, from its header alone.

    Linear layers are packed, the output head among them, also where it is tied to the embedding. The embedding stays as
    stored, vectors are float32. While torch's kernels pack a matrix it exists a second time in float32, which counts
    once, for the largest; the native ones pack from the file, but for kinds of blocks that they do not read: of these
    a layer's matrices exist a second time.

    Args:
        checkpoint: the weights.
        precision: what they are packed to.
    """
    shapes, dtypes, kinds = checkpoint.shapes, checkpoint.dtypes, checkpoint.kinds
    native = precision.kernels == "native"
    kept = largest = 0
    copied: Counter[str] = Counter()  # by layer
    for name, shape in shapes.items():
        if len(shape) < 2:
            kept += 4 * prod(shape)
            continue
        outputs, inputs = shape[0], prod(shape[1:])
        head = name == _HEAD or (name == _EMBEDDING and _HEAD not in shapes)
        if native:
            source = source_of(kinds.get(name), dtypes[name])
            linear = packed_bytes(format_of(precision, source, blocks=name in kinds, head=head), outputs, inputs)
            if not is_read_in_place(kinds.get(name), dtypes[name]):
                copied[name.rpartition(".layers.")[2].partition(".")[0]] += 4 * outputs * inputs
        else:
            linear = _TORCH_BYTES[precision.quantization] * outputs * inputs + 8 * outputs
            largest = max(largest, 4 * outputs * inputs)
        if name == _EMBEDDING:
            # Natively it stays in the file's own pages, which count as free memory.
            mapped = native and is_read_in_place(kinds.get(name), dtypes[name])
            kept += (0 if mapped else dtypes[name].itemsize * outputs * inputs) + (linear if head else 0)
        else:
            kept += linear
    return kept + max(largest, *copied.values(), 0)


def require_fit(label: str, num_bytes: int, cache_bytes: int = 0) -> None:
    """Refuses what would not fit.

    Args:
        label: the model's name, for the message.
        num_bytes: memory for its weights, as from `estimate_bytes`.
        cache_bytes: memory for keys and values.

    Raises:
        OutOfMemory: naming what is needed and what is free.
    """
    free = available_bytes()
    if free is None or num_bytes + cache_bytes + RESERVE_BYTES <= free:
        return
    parts = f"{format_bytes(num_bytes)} for weights" + (
        f", {format_bytes(cache_bytes)} for the cache" * bool(cache_bytes)
    )
    raise OutOfMemory(
        f"{label} needs {parts} and {format_bytes(RESERVE_BYTES)} to work with, {format_bytes(free)} of memory are "
        "free: take a smaller model, another quantization (int4 takes least), or fewer cache_tokens"
    )


def _system_bytes(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_bytes(root: Path) -> list[int]:
    """Memory left in every control group this process is in (version 1 and 2), outermost ones included."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, kinds, path = line.split(":", 2)
        if number != "0" and "memory" not in kinds.split(","):
            continue
        base = root / ("sys/fs/cgroup" if number == "0" else "sys/fs/cgroup/memory")
        names = (
            ("memory.max", "memory.current") if number == "0" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            left = _left_in(folder, *names)
            if left is not None:
                found.append(left)
    return found


def _left_in(folder: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = int((folder / limit_name).read_text())
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None
    # Cached file contents count as used but are given back when memory is wanted.
    reclaimable = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
    return max(0, limit - usage + reclaimable)
