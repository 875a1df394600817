"""Past outputs of the same server, each tenant's apart, for drafts of later requests.

Outputs lie in segments: an automaton over some outputs of one tenant. A segment that is full is closed, and when there
are more tokens or outputs than allowed, the segment whose text was added to or drafted from least recently is dropped,
whoever's it is. So both bounds hold at every moment, and nothing is ever rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from outpace.drafters.suffix_automaton import ROOT, SuffixAutomaton
from outpace.errors import CheckpointError, InvalidParameter, VocabularyMismatch

__all__ = ["LONGEST_MATCH", "OutputPool", "PoolMatch", "PoolMatcher", "Segment"]

LONGEST_MATCH = 64
"""Tokens at the end of a request that are looked for in a segment it has not seen; longer matches grow from there."""

_SEGMENTS = 8
"""Segments the whole pool would fill."""
_FORMAT = "outpace output pool 1"
_DIGEST_SIZE = 16


@dataclass(slots=True, eq=False)
class Segment:
    """Some outputs of one tenant.

    Args:
        tenant: digest of the tenant's name.
        automaton: over the outputs, each followed by a negative number of its own, which no request contains.
        outputs: digests of the outputs.
    """

    tenant: bytes
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    outputs: set[bytes] = field(default_factory=set)

    def __len__(self) -> int:
        """Tokens, one more for every output included."""
        return len(self.automaton)


class OutputPool:
    """Outputs that have been, at most so many.

    Args:
        max_tokens: of all tenants together, one more for every output included; at least 64. Of a longer output than
            an eighth of this, the end is kept.
        max_outputs: of all tenants together, at least 8.

    Raises:
        InvalidParameter: less than that.
    """

    def __init__(self, max_tokens: int = 200_000, max_outputs: int = 10_000) -> None:
        for name, value, least in (("max_tokens", max_tokens, 64), ("max_outputs", max_outputs, _SEGMENTS)):
            if value < least:
                raise InvalidParameter(f"{name}={value} is not possible: a pool of outputs needs at least {least}")
        self._max_tokens = max_tokens
        self._max_outputs = max_outputs
        self._segments: dict[bytes, list[Segment]] = {}  # by tenant, the newest last
        self._by_use: OrderedDict[Segment, None] = OrderedDict()  # the least recently used first
        self.num_tokens = 0
        self.num_outputs = 0

    @property
    def memory_bytes(self) -> int:
        return sum(segment.automaton.memory_bytes for segment in self._by_use)

    def add(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Takes an output up. One that is there already is only noted as used. An empty one is ignored."""
        self._add(_digest(tenant.encode()), np.asarray(token_ids[-self._segment_tokens :], dtype=np.int32))

    def segments(self, tenant: str) -> Sequence[Segment]:
        """The tenant's, to be read only."""
        return self._segments.get(_digest(tenant.encode()), ())

    def touch(self, segment: Segment) -> None:
        """A draft was made from this segment."""
        self._by_use.move_to_end(segment)

    def save(self, path: Path, vocabulary: str) -> None:
        """Writes everything to one file, readable by this user only, which appears whole or not at all.

        Args:
            path: of the file; one that is there is replaced. Its folder must exist.
            vocabulary: what the token ids mean: a digest of the tokenizer, or its name.

        Raises:
            OSError: the file cannot be written.
        """
        segments = list(self._by_use)  # in this order, so that loading into a smaller pool keeps what was used last
        tokens = np.concatenate([np.zeros(0, np.int32), *(np.asarray(s.automaton.tokens, np.int32) for s in segments)])
        metadata = {
            "format": _FORMAT,
            "vocabulary": vocabulary,
            "segments": json.dumps([[segment.tenant.hex(), len(segment)] for segment in segments]),
        }
        data = save({"tokens": tokens}, {**metadata, "digest": _content_digest(metadata, tokens)})
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(file.name)
                raise

    def load(self, path: Path, vocabulary: str) -> None:
        """Adds the outputs of a file, as if they had come again; costs some microseconds a token.

        Args:
            path: written by `save`.
            vocabulary: as given to `save`.

        Raises:
            VocabularyMismatch: the file's tokens are those of another vocabulary.
            CheckpointError: the file is damaged, no pool of outputs, or of another version.
            OSError: it cannot be read.
        """
        for tenant, tokens in _read(path, vocabulary):
            ends = np.flatnonzero(tokens < 0)
            for begin, end in zip([0, *(ends + 1)], ends, strict=False):
                self._add(tenant, tokens[begin:end][-self._segment_tokens :])

    @property
    def _segment_tokens(self) -> int:
        """Tokens of an output that fit into a segment."""
        return self._max_tokens // _SEGMENTS - 1

    def _add(self, tenant: bytes, tokens: NDArray[np.int32]) -> None:
        if not tokens.size:
            return
        output = _digest(tokens.tobytes())
        segments = self._segments.setdefault(tenant, [])
        segment = next((segment for segment in segments if output in segment.outputs), None)
        if segment is not None:
            self.touch(segment)
            return
        if not segments or self._is_full(segments[-1], tokens.size):
            segments.append(Segment(tenant))
            self._by_use[segments[-1]] = None
        segment = segments[-1]
        segment.outputs.add(output)
        segment.automaton.extend(tokens.tolist())
        segment.automaton.extend([-len(segment.outputs)])
        self.num_tokens += tokens.size + 1
        self.num_outputs += 1
        self.touch(segment)
        while self.num_tokens > self._max_tokens or self.num_outputs > self._max_outputs:
            self._drop(next(iter(self._by_use)))

    def _is_full(self, segment: Segment, num_tokens: int) -> bool:
        return (
            len(segment) + num_tokens > self._segment_tokens or len(segment.outputs) >= self._max_outputs // _SEGMENTS
        )

    def _drop(self, segment: Segment) -> None:
        self.num_tokens -= len(segment)
        self.num_outputs -= len(segment.outputs)
        del self._by_use[segment]
        segments = self._segments[segment.tenant]
        segments.remove(segment)
        if not segments:
            del self._segments[segment.tenant]


class PoolMatch(NamedTuple):
    """The end of a request's text, found in a segment.

    Args:
        length: tokens that match.
        segment: where.
        state: of the automaton.
    """

    length: int
    segment: Segment
    state: int


@dataclass(slots=True)
class _Place:
    """How far one request has been followed through one segment, which had `segment_size` tokens then."""

    segment_size: int
    num_read: int
    state: int = ROOT
    length: int = 0

    def read(self, automaton: SuffixAutomaton, token: int) -> None:
        """Goes on to the longest end that the segment has, O(1) amortised."""
        state = automaton.step(self.state, token)
        while state is None and self.state != ROOT:
            self.state = automaton.link(self.state)
            self.length = automaton.length(self.state)
            state = automaton.step(self.state, token)
        if state is not None:
            self.state, self.length = state, self.length + 1


class PoolMatcher:
    """Follows one request's text through the segments of its tenant.

    Args:
        pool: where past outputs are.
        tenant: whose are looked at.
    """

    def __init__(self, pool: OutputPool, tenant: str) -> None:
        self._pool = pool
        self._tenant = tenant
        self._places: dict[Segment, _Place] = {}

    def find(self, token_ids: Sequence[int]) -> PoolMatch | None:
        """The longest match of the text's end, in the newest of several segments; None if not a token matches.

        Exact up to LONGEST_MATCH tokens, and longer where the text was followed while it grew.

        Args:
            token_ids: the committed text; what was given before, or more.
        """
        best: PoolMatch | None = None
        places: dict[Segment, _Place] = {}
        for segment in self._pool.segments(self._tenant):
            place = self._places.get(segment)
            begin = max(0, len(token_ids) - LONGEST_MATCH)
            if place is None or place.segment_size != len(segment) or place.num_read < begin:
                place = _Place(len(segment), begin)
            for token in token_ids[place.num_read :]:
                place.read(segment.automaton, token)
            place.num_read = len(token_ids)
            places[segment] = place
            if place.length and (best is None or place.length >= best.length):
                best = PoolMatch(place.length, segment, place.state)
        self._places = places
        return best


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_SIZE).digest()


def _content_digest(metadata: dict[str, str], tokens: NDArray[np.int32]) -> str:
    return _digest(json.dumps(metadata, sort_keys=True).encode() + tokens.tobytes()).hex()


def _read(path: Path, vocabulary: str) -> list[tuple[bytes, NDArray[np.int32]]]:
    """Tenant and tokens of every segment of a file that is sound and of this vocabulary."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise CheckpointError(
                    f"{path} is no {_FORMAT!r} but {metadata.get('format')!r}: name another file, or delete this one"
                )
            tokens = file.get_tensor("tokens")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no pool of outputs, or damaged ({error}): delete it") from error
    if metadata.pop("digest", None) != _content_digest(metadata, tokens):
        raise CheckpointError(f"{path} is damaged: its content is not what was written. Delete it")
    if metadata["vocabulary"] != vocabulary:
        raise VocabularyMismatch(
            f"{path} has outputs in the vocabulary {metadata['vocabulary']!r}, this model's is {vocabulary!r}: "
            "name another file, or delete this one"
        )
    segments, begin = [], 0
    for tenant, size in json.loads(metadata["segments"]):
        segments.append((bytes.fromhex(tenant), tokens[begin : begin + size]))
        begin += size
    return segments
