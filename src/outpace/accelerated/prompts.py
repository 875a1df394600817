"""Prompts of a call and their padding."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from outpace.errors import InvalidParameter, InvalidPrompt

__all__ = ["read_padding", "read_prompts"]


def read_prompts(config: GenerationConfig, inputs: Any, input_ids: Any) -> torch.Tensor:
    """[B, L] the prompts on the CPU; BOS alone if there are none and the model has one.

    Raises:
        InvalidParameter: prompts were given twice.
        InvalidPrompt: no prompts, or none that are token ids.
    """
    if inputs is not None and input_ids is not None:
        raise InvalidParameter("inputs and input_ids are the same argument: give one of them")
    prompts = input_ids if inputs is None else inputs
    if prompts is None:
        if config.bos_token_id is None:
            raise InvalidPrompt("there are no input_ids, and the model has no bos_token_id to begin with: give some")
        prompts = torch.tensor([[config.bos_token_id]], dtype=torch.int64, device="cpu")
    if not isinstance(prompts, torch.Tensor) or prompts.ndim != 2 or prompts.dtype not in (torch.int64, torch.int32):
        kind = f"shape {list(prompts.shape)}, {prompts.dtype}" if isinstance(prompts, torch.Tensor) else type(prompts)
        raise InvalidPrompt(f"input_ids of {kind} are not possible: give a tensor [batch, length] of integers")
    if 0 in prompts.shape:
        raise InvalidPrompt(f"input_ids of shape {list(prompts.shape)} are empty: every prompt needs a token")
    return prompts.to("cpu", torch.int64)


def read_padding(
    model: PreTrainedModel, config: GenerationConfig, input_ids: torch.Tensor, mask: Any
) -> tuple[torch.Tensor | None, list[int]]:
    """The attention mask, given or inferred as transformers does, and how much padding each prompt begins with.

    Makes tensors of the config's special tokens on the way, as transformers does.

    Returns:
        [B, L] int64 mask, or None if there is no padding at all; [B] padded tokens.

    Raises:
        InvalidParameter: a mask of another shape.
        InvalidPrompt: padding anywhere but on the left, or nothing else.
    """
    model._prepare_special_tokens(
        config, kwargs_has_attention_mask=mask is not None, device=torch.device("cpu"), batch_size=input_ids.shape[0]
    )
    if mask is None:
        mask = model._prepare_attention_mask_for_generation(input_ids, config, {})
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        found = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InvalidParameter(
            f"attention_mask of {found} is not possible: it must be a tensor of the prompts' shape, "
            f"{list(input_ids.shape)}"
        )
    mask = mask.to("cpu", torch.int64)
    lengths = mask.sum(dim=1)
    expected = torch.arange(mask.shape[1], dtype=torch.int64, device="cpu") >= (mask.shape[1] - lengths)[:, None]
    wrong = (~((mask == expected).all(dim=1)) | (lengths == 0)).nonzero()
    if wrong.numel():
        raise InvalidPrompt(
            f"the attention_mask of prompt {int(wrong[0])} is not possible: zeros for padding on the left, then at "
            "least one 1 and nothing else (tokenizers pad there with padding_side='left')"
        )
    padding: list[int] = (mask.shape[1] - lengths).tolist()
    return (mask if any(padding) else None), padding
