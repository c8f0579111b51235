"""A run's copy of its tokenizer, as its checkpoints know it: the hash of each file, and of the ids that it gives."""

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer as Backend

from lmtrain.data.tokenizers import ids_hash, plain_hash
from lmtrain.files import open_regular, read_regular


def file_hashes(folder: Path) -> dict[str, str]:
    """sha256 of each file of a saved tokenizer, by name; nothing where there is no such folder.

    Raises:
        OSError: one can't be read, or is a pipe or the like.
    """
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with open_regular(path) as file:
            found[path.name] = hashlib.sha256(file.read()).hexdigest()
    return found


def gives_ids_of(folder: Path, known: str) -> bool:
    """Whether the tokenizer.json of a folder gives the ids of the tokenizer with this hash, of this version or another.

    Raises:
        OSError, ValueError: it can't be read.
    """
    plain = json.loads(read_regular(folder / "tokenizer.json"))
    if not isinstance(plain, dict):
        raise ValueError("it holds no JSON object")
    as_loaded = json.loads(Backend.from_str(json.dumps(plain)).to_str())
    return known in (ids_hash(plain), ids_hash(as_loaded), plain_hash(plain), plain_hash(as_loaded))
