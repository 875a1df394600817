"""Prompts that need no download: templates times topics, of the kinds that local models are asked.

Chat, code to write, code to edit, JSON, summaries, answers from passages, sums and translation. The same number gives
the same prompts in the same order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

__all__ = ["TASKS", "builtin_prompts"]

_PEOPLE = ("Mara", "Tobias", "Ines", "Okoro", "Lin", "Petra", "Yusuf", "Clara", "Henrik", "Aiko")
_PLACES = ("a bakery", "a bicycle shop", "a small museum", "a school library", "a community garden", "a repair cafe",
           "a music school", "a harbour office", "a bookbinder", "a weather station")  # fmt: skip
_THEMES = ("composting", "bicycle brakes", "the water cycle", "public libraries", "sourdough", "tide tables",
           "chess openings", "solar panels", "hash tables", "version control", "map projections", "bees",
           "a good night's sleep", "learning a language", "how vaccines work", "the history of paper")  # fmt: skip
_FUNCTIONS = ("counts the words in a string", "reverses a linked list", "finds the longest run of equal items",
              "parses a line of comma separated values", "checks whether brackets are balanced",
              "rotates a matrix by ninety degrees", "formats a number of seconds as hours and minutes",
              "removes duplicates and keeps the order", "computes a moving average", "flattens a nested list",
              "groups words by their first letter", "validates an ISBN", "converts Roman numerals",
              "finds the second largest number", "splits a list into chunks",
              "caches the results of a function")  # fmt: skip
_LANGUAGES = ("Python", "JavaScript", "Go", "Rust", "Java")
_TONGUES = ("French", "German", "Spanish", "Italian", "Dutch", "Portuguese")
_EDITS = ("Rename the class to `{new}` and leave the rest as it is", "Add a docstring to every method",
          "Make every method that returns nothing return self", "Add a method `clear` that empties it",
          "Raise ValueError for negative amounts", "Replace print by logging")  # fmt: skip
_CLASSES = (("Basket", "Cart", "item", "price"), ("Ledger", "Journal", "account", "amount"),
            ("Stockroom", "Depot", "part", "count"), ("Scores", "Ranking", "player", "points"))  # fmt: skip
_CODE = """class {name}:
    def __init__(self):
        self.{item}s = {{}}

    def add(self, {item}, {value}):
        if {item} in self.{item}s:
            print("again:", {item})
        self.{item}s[{item}] = self.{item}s.get({item}, 0) + {value}

    def remove(self, {item}):
        del self.{item}s[{item}]

    def total(self):
        result = 0
        for {item} in self.{item}s:
            result += self.{item}s[{item}]
        return result"""
_NOTE = (
    "{a} and {b} met at {place} on {day} May. They agreed to open at {hour} instead of {later}, to spend {sum} euros "
    "on {theme}, and to ask {c} for help. {a} will write to the neighbours before {last} May. {b} was against longer "
    "hours in winter. Nothing was decided about the roof, which has leaked since {year}."
)


def _chat(draw: random.Random) -> str:
    theme, person = draw.choice(_THEMES), draw.choice(_PEOPLE)
    return draw.choice((
        f"Explain {theme} to a curious beginner in one paragraph.",
        f"What are the most common mistakes people make with {theme}? Give five, with a remedy each.",
        f"Compare two ways to get started with {theme} and say which you would choose.",
        f"Write a short message to {person} asking for advice about {theme}.",
        f"Give me a one-week plan for finding out more about {theme}, half an hour a day.",
        f"Tell a short story in which {person} discovers {theme}.",
        f"My friend {person} thinks {theme} is boring. What would you say?",
    ))  # fmt: skip


def _code_write(draw: random.Random) -> str:
    task, language = draw.choice(_FUNCTIONS), draw.choice(_LANGUAGES)
    ending = draw.choice(("Code only.", "Add two tests.", "Explain it in one sentence.", "Mind the empty case."))
    return f"Write a function in {language} that {task}. {ending}"


def _code_edit(draw: random.Random) -> str:
    name, new, item, value = draw.choice(_CLASSES)
    code = _CODE.format(name=name, item=item, value=value)
    return f"{draw.choice(_EDITS).format(new=new)}. Print the whole class.\n```python\n{code}\n```"


def _json(draw: random.Random) -> str:
    names = draw.sample(_PEOPLE, 3)
    rows = "; ".join(f"{name} is {draw.randint(18, 80)} and paid {draw.randint(5, 95)} euros" for name in names)
    return draw.choice((
        f"Write as a JSON list of objects with keys name, age, paid. JSON only.\n{rows}.",
        f"Make a JSON object that maps each name to what was paid, with a key total. JSON only.\n{rows}.",
        f"Describe {draw.choice(_PLACES)} as JSON with keys name, opening_hours (a list), staff and rating.",
    ))  # fmt: skip


def _note(draw: random.Random) -> str:
    a, b, c = draw.sample(_PEOPLE, 3)
    day, hour = draw.randint(2, 14), draw.randint(6, 10)
    return _NOTE.format(
        a=a, b=b, c=c, place=draw.choice(_PLACES), day=day, hour=hour, later=hour + 2, last=day + 10,
        sum=draw.randint(20, 900), theme=draw.choice(_THEMES), year=draw.randint(1990, 2020),
    )  # fmt: skip


def _summarise(draw: random.Random) -> str:
    wish = draw.choice(("Summarise this in three bullet points.", "What was decided? One sentence each.",
                        "Shorten this to half its length and keep the numbers."))  # fmt: skip
    return f"{wish}\n\n{_note(draw)}"


def _passages(draw: random.Random) -> str:
    question = draw.choice(("When do they open now?", "What is the money for?", "Who was against what?",
                            "What is still undecided?", "Who will write to whom, and by when?"))  # fmt: skip
    return f"Use only this text and quote the sentence you rely on. {question}\n\n[A] {_note(draw)}"


def _maths(draw: random.Random) -> str:
    person, n, price = draw.choice(_PEOPLE), draw.randint(3, 12), draw.randint(2, 9)
    return draw.choice((
        f"{person} buys {n} notebooks at {price} euros and pays with a {n * price + draw.randint(1, 20)} euro voucher. "
        "How much is left? Show the steps.",
        f"A tank holds {n * 40} litres and fills at {price} litres a minute. How long until it is half full?",
        f"What is {n * 17} times {price * 13}? Work it out step by step.",
        f"{person} walks {n} km in {price * 20} minutes. What is the speed in km/h?",
    ))  # fmt: skip


def _translate(draw: random.Random) -> str:
    a, b = draw.sample(_PEOPLE, 2)
    sentence = draw.choice((
        f"{a} meets {b} in front of {draw.choice(_PLACES)} at {draw.randint(2, 11)} o'clock.",
        f"Please tell {a} that the book about {draw.choice(_THEMES)} has arrived.",
        f"{b} has been interested in {draw.choice(_THEMES)} for {draw.randint(2, 30)} years.",
    ))  # fmt: skip
    return f"Say this in {draw.choice(_TONGUES)}: {sentence}"


TASKS: dict[str, Callable[[random.Random], str]] = {
    "chat": _chat,
    "code_write": _code_write,
    "code_edit": _code_edit,
    "json": _json,
    "summarise": _summarise,
    "passages": _passages,
    "maths": _maths,
    "translate": _translate,
}


def builtin_prompts(count: int, seed: int = 0) -> Iterator[str]:
    """Prompts, all different, the kinds taking turns; fewer than `count` if there are no more.

    Args:
        count: how many.
        seed: another one gives others.
    """
    draw = random.Random(seed)
    seen: set[str] = set()
    tasks = itertools.cycle(TASKS.values())
    misses = 0
    while len(seen) < count and misses < 64 * len(TASKS):
        prompt = next(tasks)(draw)
        if prompt in seen:
            misses += 1
            continue
        misses = 0
        seen.add(prompt)
        yield prompt
