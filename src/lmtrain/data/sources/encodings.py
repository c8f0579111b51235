"""Text that is not UTF-8: which encoding it has, where that can be told.

UTF-16 begins with a byte order mark. Western European text (cp1252, of which Latin-1 is a part) is told by its letters;
of others charset-normalizer is asked, which is there with `datasets`. What can't be told is refused by whoever reads.
"""

import codecs
import re
from collections.abc import Callable
from typing import IO

SAMPLE = 1 << 18  # bytes, from the first on that is not ASCII
_LETTERS = frozenset("àáâãäåæçèéêëìíîïñòóôõöøùúûüýßœšžÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝŒŠŽ")
_SIGNS = frozenset("’‘“”„«»–—…•·€£§°©®™¿¡½¼¾²³×\xa0")  # that stand between words, and ’ in them
_CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0e-\x1f\x7f]")
_MARKS = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_CONFIDENT = (15.0, 10.0)  # of charset-normalizer: at most so much disorder, at least so much of a language, in percent


def marked(start: bytes) -> str | None:
    """The encoding that a byte order mark at a file's start names; None for UTF-8 and where there is none."""
    return next((name for mark, name in _MARKS if start.startswith(mark)), None)


def told(sample: bytes) -> str | None:
    """The encoding of bytes that are not UTF-8, or None."""
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
    """Decodes the bytes of a file one part after the other: as UTF-8, or as what they turn out to be.

    The first bytes that are not UTF-8 decide; if others before them were UTF-8 and no ASCII, the file is a mixture, and
    refused.
    """

    def __init__(self, reopen: Callable[[], IO[bytes]]) -> None:
        """`reopen` opens the file once more, from its beginning."""
        self.reopen = reopen
        self.encoding = "utf-8"
        self.was_ascii = True
        self._decoder: codecs.IncrementalDecoder = codecs.getincrementaldecoder("utf-8")()

    def decode(self, part: bytes, final: bool = False) -> str:
        """The text of the next part; UnicodeDecodeError where its encoding can't be told."""
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
    """The encoding of a file, told by what follows its first byte that is not ASCII."""
    while part := file.read(SAMPLE):
        if not part.isascii():
            at = next(i for i, byte in enumerate(part) if byte > 127)
            sample = part[max(0, at - 100) :] + file.read(SAMPLE)
            return told(sample[: sample.rfind(b"\n") + 1] or sample)  # whole characters
    return None
