"""A folder with a tiny random model, for servers that are really started."""

from __future__ import annotations

import json
from pathlib import Path

from tests.models.tiny_models import reference_model
from tests.models.tiny_tokenizers import byte_level

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def save_tiny_model(folder: Path) -> Path:
    """Saves a llama of four layers whose tokens are bytes; it never ends a text by itself. Returns the folder."""
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    reference_model("llama", vocab_size=size, max_position_embeddings=8192).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    for name in ("bos_token_id", "eos_token_id"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
