"""The row encoder of DPO, and its micro-batches: unpadded chosen and rejected answers, with shared prompts once."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.conversations import Completion, Conversation
from lmtrain.data.chat.pairs import Pair, to_pair
from lmtrain.data.chat.templates import cut_left
from lmtrain.data.chat.turns import BadRow, Remark, unread
from lmtrain.data.examples.documents import ExampleRows, Examples
from lmtrain.data.examples.row_format import PAIRS, Encoded, TemplateRows
from lmtrain.data.examples.rows import documents_at

Answer = tuple[np.ndarray, np.ndarray]  # ids int64 [T], and mask of those that the answer is scored by, bool [T]
Tokens = tuple[list[int], list[bool]]  # ids, and mask of those that the answer is scored by
_ESTIMATED_FROM = 2000  # pairs read to estimate the length of shared prompts; takes a tenth of a second


class PairRowEncoder(TemplateRows):
    """Encodes a pair as two examples: the prompt with its chosen and with its rejected answer."""

    holds = PAIRS
    group = 2
    independent = True
    kind = "pairs"
    version: ClassVar[dict[str, int]] = {"pairs": 2}

    def encode(self, row: dict[str, Any], where: str, cfg: DataConfig, question: bool) -> Encoded:
        """Encodes the pair of a row: the chosen answer, then the rejected one.

        Raises:
            BadRow: the chat template refuses the row, or the answers become equal; also see pairs.py and `fit_pair`.
        """
        self.chat.begin_row()
        reading = self.reading_of(row, where, cfg)
        pair = to_pair(row, reading, cfg, where)
        chosen, rejected = self._tokens(pair, pair.chosen), self._tokens(pair, pair.rejected)
        if chosen == rejected:
            raise BadRow(where, "chosen and rejected are the same once the chat template has written them")
        examples, cut = fit_pair(chosen, rejected, cfg, where, self.chat.beginning(chosen[0]))
        if examples and examples[0] == examples[1]:
            raise BadRow(where, f"chosen and rejected are the same within data.max_length={cfg.max_length} tokens")
        asked = self.question(self._preferred(pair)) if question and examples else None
        margin = None if pair.margin is None else repr(pair.margin)
        others, remarks = reading.unread(row)
        remarks = [*self.chat.remarks, *unread(row), *remarks]
        if isinstance(pair.prompt, str) and cfg.system_prompt:  # plain text doesn't go through a chat template
            words = "preference_text is plain text; data.conversation_format=preference makes turns of it"
            remarks.append(Remark(f"data.system_prompt has no effect: {words}"))
        return Encoded([*examples], cut, asked, pair.dropped_turns, remarks, others, kept=margin)

    @staticmethod
    def make_rows(examples: Examples, config: Config, seed: int | None) -> tuple["PairRows", str]:
        share = bool(config.data.share_prompts)
        words = f"each pair is two examples{', its prompt there once' if share else ''}; no padding"
        return PairRows(examples, share_prompts=share), words

    def _tokens(self, pair: Pair, answer: Any) -> Tokens:
        if isinstance(pair.prompt, str):
            return self.chat.completion(Completion(pair.prompt, answer, pair.where))
        whole = Conversation([*pair.prompt, *answer], pair.tools, pair.where, options=pair.options)
        return self.chat.pair(whole, len(pair.prompt))

    def _preferred(self, pair: Pair) -> Conversation | Completion:
        """Returns the prompt with its chosen answer, with the turns up to its last answer if only that is scored."""
        if isinstance(pair.prompt, str):
            return Completion(pair.prompt, str(pair.chosen), pair.where)
        answer = pair.chosen if self.chat.cfg.train_on == "last_assistant" else pair.chosen[:1]
        return Conversation([*pair.prompt, *answer], pair.tools, pair.where, options=pair.options)


def fit_pair(chosen: Tokens, rejected: Tokens, cfg: DataConfig, where: str, kept: int = 0) -> tuple[list[Tokens], int]:
    """Returns ([chosen, rejected], tokens cut off) within data.max_length, or ([], 0) if the pair is dropped.

    truncate_right cuts the ends of the answers; truncate_left cuts the same tokens off both prompts, so that the
    answers still have the same prompt. Before that, prompts are cut to data.max_prompt_length in this way. The first
    `kept` tokens, such as BOS, stay.

    Raises:
        BadRow: the prompt leaves no room for an answer, or the pair is too long and data.on_too_long is raise.
    """
    pair = [chosen, rejected]
    most = cfg.max_length
    policy = cfg.on_too_long
    if not all(any(trained) for _, trained in pair):
        return pair, 0
    prompt = min(trained.index(True) for _, trained in pair)
    start = 0 if cfg.max_prompt_length is None else max(0, prompt - cfg.max_prompt_length)
    longest = max(len(ids) for ids, _ in pair) - start
    stop: int | None = None
    if most is not None and longest > most:
        if policy == "drop":
            return [], 0
        if policy == "raise":
            found = f"an answer with its prompt has {longest} tokens and data.max_length is {most}"
            raise BadRow(where, f"{found}: raise it, or leave long pairs out with data.on_too_long=drop")
        if policy == "truncate_left":
            start += longest - most
        else:
            stop = start + most
        room = prompt > start if stop is None else prompt < stop
        if not room:
            raise BadRow(where, f"the prompt leaves no room for the answers within data.max_length={most} tokens")
    cut = [(ids[:stop], trained[:stop]) for ids, trained in pair]
    if start:
        cut = [cut_left(ids, trained, start, max(0, min(kept, prompt - start - 1))) for ids, trained in cut]
    return cut, sum(len(ids) for ids, _ in pair) - sum(len(ids) for ids, _ in cut)


class PairRows(ExampleRows):
    """Rows of pairs: row i is examples 2i (chosen) and 2i + 1 (rejected). A micro-batch has no padding.

    share_prompts: the beginning that both answers of a pair share occurs once, and the rejected answer continues it.
    reference: [n, 2] fp64, log-probabilities of the chosen and the rejected answers that were computed before
        training; None if there are none.
    margins: [n] fp64, the data's column margin, 0 for rows without a value; None if no row has one.
    padded: each answer is a padded row of its own, for models that can't keep several in a row apart.
    """

    group = 2
    unit = "pairs"

    def __init__(self, examples: Examples, *, share_prompts: bool) -> None:
        super().__init__(examples)
        self.share_prompts = share_prompts
        self.reference: np.ndarray | None = None
        self.margins = margins_of(examples)
        self.padded = False

    def pad(self) -> None:
        """Makes each answer a row of its own, with its prompt, padded to the longest of its micro-batch."""
        self.padded, self.share_prompts = True, False

    def title(self, example: int) -> str:
        """Returns the title of an example in lmtrain.inspect."""
        return f"pair {example // 2 + 1:,} of {len(self):,}, {('chosen', 'rejected')[example % 2]}"

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Returns a micro-batch for (epoch, row) pairs [P, 2]: 2P answers with their prompts, N tokens in one row.

        Returns:
            input_ids, position_ids int64 [1, N]; cu_seqlens int32 [2P + 1], the answers' starts; with shared prompts
            prefix_lengths, kv_index and cu_kv as in `models.documents.Prefixes`;
            scored int64 [C]: positions in N of the tokens that the answers are scored by; before int64 [C]: those of
            the tokens just before them; answer int64 [C]: the answer each belongs to, 2p the chosen and 2p + 1 the
            rejected one of pair p; lengths int64 [2P]: scored tokens per answer; ends int64 [2P]: position in N of
            the last token in each answer's text; pairs, seen int64 []: P, N; reference int64 [P, 2], margin int64 [P]
            (the bits of fp64) if available. If padded: input_ids [2P, T],
            positions in its 2P * T tokens, row_lengths int64 [2P], real int64 [N]: the positions of tokens other than
            padding, and neither position_ids nor cu_seqlens.
        """
        pairs = [(self.examples.read(2 * int(row)), self.examples.read(2 * int(row) + 1)) for _, row in rows]
        # Even if no prompt is shared there are prefixes, of 0: a compiled model would need a second variant.
        prefixes = [n for pair in pairs for n in (0, common_prompt(*pair))] if self.share_prompts else None
        batch = lay_answers([answer for pair in pairs for answer in pair], prefixes)
        starts = batch["cu_seqlens"].tolist()
        batch["pairs"] = torch.tensor(len(rows), dtype=torch.int64)
        batch["seen"] = torch.tensor(starts[-1], dtype=torch.int64)
        batch["ends"] = torch.tensor(starts[1:], dtype=torch.int64) - 1
        if self.padded:
            pad_answers(batch)
        if self.reference is not None:
            # As bits: Lightning casts a batch's floating-point tensors to the model's dtype, bf16 has only 3 digits.
            batch["reference"] = torch.from_numpy(self.reference[rows[:, 1]]).view(torch.int64)
        if self.margins is not None:
            batch["margin"] = torch.from_numpy(self.margins[rows[:, 1]]).view(torch.int64)
        return batch

    @property
    def epoch_tokens(self) -> int:
        """The number of tokens in all micro-batches of an epoch; with shared prompts, estimated from some pairs."""
        total = self.examples.tokens
        if not self.share_prompts:
            return total
        some = np.unique(np.linspace(0, len(self) - 1, min(len(self), _ESTIMATED_FROM)).astype(int))
        shared = [common_prompt(self.examples.read(2 * i), self.examples.read(2 * i + 1)) for i in some]
        return total - round(np.mean(shared) * len(self))


def margins_of(examples: Examples) -> np.ndarray | None:
    """Returns the margin of each pair, fp64 [n], or None if no row of the data has one."""
    if not any(shard.texts for shard in examples.shards):
        return None
    return np.array([float(text or 0) for text in examples.texts[::2]])


def common_prompt(chosen: Answer, rejected: Answer) -> int:
    """Returns how many first tokens both answers of a pair, (ids, trained) each, share before either is scored."""
    most = min(int(trained.argmax()) for _, trained in (chosen, rejected))
    same = chosen[0][:most] == rejected[0][:most]
    return most if same.all() else int(same.argmin())


def lay_answers(answers: list[Answer], prefixes: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Concatenates answers with their prompts, without padding; see `PairRows.read` for the tensors it returns.

    prefixes: how many first tokens of each answer are left out because the last answer before it from which none are
        left out begins with them; None: nothing is, and the tensors of `models.documents.Prefixes` are not returned.
    """
    parts: list[tuple[np.ndarray, ...]] = []  # of each answer: ids, scored, before, the positions that it sees
    starts, first = [0], 0
    # Each answer behind the one before it, without the prefix that an earlier one has.
    for (tokens, trained), prefix in zip(answers, prefixes or [0] * len(answers), strict=True):
        start = starts[-1] - prefix  # where token 0 would be if the prefix were repeated
        first = first if prefix else start  # where the prefix is
        at = np.flatnonzero(trained[1:]) + 1  # no token before the first one predicts it
        sees = np.r_[first : first + prefix, starts[-1] : start + len(tokens)]
        parts.append((tokens[prefix:], start + at, sees[at - 1], sees))
        starts.append(start + len(tokens))
    # One row of all tokens, and where its answers and their scored tokens are.
    lengths = np.array([len(scored) for _, scored, *_ in parts], dtype=np.int64)
    ids, scored, before, sees = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    batch = {
        "input_ids": ids[None],
        **documents_at(starts[:-1], 1, starts[-1]),
        "scored": scored,
        "before": before,
        "answer": torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        "lengths": torch.from_numpy(lengths),
    }
    # Where answers find the keys and values of a prefix that they share.
    if prefixes is not None:
        more = torch.tensor(prefixes, dtype=torch.int64)
        batch["position_ids"] += torch.repeat_interleave(more, torch.diff(batch["cu_seqlens"]))
        batch["prefix_lengths"], batch["kv_index"] = more.int(), sees
        batch["cu_kv"] = batch["cu_seqlens"] + F.pad(more.cumsum(0), (1, 0)).int()
    return batch


def pad_answers(batch: dict[str, torch.Tensor]) -> None:
    """Puts each document into a padded row; no mask is needed, as padding comes last and attention is causal."""
    starts = batch.pop("cu_seqlens").long()
    lengths, column = torch.diff(starts), batch.pop("position_ids").flatten()
    longest = int(lengths.max())
    place = torch.repeat_interleave(torch.arange(len(lengths)), lengths) * longest + column  # [N] in the padded rows
    padded = torch.zeros(len(lengths) * longest, dtype=torch.int64)
    padded[place] = batch["input_ids"].flatten()
    batch |= {"input_ids": padded.view(len(lengths), longest), "row_lengths": lengths, "real": place}
    for name in batch.keys() & {"scored", "before", "ends"}:
        batch[name] = place[batch[name]]
