"""What W&B's own files in a run's folder hold: after a kill that may be less than metrics.jsonl has.

A *.wandb file is a log in LevelDB's format (its log_format.md: blocks of 32 KiB; a record lies in one part, or in a
first, middle and last one) behind 7 bytes of W&B's own, whose records are protocol buffers.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

_FILE_HEADER, _PART_HEADER, _BLOCK = 7, 7, 2**15
_WHOLE, _LAST = 1, 4
STEP = "trainer/global_step"  # as Lightning's WandbLogger names it


def steps_by_name(folder: Path) -> dict[str, set[int]] | None:
    """The steps that were logged of each name, in all files of the run; None where there are none to read."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob("*run-*/*.wandb"))
    found: dict[str, set[int]] = {}
    for file in files:
        for data in log_records(file.read_bytes()):
            record = Record()
            try:
                record.ParseFromString(data)
            except DecodeError:  # cut short by a kill
                break
            items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            if STEP in items:
                step = int(json.loads(items[STEP]))
                for name in items:
                    found.setdefault(name, set()).add(step)
    return found if files else None


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of such a log, up to where it is cut off."""
    at, parts = _FILE_HEADER, b""
    while at + _PART_HEADER <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _PART_HEADER:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + _PART_HEADER])  # behind a checksum of 4 bytes
        part = content[at + _PART_HEADER : at + _PART_HEADER + length]
        if kind == 0 or len(part) < length:
            return
        parts += part
        at += _PART_HEADER + length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
