"""What the commands `outpace train data` and `outpace train KIND` do, from names and settings to a folder."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from outpace.config import EngineConfig
from outpace.errors import BadInput, InvalidParameter, UnsupportedModel
from outpace.llm import LLM
from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.models.files import format_bytes
from outpace.models.native.library import prepare
from outpace.models.resolve import lasting_name
from outpace.models.threads import usable_cores
from outpace.source import Notify, Progress, Source
from outpace.train.beginning import Beginning, open_beginning
from outpace.train.comparing import compare, judge
from outpace.train.data.packing import Windows
from outpace.train.data.prepare import DataPlan, Tools, prepare_data
from outpace.train.data.shards import TrainingData, forget_data, holds_data, read_data
from outpace.train.identity import Identity
from outpace.train.kinds.base import Kind, Material
from outpace.train.kinds.draft import Draft, DraftOptions, chosen_layers
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options, aux_layers
from outpace.train.kinds.early_exit import EarlyExit, check_layers
from outpace.train.memory import keep_freed_memory
from outpace.train.needs import require_training_fit, training_needs
from outpace.train.outcome import Ending, Outcome
from outpace.train.plan import Plan, keep_plan, resumed
from outpace.train.result import write_result
from outpace.train.settings import PRESETS, DataSettings
from outpace.train.states import StoredStates, stored_bytes
from outpace.train.target import StateSource, Target
from outpace.train.trainer import CHECKPOINT, DRAFTER, Sources, Trainer
from outpace.train.vocabulary import covered, draft_vocabulary
from outpace.train.writing import make_folder

__all__ = ["Plan", "make_data", "resumed", "train"]

_LOSS_VOCAB = 8192
_WORTH_STORING = 1.5
"""Rounds over the data from which on states are kept on disk by default."""


def make_data(
    engine: EngineConfig,
    settings: DataSettings,
    sources: Mapping[str, Sequence[str]],
    folder: Path,
    notify: Notify,
    progress: Progress,
) -> TrainingData:
    """Makes a folder of training data for a model.

    Args:
        engine: of the target.
        settings: how much of it, and how.
        sources: {"prompts": ..., "text": ..., "records": ...}.
        folder: where to.
        notify: takes lines for people.
        progress: takes (what, done, total).

    Raises:
        OutpaceError: the model or a source cannot be used, or the folder cannot be written; see `prepare_data`.
    """
    _set_threads(engine)
    source = _open(engine, notify)
    assert source.shape is not None
    plan = DataPlan(sources["prompts"], sources["text"], sources["records"], settings)
    config = replace(engine, max_num_seqs=settings.batch)

    def llm() -> LLM:
        return LLM(config, speculative="auto", notify=notify, progress=progress)

    precision = "" if engine.quantization == "auto" else f" {engine.quantization}"
    tools = Tools(source.files, Identity.of(source.files, source.shape), llm, notify, progress, precision)
    data = prepare_data(plan, folder, tools)
    gc.collect()  # the engine that answered holds threads and memory until it is collected
    splits = data.index["splits"]
    notify(
        f"{folder}: {splits['train']['windows']} windows of {data.train.width} tokens to train on, "
        f"{splits['valid']['windows']} held out; {splits['train']['labels']:,} tokens to be predicted"
    )
    return data


def train(plan: Plan, notify: Notify, progress: Progress) -> Outcome:
    """Trains a drafter, making data first where there is none.

    Raises:
        OutpaceError: model, data, settings or checkpoint cannot be used, or training failed; says why.
    """
    keep_freed_memory()
    _set_threads(plan.engine)
    begun = (plan.folder / CHECKPOINT).is_file()
    if begun and not plan.resume:
        raise BadInput(f"{plan.folder} holds a run already: go on with --resume {plan.folder}, or name another --out")
    source = _open(plan.engine, notify)
    shape = source.shape
    assert shape is not None
    identity = Identity.of(source.files, shape)
    if plan.made_for is not None:
        identity.require(plan.made_for, str(plan.folder / "run.json"))
    vocab_size = min(shape.vocab_size, source.files.tokenizer.vocab_size)
    name = lasting_name(plan.engine.model)
    material = Material(source.files, shape, vocab_size, plan.train.loss, plan.train.chain, name)
    beginning = None
    if plan.head is not None:
        allow_pickle = plan.engine.allow_pickle
        beginning = open_beginning(plan.kind, plan.head, shape, plan.options, allow_pickle=allow_pickle)
        plan = replace(plan, options=beginning.options)
    _check_options(plan, shape)
    make_folder(plan.folder)
    if not plan.resume:
        keep_plan(plan, identity.as_dict())
    data = _data(plan, source, identity, vocab_size, notify, progress)
    # Where a head is judged at the end, its state is not chosen on the same texts.
    choosing = None if beginning is None else data.choosing
    _set_threads(plan.engine)  # the engine that answered prompts may have given cores up for the moment
    kind = _make_kind(plan, material, data, notify, None if beginning is None else beginning.token_ids)
    if beginning is not None:
        beginning.load(kind)
    prepare(notify)
    model = source.load(plan.engine, None, progress)
    assert isinstance(model, Decoder)
    target = Target(model, kind.aux_layers)
    plan = _with_states_decided(plan, target, data)
    trained = sum(item.numel() for item in kind.module.parameters() if item.requires_grad)
    notify(
        f"training {trained / 1e6:.1f}M weights of a drafter ({plan.kind}) for {source.files.label}, {model.describe()}"
    )
    states = [_states(plan, target, identity, data, split, notify, progress) for split in ("train", "valid")]
    sources = Sources(target, data, states[0], states[1], choosing)
    trainer = Trainer(kind, sources, plan.train, plan.folder, identity, notify, tensorboard=plan.tensorboard)
    if begun:
        notify(f"going on behind step {trainer.resume()} of {plan.train.steps}")
    keep_plan(plan, identity.as_dict())  # once more: the model may lie elsewhere now, and it is the one
    outcome = trainer.run()
    if beginning is None or outcome.ending is Ending.INTERRUPTED:
        return outcome
    return replace(outcome, better=_is_better(plan, beginning, material, kind, sources, identity, notify, progress))


def _is_better(
    plan: Plan,
    beginning: Beginning,
    material: Material,
    kind: Kind,
    sources: Sources,
    identity: Identity,
    notify: Notify,
    progress: Progress,
) -> bool:
    """Whether the head that was kept is better than the one it began as, on texts that did not choose it; says and
    writes so."""
    new = open_beginning(plan.kind, str(plan.folder / DRAFTER), material.shape, plan.options)
    data = sources.data
    which = torch.arange(data.choosing, len(data.valid), dtype=torch.int64, device="cpu")
    judged = []
    for name, head in (("old", beginning), ("new", new)):
        head.load(kind)
        report = partial(progress, f"judging the {name} head")
        judged.append(judge(kind, sources.target, data.valid, sources.valid, which, plan.train.chain, report))
    comparison = compare(*judged)
    write_result(plan.folder, beginning, new, identity, comparison)
    notify(comparison.describe())
    return comparison.is_better


def _data(
    plan: Plan, source: Source, identity: Identity, vocab_size: int, notify: Notify, progress: Progress
) -> TrainingData:
    """What there is, or what is made of the sources, those of the preset if none is named; memory is asked for first.

    A run that is begun anew makes it anew, from the answers that are there.
    """
    own = plan.folder / "data"
    if plan.data is None and not plan.resume:
        forget_data(own)
    there = plan.data or (own if holds_data(own) else None)
    data = None if there is None else read_data(there, identity)
    window = plan.data_settings.window if data is None else data.train.width
    assert source.shape is not None
    needs = training_needs(plan.kind, plan.options, source.shape, vocab_size, plan.train, window)
    require_training_fit(needs, source.num_bytes, plan.train, window)
    if data is None:
        return _new_data(plan, source, own, notify, progress)
    made_for = data.index["target"]
    if made_for["weights"] != identity.weights:
        notify(
            f"{there} holds what {made_for['model']} says, not {identity.model}: drafters are accepted more often if "
            "they learn from their own model's answers"
        )
    return data


def _new_data(plan: Plan, source: Source, folder: Path, notify: Notify, progress: Progress) -> TrainingData:
    sources = {"prompts": plan.prompts, "text": plan.text, "records": plan.records}
    if not any(sources.values()):
        preset = PRESETS[plan.preset]
        chats = source.files.tokenizer.has_chat_template
        sources = {"prompts": preset.prompts if chats else (), "text": preset.text, "records": ()}
        if not chats:
            notify(f"{source.files.label} has no chat template: training on text alone")
    return make_data(plan.engine, plan.data_settings, sources, folder, notify, progress)


def _with_states_decided(plan: Plan, target: Target, data: TrainingData) -> Plan:
    """The plan with `states` said. Decided once for a run: states that are kept are rounded, and it would not go on to
    the bit with others."""
    if plan.train.states != "auto":
        return plan
    folder = make_folder(_states_folder(plan), private=True)
    size = sum(_states_size("int8", target, windows) for windows in (data.train, data.valid))
    looks = plan.train.steps * plan.train.batch_windows * plan.train.accumulate / max(1, len(data.train))
    stored = looks >= _WORTH_STORING and shutil.disk_usage(folder).free > 2 * size
    return replace(plan, train=replace(plan.train, states="int8" if stored else "none"))


def _states(
    plan: Plan, target: Target, identity: Identity, data: TrainingData, split: str, notify: Notify, progress: Progress
) -> StateSource:
    kind = plan.train.states
    if kind == "none":
        return target
    windows = data.train if split == "train" else data.valid
    folder = make_folder(_states_folder(plan), private=True)  # states tell the texts they come of
    notify(f"states of the {split} windows take {format_bytes(_states_size(kind, target, windows))} in {folder}")
    stored = StoredStates(folder, split, kind, target, identity)
    stored.make(windows, lambda done, total: progress(f"states of the {split} windows", done, total))
    return stored


def _states_folder(plan: Plan) -> Path:
    return (plan.data or plan.folder / "data") / "states"


def _states_size(kind: str, target: Target, windows: Windows) -> int:
    layers = len({*target.aux_layers, target.num_layers})
    return stored_bytes(kind, windows.ids.numel(), layers, target.model.hidden_size)


def _check_options(plan: Plan, shape: DecoderConfig) -> None:
    """Refuses what is not possible with this model, before data is made, which takes long."""
    options = plan.options
    if plan.kind == "eagle3":
        Eagle3Options(**options)
        aux_layers(shape.num_layers)
    elif plan.kind == "draft":
        chosen_layers(DraftOptions(**options), shape.num_layers)
    else:
        _loss_vocab(plan)
        check_layers(shape, options.get("exit_layers") or [_default_exit(shape)], options.get("init_layer"))


def _make_kind(
    plan: Plan, material: Material, data: TrainingData, notify: Notify, token_ids: torch.Tensor | None
) -> Kind:
    """The kind with new weights; `token_ids` [D] are the draft vocabulary of a head that is there already."""
    torch.manual_seed(plan.train.seed)
    options = plan.options
    if plan.kind == "eagle3":
        wanted = Eagle3Options(**options)
        ids = token_ids
        if ids is None:
            ids = draft_vocabulary(data.train, wanted.draft_vocab, material.vocab_size, material.files.eos_ids)
        train, valid = (covered(windows, ids) for windows in (data.train, data.valid))
        notify(
            f"the {len(ids):,} tokens that the head can draft are {train:.1%} of what is to be learnt, "
            f"{valid:.1%} of what is held out"
        )
        return Eagle3(material, ids, wanted)
    if plan.kind == "draft":
        return Draft(material, DraftOptions(**options))
    exits = options.get("exit_layers") or [_default_exit(material.shape)]
    return EarlyExit(material, exits, options.get("init_layer"), _common_tokens(plan, material, data))


def _common_tokens(plan: Plan, material: Material, data: TrainingData) -> torch.Tensor | None:
    """Tokens that the loss of an early exit looks at in every step; None: it looks at all there are."""
    size = _loss_vocab(plan)
    if not 0 < size < material.vocab_size // 2:
        return None
    return draft_vocabulary(data.train, size, material.vocab_size, material.files.eos_ids)


def _loss_vocab(plan: Plan) -> int:
    size: int = plan.options.get("loss_vocab", _LOSS_VOCAB)
    if size < 0:
        raise InvalidParameter(f"loss_vocab={size} is not possible: it must be 0 (all tokens) or more")
    return size


def _default_exit(shape: DecoderConfig) -> int:
    return max(1, shape.num_layers // 3)


def _open(engine: EngineConfig, notify: Notify) -> Source:
    """The target's files.

    Raises:
        UnsupportedModel: it does not run on outpace's own layers, whose states training needs.
    """
    source = Source.open(engine.model, engine, notify)
    if source.shape is None:
        raise UnsupportedModel(
            f"drafters cannot be trained for {source.files.label}: it runs on transformers' layers; possible are the "
            "architectures of outpace's own (Llama, Mistral, Qwen2, Qwen3, MiMo)"
        )
    return source


def _set_threads(engine: EngineConfig) -> None:
    torch.set_num_threads(engine.threads or usable_cores())
