"""How one request speculates.

Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from outpace.checks import boolean, check_fields, check_integer, integer, optional, parameter, text
from outpace.refused import RefusesByName

__all__ = ["MAX_DRAFT_TOKENS", "SpeculationParams", "check_num_speculative_tokens"]

MAX_DRAFT_TOKENS = 64
"""Upper limit of num_speculative_tokens: a longer draft is never worth verifying in one pass."""

_DRAFT_LENGTHS = f"an integer, 0 (off) to {MAX_DRAFT_TOKENS}"


@dataclass(frozen=True, slots=True)
class SpeculationParams(metaclass=RefusesByName):
    """How one request speculates; the default follows the engine.

    Args:
        enabled: False decodes this request plainly.
        method: one of the engine's drafters by name; None takes its first.
        num_speculative_tokens: most draft tokens a step, 0 to 64; None takes the engine's setting.

    Raises:
        InvalidParameter: at construction, naming the value and the valid range.
    """

    enabled: bool = parameter(True, boolean, meaning="False decodes this request plainly", valid="True or False")
    method: str | None = parameter(
        None,
        optional(text),
        meaning="which of the engine's drafters drafts for this request",
        valid="the name of a drafter that the engine was built with",
        unset="its first",
    )
    num_speculative_tokens: int | None = parameter(
        None,
        optional(integer(0, MAX_DRAFT_TOKENS)),
        meaning="most draft tokens a step",
        valid=_DRAFT_LENGTHS,
        unset="the engine's setting",
    )

    def __post_init__(self) -> None:
        check_fields(self)


def check_num_speculative_tokens(value: int) -> int:
    """The value as an int.

    Raises:
        InvalidParameter: it is none, or out of range.
    """
    return check_integer("num_speculative_tokens", value, low=0, high=MAX_DRAFT_TOKENS, text=_DRAFT_LENGTHS)
