"""Names that outpace does not have: refused by name at construction, neutral values let through from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from outpace.errors import InvalidParameter
from outpace.params import SamplingParams
from outpace.refused import REFUSED, STRUCTURED_REFUSED, Refusal
from outpace.structured import StructuredOutputs

EXPECTED = """
best_of use_beam_search beam_width num_beams length_penalty early_stopping typical_p typical tfs tfs_z top_a mirostat
mirostat_mode mirostat_tau mirostat_eta dry_multiplier dry_base dry_allowed_length dry_sequence_breakers
dry_penalty_last_n xtc_probability xtc_threshold dynatemp_range dynatemp_exponent smoothing_factor smoothing_curve
epsilon_cutoff eta_cutoff repeat_last_n min_keep top_n_sigma no_repeat_ngram_size guidance_scale penalty_alpha
detokenize output_kind flat_logprobs logits_processor guided_json guided_regex guided_choice guided_grammar
guided_decoding max_new_tokens repeat_penalty stop_strings
"""

INSTEAD = {
    "logits_processor": "logits_processors",
    "guided_json": "structured_outputs={'json'",
    "guided_regex": "structured_outputs={'regex'",
    "guided_choice": "structured_outputs={'choice'",
    "guided_grammar": "structured_outputs={'grammar'",
    "guided_decoding": "structured_outputs",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_strings": "stop",
    "best_of": "use n",
}


@pytest.mark.parametrize("name", sorted({*EXPECTED.split(), *REFUSED}))
def test_the_constructor_refuses_them_all_whatever_the_value(name: str) -> None:
    for value in (3, None, *REFUSED[name].neutral):
        with pytest.raises(InvalidParameter) as caught:
            SamplingParams(**{name: value})
        message = str(caught.value)
        assert message.startswith(f"{name}={value!r} is not possible: ")
        assert INSTEAD.get(name, "") in message


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_mapping_from_elsewhere_may_have_them_where_they_change_nothing(name: str) -> None:
    for value in (None, *REFUSED[name].neutral):
        assert SamplingParams.from_mapping({name: value, "n": 2}) == SamplingParams(n=2)
    with pytest.raises(InvalidParameter, match=f"{name}=3 is not possible"):
        SamplingParams.from_mapping({name: 3})


@pytest.mark.parametrize(
    "given",
    [
        {"best_of": 1}, {"use_beam_search": False}, {"typical_p": 1}, {"typical_p": 1.0}, {"mirostat": 0},
        {"dry_multiplier": 0}, {"dry_multiplier": 0.0}, {"xtc_probability": 0}, {"no_repeat_ngram_size": 0},
        {"num_beams": 1},
    ],
)  # fmt: skip
def test_these_change_nothing(given: dict[str, Any]) -> None:
    assert SamplingParams.from_mapping(given) == SamplingParams()


@pytest.mark.parametrize("given", [{"best_of": True}, {"use_beam_search": 0}, {"num_beams": "1"}, {"detokenize": 1}])
def test_a_neutral_value_is_not_another_that_equals_it(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=next(iter(given))):
        SamplingParams.from_mapping(given)


def test_an_unknown_name_is_refused_with_what_is_known_and_the_closest_first() -> None:
    known = ", ".join(item.name for item in fields(SamplingParams))
    for make in (lambda given: SamplingParams(**given), SamplingParams.from_mapping):
        with pytest.raises(InvalidParameter) as caught:
            make({"temprature": 1})
        assert str(caught.value) == (f"SamplingParams has no 'temprature'; did you mean temperature? Known: {known}")
        with pytest.raises(InvalidParameter, match="has no 'frobnicate'; known: n, temperature"):
            make({"frobnicate": 1})
    with pytest.raises(InvalidParameter, match="has no 5; known"):
        SamplingParams.from_mapping({5: 1})  # type: ignore[dict-item]
    with pytest.raises(InvalidParameter, match="has no '_refused'"):
        SamplingParams.from_mapping({"_refused": 1})
    with pytest.raises(InvalidParameter, match="has no 'frobnicate'"):
        SamplingParams.from_mapping({"frobnicate": None})  # a typo, whatever the value


def test_null_from_elsewhere_means_left_out_for_every_name() -> None:
    assert SamplingParams.from_mapping({item.name: None for item in fields(SamplingParams)}) == SamplingParams()


@pytest.mark.parametrize("value", [None, 5, "n=1", [("n", 1)]])
def test_what_is_no_mapping_is_refused(value: Any) -> None:
    with pytest.raises(InvalidParameter, match="a mapping of names to values"):
        SamplingParams.from_mapping(value)


def test_a_mapping_is_checked_like_the_constructor() -> None:
    with pytest.raises(InvalidParameter, match="n=0"):
        SamplingParams.from_mapping({"n": 0})
    assert SamplingParams.from_mapping({"logit_bias": {"5": -1}}).logit_bias == {5: -1.0}


@pytest.mark.parametrize(("names", "owner"), [(REFUSED, SamplingParams), (STRUCTURED_REFUSED, StructuredOutputs)])
def test_nothing_is_refused_that_exists_and_every_reason_fits_a_line(names: Mapping[str, Refusal], owner: Any) -> None:
    assert not {item.name for item in fields(owner)} & set(names)
    for refusal in names.values():
        assert 5 <= len(refusal.reason) < 120


@pytest.mark.parametrize("name", sorted(STRUCTURED_REFUSED))
def test_structured_outputs_refuse_by_name(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"{name}=5 is not possible"):
        StructuredOutputs(regex="a", **{name: 5})
    with pytest.raises(InvalidParameter, match=f"{name}=5 is not possible"):
        SamplingParams(structured_outputs={"regex": "a", name: 5})  # type: ignore[arg-type]
    for value in (None, *STRUCTURED_REFUSED[name].neutral):
        assert StructuredOutputs.parse({"regex": "a", name: value}) == StructuredOutputs(regex="a")
