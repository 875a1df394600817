"""Writes docs/parameters.md from the parameters themselves:

python -m outpace.parameters > docs/parameters.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from outpace.config import VERIFICATIONS
from outpace.params import SamplingParams, SpeculationParams
from outpace.refused import REFUSED, STRUCTURED_REFUSED, Refusal
from outpace.structured import StructuredOutputs

__all__ = ["page"]

_INTRODUCTION = """\
<!-- Written by `python -m outpace.parameters`; change the fields of src/outpace/params.py, not this file. -->

# Request parameters

`SamplingParams` has vLLM's names and meanings. Every parameter is exact under speculation: with the same seed the token
ids are those of plain decoding (under `standard` and `block`, see below, their distribution is), because each row of a
draft is processed with its own history: the committed text and the draft tokens before it. What is not possible is
refused when the parameters are made, naming the value and the range; what needs the vocabulary (ids beyond it,
grammars) is refused when the request is. Nothing is accepted and ignored.

On the command line a parameter is the option of the same name with hyphens (`--top-p`); lists are given one item an
option (`--stop A --stop B`), `logit_bias` as `--logit-bias ID=BIAS`, `structured_outputs` as `--json-schema FILE`,
`--regex`, `--choice`, `--grammar FILE` or `--json-object`. Parameters with `True` as their default become
`--no-skip-special-tokens` and so on. Functions (`logits_processors`) are for Python only.

`SamplingParams.from_mapping(mapping)` reads parameters that come from elsewhere: null means "left out", and
parameters of other engines pass where their value changes nothing.
"""

_ORDER = """\
## Order of processing

The logits of every row, drafted or not, pass in this order:

1. ids that the tokenizer does not have, tokens that are not in `allowed_token_ids`, and those that the grammar of
   `structured_outputs` refuses are ruled out;
2. `bad_words`;
3. `min_tokens`: EOS and stop tokens are ruled out until there are enough tokens;
4. `logit_bias`;
5. `logits_processors`, in their order;
6. penalties: `repetition_penalty`, `frequency_penalty`, `presence_penalty`;
7. `temperature`; at 0 the most likely token is taken (the lowest id of equal ones), and nothing below applies;
8. `min_p`, then `top_k`, then `top_p`; of equally likely tokens the lowest ids are kept;
9. the token is drawn with noise that is a function of seed, answer, position and token id.

A row of which these leave no token ends the request with an error that says so.
"""

_VERIFICATION = {
    "coupled": "The target's token is a function of its logits and the seed's noise, drafters draw with the same "
    "noise, and a draft token is kept if it is that token. The text of a seed is the same with every drafter and with "
    "none. The default.",
    "standard": "Rejection sampling (arXiv 2211.17192, 2302.01318): a draft token x is kept with probability "
    "min(1, p(x)/q(x)), else the token is drawn from what p has more than q. Tokens have the target's distribution, "
    "but the text of a seed depends on what was drafted.",
    "block": "Block verification (arXiv 2403.10444): the tokens of a draft are judged together, which keeps at least "
    "as many of them as `standard` does. The same distribution, the same remark on seeds.",
}


def page() -> str:
    """The text of docs/parameters.md."""
    parts = [
        _INTRODUCTION,
        _parameter_table(SamplingParams, "## `SamplingParams`", "under speculation"),
        "### Fields of `structured_outputs`\n\n`StructuredOutputs(...)`, or a mapping with exactly one of these:\n\n"
        + _rows(("name", "meaning", "possible"), [_row(item)[:3] for item in fields(StructuredOutputs)]),
        _ORDER,
        _parameter_table(SpeculationParams, "## `SpeculationParams`", ""),
        "These change the time an answer takes, never its token ids (under `coupled`; see below).\n",
        _verification(),
        _refused("## Refused", "These parameters of other engines are refused by name.", REFUSED),
        _refused("### Of `structured_outputs`", "Likewise in its mapping.", STRUCTURED_REFUSED),
    ]
    return "\n".join(parts)


def _parameter_table(owner: Any, heading: str, speculation: str) -> str:
    columns = ["name", "meaning", "possible", "default", *([speculation] if speculation else [])]
    return f"{heading}\n\n" + _rows(columns, [_row(item)[: len(columns)] for item in fields(owner)])


def _row(item: Field[Any]) -> list[str]:
    told = item.metadata
    default = f"`{item.default!r}`" + (f": {told['unset']}" if told["unset"] else "")
    return [f"`{item.name}`", told["meaning"], told["valid"], default, told["speculation"]]


def _verification() -> str:
    rows = [[f"`{name}`", _VERIFICATION[name]] for name in VERIFICATIONS]
    return (
        "## `rejection_sample_method`\n\nA setting of the drafter (`speculative_config`), not of a request: how "
        "sampled drafts are verified. At temperature 0 all are the same.\n\n" + _rows(("value", "meaning"), rows)
    )


def _refused(heading: str, sentence: str, refused: Mapping[str, Refusal]) -> str:
    rows = [
        [f"`{name}`", item.reason, ", ".join(f"`{value!r}`" for value in item.neutral)]
        for name, item in sorted(refused.items())
    ]
    return f"{heading}\n\n{sentence}\n\n" + _rows(("name", "instead", "passes in a mapping"), rows)


def _rows(columns: Any, rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
