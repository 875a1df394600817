"""Prompts that need no download: templates times topics, of the kinds that local models are asked.

Chat, code to write, to edit and to read, JSON, summaries, answers from passages, sums and translation. Half of the code
and of the texts is Python's own. The same number gives the same prompts in the same order, on the same Python.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from outpace.train.data.snippets import snippets

__all__ = ["TASKS", "builtin_prompts"]

_PEOPLE = ("Mara", "Tobias", "Ines", "Okoro", "Lin", "Petra", "Yusuf", "Clara", "Henrik", "Aiko", "Rosa", "Emeka",
           "Sofia", "Jonas", "Priya", "Mateo", "Hana", "Viktor", "Zoe", "Amir")  # fmt: skip
_PLACES = ("a bakery", "a bicycle shop", "a small museum", "a school library", "a community garden", "a repair cafe",
           "a music school", "a harbour office", "a bookbinder", "a weather station", "a dance studio",
           "a village cinema", "a climbing hall", "a ferry company")  # fmt: skip
_THEMES = ("composting", "bicycle brakes", "the water cycle", "public libraries", "sourdough", "tide tables",
           "chess openings", "solar panels", "hash tables", "version control", "map projections", "bees",
           "a good night's sleep", "learning a language", "how vaccines work", "the history of paper",
           "black holes", "personal budgeting", "house plants", "running a marathon", "photosynthesis",
           "job interviews", "the French Revolution", "unit tests", "garden birds", "public speaking", "earthquakes",
           "coffee", "machine learning", "the Roman Empire", "recursion", "recycling", "vitamins", "volcanoes", "opera",
           "regular expressions", "the immune system", "inflation", "time zones", "writing a novel", "home networks",
           "electric cars", "the moon landing", "sailing knots", "meditation", "databases", "whales",
           "first aid", "probability", "impressionist painting")  # fmt: skip
_FUNCTIONS = ("counts the words in a string", "reverses a linked list", "finds the longest run of equal items",
              "parses a line of comma separated values", "checks whether brackets are balanced",
              "rotates a matrix by ninety degrees", "formats a number of seconds as hours and minutes",
              "removes duplicates and keeps the order", "computes a moving average", "flattens a nested list",
              "groups words by their first letter", "validates an ISBN", "converts Roman numerals",
              "finds the second largest number", "splits a list into chunks",
              "caches the results of a function", "merges two sorted lists", "checks whether a word is a palindrome",
              "sorts people by age and then by name", "finds all prime numbers below a limit",
              "computes the greatest common divisor", "reads a file and counts its lines",
              "finds the shortest path in a grid", "searches a sorted list by halving it",
              "turns a string into title case", "adds two fractions", "draws a triangle of stars",
              "picks the most frequent word of a text", "checks a password for length and digits",
              "transposes a table", "computes compound interest", "finds two numbers that add up to a target",
              "converts Celsius to Fahrenheit", "counts how often each letter occurs", "intersects two lists",
              "walks a binary tree in order", "generates the Fibonacci numbers", "retries a call three times",
              "measures how long a call takes", "downloads a page and lists its links")  # fmt: skip
_LANGUAGES = ("Python", "JavaScript", "Go", "Rust", "Java", "C", "TypeScript", "Ruby")
_TONGUES = ("French", "German", "Spanish", "Italian", "Dutch", "Portuguese")
_EDITS = ("Rename the class to `{new}` and leave the rest as it is", "Add a docstring to every method",
          "Make every method that returns nothing return self", "Add a method `clear` that empties it",
          "Raise ValueError for negative amounts", "Replace print by logging", "Add type hints to every method",
          "Rename the method `total` to `sum_up`", "Make `remove` return False if nothing is there",
          "Add a method `__len__`", "Put a comment above every method", "Let `add` take several at once")  # fmt: skip
_CLASSES = (("Basket", "Cart", "item", "price"), ("Ledger", "Journal", "account", "amount"),
            ("Stockroom", "Depot", "part", "count"), ("Scores", "Ranking", "player", "points"),
            ("Garden", "Orchard", "plant", "litres"), ("Fleet", "Garage", "lorry", "weight"),
            ("Library", "Archive", "title", "copies"), ("Menu", "Card", "dish", "cost"))  # fmt: skip
_CODES = (
    """class {name}:
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
        return result""",
    """class {name}:
    limit = 100

    def __init__(self, owner):
        self.owner = owner
        self._{item}s = []

    def add(self, {item}, {value}):
        if len(self._{item}s) >= self.limit:
            print("no room for", {item})
            return
        self._{item}s.append(({item}, {value}))

    def remove(self, {item}):
        self._{item}s = [pair for pair in self._{item}s if pair[0] != {item}]

    def largest(self):
        return max(self._{item}s, key=lambda pair: pair[1])

    def total(self):
        return sum({value} for _, {value} in self._{item}s)""",
)
_CODE_EDITS = ("Add type hints and print it whole.", "Add a docstring and leave the code as it is.",
               "Rename the variables so that they explain themselves. Print all of it.",
               "Add a comment above each step and print the whole code again.",
               "Print it again with print() calls that show each argument.",
               "Print it again without its comments and docstrings.")  # fmt: skip
_CODE_QUESTIONS = ("Explain what this code does.", "What does this return, and when does it raise?",
                   "Write two unit tests for this.", "List the names that this code uses, one a line.",
                   "Is there a mistake in this? Answer briefly.", "Rewrite this in JavaScript.")  # fmt: skip
_PROSE_WISHES = ("Summarise this in two sentences.", "Rewrite this for a beginner.", "List the main points.",
                 "What is this about? Quote the sentence that says it.", "Shorten this to half its length.",
                 "Turn this into questions and answers.")  # fmt: skip
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
        f"What should I know about {theme}?",
        f"Write a short poem about {theme}.",
        f"Why does {theme} matter? Give three reasons.",
        f"I have ten minutes to talk about {theme} in front of a class. What do I say?",
        f"What are three surprising facts about {theme}?",
        f"Write an email to {person} that invites them to an evening about {theme}.",
        f"How would you test whether somebody understands {theme}? Write five questions.",
        f"What is the difference between {theme} and {draw.choice(_THEMES)}?",
    ))  # fmt: skip


def _code_write(draw: random.Random) -> str:
    task, language = draw.choice(_FUNCTIONS), draw.choice(_LANGUAGES)
    ending = draw.choice(("Code only.", "Add two tests.", "Explain it in one sentence.", "Mind the empty case."))
    return f"Write a function in {language} that {task}. {ending}"


def _code_edit(draw: random.Random) -> str:
    name, new, item, value = draw.choice(_CLASSES)
    if draw.random() < 0.5:
        return f"{draw.choice(_CODE_EDITS)}\n```python\n{draw.choice(snippets().code)}\n```"
    code = draw.choice(_CODES).format(name=name, item=item, value=value)
    return f"{draw.choice(_EDITS).format(new=new)}. Print the whole class.\n```python\n{code}\n```"


def _code_read(draw: random.Random) -> str:
    return f"{draw.choice(_CODE_QUESTIONS)}\n```python\n{draw.choice(snippets().code)}\n```"


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
    if draw.random() < 0.5:
        return f"{draw.choice(_PROSE_WISHES)}\n\n{draw.choice(snippets().prose)}"
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
    "code_read": _code_read,
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
