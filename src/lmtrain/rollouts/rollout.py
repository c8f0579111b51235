"""A rollout: completions of some prompts with their rewards and advantages, and the tensors to train on them."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.special_text import AnswerDecoder
from lmtrain.data.chat.thoughts import ThoughtMarks
from lmtrain.data.examples.pair_rows import Answer, lay_answers, pad_answers
from lmtrain.data.examples.prompt_rows import PromptRow, prompt_column
from lmtrain.data.order import mix64
from lmtrain.losses.policy import Variant, advantages, deviation, overlong_penalty
from lmtrain.rewards.scoring import Scorer
from lmtrain.rollouts.engine import Engine, Request, SampledText, Sampling
from lmtrain.rollouts.episodes import PLAYED, Episode, Player, answers, columns_of, report_of_episode

_ROLLOUT = 0x726F6C6C  # separates the seeds of completions from all others


@dataclass
class Group:
    """A prompt with its G completions."""

    prompt: PromptRow
    completions: list[SampledText]
    texts: list[str]
    parts: dict[str, list[float]]  # rewards by name; NaN where one failed or returned None
    rewards: Tensor  # fp64 [G], the weighted sum with the overlong penalty; NaN where a part failed
    penalties: list[float]  # overlong penalty of each completion
    advantages: Tensor  # fp64 [G]
    resampled: int = 0  # how often the prompt was replaced by another
    old: list[list[float]] | None = None  # log-probabilities by the trainer's forward, if rollouts serve several steps
    played: list[dict[str, Any]] | None = None  # with an environment, what `report_of_episode` says of each completion

    @property
    def has_signal(self) -> bool:
        return bool((self.advantages != 0).any())


@dataclass
class Maker:
    """A maker of groups: it samples, scores and compares completions of prompts."""

    engine: Engine
    sampling: Sampling
    scorer: Scorer
    decoder: AnswerDecoder
    variant: Variant
    group_size: int
    overlong_buffer: int
    most: int  # maximum number of tokens that the model samples for a completion
    data: DataConfig  # data.columns tells which column is the prompt
    seed: int
    player: Player | None = None  # set if completions have turns of an environment
    thoughts: ThoughtMarks = field(default_factory=ThoughtMarks)  # of the chat template

    def groups(
        self, step: int, prompts: Sequence[PromptRow], attempt: int = 0, slots: Sequence[PromptRow] = ()
    ) -> tuple[list[Group], Counter[str]]:
        """Returns the groups of prompts of a step, and the number of occurrences of each reward failure.

        Args:
            attempt: 0 for the step's own prompts; higher for those that replace groups without signal.
            slots: the step's own prompts that these replace; they seed the completions, as two may get one prompt.
        """
        if not prompts:
            return [], Counter()
        # A seed for each completion.
        keys = [
            [mix64(_ROLLOUT, self.seed, step, slot.epoch, slot.row, i, attempt) for i in range(self.group_size)]
            for slot in slots or prompts
        ]
        # The completions: whole episodes with an environment, single answers without.
        played: list[list[Episode]] = []
        if self.player is not None:
            played = self.player.play(self.engine, self.sampling, prompts, slots or prompts, keys, self.seed)
            prompts = [p._replace(ids=own[0].prompt) for p, own in zip(prompts, played, strict=True)]
            completions = [episode.completion() for own in played for episode in own]
            texts = [episode.answer for own in played for episode in own]
        else:
            requests = [Request(p.ids, key) for p, own in zip(prompts, keys, strict=True) for key in own]
            completions = self.engine.generate(requests, self.sampling)
            texts = [self.decoder.decode(c.ids) for c in completions]
        # Their rewards, from all columns of their rows but the prompt.
        rows = [p.columns for p in prompts for _ in range(self.group_size)]
        prompt_columns = [prompt_column(row, self.data) for row in rows]
        names = dict.fromkeys(itertools.chain.from_iterable(rows))
        columns = {name: [row.get(name) for row in rows] for name in names if name not in prompt_columns}
        columns |= {"completion_ids": [c.ids for c in completions], "cut_off": [not c.ended for c in completions]}
        begun = [self.thoughts.begun(self.decoder.tokenizer, p.ids) for p in prompts]
        columns |= {"turn_start": [text for text in begun for _ in range(self.group_size)]}
        columns |= columns_of([episode for own in played for episode in own]) if self.player else {}
        said = [row[name] for row, name in zip(rows, prompt_columns, strict=True)]
        scores = self.scorer(said, texts, columns)
        # Their advantages over the others of their group.
        lengths = torch.tensor([len(c.log_probs) for c in completions], dtype=torch.int64)
        penalties = overlong_penalty(lengths, self.most, self.overlong_buffer)
        totals = (torch.tensor(scores.total, dtype=torch.float64) + penalties).view(-1, self.group_size)
        compared = advantages(totals, self.variant)
        found = []
        size = self.group_size
        for i, prompt in enumerate(prompts):
            own = slice(i * size, (i + 1) * size)
            parts = {name: values[own] for name, values in scores.parts.items()}
            reports = [report_of_episode(e) for e in played[i]] if played else None
            rewards = totals[i], penalties[own].tolist(), compared[i]
            found.append(Group(prompt, completions[own], texts[own], parts, *rewards, attempt, played=reports))
        return found, scores.reasons


def tensors_of(groups: Sequence[Group], *, padded: bool, mask_cut_off: bool) -> dict[str, Tensor]:
    """Builds the training tensors of some groups, A completions with their prompts laid out as by `lay_answers`.

    The completions of a group share their prompt, which is read once.

    Args:
        padded: each completion is a row of its own with its prompt, for models that can't separate several in a row.
        mask_cut_off: completions that were cut off have weight 0.

    Returns:
        input_ids to lengths, prefix_lengths to cu_kv as of `PairRows.read`; for the C tokens
        sampler, fp64 bits as int64 [C], the sampler's log-probabilities, and old, the trainer's, if all groups have
        them; for the completions advantages, entropy and rewards, fp64 bits as int64 [A]; weight int64 [A]; sampled
        int64 []: A, or 0 if there are none and a dummy of two tokens is in their place.
    """
    each = [(group, i) for group in groups for i in range(len(group.completions))]
    texts = [group.completions[i] for group, i in each]
    answers = [after_prompt(group.prompt.ids, t.ids, t.sampled) for (group, _), t in zip(each, texts, strict=True)]
    shared = [len(group.prompt.ids) if i else 0 for group, i in each]
    batch = lay_answers(answers or [after_prompt([0], [0])], None if padded else shared or [0])
    if padded:
        pad_answers(batch)
    if groups and all(group.old is not None for group in groups):
        batch["old"] = _bits([p for group, i in each for p in group.old[i]])  # type: ignore[index]
    return {
        **batch,
        "sampler": _bits([p for text in texts for p in text.log_probs]),
        "advantages": _bits([float(group.advantages[i]) for group, i in each]),
        "entropy": _bits([text.entropy for text in texts]),
        "rewards": _bits([float(group.rewards[i]) for group, i in each]),
        "weight": torch.tensor([int(t.ended or not mask_cut_off) for t in texts] or [0], dtype=torch.int64),
        "sampled": torch.tensor(len(each), dtype=torch.int64),
    }


def after_prompt(prompt: Sequence[int], completion: Sequence[int], sampled: Sequence[bool] | None = None) -> Answer:
    """Returns the ids of a prompt with its completion, int64 [T], and a mask of those that were sampled, bool [T]."""
    mask = np.array([*[False] * len(prompt), *(sampled or [True] * len(completion))])
    return np.array([*prompt, *completion], dtype=np.int64), mask


def keep_old(groups: Sequence[Group], log_probs: Tensor) -> None:
    """Stores the trainer's log-probabilities [C] of a micro-batch of these groups in them."""
    values = iter(log_probs.tolist())
    for group in groups:
        group.old = [list(itertools.islice(values, len(c.log_probs))) for c in group.completions]


def _bits(values: Sequence[float]) -> Tensor:
    """Returns fp64 as int64 bits: floating-point tensors of a batch are rounded to the model's dtype on transfer.

    Without values there is one 0, for the dummy in their place.
    """
    return torch.tensor(list(values) or [0.0], dtype=torch.float64).view(torch.int64)


def report_of(groups: Sequence[Group], names: Sequence[str], played: bool = False) -> dict[str, float]:
    """Sums what is recorded of a rollout over the completions of some groups.

    Args:
        names: of the rewards of a weighted sum.
        played: whether completions have turns of an environment.
    """
    reported = [*REPORTED, *(PLAYED if played else ())]
    sums = dict.fromkeys([*reported, *(f"reward/{n}" for n in names), *(f"scored/{n}" for n in names)], 0.0)
    for group in groups:
        size = len(group.completions)
        known = group.rewards[~group.rewards.isnan()]
        sums["reward"] += float(known.sum())
        sums["scored"] += len(known)
        sums["reward_failures"] += size - len(known)
        sums["reward_spread"] += size * float(deviation(group.rewards[None]))
        sums["advantage_spread"] += size * float(group.advantages.std(correction=0))
        sums["groups_without_signal"] += size * (not group.has_signal)
        sums["resampled"] += size * group.resampled
        sums["overlong_penalty"] += sum(group.penalties)
        sums["response_length"] += sum(len(c.log_probs) for c in group.completions)
        sums["cut_off"] += sum(not c.ended for c in group.completions)
        for name in PLAYED if played else ():
            sums[name] += sum(answers(e["turns"]) if name == "turns" else e[name] for e in group.played or ())
        for name in names:
            finite = [v for v in group.parts[name] if v == v]
            sums[f"reward/{name}"] += sum(finite)
            sums[f"scored/{name}"] += len(finite)
    return sums


REPORTED = ("reward", "scored", "reward_failures", "reward_spread", "advantage_spread", "groups_without_signal",
            "resampled", "overlong_penalty", "response_length", "cut_off")  # fmt: skip


_PLAIN = [field.name for field in fields(Group)][2:]  # all but the prompt and its completions


def pack_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """Converts groups to plain containers and tensors, which a checkpoint may hold."""
    return {
        "prompts": [tuple(group.prompt) for group in groups],
        "completions": [[tuple(c) for c in group.completions] for group in groups],
        **{name: [getattr(group, name) for group in groups] for name in _PLAIN},
    }


def unpack_groups(packed: Mapping[str, Any]) -> list[Group]:
    """Restores the groups that `pack_groups` was given."""
    columns = [packed[name] for name in ("prompts", "completions", *_PLAIN)]
    return [
        Group(PromptRow(*prompt), [SampledText(*c) for c in completions], *rest)
        for prompt, completions, *rest in zip(*columns, strict=True)
    ]
