"""`outpace train`: data for drafters, and drafters."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli.backend import Backend
from outpace.cli.options import NUMBER_WORDS, Parser, add_engine_options, engine_config, flag_of, given_options
from outpace.cli.progress import Progress
from outpace.cli.streams import say
from outpace.cli.train_from import EPILOG, Recorded, add_option, clear_refused, free_name
from outpace.errors import BadInput, OutpaceError
from outpace.train.settings import PRESETS, DataSettings, TrainSettings

if TYPE_CHECKING:
    from outpace.train.acceptance import Acceptance
    from outpace.train.trainer import Outcome

__all__ = ["add_commands"]

_ENGINE = ("model", "quantization", "dtype", "kernels", "threads", "trust_remote_code", "allow_pickle")
_SOURCES = ("prompts", "text", "records")
_KEPT_ON_RESUME = ("model", "threads")
_ABOUT = {
    "early-exit": "train a small network that drafts behind the model's first layers",
    "eagle3": "train an EAGLE-3 head, one layer that drafts from the model's inner states",
    "draft": "train a small model that drafts, made of some of the model's layers",
}
_PRESET = "small"


def add_commands(parser: Parser) -> None:
    """Adds `data` and the kinds of drafters under `outpace train`."""
    parser.epilog = EPILOG
    commands = parser.add_subparsers(title="what to do", metavar="WHAT", required=True)
    command = _command(commands, "data", "make training data: the model's answers to prompts, and text", _run_data)
    add_engine_options(command, only=_ENGINE)
    group = _add_data_options(command)
    _add_fields(group, DataSettings, by_preset=False)
    command.add_argument(
        "--out", metavar="DIR", required=True, help="folder for it; a run that was stopped goes on in it"
    )
    for kind, about in _ABOUT.items():
        command = _command(commands, kind, about, _run_training)
        command.set_defaults(kind=kind)
        _add_kind_options(command, kind)
        add_engine_options(command, only=_ENGINE)
        _add_training_options(command, kind)
        group = _add_data_options(command)
        add_option(group, "--from", kind)
        group.add_argument("--data", metavar="DIR", help="folder that `outpace train data` made, instead of sources")
        _add_fields(group, DataSettings, by_preset=True, leave_out=("seed",))


def _command(commands, name: str, text: str, run) -> Parser:  # type: ignore[no-untyped-def]
    parser: Parser = commands.add_parser(name, help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def _add_kind_options(parser: Parser, kind: str) -> None:
    group = parser.add_argument_group(f"the drafter ({kind})")
    if kind == "early-exit":
        group.add_argument(
            "--exit-layers",
            type=_layers,
            metavar="E[,E]",
            help="layers of the model that run before the network, one or several, which then learn side by side "
            "(default: a third of all)",
        )
        group.add_argument(
            "--init-layer",
            type=int,
            metavar="N",
            help="layer of the model that the network begins as (default: the last)",
        )
        group.add_argument(
            "--loss-vocab",
            type=int,
            metavar="N",
            help="tokens the loss looks at in every step, the most frequent ones of the data, beside half as many "
            "others drawn anew each time; 0: all tokens there are, which takes much longer (default: 8192)",
        )

    if kind == "eagle3":
        group.add_argument("--unroll", type=int, metavar="N", help="tokens drafted in training (default: 4)")
        group.add_argument(
            "--draft-vocab",
            type=int,
            metavar="N",
            help="tokens it can guess, the most frequent ones of the data (default: 8192)",
        )
        group.add_argument(
            "--train-head",
            action="store_true",
            default=None,
            help="train its output head too (default: it is made of the model's own rows, and not stored)",
        )
        group.add_argument(
            "--decay",
            type=float,
            metavar="X",
            help="weight of a token against the one before it (default: 0.8)",
        )
        group.add_argument(
            "--row-share",
            type=float,
            metavar="X",
            help="places in the text looked at for a token against the one before it, 1 for all (default: 0.6)",
        )

    if kind == "draft":
        group.add_argument("--layers", type=int, metavar="N", help="layers it has (default: a quarter of the model's)")
        group.add_argument(
            "--from-scratch",
            action="store_true",
            default=None,
            help="begin with new layers (default: with those of the model at even distances)",
        )
        group.add_argument(
            "--train-embedding",
            action="store_true",
            default=None,
            help="train embedding and output head too (default: they stay the model's)",
        )


def _add_training_options(parser: Parser, kind: str) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--out", metavar="DIR", help=f"folder of the run (default: outpace-{kind}-MODEL)")
    group.add_argument("--resume", metavar="DIR", help="go on with a run that was stopped, as it was begun")
    names = ", ".join(f"{name} ({preset.about})" for name, preset in PRESETS.items())
    add_option(group, "--head", kind)
    group.add_argument("--preset", choices=list(PRESETS), help=f"{names} (default: {_PRESET})")
    _add_fields(group, TrainSettings, by_preset=True)
    group.add_argument(
        "--tensorboard", action="store_true", default=None, help="write TensorBoard's files too (needs its package)"
    )


def _add_data_options(parser: Parser):  # type: ignore[no-untyped-def]
    group = parser.add_argument_group("data")
    texts = {
        "prompts": "prompts that the model answers: builtin, FILE.jsonl, a folder of them, or datasets:ID[:SPLIT]",
        "text": "text taken as it is: stdlib (Python's own), docs (/usr/share/doc), a file or a folder",
        "records": "answers given already: FILE.jsonl or a folder, with prompt_token_ids and token_ids a line",
    }
    for name in _SOURCES:
        group.add_argument(f"--{name}", action="append", metavar="WHAT", help=f"{texts[name]}; may be repeated")
    return group


def _add_fields(  # type: ignore[no-untyped-def]
    group, settings: type, *, by_preset: bool, leave_out: Sequence[str] = ()
) -> None:
    """One option for every field of some settings."""
    kinds = {"int": int, "float": float, "str": str}
    for item in fields(settings):
        if item.name in leave_out:
            continue
        text = str(item.metadata["help"])
        set_by = [name for name, preset in PRESETS.items() if item.name in {**preset.train, **preset.data}]
        default = "by preset" if by_preset and set_by else item.default
        if str(item.type) == "bool":
            group.add_argument(flag_of(item.name), action="store_true", default=None, help=text)
            continue
        kind = kinds[str(item.type)]
        group.add_argument(
            flag_of(item.name), type=kind, metavar=NUMBER_WORDS[kind], help=f"{text} (default: {default})"
        )


def _run_data(arguments: argparse.Namespace, backend: Backend) -> int:
    """Makes a folder of training data."""
    settings = DataSettings(**given_options(arguments, [item.name for item in fields(DataSettings)]))
    sources = _sources(arguments)
    engine = engine_config(arguments)
    try:
        with Progress() as progress:
            import_module("outpace.train.run").make_data(
                engine, settings, sources, Path(arguments.out).expanduser(), progress.say, progress.report
            )
    except KeyboardInterrupt:
        say("Interrupted. What was answered is kept, and the same command goes on.")
        raise
    return 0


def _run_training(arguments: argparse.Namespace, backend: Backend) -> int:
    """Trains a drafter, says how acceptance grew and how to serve it."""
    if arguments.resume is None:
        options = _new_plan(arguments)  # refuse bad options before torch is loaded
        run = import_module("outpace.train.run")
        plan = run.Plan(**options)
    else:
        _refuse_with_resume(arguments)
        run = import_module("outpace.train.run")
        changes = given_options(arguments, _KEPT_ON_RESUME)
        plan = run.resumed(Path(arguments.resume).expanduser(), lambda engine: replace(engine, **changes))
        if plan.kind != arguments.kind:
            raise BadInput(f"{arguments.resume} is a run of `outpace train {plan.kind}`, not {arguments.kind}")
    is_new = not plan.folder.exists()
    try:
        with Progress() as progress:
            outcome = run.train(plan, progress.say, progress.report)
    except OutpaceError:
        if is_new:
            clear_refused(plan.folder)
        raise
    except KeyboardInterrupt:
        if (plan.folder / "run.json").is_file():
            say(f"Interrupted. {_how_to_go_on(arguments.kind, plan.folder)}")
        raise
    _say_outcome(outcome, arguments.kind, plan.folder)
    return 130 if outcome.ending.name == "INTERRUPTED" else 0


def _new_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    preset_name = arguments.preset or _PRESET
    preset = PRESETS[preset_name]

    def filled(settings: type, given: Mapping[str, Any]) -> Any:
        return settings(**{**given, **given_options(arguments, [item.name for item in fields(settings)])})

    sources, recorded = _sources(arguments), Recorded.of(arguments)
    sources["records"] += recorded.records
    if arguments.data is not None and any(sources.values()):
        raise BadInput(
            "--data names data that is made already; --prompts, --text, --records and --from make some: take one of "
            "both"
        )
    engine = engine_config(arguments, **recorded.engine)
    folder = f"outpace-{arguments.kind}-{Path(engine.model).name.removesuffix('.gguf')}"
    return {
        "kind": arguments.kind,
        "engine": engine,
        "train": filled(TrainSettings, preset.train),
        "folder": Path(arguments.out or (free_name(folder) if recorded.records else folder)).expanduser(),
        "data": None if arguments.data is None else Path(arguments.data).expanduser(),
        **sources,
        "data_settings": filled(DataSettings, preset.data),
        "preset": preset_name,
        "options": given_options(arguments, _kind_options(arguments.kind)),
        "tensorboard": bool(arguments.tensorboard),
        "head": recorded.head,
    }


def _kind_options(kind: str) -> tuple[str, ...]:
    return {
        "early-exit": ("exit_layers", "init_layer", "loss_vocab"),
        "draft": ("layers", "from_scratch", "train_embedding"),
        "eagle3": ("unroll", "draft_vocab", "train_head", "decay", "row_share"),
    }[kind]


def _refuse_with_resume(arguments: argparse.Namespace) -> None:
    known = ("run", "kind", "resume", *_KEPT_ON_RESUME)
    given = [name for name, value in vars(arguments).items() if value is not None and name not in known]
    if given:
        raise BadInput(
            f"{flag_of(given[0])} does not go with --resume: the run goes on as it was begun; only "
            f"{' and '.join(map(flag_of, _KEPT_ON_RESUME))} may be given anew"
        )


def _sources(arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    return {name: tuple(getattr(arguments, name) or ()) for name in _SOURCES}


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not possible: write layers as 10 or 8,10,12") from None


def _say_outcome(outcome: Outcome, kind: str, folder: Path) -> None:
    """A line for each drafter on standard error, and how to serve them as JSON on standard output."""
    say(f"{outcome.ending.value} after step {outcome.step}; {outcome.speed.describe()}")
    if outcome.ending.name == "INTERRUPTED":
        say(_how_to_go_on(kind, folder))
        return
    for name, item in outcome.best.items():
        first = outcome.first.get(name, item)
        step = outcome.best_steps[name]
        say(f"{name}: mean acceptance length {_both(first)} before, {_both(item)} after step {step} (kept)")
    if outcome.better is not None:
        swap = f"Better: `outpace swap URL {folder}` puts it into a server that serves the head it began as."
        say(swap if outcome.better else "Not shown to be better than the head it began as, which stays.")
    served = {name: json.loads(config) for name, config in outcome.served.items()}
    for config in served.values():
        say(f"Serve it with: --speculative-config '{json.dumps(config)}'")
    acceptance = {name: asdict(item) for name, item in outcome.best.items()}
    better = {} if outcome.better is None else {"better": outcome.better}
    print(json.dumps({"folder": str(folder), "speculative_config": served, "acceptance": acceptance, **better}))


def _how_to_go_on(kind: str, folder: Path) -> str:
    return f"Go on with: outpace train {kind} --resume {shlex.quote(str(folder))}"


def _both(item: Acceptance) -> str:
    return f"{item.greedy_length:.2f} (temperature 0) and {item.sampled_length:.2f} (1)"
