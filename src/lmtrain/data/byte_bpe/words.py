"""Where the words of a text begin for byte-level BPEs: the patterns of GPT-2, SmolLM2, Qwen2 and Llama 3 over arrays.

Where a match begins depends on the kinds of the characters beside it and on the run of white space it is in, so all
begins are found together.
"""

import unicodedata
from collections.abc import Callable

import numpy as np

# Kinds of characters. END stands between texts: NUL, which no text that is encoded so contains.
END, LETTER, NUMBER, OTHER, SPACE, BLANK, NEWLINE = range(7)  # BLANK: white space but " ", "\r" and "\n"

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

Begins = Callable[[np.ndarray, np.ndarray], np.ndarray]


def kind_of(character: str) -> int:
    """LETTER is Unicode's L, NUMBER its N, white space its White_Space."""
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
    """Whether a word of GPT-2's pattern begins at each character, bool [n].

    characters: code points, uint8 or uint32 [n]; kinds: of each, uint8 [n]. The text ends with four ENDs at least.
    """
    return _gpt2(characters, kinds, _kind_begins(kinds), _in_word(kinds))


def gpt2_digits(characters: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """The same after `Digits`: each digit alone, white space before one whole."""
    digit = kinds == NUMBER
    return _gpt2(characters, kinds, _kind_begins(kinds) | digit, _in_word(kinds) & ~digit)


def _gpt2(characters: np.ndarray, kinds: np.ndarray, begins: np.ndarray, takes_space: np.ndarray) -> np.ndarray:
    """takes_space: characters whose word takes the space before it, bool [n]."""
    begins[1:] &= ~(takes_space[1:] & (kinds[:-1] == SPACE))
    begins[:-1] |= (kinds[:-1] >= SPACE) & takes_space[1:]  # the last of the white space before it
    return _with_contractions(begins, characters, any_case=False)


def qwen2(characters: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """The same for Qwen2's pattern."""
    white, newline = kinds >= SPACE, kinds == NEWLINE
    begins = _kind_begins(kinds) | (kinds == NUMBER)
    # White space: its last character goes to the word after it or stands alone, if it is not a newline.
    begins[:-1] |= white[:-1] & ~newline[:-1] & _in_word(kinds)[1:]
    begins[1:] &= ~((kinds[1:] == OTHER) & (kinds[:-1] == SPACE))
    _begin_letters(begins, kinds)
    if newline.any():
        _begin_after_newlines(begins, kinds, white, newline)
    return _with_contractions(begins, characters, any_case=True)


def llama3(characters: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """The same for Llama 3's: as Qwen2's, with numbers of up to three digits."""
    begins = qwen2(characters, kinds)
    digits = np.flatnonzero(kinds == NUMBER)
    first = np.diff(digits, prepend=-2) != 1  # of a run of digits
    run = np.maximum.accumulate(np.where(first, digits, 0))
    begins[digits] = (digits - run) % 3 == 0
    return begins


PATTERNS: dict[str, Begins] = {QWEN2: qwen2, LLAMA3: llama3}


def _kind_begins(kinds: np.ndarray) -> np.ndarray:
    """Where another kind begins, all white space being one, and every END."""
    kinds = np.minimum(kinds, SPACE)
    begins = np.ones(len(kinds), dtype=bool)
    np.not_equal(kinds[1:], kinds[:-1], out=begins[1:])
    begins |= kinds == END
    return begins


def _in_word(kinds: np.ndarray) -> np.ndarray:
    return (kinds != END) & (kinds < SPACE)


def _begin_letters(begins: np.ndarray, kinds: np.ndarray) -> None:
    """Letters take the character before them: white space, or a single sign that no space stands before."""
    before = kinds[:-1]
    prefix = (before == SPACE) | (before == BLANK)
    alone = np.ones(len(before), dtype=bool)  # not after another sign or a space
    alone[1:] = (kinds[:-2] != OTHER) & (kinds[:-2] != SPACE)
    prefix |= (before == OTHER) & alone
    begins[1:] &= ~((kinds[1:] == LETTER) & prefix)


def _begin_after_newlines(begins: np.ndarray, kinds: np.ndarray, white: np.ndarray, newline: np.ndarray) -> None:
    """Signs take the newlines after them; white space is one word up to its last newline."""
    lines = np.flatnonzero(newline)
    after_signs = lines[kinds[lines - 1] == OTHER]  # before the first character there is the last, an END
    ends = np.flatnonzero(newline[:-1] & ~newline[1:]) + 1  # where newlines stop
    begins[after_signs] = False
    begins[ends[np.searchsorted(ends, after_signs, side="right")]] = True
    runs = np.flatnonzero(white[:-1] & ~white[1:]) + 1  # where white space stops
    run = np.searchsorted(runs, lines, side="right")
    last = np.append(run[1:] != run[:-1], True)
    begins[lines[last] + 1] = True


def _with_contractions(begins: np.ndarray, characters: np.ndarray, any_case: bool) -> np.ndarray:
    """'s, 't, 'm, 'd, 're, 've and 'll are words where one begins at the apostrophe."""
    at = np.flatnonzero((characters == ord("'")) & begins)
    first, second = characters[at + 1], characters[at + 2]
    if any_case:
        first, second = first | 32, second | 32  # ASCII letters to lower case
    one = np.isin(first, _codes("stmd"))
    two = (first == ord("l")) & (second == ord("l")) | np.isin(first, _codes("rv")) & (second == ord("e"))
    begins[at[one | two] + 1] = False
    begins[at[one] + 2] = True
    begins[at[two] + 3] = True
    return begins


def _codes(characters: str) -> np.ndarray:
    return np.array([ord(character) for character in characters], np.uint8)
