"""Reports on rollouts: completions with their rewards, failing rewards, and steps without a learning signal."""

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
from rich.console import Console
from rich.text import Text

from lmtrain import terminal
from lmtrain.callbacks.metrics import Metrics
from lmtrain.callbacks.parts import Parts, Phase, Placed
from lmtrain.callbacks.samples import on_a_line
from lmtrain.config.effect import TRIAL
from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.pairs import bare_turns
from lmtrain.data.examples.prompt_rows import prompt_column
from lmtrain.data.order import mix64
from lmtrain.files import json_line
from lmtrain.models.feature import Feature
from lmtrain.objectives.grpo import GRPO
from lmtrain.objectives.grpo_options import GRPOOptions
from lmtrain.rollouts.episodes import written
from lmtrain.rollouts.rollout import Group
from lmtrain.run_folder.folder import RunDir
from lmtrain.secrets import hide, shown_in

FIRST_STEPS = 10  # with which later ones are compared


class Validated(NamedTuple):
    """Rewards of a validation, and of training since the one before."""

    step: int
    held_out: float  # mean over the held-out prompts
    trained: float  # mean over the completions
    spread: float  # their standard deviation


class Rollouts(pl.Callback):
    """A callback that reads `objective.rollout`, this rank's part of the step's completions, after each step."""

    def __init__(
        self, metrics: Metrics, run_dir: RunDir, options: GRPOOptions, data: DataConfig, console: Console
    ) -> None:
        self.metrics, self.samples, self.data, self.console = metrics, run_dir.samples, data, console
        self.kept = run_dir.path / "rollouts" if options.keep_rollouts else None  # for whole rollouts
        self.warn_after_steps = options.warn_after_steps
        self.idle_steps, self.warned = 0, False
        self.reported: list[str] = []  # kinds of failures and of collapse already reported
        self.first: list[dict[str, float]] = []  # `signs` of the first steps
        self.sums = [0, 0.0, 0.0]  # since the last validation: number of rewards, their sum and that of their squares
        self.validated: list[Validated] = []

    def state_dict(self) -> dict[str, Any]:
        said = {"idle_steps": self.idle_steps, "warned": self.warned, "told": [*self.reported], "first": [*self.first]}
        return said | {"sums": [*self.sums], "validated": [[*one] for one in self.validated]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.idle_steps, self.warned = state_dict["idle_steps"], state_dict["warned"]
        self.reported, self.first = list(state_dict["told"]), list(state_dict.get("first", []))
        self.sums = list(state_dict.get("sums", self.sums))
        self.validated = [Validated(*one) for one in state_dict.get("validated", [])]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: GRPO, *_: Any, **__: Any) -> None:
        step, groups = trainer.global_step, pl_module.rollout
        if self.kept is not None:
            keep(groups, self.data, self.kept / f"step_{step:08d}_rank{trainer.global_rank}.parquet")
        self.idle_steps = 0 if pl_module.has_signal else self.idle_steps + 1
        if not trainer.is_global_zero:
            return
        self._warn(pl_module, step)
        for group in groups:
            scored = group.rewards[~group.rewards.isnan()].double()
            more = (len(scored), float(scored.sum()), float(scored.square().sum()))
            self.sums = [a + b for a, b in zip(self.sums, more, strict=True)]
        if len(self.first) < FIRST_STEPS:
            self.first += [signs(groups)] if groups else []
        else:
            self._warn_of_collapse(groups, step)
        if groups and self.metrics.records.holds_step():
            self._show(chosen(groups, step), step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: GRPO) -> None:
        held_out, (count, total, squares) = self.metrics.last_val.get("val/reward"), self.sums
        if not trainer.is_global_zero or not count or held_out is None:
            return
        mean, self.sums = total / count, [0, 0.0, 0.0]
        spread = math.sqrt(max(0.0, squares / count - mean**2))
        self.validated.append(Validated(trainer.global_step, held_out, mean, spread))
        words = overfits(self.validated, int(pl_module.val_sums[0]["n_tokens"]) * trainer.world_size)
        if words is not None:
            self._say_once("held_out", trainer.global_step, words)

    def _say_once(self, kind: str, step: int, words: str) -> None:
        if kind not in self.reported:
            self.reported.append(kind)
            terminal.note(f"step {step:,}: {words}")

    def _warn(self, module: GRPO, step: int) -> None:
        for reason, count in module.failures.items():
            out = "They are left out of their groups and counted in train/reward_failures"
            self._say_once(reason.split(":")[0], step, f"the reward {reason} ({count} completions). {out}")
        if self.warn_after_steps is None or self.idle_steps < self.warn_after_steps or self.warned:
            return
        self.warned = True
        rewards = sorted({float(r) for group in module.rollout for r in group.rewards})
        same = f"all rewards are {rewards[0]:g}" if len(rewards) == 1 else "within each group all rewards are equal"
        terminal.note(
            f"step {step:,}: {same} for {self.idle_steps:,} steps, so nothing is learned. Where they are low the task "
            "is too hard: fine-tune on some answers first (objective=sft), start with easier prompts, add a reward for "
            "the right format (reward=sum), or raise objective.group_size or objective.temperature. Where they are "
            "high the task is learned: use harder prompts"
        )

    def _warn_of_collapse(self, groups: list[Group], step: int) -> None:
        first = {name: sum(one[name] for one in self.first) / len(self.first) for name in self.first[0]}
        for kind, words in collapses(first, signs(groups)).items() if groups else ():
            self._say_once(kind, step, words)

    def _show(self, found: list[tuple[str, Group, int]], step: int) -> None:
        with self.samples.open("a", encoding="utf-8") as file:
            for which, group, i in found:
                row = {"step": step, "prompt": shown_prompt(group, self.data), "text": shown(group, i), "which": which,
                       "reward": number(group.rewards[i]), "advantage": number(group.advantages[i])}  # fmt: skip
                if len(group.parts) > 1:
                    row["rewards"] = {name: number(values[i]) for name, values in group.parts.items()}
                file.write(json_line(row))
        if os.environ.get(TRIAL) or not self.console.is_terminal:
            return
        for which, group, i in found:
            given, text = on_a_line(shown_prompt(group, self.data), 40), on_a_line(shown(group, i), 90)
            score = f"{float(group.rewards[i]):<7.3g}"
            words = Text.assemble((f"{which:<7}", "bold"), score, (given, "dim"), " ", text)
            self.console.print(words, soft_wrap=True)


class ReportingRollouts(Feature):
    """Reports on the completions of an objective that trains on groups of its own."""

    def is_on(self, config: Config) -> bool:
        return config.objective.trains_on_rollouts

    def callbacks(self, parts: Parts) -> list[Placed]:
        options: Any = parts.config.objective
        rollouts = Rollouts(parts.metrics, parts.run_dir, options, parts.config.data, parts.console)
        return [(Phase.MEASURES, rollouts)]


def signs(groups: list[Group]) -> dict[str, float]:
    """Returns in what a collapse shows: nats a token, tokens a completion, and the share that is cut off."""
    each = [completion for group in groups for completion in group.completions]
    tokens = sum(len(completion.log_probs) for completion in each)
    cut_off = sum(not completion.ended for completion in each) / len(each)
    return {"entropy": sum(c.entropy for c in each) / max(tokens, 1), "length": tokens / len(each), "cut_off": cut_off}


def collapses(first: dict[str, float], now: dict[str, float]) -> dict[str, str]:
    """Returns what of a collapse a rollout shows, by kind, in words that say what to change."""
    found = {}
    if now["entropy"] < first["entropy"] / 10:
        found["entropy"] = (
            f"the entropy of a token has fallen from {first['entropy']:.2g} to {now['entropy']:.2g} nats, so "
            "completions of a group hardly differ. If rewards should still rise, go back to an earlier checkpoint and "
            "lower optimizer.lr, or raise objective.temperature or objective.clip_high (0.28)"
        )
    if now["length"] > 2 * first["length"] and now["cut_off"] > 0.5:
        found["length"] = (
            f"completions have grown from {first['length']:,.0f} to {now['length']:,.0f} tokens, and most are cut off. "
            "If they should be that long, raise objective.max_new_tokens; if not, set objective.overlong_buffer, a "
            "penalty, or objective.loss=dr_grpo, in which long wrong answers cost as much as short ones"
        )
    return found


def overfits(validated: list[Validated], prompts: int) -> str | None:
    """Returns what to do if rewards of `prompts` held-out prompts fall while those of training rise, else None.

    They fall if the last two validations are both below an earlier one by twice the standard error of the difference.
    """
    if len(validated) < 3:
        return None
    best, last = max(validated[:-2], key=lambda one: one.held_out), validated[-1]
    margin = 2 * last.spread * math.sqrt(2 / prompts)
    if max(one.held_out for one in validated[-2:]) >= best.held_out - margin or last.trained <= best.trained:
        return None
    fell = f"val/reward has fallen from {best.held_out:.3g} (step {best.step:,}) to {last.held_out:.3g}"
    rose = f"train/reward rose from {best.trained:.3g} to {last.trained:.3g}"
    instead = "Use the best checkpoint, as lmtrain.export does, more prompts, or objective.kl_coef=0.05"
    return f"{fell}, while {rose}: the model learns the training prompts by heart. {instead}"


def chosen(groups: list[Group], step: int) -> list[tuple[str, Group, int]]:
    """Returns the completions with the highest and lowest reward, and one at random that is the same in every run."""
    each = [(group, i) for group in groups for i in range(len(group.texts))]
    scored = [(group, i) for group, i in each if group.rewards[i] == group.rewards[i]] or each
    best = max(scored, key=lambda at: float(at[0].rewards[at[1]]))
    worst = min(scored, key=lambda at: float(at[0].rewards[at[1]]))
    random = each[mix64(step, len(each)) % len(each)]
    return [("best", *best), ("worst", *worst), ("random", *random)]


def number(value: Any) -> float | None:
    """Returns the value as a float, or None for NaN, which JSON does not have."""
    return float(value) if value == value else None


def shown(group: Group, i: int) -> str:
    """Returns a completion as text for people, with the turns of its environment."""
    return group.texts[i] if group.played is None else written(group.played[i]["turns"])


def shown_prompt(group: Group, data: DataConfig) -> str:
    """Returns the prompt as text; of messages, the last one by the user."""
    columns = group.prompt.columns
    prompt = columns[prompt_column(columns, data)]
    if isinstance(prompt, str):
        return prompt
    turns = bare_turns(prompt, "the prompt")  # those after the last by the user are the data's answer
    return next((turn["content"] for turn in reversed(turns) if turn["role"] == "user"), "")


def keep(groups: list[Group], data: DataConfig, path: Path) -> None:
    """Writes a rollout as a Parquet file with one row per completion."""
    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "epoch": group.prompt.epoch, "row": group.prompt.row, "sample": i, "prompt": shown_prompt(group, data),
            "prompt_ids": list(group.prompt.ids), "text": group.texts[i], "completion_ids": completion.ids,
            "sampler_log_probs": completion.log_probs, "reward": number(group.rewards[i]),
            "advantage": number(group.advantages[i]), "ended": completion.ended, "resampled": group.resampled,
            **({"turns": json.dumps(group.played[i]["turns"], ensure_ascii=False)} if group.played else {}),
            **({"sampled": completion.sampled} if completion.sampled else {}),
            **{f"reward_{name}": number(values[i]) for name, values in group.parts.items() if len(group.parts) > 1},
        }
        for group in groups for i, completion in enumerate(group.completions)
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    parquet.write_table(pyarrow.Table.from_pylist(shown_in(rows, hide)), temporary)
    temporary.replace(path)
