"""Keeps the memory that each step of training on a CPU takes and frees, in large pages.

glibc returns the end of its heap to the system whenever enough of it is free, as after a backward pass, and the next
step pays for a page fault per 4 KiB that it takes again. In pages of 2 MiB, where Linux offers them on request (as most
distributions do), an address is also found faster: a step's activations take thousands of small pages, and a processor
remembers the places of one or two thousand. Nothing is computed differently, and memory that is never used is never
taken. Imports no torch.
"""

import ctypes
import os
import sys
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_HUGE_PAGE = 14  # MADV_HUGEPAGE of mman.h
_KEPT = 2**30  # bytes that may be free at the heap's end before they are returned
_PIECE = 2**25  # bytes of the largest piece that glibc takes from its heap; larger ones come from the system each time
_ROOM = 16  # pieces by which the heap grows now, for the steps to come
_THEIRS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep() -> None:
    """Makes the heap of this process keep what is freed; does nothing where it isn't glibc's, or a user has set it."""
    if sys.platform != "linux" or any(name in os.environ for name in _THEIRS):
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    libc.mallopt(_TRIM_THRESHOLD, _KEPT)
    libc.mallopt(_MMAP_THRESHOLD, _PIECE)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # Large pages can be asked for only where there is heap already: it grows, untouched, before it is used.
    pieces = [libc.malloc(_PIECE // 2) for _ in range(2 * _ROOM)]
    for piece in pieces:
        libc.free(piece)
    for start, stop in _heap():
        libc.madvise(start, stop - start, _HUGE_PAGE)  # refused by a kernel without them


def _heap() -> list[tuple[int, int]]:
    """Returns the addresses of the heap, in its parts; none where the system doesn't say them."""
    maps = Path("/proc/self/maps")
    lines = maps.read_bytes().splitlines() if maps.exists() else []  # paths in it may be no UTF-8
    spans = [line.split()[0].split(b"-") for line in lines if line.endswith(b"[heap]")]
    return [(int(start, 16), int(stop, 16)) for start, stop in spans]
