"""The command line of the load test, and what it means."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """A closed-loop load test of `outpace serve`: 1 to 32 clients, with and without drafts, in one run.

    python benchmarks/load.py --model smollm2-135m --save RESULTS
    python benchmarks/load.py --model MODEL --clients 1,8 --rounds 3 -- --max-num-seqs 16 --speculative-model DRAFT
    python benchmarks/load.py --mixed 500
    python benchmarks/load.py --url http://127.0.0.1:8000 --parts load,prefill

The server is started by this script on a free port, with the options behind `--`, and ended with it; --url takes one
that runs already. Parts (--parts):

  load      every client asks for the next prompt as soon as it has its answer; rounds with and without drafts
            alternate. Tokens/s are counted while all clients are busy; gaps lie between chunks of one stream (a chunk
            is a step, with one token or several); the text of a prompt must be the same in all rounds.
  prefill   the longest gap of running streams while a long prompt is computed, beside the longest when it is quiet.
  overhead  one stream from the server beside the same from the library in this process, alternating: what HTTP costs,
            the client's own reading included. The model is loaded twice. Not with --url.

--mixed N is a run of its own: N mixed requests, of which 10% of the clients leave and 10% are bad. The exit code is 1
if a status is not as expected, an answer differs from what it is alone, or requests or cache rows are left behind.

Prompts are computed anew every time: the server's prefix cache is off, unless it is switched on behind `--`. Times
mean something only on a machine that is otherwise quiet; clients take processor time too. --save PATH writes
PATH.json, PATH.md and, where matplotlib is installed (outpace[plots]), PATH.png.
"""
_HERE = Path(__file__).resolve().parent
_PARTS = ("load", "prefill", "overhead")
_OWN_OPTIONS = ("--no-enable-prefix-caching",)
"""A prompt is asked many times here: with the rows of the last time only the first would be measured."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options; `options` are those of the server: the model, the threads, and what stands behind `--`."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    parser = _parser()
    args = parser.parse_args(words[:place])
    options = words[place + 1 :]
    if args.url is not None and (options or args.threads is not None):
        parser.error("--url is a server that runs already: leave out --threads and the options behind `--`")
    if not args.prompts.is_file():
        parser.error(f"--prompts {args.prompts} is not there: give a file like benchmarks/prompts.jsonl")
    threads = [] if args.threads is None else ["--threads", str(args.threads)]
    args.options = [] if args.url is not None else [*_OWN_OPTIONS, "--model", args.model, *threads, *options]
    return args


def _counts(text: str) -> list[int]:
    return [_positive(word) for word in text.split(",")]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not possible: it must be at least 1")
    return value


def _parts(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",")]
    for word in found:
        if word not in _PARTS:
            raise argparse.ArgumentTypeError(f"{word!r} is not possible: parts are {', '.join(_PARTS)}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="load.py [options] [-- options of outpace serve]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="default: %(default)s")
    add(
        "--threads", type=_positive, metavar="N", help="of the server, and of the library (default: as outpace chooses)"
    )
    add("--url", help="a server that runs already, in place of one started here")
    add("--api-key", metavar="KEY", help="for --url")
    add("--parts", type=_parts, default=list(_PARTS), metavar="NAMES", help="default: load,prefill,overhead")
    add("--clients", type=_counts, default=[1, 2, 4, 8, 16, 32], metavar="N,N", help="default: 1,2,4,8,16,32")
    add(
        "--requests",
        type=_positive,
        default=13,
        metavar="N",
        help="least of a round (default: %(default)s); 2 a client",
    )
    add("--rounds", type=_positive, default=2, metavar="N", help="with and without drafts each (default: %(default)s)")
    add("--max-tokens", type=_positive, default=64, metavar="N", help="of an answer (default: %(default)s)")
    add("--streams", type=_positive, default=4, metavar="N", help="beside the long prompt (default: %(default)s)")
    add("--long-prompt", type=_positive, default=2000, metavar="N", help="its tokens (default: %(default)s)")
    add(
        "--mixed",
        type=_positive,
        metavar="N",
        help="send N mixed requests from the most --clients, and measure nothing",
    )
    add("--greedy-only", action="store_true", help="of --mixed: no seeded answers, which rejection sampling changes")
    add("--seed", type=int, default=0, help="of the order of mixed requests (default: %(default)s)")
    add("--prompts", type=Path, default=_HERE / "prompts.jsonl", metavar="FILE", help="default: prompts.jsonl here")
    add("--save", type=Path, metavar="PATH", help="writes PATH.json, PATH.md and PATH.png")
    return parser
