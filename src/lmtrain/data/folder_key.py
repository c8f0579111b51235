"""The key of a folder of prepared data, computed from every setting that shapes its tokens."""

import hashlib
import json
from typing import Any

from lmtrain.config.constraints import PREPARED
from lmtrain.config.keys import values
from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.secrets import hashed, shown_in


def settings(section: DataConfig | TokenizerConfig) -> dict[str, Any]:
    """The keys of the config that shape tokens, but for those that name files: what these hold stands in the key too.

    What is not set is left out, so that a key that comes to the schema makes no new folders by being there.
    """
    return {k: v for k, v in values(section, PREPARED, by_content=False).items() if v not in (None, [], {})}


def folder_key(data: DataConfig, tokenizer: TokenizerConfig, **contents: Any) -> dict[str, Any]:
    """The key as it will be read back from JSON.

    Args:
        contents: what the files, datasets and templates that the config names turned out to hold; a version.
    """
    # A secret among them, of a source of the user's own, is not written beside the tokens.
    key = shown_in({"data": settings(data), "tokenizer": settings(tokenizer), **contents}, hashed)
    return dict(json.loads(json.dumps(key, sort_keys=True)))


def key_hash(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
