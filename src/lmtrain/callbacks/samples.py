"""Text the model writes while it trains: shown, logged and kept in samples.jsonl."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from lmtrain.callbacks.metrics import Metrics
from lmtrain.generation import sample_text
from lmtrain.objectives.base import Objective
from lmtrain.schema import Samples as SamplesConfig


class Samples(pl.Callback):
    """After every n validations: continues each prompt, with a seed of its own so training is not disturbed."""

    def __init__(
        self,
        path: Path,
        tokenizer: Any,
        prompts: list[str],
        cfg: SamplesConfig,
        metrics: Metrics,
        console: Console,
        seed: int,
    ) -> None:
        self.path, self.tokenizer, self.prompts, self.cfg = path, tokenizer, prompts, cfg
        self.metrics, self.console, self.seed = metrics, console, seed
        self.validations = 0

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.validations = state_dict["validations"]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validations += 1
        if self.validations % self.cfg.every_n_validations != 0 or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, Objective)
        step = trainer.global_step
        with self.metrics.clock.pause():
            texts = [
                sample_text(
                    pl_module.model.model,
                    self.tokenizer,
                    prompt,
                    max_new_tokens=self.cfg.max_new_tokens,
                    temperature=self.cfg.temperature,
                    top_k=self.cfg.top_k,
                    seed=self.seed,
                )
                for prompt in self.prompts
            ]
        for prompt, text in zip(self.prompts, texts, strict=True):
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
            body = Text(prompt, style="dim") + Text(text)
            self.console.print(Panel(body, title=f"sample at step {step}", title_align="left"))
        self._log(trainer, step, texts)

    def _log(self, trainer: pl.Trainer, step: int, texts: list[str]) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, pl.loggers.TensorBoardLogger):
                for i, text in enumerate(texts):
                    logger.experiment.add_text(f"sample/{i}", f"```\n{self.prompts[i]}{text}\n```", step)
            elif isinstance(logger, pl.loggers.WandbLogger):
                logger.log_text("samples", columns=["step", "text"], data=[[str(step), t] for t in texts])
