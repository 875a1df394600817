"""Near copies are never on both sides, and what is held out does not depend on anything but the texts."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from outpace.train.data.builtin import builtin_prompts
from outpace.train.data.document import Document
from outpace.train.data.holding_out import split_documents
from outpace.train.data.talks import talks_of


class Words:
    """Texts as documents and back, a token a character."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def prompt(self, text: str) -> Document:
        return Document.answer([*map(ord, text)], [*map(ord, "an answer")])

    def text(self, text: str) -> Document:
        return Document.text([*map(ord, text)])


WORDS = Words()


def split(documents: Sequence[Document], share: float = 0.3, seed: int = 0) -> tuple[list[str], list[str]]:
    sides = split_documents(documents, WORDS.decode, share, seed)
    return names(sides.train), names(sides.choosing + sides.judging)


def names(documents: Sequence[Document]) -> list[str]:
    return [WORDS.decode(item.ids).removesuffix("an answer") for item in documents]


def test_names_numbers_and_other_wishes_make_no_other_prompt() -> None:
    """Thirty topics, each asked for by several people in several ways."""
    topics = [f"the {a} {b}" for a in ("old", "tame", "wild", "slow", "fast") for b in "abcdef"]
    prompts = [
        f"{wish} {name} buys {number} books about how {topic} came to be."
        for topic in topics
        for name, number in (("Mara", 4), ("Tobias", 71))
        for wish in ("Say it again.", "Write it as a poem.")
    ]
    random.Random(1).shuffle(prompts)
    train, valid = split([WORDS.prompt(prompt) for prompt in prompts])
    sides = [{topic for topic in topics if any(topic in prompt for prompt in side)} for side in (train, valid)]
    assert sides[0] and sides[1]
    assert not sides[0] & sides[1]
    assert sorted(train + valid) == sorted(prompts)


def test_a_system_prompt_does_not_make_all_prompts_one() -> None:
    system = "You are a helpful assistant that answers at length and always begins with a friendly word. "
    prompts = [f"{system}What is a word for the sound {'ab'[n % 2] * (n + 3)}?" for n in range(60)]
    train, valid = split([WORDS.prompt(prompt) for prompt in prompts])
    assert len(valid) == 18
    assert len(train) + len(valid) == 60


def test_texts_that_differ_in_numbers_only_stay_together() -> None:
    texts = [f"version {n} of a text about {'xyz'[n % 3] * 5} and {'pqr'[n // 3 % 3] * 3}" for n in range(90)]
    train, valid = split([WORDS.text(text) for text in texts])
    assert train and valid
    assert not {text[10:] for text in train} & {text[10:] for text in valid}


def test_sides_depend_on_the_texts_and_the_seed_not_on_their_order() -> None:
    texts = [f"a text about {chr(97 + n % 26) * (3 + n // 26)}" for n in range(80)]
    _, valid = split([WORDS.text(text) for text in texts])
    assert len(valid) == 24
    _, again = split([WORDS.text(text) for text in reversed(texts)])
    assert set(again) == set(valid)
    _, other = split([WORDS.text(text) for text in texts], seed=1)
    assert set(other) != set(valid)


def test_prompts_and_texts_are_held_out_alike() -> None:
    words = [chr(97 + n % 26) * (3 + n // 26) for n in range(100)]
    documents = [WORDS.text(f"a text about {word}") for word in words]
    documents += [WORDS.prompt(f"say {word} to me") for word in words[:40]]
    _, valid = split(documents, share=0.1)
    assert sum(text.startswith("a text") for text in valid) == 10
    assert sum(text.startswith("say") for text in valid) == 4


def test_what_chooses_is_nothing_like_what_judges() -> None:
    """Groups of near copies are not torn; both halves have about as many prompts and as many texts."""
    topics = [chr(97 + n % 26) * (3 + n // 26) for n in range(120)]
    documents = [WORDS.prompt(f"say {topic} to {name}") for topic in topics for name in ("Mara", "Tobias")]
    documents += [WORDS.text(f"a text about {topic}, number {n}") for n, topic in enumerate(topics[:40] * 3)]
    sides = split_documents(documents, WORDS.decode, 0.2, 0)
    halves = [names(sides.choosing), names(sides.judging)]
    assert [sum(name.startswith("say") for name in half) for half in halves] == [24, 24]
    assert [sum(name.startswith("a text") for name in half) for half in halves] == [12, 12]
    groups = [{name.split(" to ")[0].split(", number")[0] for name in half} for half in halves]
    assert not groups[0] & groups[1]
    again = split_documents(documents[::-1], WORDS.decode, 0.2, 0)
    assert sorted(names(again.judging)) == sorted(halves[1])


def test_of_one_group_none_is_left_to_judge_by() -> None:
    sides = split_documents([WORDS.text("one"), WORDS.text("two")], WORDS.decode, 0.01, 0)
    assert (len(sides.train), len(sides.choosing), len(sides.judging)) == (1, 1, 0)


def test_a_few_texts_are_on_both_sides() -> None:
    for seed in range(8):
        train, valid = split([WORDS.text("one"), WORDS.text("two")], share=0.01, seed=seed)
        assert train and valid
    train, valid = split([WORDS.text("only one")])
    assert len(train) + len(valid) == 1


def test_built_in_prompts_about_one_thing_are_on_one_side() -> None:
    prompts = list(builtin_prompts(800, 0))
    train, valid = split([WORDS.prompt(prompt) for prompt in prompts], share=0.1)
    assert 70 <= len(valid) <= 80
    for words in ("that counts the words in a string", "reverses a linked list", "validates an ISBN"):
        assert sum(any(words in prompt for prompt in side) for side in (train, valid)) == 1


def recorded(seed: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """(prompts, answers, numbers of conversations) of 60 conversations of four turns each, mixed."""
    rng = random.Random(seed)

    def words(count: int) -> str:
        return " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(count))

    found = []
    for number in range(60):
        text = f"<s>you are kind and never say no to anybody\n<u>{words(6)}.\n<a>"
        for turn in range(4):
            answer = f"{words(12 + 3 * turn)}. {words(9)}."
            found.append(([*map(ord, text)], [*map(ord, answer)], number))
            text += f"{answer.removesuffix('.')}\n<u>{words(6)}.\n<a>"  # a template may write answers otherwise later
    rng.shuffle(found)
    return [each[0] for each in found], [each[1] for each in found], [each[2] for each in found]


def test_turns_of_a_conversation_are_one_talk() -> None:
    prompts, _, numbers = recorded(0)
    talks = talks_of([array("i", ids) for ids in prompts])
    assert len(set(zip(talks, numbers, strict=True))) == len(set(talks)) == len(set(numbers)) == 60


def test_short_prompts_begin_no_talk() -> None:
    prompts = [[1], [1, 2, 3], [1, 2, 4], list(range(1, 9)), list(range(1, 10)), [*range(1, 9), 99], [5, *range(9)]]
    talks = talks_of([array("i", ids) for ids in prompts])
    assert len({talks[i] for i in (0, 1, 2, 3, 6)}) == 5
    assert talks[3] == talks[4] == talks[5]
    assert talks_of([]) == []


def test_turns_of_a_conversation_fall_on_one_side() -> None:
    """Also where windows hold no more than their ends."""
    prompts, answers, numbers = recorded(1)
    talks = talks_of([array("i", ids) for ids in prompts])
    for window in (None, 150):
        documents = [Document.answer(*each, window, talk) for *each, talk in zip(prompts, answers, talks, strict=True)]
        sides = split_documents(documents, WORDS.decode, 0.1, 0)
        where = {id(document): number for document, number in zip(documents, numbers, strict=True)}
        parts = [{where[id(document)] for document in side} for side in (sides.train, sides.choosing, sides.judging)]
        assert [len(part) for part in parts] == [54, 3, 3]
        assert len(set.union(*parts)) == 60
        assert len(sides.choosing) == len(sides.judging) == 12
