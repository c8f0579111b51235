"""Learning from rewards: the model's own completions that score better than their group become likelier.

A micro-batch holds some prompts (`data.examples.prompt_rows.PromptRows`); before a step's first forward pass their
completions are sampled, scored and compared (`rollouts/`), and then trained on (`losses/policy.py`). The loss is a mean
over completions, so that the parts of a step add up whatever the lengths; averages over tokens are scaled by the tokens
of the whole step.

With objective.updates_per_rollout=U a rollout samples the prompts of the next U steps with the weights of the first:
what TRL calls steps_per_generation, with num_iterations=1. The unused part of a rollout is saved with a checkpoint.
With U=1 there is none: a rollout follows from weights, seed and step.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.data import tokenizers
from lmtrain.data.chat.special_text import AnswerDecoder
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.chat.thoughts import thought_marks
from lmtrain.data.corpus import Corpus
from lmtrain.data.examples.prompt_rows import PromptRow, PromptRows, prompts_of
from lmtrain.data.loaders import rows_used
from lmtrain.data.order import mix64, permute
from lmtrain.distributed import process_group as world
from lmtrain.distributed.devices import data_parallel, total
from lmtrain.errors import RunError, UserError
from lmtrain.losses.policy import VARIANTS, LossSettings, Sampled, advantages, per_completion, policy_loss
from lmtrain.models.blocks import evaluating
from lmtrain.objectives.base import Objective
from lmtrain.objectives.grpo_options import GRPOOptions
from lmtrain.objectives.parts import LossParts, add_sums, means_over, options_of, with_routers
from lmtrain.objectives.start_check import FirstSteps
from lmtrain.objectives.with_reference import ReferenceObjective
from lmtrain.rewards.base import label
from lmtrain.rewards.environment import build_environment
from lmtrain.rewards.scoring import SOLE, Scorer, build_rewards
from lmtrain.rollouts.engine import Engine, Sampling
from lmtrain.rollouts.episodes import PLAYED, Limits, Player
from lmtrain.rollouts.in_process import InProcess
from lmtrain.rollouts.rollout import Group, Maker, keep_old, pack_groups, report_of, tensors_of, unpack_groups
from lmtrain.strategies import sharding

OF_TOKENS = ("entropy", "kl", "clip_fraction", "logps/sampler", "logps/trainer", "sampler_difference")


class GRPO(ReferenceObjective):
    """GRPO and its variants; `rollout` holds the groups of the current step, `pending` those of the steps after it."""

    Options = GRPOOptions
    reported = (
        "loss", "reward", "reward/<name>", "reward_failures", "reward_spread", "advantage_spread",
        "groups_without_signal", "resampled", "overlong_penalty", "response_length", "cut_off", *PLAYED, "entropy",
        "clip_fraction", "kl", "logps/sampler", "logps/trainer", "sampler_difference",
    )  # fmt: skip
    answers = 1

    def prepare(self, config: Config, corpus: Corpus) -> None:
        """Builds rewards and sampler; raises UserError without a reward or without room for completions."""
        self.options = o = options_of(config, GRPOOptions)
        if not isinstance(corpus.train, PromptRows):
            raise UserError(f"objective={config.objective.name} samples prompts: data.rows={config.data.rows} has none")

        # The loss, by its variant.
        self.prompts, self.prompts_used = corpus.train, rows_used(config, len(corpus.train))
        own: dict[str, Any] = {"clip_low": o.clip_low, "clip_high": o.clip_high}
        self.variant = VARIANTS[o.loss]._replace(**{name: value for name, value in own.items() if value is not None})
        self.loss_settings = LossSettings(
            self.variant.clip_low, self.variant.clip_high, o.max_sampled, o.kl_coef, o.kl_estimator, o.kl_by_ratio
        )

        # What samples, scores and compares completions.
        parts = build_rewards(config.reward, config.run.allow_target, o.plays)
        self.reward_names = [part.name for part in parts if part.name != SOLE]
        self.check_room(corpus)
        ends, vocabulary = end_ids(corpus, o.stop_tokens), len(corpus.tokenizer)
        sampling = Sampling(o.max_new_tokens, o.temperature, o.top_p, ends, vocabulary)
        decoder = AnswerDecoder(corpus.tokenizer, corpus.end_ids or ())  # stop_tokens belong to what is scored
        chat = ChatEncoder(corpus.tokenizer, config.data)
        self.maker = Maker(
            self.make_engine(), sampling, Scorer(parts, o.reward_timeout), decoder, self.variant, o.group_size,
            round(self.variant.overlong_share * o.max_sampled) if o.overlong_buffer is None else o.overlong_buffer,
            o.max_sampled, config.data, self.seed, self.make_player(config, chat, decoder),
            thought_marks(chat.chat if chat.template else None),
        )  # fmt: skip

        # The validation, and the reference.
        greedy = sampling._replace(temperature=0.0, top_p=1.0)
        self.judge = replace(self.maker, sampling=greedy, group_size=1, overlong_buffer=0)
        self.settle_reference(o.reference_in_use(), config)
        contents = {part.name: content for part in parts if (content := part.reward.content()) is not None}
        self.fingerprint["contents"] |= {"reward": contents} if contents else {}

        # The state of the current step.
        self.pending: dict[int, dict[tuple[int, int], Group]] = {}  # by step, then by (epoch, row) of the prompt
        self.rollout: list[Group] = []
        self.failures = Counter[str]()  # number of occurrences of each reward failure in the last rollout
        self.judge_failures = Counter[str]()  # the same in the last validation
        self.completions_per_token = torch.ones((), dtype=torch.float32)
        self.has_signal = True  # whether some group of the step has a nonzero advantage

    def make_engine(self) -> Engine:
        return InProcess(self.model.model, self.options.rollout_batch_size)

    def make_player(self, config: Config, chat: ChatEncoder, decoder: AnswerDecoder) -> Player | None:
        """Builds what plays objective.environment, if there is one."""
        o = self.options
        if not o.plays:
            return None
        make = build_environment(dict(o.environment or {}), config.run.allow_target)
        limits = Limits(o.max_turns, min(self.positions, o.max_total_tokens or self.positions), o.tool_timeout)
        return Player(make, chat, decoder, limits)

    @property
    def positions(self) -> int:
        """The maximum number of tokens of a prompt with its completion."""
        most = getattr(self.model.model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        # Beyond it a rotary embedding changes for all positions, and keys in the sampler's cache don't (rotary.py).
        return min(most, self.model.lengths.limit or most)

    def check_room(self, corpus: Corpus) -> None:
        """Raises UserError if a prompt and its completion may together exceed the model's positions."""
        most = self.positions
        room = most - self.options.max_new_tokens
        splits: list[Any] = [rows for rows in (corpus.train, corpus.val) if rows is not None]
        longest = max(int(rows.examples.lengths.max()) for rows in splits)
        if longest > room:
            found = f"a prompt has {longest:,} tokens, and the model's {most:,} positions leave room for"
            advice = f"set data.max_prompt_length={max(room, 1)}, or lower objective.max_new_tokens"
            raise UserError(f"{found} {max(room, 0):,}: {advice}")

    def on_placed(self) -> None:
        super().on_placed()
        for part in self.maker.scorer.parts:
            part.reward.place(self.trainer.strategy.root_device)

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["prompts"] * self.options.group_size

    def report_of(self, groups: Sequence[Group]) -> dict[str, float]:
        return report_of(groups, self.reward_names, self.options.plays)

    def validation_names(self) -> list[str]:
        return ["loss", "reward", *(f"reward/{name}" for name in self.reward_names), "response_length", "cut_off",
                "reward_failures", *(PLAYED if self.options.plays else ())]  # fmt: skip

    def plan_rows(self) -> list[tuple[str, str]]:
        o, rows = self.options, []
        clip = "" if self.variant.ratio == "none" else f", clip -{self.variant.clip_low:g} +{self.variant.clip_high:g}"
        to = f"{o.kl_coef:g} x KL ({o.kl_estimator}) to {self.describe_reference()}" if o.kl_coef else "no reference"
        rows.append(("loss", f"{o.loss}{clip}, {to}"))
        updates = f", {o.updates_per_rollout} updates a rollout" if o.updates_per_rollout > 1 else ""
        rows.append(("rollouts", f"{o.group_size} completions a prompt, up to {o.max_new_tokens:,} tokens, temperature "
                     f"{o.temperature:g}{updates}; {o.rollout_batch_size} at once"))  # fmt: skip
        if self.maker.player is not None:
            rows.append(("environment", self.maker.player.words()))
        parts = self.maker.scorer.parts
        words = [f"{p.weight:g} x {label(p.reward)}" + f" ({p.name})" * (p.name != SOLE) for p in parts]
        return [*rows, ("reward", " + ".join(words))]

    def first_checks(self, batch: dict[str, Tensor]) -> list[FirstSteps]:
        return Objective.first_checks(self, batch)  # what could be compared with the reference is sampled first

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        returned = super().training_step(batch, batch_idx)
        assert self.last_step is not None
        self.last_step = self.last_step._replace(seen=self.tokens_read)  # known only after sampling
        return returned

    @torch.no_grad()
    def look_ahead(self, micro_batches: list[dict[str, Tensor]], n_tokens: Tensor) -> None:
        """Fills the micro-batches with what the step trains on: from a new rollout, or from the rest of the last one.

        Raises:
            RunError: no completion of the step could be scored.
        """
        step = self.trainer.global_step
        if step not in self.pending:  # the rollout is used up; an extended run may have cut its last one short
            self._sample(step, micro_batches)
        found = self.pending.pop(step)
        groups = [[found[p.epoch, p.row] for p in prompts_of(batch)] for batch in micro_batches]
        self.rollout = [group for some in groups for group in some]
        for batch, some in zip(micro_batches, groups, strict=True):
            report = torch.tensor(list(self.report_of(some).values()), dtype=torch.float64)
            tensors = {**self._tensors(some), "report": report.view(torch.int64)}
            batch.clear()
            batch.update({name: value.to(self.device) for name, value in tensors.items()})
        each = [c for g in self.rollout for c in g.completions]
        learned = sum(len(c.log_probs) for c in each if c.ended or not self.options.mask_cut_off)
        times = 1 if self.model.unpacked_because is None else self.options.group_size  # that a prompt is read
        seen = sum(len(c.ids) for c in each) + sum(len(g.prompt.ids) for g in self.rollout) * times
        scored = sum(int((~g.rewards.isnan()).sum()) for g in self.rollout)
        signal = sum(g.has_signal for g in self.rollout)
        counts = torch.tensor([learned, seen, scored, signal], dtype=torch.float64)
        tokens, read, scored_by_all, groups_with_signal = total(self.trainer, counts.to(self.device))
        self.completions_per_token, self.tokens_read = n_tokens / tokens.clamp(min=1), read.long()
        self.has_signal = bool(groups_with_signal)
        if not scored_by_all and int(n_tokens):
            why = next(iter(self.failures), "see what the other ranks say")
            raise RunError(f"at step {step} no completion could be scored: {why}. Nothing was learned from them; "
                           "fix the reward and start the run again: it continues from its last checkpoint")  # fmt: skip

    def _tensors(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        padded = self.model.unpacked_because is not None
        return tensors_of(groups, padded=padded, mask_cut_off=self.options.mask_cut_off)

    def _sample(self, step: int, micro_batches: list[dict[str, Tensor]]) -> None:
        """Fills `pending` with the groups of this step and of the later steps that share its rollout."""
        last = min(step + self.options.updates_per_rollout, self.total_steps)
        batches = {step: micro_batches}
        dataset = getattr(self.trainer.train_dataloader, "dataset", None)
        batches |= {later: dataset[later]["micro_batches"] for later in range(step + 1, last)}  # type: ignore[index]
        self.failures = Counter()
        with sharding.gathered(self.model):
            for later, some in batches.items():
                prompts = [prompt for batch in some for prompt in prompts_of(batch)]
                groups = self._with_signal(later, prompts)
                self.pending[later] = {(p.epoch, p.row): g for p, g in zip(prompts, groups, strict=True)}
        if self.options.updates_per_rollout > 1:
            for later, some in batches.items():
                for batch in some:
                    self._score_old([self.pending[later][p.epoch, p.row] for p in prompts_of(batch)])

    def _with_signal(self, step: int, prompts: Sequence[PromptRow]) -> list[Group]:
        """Returns the prompts' groups; those without signal are replaced by others', up to objective.resample times."""
        groups = self._groups(step, prompts, 0)
        times = self.options.resample
        for attempt in range(1, 1 + (3 if times is None and self.options.loss == "dapo" else times or 0)):
            idle = [i for i, group in enumerate(groups) if not group.has_signal]
            if not idle:
                break
            slots = [prompts[i] for i in idle]
            others = self._others(step, slots, attempt)
            for i, group in zip(idle, self._groups(step, others, attempt, slots), strict=True):
                groups[i] = group
        return groups

    def _groups(
        self, step: int, prompts: Sequence[PromptRow], attempt: int, slots: Sequence[PromptRow] = ()
    ) -> list[Group]:
        groups, reasons = self.maker.groups(step, prompts, attempt, slots)
        self.failures.update(reasons)
        return groups

    def _others(self, step: int, slots: Sequence[PromptRow], attempt: int) -> list[PromptRow]:
        """Draws random prompts that the step doesn't have, to replace those at `slots`, whose groups had no signal.

        Each slot of the step and each attempt gets another one, as long as there are enough. The draw follows from the
        step and the slot, so it is the same however many ranks share the step.
        """
        held: np.ndarray = self.trainer.train_dataloader.dataset.row_ids(step)  # type: ignore[union-attr]
        count = min(self.prompts_used, (attempt + 1) * len(held))
        drawn = permute(np.arange(count), self.prompts_used, mix64(self.seed, step), 0)
        free = drawn[~np.isin(drawn, held[:, 1])]
        free = free if len(free) else drawn  # the step has all prompts
        place = {row: i for i, row in enumerate(held[:, 1].tolist())}
        numbers = (place[slot.row] + (attempt - 1) * len(held) for slot in slots)
        chosen = (int(free[number % len(free)]) for number in numbers)
        return [self.prompts.prompt(slot.epoch, row) for slot, row in zip(slots, chosen, strict=True)]

    def _judged(self, batch: dict[str, Tensor]) -> list[Group]:
        """Samples and scores a greedy completion of each prompt."""
        with sharding.gathered(self.model):
            groups, reasons = self.judge.groups(-1, prompts_of(batch))
        self.judge_failures.update(reasons)
        return groups

    def _score_old(self, groups: list[Group]) -> None:
        """Stores the completions' log-probabilities under the weights that sampled them, by the trainer's forward."""
        batch = {name: value.to(self.device) for name, value in self._tensors(groups).items()}
        with evaluating(self.model):
            keep_old(groups, self.token_log_probs(batch, self.options.temperature)[0])

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        # Log-probabilities of the tokens under the reference, under the policy and under the one that sampled them.
        reference = None
        if self.reference != "none":
            with torch.no_grad(), evaluating(self.model), self._reference_weights():
                reference = self.token_log_probs(batch, self.options.temperature)[0]
        policy, out = self.token_log_probs(batch, self.options.temperature)
        current = policy.detach()
        old, sampler = (batch[name].view(torch.float64) if name in batch else current for name in ("old", "sampler"))

        # The completions as the loss sees them; an empty micro-batch has a dummy one of weight 0.
        compared = batch["advantages"].view(torch.float64)
        real = (batch["sampled"] > 0).double()
        weight = batch["weight"].double() * real
        cap = self.options.importance_cap
        correction = None if cap is None else (old - sampler).exp().clamp(max=cap)
        sampled = Sampled(old, batch["answer"], batch["lengths"], compared, weight, correction, reference)
        if reference is not None and self.variant.kl_in_reward:
            sampled = sampled._replace(advantages=self._with_kl(batch, sampled, reference))
        loss = policy_loss(policy, sampled, self.variant, self.loss_settings, self.completions_per_token)

        # What is reported.
        sums = {
            "loss": loss.loss.detach(),
            "clip_fraction": loss.clipped,
            "entropy": batch["entropy"].view(torch.float64).sum(),
            "logps/sampler": sampler.sum() * real,
            "logps/trainer": old.sum() * real,
            "sampler_difference": (old - sampler).abs().sum() * real,
            "tokens": batch["lengths"].sum() * real,
        }
        if reference is not None:
            sums["kl"] = loss.kl * real
        report = batch["report"].view(torch.float64)
        sums |= dict(zip(self.report_of([]), report, strict=True))
        return with_routers(LossParts(loss.loss, batch["sampled"], sums), out)

    def _with_kl(self, batch: dict[str, Tensor], sampled: Sampled, reference: Tensor) -> Tensor:
        """Computes advantages [A] of the rewards minus kl_coef times each completion's log-ratio to the reference."""
        if not int(batch["sampled"]):
            return sampled.advantages
        kl = per_completion(sampled.old - reference, sampled)
        rewards = batch["rewards"].view(torch.float64) - self.options.kl_coef * kl
        return advantages(rewards.view(-1, self.options.group_size), self.variant).flatten()

    def means_of(self, sums: dict[str, Any], n_tokens: Any) -> dict[str, Any]:
        """Averages rewards over the completions they scored (left out without any), and token values over tokens.

        A validation's loss is minus its reward, over the same completions: its sums have no "tokens".
        """
        sums = dict(sums)
        scored, tokens = sums.pop("scored"), sums.pop("tokens", None)
        of_rewards = {"reward": scored} if tokens is not None else {"reward": scored, "loss": scored}
        of_rewards |= {f"reward/{name}": sums.pop(f"scored/{name}") for name in self.reward_names}
        return means_over(sums, n_tokens, {**dict.fromkeys(OF_TOKENS, tokens), **of_rewards})

    @torch.no_grad()
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Samples a greedy completion of each prompt; the loss is minus its reward, so that the lowest loss is best."""
        groups = self._judged(batch)
        found = self.report_of(groups)
        keep = [*self.validation_names(), "scored", *(f"scored/{name}" for name in self.reward_names)]
        found = {"loss": -found["reward"], **{name: value for name, value in found.items() if name in keep}}
        sums = {name: torch.tensor(value, dtype=torch.float64, device=self.device) for name, value in found.items()}
        sums["n_tokens"] = torch.tensor(len(groups), dtype=torch.int64, device=self.device)
        add_sums(self.val_sums.setdefault(dataloader_idx, {}), sums)

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.judge_failures.clear()

    def validation_means(self, loader: int = 0) -> dict[str, float]:
        """Returns the means as in the base class.

        Raises:
            RunError: no completion could be scored, so there is no loss by which checkpoints could be compared.
        """
        means = super().validation_means(loader)
        if "loss" not in means:
            why = next(iter(self.judge_failures), "see what the other ranks say")
            raise RunError(f"in the validation after step {self.trainer.global_step} no completion could be scored: "
                           f"{why}; fix the reward, or the columns of the validation rows that it reads")  # fmt: skip
        return means

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        mine = {step: ([*groups], pack_groups([*groups.values()])) for step, groups in self.pending.items()}
        # Each rank has sampled its own prompts; on resume, ranks look up theirs among those of all.
        everywhere = world.gathered(mine) if self.options.updates_per_rollout > 1 else [mine]
        checkpoint["rollout"] = everywhere[:: data_parallel(self.trainer).copies]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.pending = {}
        for rank in checkpoint.get("rollout", []):
            for step, (keys, packed) in rank.items():
                groups = unpack_groups(packed)
                self.pending.setdefault(int(step), {}).update(zip(map(tuple, keys), groups, strict=True))

    @torch.no_grad()
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Returns `texts`, a greedy completion of each prompt, and `rewards`, fp64 [prompts]."""
        groups = self._judged(batch)
        return {"texts": [g.texts[0] for g in groups], "rewards": torch.stack([g.rewards[0] for g in groups])}


def end_ids(corpus: Corpus, stop_tokens: Sequence[str]) -> tuple[int, ...]:
    """Returns the ids that end a completion; raises UserError for a stop token that is no single token."""
    found = list(corpus.end_ids or [corpus.tokenizer.eos_token_id])
    for text in stop_tokens:
        ids = tokenizers.ids_of(corpus.tokenizer, text)
        if not ids:
            parts = [*map(corpus.tokenizer.decode, corpus.tokenizer(text, add_special_tokens=False)["input_ids"])]
            several = f"objective.stop_tokens: the tokenizer writes {text!r} as {len(parts)} tokens, and none reads so"
            raise UserError(f"{several}: name one of {' '.join(map(repr, parts))}")
        found += ids
    return tuple(dict.fromkeys(found))
