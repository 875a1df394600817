"""`outpace doctor`: what this machine has for running models, and what to expect from speculation on it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outpace.cli.backend import Backend
from outpace.cli.options import engine_config
from outpace.cli.progress import Progress
from outpace.cli.report import counted, gigabytes, megabytes, percent
from outpace.doctor.report import DRAFT_TOKENS, TOKENS_A_STEP, BitCheck, Costs, Examination
from outpace.errors import InvalidParameter

__all__ = ["DEFAULTS", "MODEL_OPTIONS", "OPTIONS", "run"]

MODEL_OPTIONS = ("quantization", "dtype", "kernels", "trust_remote_code", "allow_pickle")
"""Settings of the engine that say how a model is run; without a model there is nothing that they would change."""
OPTIONS = ("model", "threads", *MODEL_OPTIONS)
"""Settings of the engine that this command takes."""
DEFAULTS = {"model": "none, only layers of random weights", "threads": "all usable cores"}
"""{setting: what happens without it}, where that is this command's own affair."""


def run(arguments: argparse.Namespace, backend: Backend) -> int:
    """Examines and prints: tables, or one JSON object.

    Raises:
        OutpaceError: bad options, or a model that cannot be run.
    """
    config = engine_config(arguments)
    given = [name for name in MODEL_OPTIONS if getattr(arguments, name) is not None]
    if given and arguments.model is None:
        raise InvalidParameter(f"--{given[0].replace('_', '-')} belongs to a model: name one with --model")
    with Progress() as progress:
        found = backend.examine(config, with_model=arguments.model is not None, progress=progress.report)
    if arguments.json:
        print(json.dumps(found.as_dict(), allow_nan=False))
    else:
        _show(found, Console(highlight=False))
    return 0


def _show(found: Examination, console: Console) -> None:
    _show_facts(found, console)
    measured = [costs for costs in found.costs if costs.seconds]
    if measured:
        _print(
            console,
            f"\nWhat a step costs with {counted(found.threads, 'thread')}: the weights it reads, one row, the share of "
            "memory's speed at which it reads them, and more rows in steps of one row (samples differ in size: compare "
            "times by the weights):\n",
        )
        console.print(_costs_table(measured))
        _print(console, f"\nSpeed-up of {DRAFT_TOKENS} draft tokens that cost nothing, by tokens a step brings:\n")
        console.print(_speed_table(measured))
    console.print()
    for sentence in [found.advice(), *_skipped(found.costs), *found.warnings()]:
        _print(console, sentence)


def _show_facts(found: Examination, console: Console) -> None:
    facts = list(_facts(found))
    if not console.is_terminal:
        for heading, text in facts:
            _print(console, f"{heading}: {text}")
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    for heading, text in facts:
        table.add_row(heading, Text(text))
    console.print(table)


def _print(console: Console, text: str) -> None:
    # A terminal gets lines broken between words; elsewhere lines stay whole.
    console.print(Text(text), soft_wrap=not console.is_terminal)


def _facts(found: Examination) -> Iterator[tuple[str, str]]:
    machine, kernels = found.machine, found.kernels
    cores = f"{machine.cores} usable {'core' if machine.cores == 1 else 'cores'}"
    limited = machine.usable_cores < machine.cores
    quota = f", {machine.usable_cores} by the control group's limit" if limited else ", no control group limits them"
    cache = "" if machine.cache_bytes is None else f", last-level cache {machine.cache_bytes / (1 << 20):.0f} MiB"
    yield "processor", f"{machine.processor}, {cores}{quota}{cache}"
    yield "memory", "unknown" if machine.memory_free is None else f"{gigabytes(machine.memory_free)} free"
    yield "system", ", ".join([machine.system, *(f"{name} {number}" for name, number in machine.versions.items())])
    if kernels.native:
        compiler = "" if kernels.compiler is None else f", compiled by {kernels.compiler}"
        yield "kernels", f"native{compiler}: {kernels.file}"
    else:
        yield "kernels", f"not native: {kernels.reason}"
    yield "fallback", f"torch: {'; '.join(kernels.torch)}"
    for check in found.bits:
        yield "bits", f"{check.name}: {check.text}{_on_threads(check)}"
    speeds = (
        f"{gigabytes(speed)}/s with {counted(count, 'thread')}" for count, speed in found.bytes_per_second.items()
    )
    yield "reading", ", ".join(speeds)
    if found.others is not None:
        yield "others", f"other programs used {found.others:.1f} cores meanwhile"


def _on_threads(check: BitCheck) -> str:
    if len(check.threads) < 2:
        return ""
    counts = " and ".join(map(str, check.threads))
    return f"; {'the same' if check.same_on_all else 'OTHER'} bits with {counts} threads"


def _costs_table(measured: list[Costs]) -> Table:
    rows = sorted(measured[0].seconds)
    table = _table("weights", "1 row", "memory\nspeed", *(f"{count}\nrows" for count in rows[1:]))
    for costs in measured:
        relative = (f"{costs.relative(count):.2f}" for count in rows[1:])
        once = (megabytes(costs.bytes_read), f"{1e3 * costs.seconds[1]:.1f} ms", percent(costs.bandwidth_share(1)))
        table.add_row(costs.name, *once, *relative)
    return table


def _speed_table(measured: list[Costs]) -> Table:
    headings = (f"{tokens} of {DRAFT_TOKENS + 1}" for tokens in TOKENS_A_STEP)
    table = _table(*headings, "pays from\nacceptance")
    for costs in measured:
        pays = percent(costs.pays_from) if costs.pays_from < 1 else "never"
        table.add_row(costs.name, *(f"{costs.speed_up(tokens):.2f}x" for tokens in TOKENS_A_STEP), pays)
    return table


def _table(*headings: str) -> Table:
    """An empty table whose first column, of names, gives way where the console is narrow."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _skipped(all_costs: tuple[Costs, ...]) -> list[str]:
    return [f"Steps in {costs.name} were not measured: {costs.skipped}." for costs in all_costs if costs.skipped]
