"""Heads as files. EAGLE-3: read, checked, written, and taken to other engines; MTP layers: found in checkpoints."""

from outpace.heads.config_json import Verifier
from outpace.heads.draft_vocabulary import marks_of, offsets_of, token_ids_of
from outpace.heads.mtp import MtpFiles, has_own_mtp, open_mtp, read_mtp
from outpace.heads.reading import Eagle3Files, open_eagle3, open_head
from outpace.heads.writing import save_eagle3
from outpace.models.eagle3_config import Eagle3Config, default_aux_layers, eagle3_tensors

__all__ = [
    "Eagle3Config",
    "Eagle3Files",
    "MtpFiles",
    "Verifier",
    "default_aux_layers",
    "eagle3_tensors",
    "has_own_mtp",
    "marks_of",
    "offsets_of",
    "open_eagle3",
    "open_head",
    "open_mtp",
    "read_mtp",
    "save_eagle3",
    "token_ids_of",
]
