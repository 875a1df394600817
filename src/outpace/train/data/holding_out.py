"""Which texts are held out to measure on: never one that is nearly the same as one that is trained on.

What is nearly the same falls on one side together:

    prompts   whose longest sentence is the same when names (capitalised words) and numbers are taken out: one
              template about one topic, whoever it is about and whatever is asked besides. A sentence that stands in
              many prompts, such as a system prompt, tells nothing and is passed over.
    turns     of one conversation, of which the first tells where they fall: each repeats those before it
    texts     that are the same when names and numbers are taken out

Such groups are held out in the order of a hash of what is left, as many as fit into the share that is asked for, of
prompts and of texts alike. So it does not matter in which order they come, and a group that is larger than that (a
template without a topic, say) is trained on.

What is held out has two halves, group by group again: the best state of a run is chosen on one, and on the other it is
judged against the head it began as. What is best of many on the texts that choose it looks better there than it is.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from outpace.train.data.document import Document

__all__ = ["Sides", "split_documents"]

_ENDS = re.compile(r"[.!?:;]\s+|\n+")
_SPECIFIC = re.compile(r"\w*\d\w*|\b[A-Z]\w*")
"""Numbers, and words that begin with a capital: names, and the first word of a sentence, which does not matter."""
_FEW = 8
"""A sentence that stands in no more prompts than these is never taken for one that stands in all."""


@dataclass(slots=True)
class Sides:
    """Texts by what they are for, each in the order in which they came.

    Args:
        train: to train on.
        choosing: held out, to choose the best state on.
        judging: held out, to judge that state on; none if but one group is held out.
    """

    train: list[Document] = field(default_factory=list)
    choosing: list[Document] = field(default_factory=list)
    judging: list[Document] = field(default_factory=list)


def split_documents(
    documents: Sequence[Document], decode: Callable[[Sequence[int]], str], share: float, seed: int
) -> Sides:
    """What each text is for.

    Of few texts none may fit into the share; then the smallest group is held out all the same.

    Args:
        documents: all texts.
        decode: token ids -> text.
        share: of the texts to hold out.
        seed: another one holds out others.
    """
    keys = _keys(documents, decode, share)
    held_out: set[str] = set()
    kinds = [_is_plain(document) for document in documents]
    for kind in (False, True):
        sizes = Counter(key for key, each in zip(keys, kinds, strict=True) if each is kind)
        room = share * sizes.total()
        for key in sorted(sizes, key=partial(_place, seed)):
            if sizes[key] <= room:
                held_out.add(key)
                room -= sizes[key]
    sizes = Counter(keys)
    if not held_out and len(sizes) > 1:
        held_out.add(min(sizes, key=lambda key: (sizes[key], _place(seed, key))))
    judging = _half(Counter(zip(keys, kinds, strict=True)), held_out, seed)
    sides = Sides()
    for document, key in zip(documents, keys, strict=True):
        side = sides.train if key not in held_out else sides.judging if key in judging else sides.choosing
        side.append(document)
    return sides


def _half(sizes: Mapping[tuple[str, bool], int], held_out: set[str], seed: int) -> set[str]:
    """About half of the groups that are held out, of prompts and of texts alike: the largest first, each where there is
    less.

    Args:
        sizes: texts of every (group, whether they are plain texts).
        held_out: groups.
        seed: decides between groups of one size.
    """
    chosen: set[str] = set()
    for kind in (False, True):
        texts = [0, 0]
        own = {key: size for (key, each), size in sizes.items() if each is kind and key in held_out}
        for key in sorted(own, key=lambda key: (-own[key], _place(seed, key))):
            side = texts[0] > texts[1]
            texts[side] += own[key]
            if side:
                chosen.add(key)
    return chosen


def _keys(documents: Sequence[Document], decode: Callable[[Sequence[int]], str], share: float) -> list[str]:
    """What is left of each text once names and numbers are taken out; the same for those that are nearly the same."""
    firsts = _first_turns(documents)
    own = {id(first): first for first in firsts}
    prompts = {key: [i for i, label in zip(d.ids, d.labels, strict=True) if not label] for key, d in own.items()}
    sentences = {key: _sentences(decode(ids)) if ids else [] for key, ids in prompts.items()}
    spread = Counter(sentence for each in sentences.values() for sentence in set(each))
    most = max(_FEW, share * sum(map(bool, sentences.values())))
    keys = {}
    for key, each in sentences.items():
        telling = [sentence for sentence in each if spread[sentence] <= most]
        if each:
            keys[key] = max(telling, key=len, default=" ".join(each))
        else:
            keys[key] = _without_specifics(decode(own[key].ids))
    return [keys[id(first)] for first in firsts]


def _first_turns(documents: Sequence[Document]) -> list[Document]:
    """For each text the shortest of its conversation; itself if it stands alone."""
    first: dict[int, Document] = {}
    for document in documents:
        if document.talk is not None:
            known = first.setdefault(document.talk, document)
            if len(document.ids) < len(known.ids):
                first[document.talk] = document
    return [document if document.talk is None else first[document.talk] for document in documents]


def _sentences(text: str) -> list[str]:
    found = (_without_specifics(part) for part in _ENDS.split(text))
    return [sentence for sentence in found if sentence]


def _without_specifics(text: str) -> str:
    return " ".join(_SPECIFIC.sub(" ", text).split())


def _is_plain(document: Document) -> bool:
    """Whether all of it is to be predicted: a text, not an answer."""
    return all(document.labels)


def _place(seed: int, key: str) -> bytes:
    return hashlib.sha256(f"{seed}:{key}".encode()).digest()
