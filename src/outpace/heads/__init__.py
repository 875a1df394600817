"""EAGLE-3 heads as files: read, checked, written, and taken to other engines."""

from outpace.heads.config_json import Verifier
from outpace.heads.draft_vocabulary import marks_of, offsets_of, token_ids_of
from outpace.heads.reading import Eagle3Files, open_eagle3, open_head
from outpace.heads.writing import save_eagle3
from outpace.models.eagle3_config import Eagle3Config, default_aux_layers, eagle3_tensors

__all__ = [
    "Eagle3Config",
    "Eagle3Files",
    "Verifier",
    "default_aux_layers",
    "eagle3_tensors",
    "marks_of",
    "offsets_of",
    "open_eagle3",
    "open_head",
    "save_eagle3",
    "token_ids_of",
]
