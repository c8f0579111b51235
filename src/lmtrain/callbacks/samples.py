"""Text samples from training: printed, logged, written to samples.jsonl, and scored if there are references."""

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from lmtrain.callbacks.metrics import Clock
from lmtrain.callbacks.records import Joined
from lmtrain.config.effect import TRIAL
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus
from lmtrain.distributed import process_group as world
from lmtrain.files import json_line
from lmtrain.generation.prompts import Prompt, prompts_of
from lmtrain.generation.sampling import Continuation, continuations
from lmtrain.generation.text_metrics import TextMetrics, reading
from lmtrain.objectives.base import Objective
from lmtrain.secrets import hide
from lmtrain.strategies import sharding
from lmtrain.terminal import visible


class Samples(pl.Callback):
    """A callback that continues each prompt at every n-th validation, with its own seed so as not to affect training.

    Text that is compared with a reference is decoded greedily: the same weights give the same answers and scores.
    """

    def __init__(self, path: Path, config: Config, corpus: Corpus, console: Console, clock: Clock) -> None:
        """
        Args:
            clock: measures the training time, which sampling is no part of.
        """
        self.clock = clock
        self.path, self.console = path, console
        self.cfg, self.seed = config.callbacks.samples, config.seed
        self.tokenizer, self.end_ids = corpus.tokenizer, corpus.end_ids
        self.prompts = prompts_of(self.cfg, corpus, config.data.system_prompt)
        self.text_metrics = TextMetrics(self.cfg.metrics, config.run.allow_target)
        every, timed = config.trainer.val_check_interval, config.budget.minutes is not None
        # A run with a time budget shows samples within its first minute, long before its first validation.
        self.early = math.ceil(every / 3) if timed and every is not None else None
        self.early_seconds = 0.0  # that this took
        self.validations = 0
        self.written: list[Continuation] = []  # in this validation

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations = state_dict["validations"]

    def write(self, trainer: pl.Trainer, module: Objective) -> dict[str, float]:
        """Generates the texts if they are due and returns their scores; every rank must call it at each validation."""
        self.written, places = [], list(range(len(self.prompts)))
        # The validation before training is not counted, and always generates samples.
        if trainer.global_step > 0 and trainer.state.fn == TrainerFn.FITTING:
            self.validations += 1
        if self.validations % self.cfg.every_n_validations != 0:
            return {}
        if sharding.is_sharded(module.model):  # generation needs all ranks
            with sharding.root_gathered(module.model):
                self.written = [self._continue(module, i, True) for i in places]
        else:
            self.written = world.shared_out(places, lambda i: self._continue(module, i, False))
        both = zip(self.written, self.prompts, strict=True)
        pairs = [(made.text, p.reference, p.shown) for made, p in both if p.reference is not None]
        if not pairs or not self.text_metrics.metrics:
            return {}
        return world.from_first(lambda: self.text_metrics.score(*map(list, zip(*pairs, strict=True))))

    def _continue(self, module: Objective, place: int, together: bool) -> Continuation:
        prompt = self.prompts[place]
        [written] = continuations(
            module.model.model,
            self.tokenizer,
            [prompt.given],
            max_new_tokens=self.cfg.max_new_tokens,
            temperature=self.cfg.temperature if prompt.reference is None else 0.0,
            top_k=self.cfg.top_k,
            seed=self.seed + place,  # a prompt that is given twice shows two samples
            end_ids=self.end_ids,
            together=together,
            no_repeat=self.cfg.no_repeat if prompt.reference is None else None,
        )
        return written

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.early and trainer.world_size == 1:
            assert isinstance(pl_module, Objective)
            began = time.perf_counter()
            with self.clock.pause():
                self.written = [self._continue(pl_module, i, False) for i in range(len(self.prompts))]
                self._show(trainer)
            self.early_seconds = time.perf_counter() - began

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show(trainer)

    def _show(self, trainer: pl.Trainer) -> None:
        if not self.written or not trainer.is_global_zero or trainer.state.fn != TrainerFn.FITTING:
            return
        step = trainer.global_step
        prompts = [replace(p, shown=hide(p.shown), reference=p.reference and hide(p.reference)) for p in self.prompts]
        texts = list(zip(prompts, (hide(made.text) for made in self.written), strict=True))
        for (prompt, text), made in zip(texts, self.written, strict=True):
            row = {"step": step, "prompt": prompt.shown, "text": text}
            row |= {"reference": prompt.reference} if prompt.reference is not None else {}
            row |= {"is_answer": True} if self.end_ids else {}
            # A text goes on for ever, an answer has an end.
            row |= {"cut_off": True} if self.end_ids and made.cut else {}
            said = reading(prompt.shown + text) if self.cfg.reading is not None else None
            row |= {"reading": said} if said is not None else {}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json_line(row))
            title = f"{'answer' if self.end_ids else 'sample'} at step {step}{', cut off' if 'cut_off' in row else ''}"
            if self.console.is_terminal:
                panel = Panel(self._shown(prompt, text), title=title, title_align="left", subtitle=said)
                self.console.print(panel)
            elif not os.environ.get(TRIAL):
                words = [title, on_a_line(prompt.shown), on_a_line(text), *([said] if said is not None else [])]
                self.console.print(" | ".join(words), soft_wrap=True, highlight=False, markup=False)
        self._log(trainer, step, texts)

    def _shown(self, prompt: Prompt, text: str) -> Text:
        if self.end_ids is None:
            return Text(visible(prompt.shown), style="dim") + Text(visible(text))
        parts = [("prompt", prompt.shown, "dim"), ("answer", text, ""), ("reference", prompt.reference, "dim")]
        given = [(name, visible(words), style) for name, words, style in parts if words is not None]
        return Text("\n").join(Text.assemble((f"{name:<11}", "bold"), (words, style)) for name, words, style in given)

    def _log(self, trainer: pl.Trainer, step: int, texts: list[tuple[Prompt, str]]) -> None:
        columns = ["step", "prompt", "text", "reference"]
        rows = [[str(step), prompt.shown, text, prompt.reference or ""] for prompt, text in texts]
        for logger in trainer.loggers:
            if not isinstance(logger, Joined) or logger not in logger.records.joined:
                continue
            with logger.records.outliving(logger):
                if isinstance(logger, pl.loggers.TensorBoardLogger):
                    for i, (prompt, text) in enumerate(texts):
                        logger.experiment.add_text(f"sample/{i}", f"```\n{self._shown(prompt, text).plain}\n```", step)
                else:
                    logger.log_texts(columns, rows)


def on_a_line(text: str, characters: int = 160) -> str:
    """Returns the beginning of a text on one line, for the screen or a log; samples.jsonl has all of it."""
    words = " ".join(text.split())
    return words if len(words) <= characters else f"{words[:characters]}..."
