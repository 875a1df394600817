"""Takes a newly trained head in place of the one that drafts, if its run says that it is better. No restart."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from outpace.async_llm import AsyncLLM
from outpace.config import SpeculativeConfig
from outpace.errors import CheckpointError, OutpaceError, Unavailable
from outpace.head_words import is_eagle3_config
from outpace.models.adapter import ADAPTER_TYPE
from outpace.models.checkpoint import Checkpoint, read_json
from outpace.models.resolve import resolve_model
from outpace.server.errors import ApiError
from outpace.server.recording import Recorder
from outpace.train.identity import Identity
from outpace.train.result import read_result, weights_digest
from outpace.train.trainer import DRAFTER

__all__ = ["Swapper"]

log = logging.getLogger(__name__)

_REFUSED = "drafter_refused"


class _Found(NamedTuple):
    """A head that may be taken.

    Args:
        settings: to load it with.
        digest: of its weights.
        reason: why it is taken, for people.
    """

    settings: SpeculativeConfig
    digest: str
    reason: str


class Swapper:
    """Replaces heads, one at a time.

    Args:
        llm: the engine's front.
        place: heads are taken from folders below this one alone.
        recorder: is told when another head drafts.
    """

    def __init__(self, llm: AsyncLLM, place: Path, recorder: Recorder | None) -> None:
        self._llm, self._place, self._recorder = llm, place, recorder
        self._lock = asyncio.Lock()
        self._digests = {item.method: _digest_of(item) for item in llm.built.speculative}

    async def swap(self, run: str, *, force: bool) -> tuple[SpeculativeConfig, str]:
        """Checks, loads, and puts in place. If anything is raised, the old head drafts on.

        Args:
            run: folder of a run, or of a head alone.
            force: take it whatever its run says, or does not say, about being better.

        Returns:
            the settings of the new head, and why it was taken.

        Raises:
            ApiError: it is not taken; says why.
            Unavailable: the engine has ended.
        """
        if self._lock.locked():
            raise ApiError(409, "another drafter is being put in place: ask again when that is done", code=_REFUSED)
        async with self._lock:
            try:
                found = await asyncio.to_thread(self._find, run, force)
                await self._llm.replace_drafter(found.settings)
            except Unavailable:
                raise
            except OutpaceError as error:
                raise _refusal(str(error)) from error
            self._digests[found.settings.method] = found.digest
            if self._recorder is not None:
                self._recorder.renew()
            log.info("drafter replaced: %s now drafts with %s (%s)", found.settings.method, run, found.reason)
            return found.settings, found.reason

    def _find(self, run: str, force: bool) -> _Found:
        """Looks at everything that can be seen without loading.

        Raises:
            ApiError: it is not to be taken.
            OutpaceError: it is damaged.
        """
        folder = self._below(Path(run), run)
        head = folder
        if _is_head(folder / DRAFTER):
            head = self._below(folder / DRAFTER, run)  # a link out of the folder is no way around
        old = self._place_of(head)
        digest = weights_digest(head)
        reason = "forced" if force else self._judge(folder, old.method, digest)
        _check_numbers(head, allow_pickle=self._llm.built.config.allow_pickle)
        if old.method == "eagle3":
            return _Found(replace(old, model=str(head)), digest, reason)
        return _Found(replace(old, adapter=str(head), exit_layer=None), digest, reason)

    def _below(self, path: Path, run: str) -> Path:
        """The path without links and dots, which is below the folder that heads are taken from.

        Raises:
            ApiError: it is not, or there cannot be such a path.
        """
        try:
            found = path.expanduser().resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a name too long, a home of nobody, links in a circle, \0
            raise _refusal(f"{run!r:.80} is no folder ({error!s:.80})") from error
        if not found.is_relative_to(self._place.resolve()):
            raise ApiError(403, f"{run} is not below the folder that --swap-drafters-from names", param="run")
        return found

    def _place_of(self, head: Path) -> SpeculativeConfig:
        """Settings of the loaded drafter that a head can take the place of."""
        if not _is_head(head):
            raise _refusal(f"{head} holds no head: name the folder of a run, or of a head with its config.json")
        keys = read_json(head / "config.json")
        adapter = keys.get("model_type") == ADAPTER_TYPE
        if not adapter and not is_eagle3_config(keys):
            raise _refusal(f"{head} holds neither an EAGLE-3 head nor an adapter of an early exit")
        method = "early_exit" if adapter else "eagle3"
        loaded = self._llm.built.speculative
        for item in loaded:
            if item.method == method:
                return item
        names = ", ".join(item.method for item in loaded) or "none"
        raise _refusal(f"{head} is for method {method!r}, of which no drafter is loaded (loaded: {names})")

    def _judge(self, run: Path, method: str, digest: str) -> str:
        """Why a head is better than the one that drafts."""
        result = read_result(run)
        if result is None:
            raise _refusal(
                f"{run} does not say whether it is better than the head that drafts: train it with --from or --head, "
                "or force it"
            )
        if not result.better:
            raise _refusal(f"{run} is not better: {result.said}")
        if result.new != digest:
            raise _refusal(f"{run}: the weights are not those that were measured; they are damaged, or others")
        source = self._llm.built.source
        if source is not None and source.shape is not None:
            Identity.of(source.files, source.shape).require(result.target, str(run))
        if result.old != self._digests.get(method):
            raise _refusal(f"{run} was measured against another head than the one that drafts here: train it from that")
        return result.said


def _is_head(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file()
    except OSError:  # a name too long, or a folder that is not for us to read
        return False


def _digest_of(item: SpeculativeConfig) -> str | None:
    """Of the head that a drafter runs; None if it runs none."""
    name = item.model if item.method == "eagle3" else item.adapter
    if name is None:
        return None
    try:
        return weights_digest(Path(resolve_model(name).path) if item.method == "eagle3" else Path(name).expanduser())
    except OutpaceError as error:
        log.warning("drafters are taken only by force here: %s", error)
        return None


def _check_numbers(head: Path, *, allow_pickle: bool) -> None:
    """Refuses weights that are no numbers: with them nothing would ever be accepted."""
    stored = Checkpoint.open(head, allow_pickle=allow_pickle)
    for name in stored.shapes:
        tensor = stored.get(name)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{head}: tensor {name!r} holds values that are no numbers")


def _refusal(message: str) -> ApiError:
    return ApiError(409, f"the old drafter stays: {message}", param="run", code=_REFUSED)
