"""The shape of an EAGLE-3 head, and the tensors that follow from it. Never imports torch.

Li et al. "EAGLE-3" 2503.01840. A head is one decoder layer that reads two things side by side: the embedding of the
newest token, and a feature of the position before it. Of committed text the feature is made from three states of
the target; while drafting it is what the head itself put out.

    aux states of position i     a = cat(states entering layers low, middle, high)     [N * Ht]
    feature                      h = fc(a)                                             [H]
    layer                        attention and MLP on cat(norm(embed(t_i+1)), norm(h)), added to h
    guess at t_i+2               lm_head(norm(output)); the output itself is the next feature
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from outpace.errors import CheckpointError
from outpace.models.config import DecoderConfig, expected_tensors

__all__ = ["LAYER_PREFIX", "Eagle3Config", "default_aux_layers", "eagle3_tensors"]

LAYER_PREFIX = "midlayer."
"""What the names of the layer's tensors begin with."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head.

    Args:
        layer: shape of its one layer; `hidden_size` is H, `vocab_size` that of the target (padded ids included).
        target_hidden_size: width Ht of the target's states.
        draft_vocab_size: tokens it can guess.
        aux_layers: layers of the target whose entering states it reads, ascending; None for `default_aux_layers`.
        num_aux: how many these are.
        norm_before_residual: the layer adds to the normalised feature; otherwise to the feature as it is.
        norm_before_fc: one norm over all aux states together before `fc`.
        fc_norm: a norm of its own for each aux state before `fc`.
        norm_output: the next feature is the output behind the last norm; otherwise before it.
        fc_bias: `fc` has a bias.
        shares_target_head: its output head is made of the target's rows, and not stored.
        target_layers: how many layers its target has; None if nobody says.
    """

    layer: DecoderConfig
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...] | None = None
    num_aux: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    shares_target_head: bool = False
    target_layers: int | None = None

    @property
    def hidden_size(self) -> int:
        """Width H of its own states."""
        return self.layer.hidden_size

    @property
    def vocab_size(self) -> int:
        """Of the target, padded ids included."""
        return self.layer.vocab_size

    @property
    def is_pruned(self) -> bool:
        """Whether it guesses some of the target's tokens only."""
        return self.draft_vocab_size != self.vocab_size

    def aux_layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers it reads of a target with so many.

        Raises:
            CheckpointError: the target has no such layers.
        """
        found = default_aux_layers(num_layers) if self.aux_layers is None else self.aux_layers
        ascending = all(a < b for a, b in pairwise(found))
        if not ascending or len(found) != self.num_aux or not 0 <= found[0] <= found[-1] < num_layers:
            raise CheckpointError(
                f"the head reads states entering layers {list(found)}; of a target with {num_layers} layers it must be "
                f"{self.num_aux} different ones from 0 to {num_layers - 1}, ascending"
            )
        return found


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high: the layers whose entering states a head reads if nothing else is said."""
    return 2, num_layers // 2, num_layers - 3


def eagle3_tensors(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of weights a head must have; embeddings of its own and index tensors aside.

    `embed_tokens.weight` [V, H] may be there as well, else the target's is used. `d2t` and `t2d` say which tokens the
    head guesses (`outpace.heads.draft_vocabulary`).
    """
    hidden, fused = config.hidden_size, config.num_aux * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, fused), "norm.weight": (hidden,)}
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (fused,)
    if config.fc_norm:
        shapes.update({f"fc_norm.{each}.weight": (config.target_hidden_size,) for each in range(config.num_aux)})
    prefix = "model.layers.0."
    for name, shape in expected_tensors(replace(config.layer, num_layers=1)).items():
        if name.startswith(prefix):
            entering = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            shapes[LAYER_PREFIX + name.removeprefix(prefix)] = (shape[0], 2 * hidden) if entering else shape
    shapes[f"{LAYER_PREFIX}hidden_norm.weight"] = (hidden,)
    if not config.shares_target_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    return shapes
