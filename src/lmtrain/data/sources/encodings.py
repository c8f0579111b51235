"""Detection of the encoding of text that is not UTF-8.

UTF-16 and UTF-32 begin with a byte order mark. Western European text (cp1252, of which Latin-1 is a part) is recognized
by its letters; for others charset-normalizer is used, which `datasets` brings. What can't be recognized is refused by
callers.
"""

import codecs
import re
from collections.abc import Callable
from typing import IO

SAMPLE = 1 << 18  # bytes read from the first non-ASCII byte on
_LETTERS = frozenset("àáâãäåæçèéêëìíîïñòóôõöøùúûüýßœšžÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝŒŠŽ")
_SIGNS = frozenset("’‘“”„«»–—…•·€£§°©®™¿¡½¼¾²³×\xa0")  # allowed between words, some also inside them
_CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0e-\x1f\x7f]")
# The longer marks first: that of UTF-32 begins with that of UTF-16.
MARKS = {"utf-32-le": codecs.BOM_UTF32_LE, "utf-32-be": codecs.BOM_UTF32_BE,
         "utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}  # fmt: skip
_CONFIDENT = (15.0, 10.0)  # charset-normalizer's maximum chaos and minimum language coherence, in percent


def marked(start: bytes) -> str | None:
    """Returns the encoding that a byte order mark at a file's start names; None for UTF-8 or without a mark."""
    return next((name for name, mark in MARKS.items() if start.startswith(mark)), None)


def detect(sample: bytes) -> str | None:
    """Returns the detected encoding of bytes that are not UTF-8, or None."""
    if _CONTROLS.search(sample):
        return None
    if _is_western(sample):
        return "cp1252"
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return None
    best = from_bytes(sample).best()
    if best is None or best.percent_chaos > _CONFIDENT[0] or best.percent_coherence < _CONFIDENT[1]:
        return None
    return str(best.encoding)


def _is_western(sample: bytes) -> bool:
    try:
        text = sample.decode("cp1252")
    except UnicodeDecodeError:
        return False
    for match in re.finditer(r"[^\x00-\x7f]", text):
        sign = match[0]
        before, after = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
        inside = before.isalpha() and after.isalpha()
        if sign not in _LETTERS and (sign not in _SIGNS or (inside and sign not in "’·–—")):
            return False
    return True


class Decoder:
    """Decodes the bytes of a file part by part: as UTF-8, or as the encoding that is detected.

    The first bytes that are not UTF-8 decide. If there was non-ASCII UTF-8 before them, the file mixes encodings and is
    refused.
    """

    def __init__(self, reopen: Callable[[], IO[bytes]], encoding: str | None) -> None:
        """`reopen` opens the file again, at its beginning; `encoding` is that of its mark, which it is read without."""
        self.reopen = reopen
        self.encoding = encoding or "utf-8"
        self.was_ascii = True
        self._decoder: codecs.IncrementalDecoder = codecs.getincrementaldecoder(self.encoding)()

    def decode(self, part: bytes, final: bool = False) -> str:
        """Returns the text of the next part; raises UnicodeDecodeError if its encoding can't be detected."""
        if self.encoding != "utf-8":
            return self._decoder.decode(part, final)
        pending = self._decoder.getstate()[0]
        try:
            text = self._decoder.decode(part, final)
        except UnicodeDecodeError as error:
            whole = pending + part
            found = _of_file(self.reopen()) if self.was_ascii and whole[: error.start].isascii() else None
            if found is None:
                raise
            self.encoding = found
            self._decoder = codecs.getincrementaldecoder(found)()
            return self._decoder.decode(whole, final)
        self.was_ascii = self.was_ascii and text.isascii()
        return text


def _of_file(file: IO[bytes]) -> str | None:
    """Detects the encoding of a file from the bytes around and after its first non-ASCII byte."""
    while part := file.read(SAMPLE):
        if not part.isascii():
            at = next(i for i, byte in enumerate(part) if byte > 127)
            sample = part[max(0, at - 100) :] + file.read(SAMPLE)
            return detect(sample[: sample.rfind(b"\n") + 1] or sample)  # up to a line end: no character is cut
    return None
