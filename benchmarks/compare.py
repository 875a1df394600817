"""outpace beside what one would take instead: the same model file, prompts and tokens through every engine.

    python benchmarks/engines/environments.py --folder DIR          # once: an environment an engine
    python benchmarks/compare.py --models MODELS --environments DIR --save RESULTS

Engines: outpace, llama-cpp-python, llama.cpp's server, OpenVINO GenAI, transformers and vLLM, each plainly and in each
way of speculating it has. One runs at a time, in a process of its own, ended before the next begins; rounds alternate
(A B C A B C). Prompts are encoded once and sent as token ids. What cannot be run is listed with its reason, and rows
that outpace loses are listed too. --save writes compare.json (every answer) and compare.md after every engine, so that
a run that is ended early keeps what it has; --show prints the report of a saved one.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.client import Worker, WorkerFailed
from engines.contenders import REFERENCE, Contender, Places, all_contenders, select
from engines.environments import DEFAULT_FOLDER
from engines.model_files import ModelFiles, Tokens, choose_prompts, parse_tasks, score_texts
from engines.protocol import Prompt, Settings, one_line
from engines.quality import compare_logits
from engines.report import prompt_medians, render
from machine import describe_machine

_HERE = Path(__file__).resolve().parent
_TARGET = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
_DRAFT = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
_TASKS = "code_edit=10,chat=2,code_write=1,summarize=1,rag_qa=1,json=1,math=1,translate=1"
_LOAD_SECONDS = 1200.0  # vLLM compiles the model the first time
_ANSWER_SECONDS = 1200.0
_ROOM = 64  # tokens beside the longest prompt and its answer: some engines round, others draft beyond the end
_WARM_UP_TOKENS = 8
_WARM_UP_PROMPT = 32


class Comparison:
    """One run: who, what, and what has been recorded so far.

    Args:
        args: the command line.
        files: the models.
        tokens: the prompts.
        contenders: who is compared.
    """

    def __init__(
        self, args: argparse.Namespace, files: ModelFiles, tokens: Tokens, contenders: Sequence[Contender]
    ) -> None:
        self._args = args
        self._files = files
        self._tokens = tokens
        self._contenders = contenders
        self._places = Places(args.environments)
        self._context = max(len(prompt.token_ids) for prompt in tokens.prompts) + args.max_tokens + _ROOM
        self._log = args.environments / "compare.log"
        settings = ("rounds", "max_tokens", "threads", "draft_tokens", "ignore_eos", "tasks", "engines", "once", "cap")
        self.run: dict[str, Any] = {
            "machine": describe_machine(),
            "revision": _revision(),
            "began": time.strftime("%Y-%m-%d %H:%M"),
            "models": {"target": files.target.name, "draft": files.draft.name if files.draft else None},
            "settings": {name: getattr(args, name) for name in settings},
            "prompts": [{"name": p.name, "task": p.task, "tokens": len(p.token_ids)} for p in tokens.prompts],
            "contenders": {one.name: self._empty(one) for one in contenders},
        }

    def measure(self) -> None:
        """All rounds, saving after every engine."""
        once = {one.name for one in select(self._contenders, self._args.once)} if self._args.once else set()
        for number in range(1, self._args.rounds + 1):
            for contender in self._contenders:
                record = self.run["contenders"][contender.name]
                if record["reason"] is not None or (number > 1 and contender.name in once):
                    continue
                began = time.perf_counter()
                try:
                    self._one_round(number, contender, record)
                except WorkerFailed as error:
                    record["reason"] = f"in round {number}: {error}"
                except (ValueError, OSError) as error:  # a form of the model could not be made
                    record["reason"] = one_line(error)
                self._report(number, contender, record, time.perf_counter() - began)
                self.save()

    def score(self) -> None:
        """Distance of every engine's next-token distributions from the reference's, once an engine."""
        scratch = self._files.scratch
        reference, other = scratch / "reference.npy", scratch / "other.npy"
        scratch.mkdir(parents=True, exist_ok=True)
        everybody = all_contenders(self._args.outpace_quantizations, self._places)
        (judge,) = [one for one in everybody if one.name == REFERENCE]
        try:
            found = self._logits(judge, reference)
            for engine in dict.fromkeys(one.engine for one in self._contenders):
                rows = [one for one in self._contenders if one.engine == engine]
                quality = self._quality(rows[0], reference, other) if found is None else f"no reference: {found}"
                print(f"quality of {engine}: {quality}", flush=True)
                for row in rows:
                    self.run["contenders"][row.name]["quality"] = quality
                self.save()
        finally:
            reference.unlink(missing_ok=True)
            other.unlink(missing_ok=True)

    def save(self) -> None:
        """Writes compare.json and compare.md, if a folder was given."""
        folder = self._args.save
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "compare.json").write_text(json.dumps(self.run, indent=1) + "\n", encoding="utf-8")
            (folder / "compare.md").write_text(render(self.run), encoding="utf-8")

    def _empty(self, contender: Contender) -> dict[str, Any]:
        return {
            "engine": contender.engine,
            "variant": contender.variant,
            "versions": {},
            "notes": [],
            "load_seconds": [],
            "memory": {},
            "quality": None,
            "reason": self._places.missing(contender, has_draft=self._files.draft is not None),
            "answers": [],
        }

    def _one_round(self, number: int, contender: Contender, record: dict[str, Any]) -> None:
        """Loads, warms up and asks everything once."""
        with self._worker(contender) as worker:
            loaded = worker.load(self._settings(contender), _LOAD_SECONDS)
            record["load_seconds"].append(loaded["load_seconds"])
            record.update(versions=loaded["versions"], notes=loaded["notes"])
            first = self._tokens.prompts[0].token_ids[:_WARM_UP_PROMPT]
            worker.generate(Prompt(first, _WARM_UP_TOKENS, True), _ANSWER_SECONDS)
            began = time.perf_counter()
            for prompt in self._tokens.prompts:
                if self._args.cap is not None and time.perf_counter() - began > self._args.cap:
                    break  # the report says how many prompts a number is from
                asked = Prompt(prompt.token_ids, self._args.max_tokens, self._args.ignore_eos)
                answer, record["memory"], others = worker.generate(asked, _ANSWER_SECONDS)
                known = {"round": number, "prompt": prompt.name, **asdict(answer), "others_cores": others}
                speeds = {
                    "milliseconds_per_token": answer.milliseconds_per_token,
                    "whole_milliseconds_per_token": answer.whole_milliseconds_per_token,
                }
                record["answers"].append({**known, **speeds})

    def _quality(self, contender: Contender, reference: Path, other: Path) -> dict[str, Any] | str:
        """As numbers, or why there are none."""
        record = self.run["contenders"][contender.name]
        if record["reason"] is not None and not record["answers"]:
            return str(record["reason"])
        lengths = [len(text) for text in score_texts(self._tokens.prompts)]
        if contender.name == REFERENCE:
            return asdict(compare_logits(reference, reference, lengths))
        reason = self._logits(contender, other)
        return asdict(compare_logits(reference, other, lengths)) if reason is None else reason

    def _logits(self, contender: Contender, path: Path) -> str | None:
        """Writes a contender's logits over the texts; returns why it could not."""
        reason = self._places.missing(contender, has_draft=self._files.draft is not None)
        if reason is not None:
            return reason
        try:
            with self._worker(contender) as worker:
                worker.load(self._settings(contender), _LOAD_SECONDS)
                worker.score(score_texts(self._tokens.prompts), path, _ANSWER_SECONDS)
        except WorkerFailed as error:
            return str(error)
        return None

    def _worker(self, contender: Contender) -> Worker:
        return Worker(
            self._places.python(contender),
            f"engines.{contender.worker}",
            threads=self._args.threads,
            log=self._log,
            environment=self._places.environment_variables(contender),
        )

    def _settings(self, contender: Contender) -> Settings:
        target, draft = self._files.paths(contender)
        return Settings(
            target=target,
            draft=draft,
            variant=contender.method,
            options=contender.options,
            threads=self._args.threads,
            context=self._context,
            draft_tokens=self._args.draft_tokens,
            eos_ids=self._tokens.eos_ids,
            vocab_size=self._tokens.vocab_size,
            scratch=str(self._files.scratch),
        )

    def _report(self, number: int, contender: Contender, record: dict[str, Any], seconds: float) -> None:
        speeds = sorted(prompt_medians(record, "milliseconds_per_token").values())
        middle = f"{speeds[len(speeds) // 2]:.1f} ms a token so far, {len(speeds)} prompts" if speeds else "no answers"
        failed = f"; {record['reason']}" if record["reason"] else ""
        print(f"round {number}, {contender.name}: {middle}, {seconds:.0f} s in all{failed}", flush=True)


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.show is not None:
        print(render(json.loads(args.show.read_text(encoding="utf-8"))))
        return
    if args.models is None and args.target is None:
        parser.error("give --models, a folder with the GGUF files, or --target, one of them")
    args.environments = args.environments.expanduser().resolve()
    args.environments.mkdir(parents=True, exist_ok=True)
    try:
        target, draft = _find_models(args)
        files = ModelFiles(target, draft, (args.scratch or args.environments / "models").expanduser().resolve())
        chosen = choose_prompts([_HERE / "edits.jsonl", _HERE / "prompts.jsonl"], parse_tasks(args.tasks))
        contenders = select(all_contenders(args.outpace_quantizations, Places(args.environments)), args.engines)
        select(contenders, args.once)
    except ValueError as error:
        parser.error(str(error))
    comparison = Comparison(args, files, Tokens.encode(target, chosen, print), contenders)
    print(f"{comparison.run['machine']}\n{len(chosen)} prompts, {len(contenders)} contenders", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended like Ctrl-C: no worker is left behind
    try:
        comparison.measure()
        if not args.no_quality:
            comparison.score()
    except KeyboardInterrupt:
        print("interrupted: the report has what was measured", file=sys.stderr)
    comparison.save()
    print("\n" + render(comparison.run))


def _revision() -> str:
    """Of the checkout, marked where files differ from it."""
    command = ["git", "-C", str(_HERE), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _find_models(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Target and draft as paths. The default pair's draft goes with the default target only.

    Raises:
        ValueError: a file is not there.
    """
    folder = (args.models or Path()).expanduser()
    target = folder / (args.target or _TARGET)
    draft = folder / args.draft if args.draft else None
    if args.draft is None and args.target in (None, Path(_TARGET)) and (folder / _DRAFT).is_file():
        draft = folder / _DRAFT
    for path in (target, draft):
        if path is not None and not path.is_file():
            raise ValueError(f"{path} is not there: give --models, a folder with GGUF files, and --target, one of them")
    return target.resolve(), draft.resolve() if draft else None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder with the GGUF files")
    parser.add_argument("--target", type=Path, help=f"GGUF file, below --models or a path (default: {_TARGET})")
    parser.add_argument("--draft", type=Path, help=f"draft model, likewise (default: {_DRAFT}, with that target)")
    parser.add_argument("--environments", type=Path, default=DEFAULT_FOLDER, help="folder made by environments.py")
    parser.add_argument("--scratch", type=Path, help="converted models go here (default: models in --environments)")
    parser.add_argument("--engines", type=_words, default=[""], help="beginnings of names, or globs: outpace,*/ngram")
    parser.add_argument("--outpace-quantizations", type=_words, default=["auto"], help="rows of outpace: auto,int8")
    parser.add_argument("--tasks", default=_TASKS, help="task or task=count, by commas (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--once", type=_words, default=[], help="measured in the first round only, as --engines")
    parser.add_argument("--cap", type=float, help="seconds after which an engine gets no further prompt in a round")
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: %(default)s)")
    parser.add_argument("--draft-tokens", type=int, default=5, help="most a step (default: %(default)s)")
    parser.add_argument("--ignore-eos", action="store_true", help="answers go on after the end token, in all engines")
    parser.add_argument("--no-quality", action="store_true", help="leave out KL and agreement")
    parser.add_argument("--save", type=Path, help="folder for compare.json and compare.md")
    parser.add_argument("--show", type=Path, help="print the report of a saved compare.json, and measure nothing")
    return parser


if __name__ == "__main__":
    main()
