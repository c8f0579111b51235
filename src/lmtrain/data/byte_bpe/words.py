"""Finds where words begin for byte-level BPEs: the patterns of GPT-2, SmolLM2, Qwen2 and Llama 3, vectorized.

Whether a match begins at a character depends only on the kinds of the adjacent characters and on the run of white space
it is in, so the begins of all words are found at once.
"""

import unicodedata
from collections.abc import Callable

import numpy as np

# Kinds of characters. END (NUL) separates texts; a text that contains NUL is not encoded here.
END, LETTER, NUMBER, OTHER, SPACE, BLANK, NEWLINE = range(7)  # BLANK: white space except " ", "\r" and "\n"

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

Begins = Callable[[np.ndarray, np.ndarray], np.ndarray]


def kind_of(character: str) -> int:
    """Returns a character's kind: LETTER for Unicode category L, NUMBER for N, white space for White_Space."""
    if character == "\0":
        return END
    if character == " ":
        return SPACE
    if character in "\r\n":
        return NEWLINE
    if character.isspace() and not "\x1c" <= character <= "\x1f":
        return BLANK
    return {"L": LETTER, "N": NUMBER}.get(unicodedata.category(character)[0], OTHER)


def gpt2(characters: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Returns whether a word of GPT-2's pattern begins at each character, bool [n].

    characters: code points, uint8 or uint32 [n]; kinds: their kinds, uint8 [n]. The text ends with at least four ENDs.
    """
    return _gpt2(characters, kinds, _kind_begins(kinds), _in_word(kinds))


def gpt2_digits(characters: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Works like `gpt2` after `Digits`: each digit is a word, and white space before a digit is one whole word."""
    digit = kinds == NUMBER
    return _gpt2(characters, kinds, _kind_begins(kinds) | digit, _in_word(kinds) & ~digit)


def _gpt2(characters: np.ndarray, kinds: np.ndarray, begins: np.ndarray, takes_space: np.ndarray) -> np.ndarray:
    """Completes `begins` for GPT-2's pattern. takes_space: characters whose word includes a space before it."""
    begins[1:] &= ~(takes_space[1:] & (kinds[:-1] == SPACE))
    begins[:-1] |= (kinds[:-1] >= SPACE) & takes_space[1:]  # the last white-space character before a word
    return _with_contractions(begins, characters, any_case=False)


def qwen2(characters: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Works like `gpt2` for Qwen2's pattern."""
    white, newline = kinds >= SPACE, kinds == NEWLINE
    begins = _kind_begins(kinds) | (kinds == NUMBER)
    # The last white-space character belongs to the next word or is a word by itself, if it is not a newline.
    begins[:-1] |= white[:-1] & ~newline[:-1] & _in_word(kinds)[1:]
    begins[1:] &= ~((kinds[1:] == OTHER) & (kinds[:-1] == SPACE))
    _begin_letters(begins, kinds)
    if newline.any():
        _begin_after_newlines(begins, kinds, white, newline)
    return _with_contractions(begins, characters, any_case=True)


def llama3(characters: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Works like `gpt2` for Llama 3's pattern, which is Qwen2's with numbers of up to three digits."""
    begins = qwen2(characters, kinds)
    digits = np.flatnonzero(kinds == NUMBER)
    first = np.diff(digits, prepend=-2) != 1  # the first digit of a run
    run = np.maximum.accumulate(np.where(first, digits, 0))
    begins[digits] = (digits - run) % 3 == 0
    return begins


PATTERNS: dict[str, Begins] = {QWEN2: qwen2, LLAMA3: llama3}


def _kind_begins(kinds: np.ndarray) -> np.ndarray:
    """Returns where the kind changes, counting all white space as one kind, and every END; bool [n]."""
    kinds = np.minimum(kinds, SPACE)
    begins = np.ones(len(kinds), dtype=bool)
    np.not_equal(kinds[1:], kinds[:-1], out=begins[1:])
    begins |= kinds == END
    return begins


def _in_word(kinds: np.ndarray) -> np.ndarray:
    return (kinds != END) & (kinds < SPACE)


def _begin_letters(begins: np.ndarray, kinds: np.ndarray) -> None:
    """Adds to words of letters the character before them: SPACE, BLANK or a single symbol without a space before it."""
    before = kinds[:-1]
    prefix = (before == SPACE) | (before == BLANK)
    alone = np.ones(len(before), dtype=bool)  # not after another symbol or a space
    alone[1:] = (kinds[:-2] != OTHER) & (kinds[:-2] != SPACE)
    prefix |= (before == OTHER) & alone
    begins[1:] &= ~((kinds[1:] == LETTER) & prefix)


def _begin_after_newlines(begins: np.ndarray, kinds: np.ndarray, white: np.ndarray, newline: np.ndarray) -> None:
    """Adds newlines to the symbols before them, and makes white space one word up to its last newline."""
    lines = np.flatnonzero(newline)
    after_signs = lines[kinds[lines - 1] == OTHER]  # index -1 is the last character, an END
    ends = np.flatnonzero(newline[:-1] & ~newline[1:]) + 1  # one past each run of newlines
    begins[after_signs] = False
    begins[ends[np.searchsorted(ends, after_signs, side="right")]] = True
    runs = np.flatnonzero(white[:-1] & ~white[1:]) + 1  # one past each run of white space
    run = np.searchsorted(runs, lines, side="right")
    last = np.append(run[1:] != run[:-1], True)
    begins[lines[last] + 1] = True


def _with_contractions(begins: np.ndarray, characters: np.ndarray, any_case: bool) -> np.ndarray:
    """Makes 's, 't, 'm, 'd, 're, 've and 'll words if a word begins at the apostrophe; changes `begins` in place."""
    at = np.flatnonzero((characters == ord("'")) & begins)
    first, second = characters[at + 1], characters[at + 2]
    if any_case:
        first, second = first | 32, second | 32  # ASCII letters to lower case
    one = np.isin(first, list(b"stmd"))
    two = (first == ord("l")) & (second == ord("l")) | np.isin(first, list(b"rv")) & (second == ord("e"))
    begins[at[one | two] + 1] = False
    begins[at[one] + 2] = True
    begins[at[two] + 3] = True
    return begins
