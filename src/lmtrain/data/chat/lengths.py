"""Shortens, splits or drops examples longer than data.max_length."""

from dataclasses import dataclass

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.turns import BadRow
from lmtrain.errors import UserError

POLICIES = ("truncate_right", "truncate_left", "drop", "split", "raise")


@dataclass(frozen=True)
class Example:
    """Token ids with whether each is learned (as a target, so never the first), and how many tokens were cut off."""

    input_ids: list[int]
    trained: list[bool]
    cut: int = 0


def fit(ids: list[int], trained: list[bool], borders: list[int], cfg: DataConfig, where: str) -> list[Example]:
    """One example, or by data.on_too_long none or several where it is longer than data.max_length.

    Args:
        borders: rising positions in `ids` where split may cut without harm; elsewhere it cuts only if it must.

    Raises:
        BadRow: it is longer and on_too_long is raise.
    """
    most, policy = cfg.max_length, cfg.on_too_long
    if most is None or len(ids) <= most:
        return [Example(ids, trained)]
    if policy == "truncate_right":
        return [Example(ids[:most], trained[:most], len(ids) - most)]
    if policy == "truncate_left":
        return [_piece(ids, trained, len(ids) - most, len(ids), len(ids) - most)]
    if policy == "drop":
        return []
    if policy == "raise":
        raise BadRow(
            where,
            f"it has {len(ids)} tokens and data.max_length is {most}: raise it, shorten the row, or let long rows "
            f"be cut with data.on_too_long=truncate_right",
        )
    if policy != "split":
        raise UserError(f"data.on_too_long={policy} is unknown; there are {', '.join(POLICIES)}")
    return _split(ids, trained, borders, most)


def _split(ids: list[int], trained: list[bool], borders: list[int], most: int) -> list[Example]:
    pieces, start = [], 0
    while start < len(ids):
        end = min(start + most, len(ids))
        if end < len(ids):
            end = max((border for border in borders if start < border <= end), default=end)
        pieces.append(_piece(ids, trained, start, end, 0))
        start = end
    return pieces


def _piece(ids: list[int], trained: list[bool], start: int, end: int, cut: int) -> Example:
    return Example(ids[start:end], [False, *trained[start + 1 : end]], cut)
