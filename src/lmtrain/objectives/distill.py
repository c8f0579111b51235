"""Distillation: the student learns a teacher's next-token distributions, on data or on its own samples.

The loss is forward KL, reverse KL or a divergence between them (Agarwal et al. 2024, "On-policy distillation of
language models", GKD, arXiv:2306.13649), as a mean over learned tokens.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from lmtrain.config.constraints import (
    CONTENT,
    MACHINE,
    MODEL,
    SOURCE,
    TRAJECTORY,
    ReadWhere,
    above_zero,
    at_least,
    up_to_one,
)
from lmtrain.config.options import LoadedModelConfig
from lmtrain.config.schema import Config, ObjectiveConfig
from lmtrain.config.schema_data import TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.corpus import Corpus
from lmtrain.data.examples.rows import PaddedRows, padded
from lmtrain.data.order import mix64
from lmtrain.data.text.windows import IGNORE
from lmtrain.distributed.devices import data_parallel, total
from lmtrain.errors import UserError
from lmtrain.losses.distillation import OutputHead
from lmtrain.models.blocks import output_head
from lmtrain.models.build import build_model
from lmtrain.models.folder import export_of
from lmtrain.models.language_model import LanguageModel
from lmtrain.objectives.base import Objective
from lmtrain.objectives.parts import LossParts, inputs_of, options_of, with_routers
from lmtrain.objectives.reference import first_values_hash
from lmtrain.rollouts.engine import Request, Sampling
from lmtrain.rollouts.in_process import InProcess
from lmtrain.rollouts.rollout import after_prompt
from lmtrain.strategies import sharding

_STUDENT = 0x67_6B_64  # separates the seeds of the student's samples from others


_SAMPLES = ReadWhere(lambda c: c.objective.on_policy > 0, "set objective.on_policy=0.5 too")


@dataclass(kw_only=True)
class DistillOptions(ObjectiveConfig):
    rows: ClassVar[str] = "conversations"

    teacher: Annotated[str | None, MODEL, SOURCE, CONTENT]
    beta: Annotated[float, TRAJECTORY, up_to_one]
    temperature: Annotated[float, TRAJECTORY, above_zero]
    on_policy: Annotated[float, TRAJECTORY, up_to_one]
    max_new_tokens: Annotated[int, TRAJECTORY, at_least(1), _SAMPLES]
    sampling_temperature: Annotated[float, TRAJECTORY, above_zero, _SAMPLES]
    rollout_batch_size: Annotated[int, MACHINE, at_least(1), _SAMPLES]

    def check(self, config: Config) -> None:
        if not self.teacher:
            raise UserError("objective=distill needs a teacher: set objective.teacher to a run, a folder or a hub name")
        if self.beta < 0:
            raise UserError(f"objective.beta={self.beta}: a number from 0 (forward KL) to 1 (reverse KL) is needed")

    def other_models(self, config: Config) -> list[LoadedModelConfig]:
        return [
            LoadedModelConfig(
                name="teacher",
                init="pretrained",
                name_or_path=export_of(str(self.teacher)),
                trust_remote_code=config.model.trust_remote_code,
                attention=config.model.attention,
                learning_rate=0.0,
                vocab_size=None,
                vocab_multiple_of=1,
                dropout=0.0,
            )
        ]


class Distill(Objective):
    """Distillation. A micro-batch is that of SFT: {input_ids, labels, learned, seen, [position_ids, cu_seqlens]}."""

    Options = DistillOptions
    reported = ("loss", "on_policy")
    loss_is_nll = False

    def prepare(self, config: Config, corpus: Corpus) -> None:
        """Loads the teacher.

        Raises:
            UserError: it can't be loaded or has another tokenizer than the student, or answers may not fit a model.
        """
        self.options, self.tokenizer = options_of(config, DistillOptions), corpus.tokenizer
        (cfg,) = self.options.other_models(config)
        check_tokenizer(str(cfg.name_or_path), corpus)
        eos = corpus.tokenizer.eos_token_id
        model = build_model(cfg, len(corpus.tokenizer), eos, config.data.seq_len)
        self.fingerprint["contents"]["teacher"] = first_values_hash(model)
        teacher = LanguageModel(model.eval().requires_grad_(False), config.router)
        self._teacher = [teacher]  # in a list: not a submodule, so neither saved nor optimized
        if self.options.on_policy:
            self._check_room(corpus)
        self.end_ids = tuple(corpus.end_ids or [eos])
        self.scale: Tensor | float = 1.0
        self.is_on_policy = False

    def _check_room(self, corpus: Corpus) -> None:
        """Raises UserError if a prompt and the student's answer may together exceed the positions of a model."""
        configs = (model.model.config.get_text_config() for model in (self.model, self.teacher))
        most = min(getattr(config, "max_position_embeddings", None) or 2**31 for config in configs)
        examples, room = cast(PaddedRows, corpus.train).examples, most - self.options.max_new_tokens
        long = np.flatnonzero(examples.lengths - 1 > room).tolist()  # others have short prompts, whatever is learned
        longest = max((1 + int(examples.read(index)[1][1:].argmax()) for index in long), default=0)
        if longest > room:
            found = f"objective.on_policy: a prompt has {longest:,} tokens, and the models' {most:,} positions"
            drop = f"data.on_too_long=drop data.max_length={max(room, 1)}"
            raise UserError(f"{found} leave room for {max(room, 0):,}: lower objective.max_new_tokens, or set {drop}")

    @property
    def teacher(self) -> LanguageModel:
        return self._teacher[0]

    def on_placed(self) -> None:
        self.teacher.to(self.device)

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != IGNORE).sum()

    def validation_names(self) -> list[str]:
        return ["loss", *self.model.router_losses.names()]

    def plan_rows(self) -> list[tuple[str, str]]:
        o = self.options
        kind = {0.0: "forward KL", 1.0: "reverse KL"}.get(o.beta, f"generalised JSD, beta={o.beta:g}")
        where = f"{o.on_policy:.0%} of steps on the student's own samples" if o.on_policy else "on the data"
        return [("loss", f"{kind} at temperature {o.temperature:g}, {where}; teacher: {o.teacher}")]

    @torch.no_grad()
    def look_ahead(self, micro_batches: list[dict[str, Tensor]], n_tokens: Tensor) -> None:
        """Replaces the step's answers by the student's own samples, in a share objective.on_policy of all steps."""
        step = self.trainer.global_step
        self.scale = 1.0
        self.is_on_policy = self.training and mix64(_STUDENT, self.seed, step) < self.options.on_policy * 2**64
        if not self.is_on_policy:
            return
        prompts = [prompts_of(batch) for batch in micro_batches]
        part = data_parallel(self.trainer)
        with sharding.gathered(self.model):
            written = self._written(step, [p for some in prompts for p in some], part.rank, part.size)
        for batch, some in zip(micro_batches, prompts, strict=True):
            if any(some):
                rows = padded([after_prompt(prompt, written.pop(0)) for prompt in some if prompt])
                batch.clear()
                batch.update({name: value.to(self.device) for name, value in rows.items()})
        counted = torch.stack([self.count_tokens(batch).to(self.device) for batch in micro_batches]).sum()
        # The step's sums are divided by the number of labels in the data, and the samples have another.
        self.scale = n_tokens / total(self.trainer, counted.double()).clamp(min=1)

    def _written(self, step: int, prompts: list[list[int]], part: int = 0, parts: int = 1) -> list[list[int]]:
        """Returns an answer to each prompt that isn't empty, in their order.

        The seed of an answer is its row's place in the step, so that rows with the same prompt get different answers.

        Args:
            prompts: of the rows at the places part, part + parts, part + 2 * parts, ... of the step.
        """
        o = self.options
        sampling = Sampling(o.max_new_tokens, o.sampling_temperature, 1.0, self.end_ids, len(self.tokenizer))
        keys = (mix64(_STUDENT, self.seed, step, part + parts * row) for row in range(len(prompts)))
        requests = [Request(p, key) for p, key in zip(prompts, keys, strict=True) if p]
        engine = InProcess(self.model.model, o.rollout_batch_size)
        return [completion.ids for completion in engine.generate(requests, sampling)]

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        o, labels = self.options, batch["labels"].flatten()
        at = batch["learned"] if "learned" in batch else (labels != IGNORE).nonzero()[:, 0]
        inputs = inputs_of(batch)
        with torch.no_grad():
            hidden, _ = self.teacher.hidden_states(inputs)
            hidden, weight, bias = output_head(self.teacher.model, hidden.flatten(0, 1).index_select(0, at))
        head = OutputHead(weight, bias, self.teacher.logit_scale, self.teacher.logit_softcap)
        out = self.model.divergence(
            inputs, at=at, teacher_hidden=hidden, teacher=head, vocabulary=len(self.tokenizer), beta=o.beta,
            temperature=o.temperature,
        )  # fmt: skip
        scale = self.scale if self.training else 1.0
        loss, n = out.tokens.double().sum() * scale, self.count_tokens(batch)
        scaled = n.double() * scale
        sums = {"loss": loss.detach()}
        if self.training:
            sums["on_policy"] = scaled * self.is_on_policy
        return with_routers(LossParts(loss, scaled, sums), out)._replace(n_tokens=n)


def check_tokenizer(teacher: str, corpus: Corpus) -> None:
    """Raises UserError unless the teacher's tokenizer gives the same ids as the student's."""
    cfg = TokenizerConfig(kind="hub", name_or_path=teacher)
    theirs = tokenizers.load_or_train(cfg, lambda _: iter(()), tokenizers.identity(cfg))
    if tokenizers.tokenizer_hash(theirs) != corpus.tokenizer_hash:
        found = f"objective.teacher={teacher} has another tokenizer ({len(theirs):,} tokens) than the student"
        own = f"train the student with its tokenizer: tokenizer=hub tokenizer.name_or_path={teacher}"
        raise UserError(f"{found} ({len(corpus.tokenizer):,}): choose a teacher of the student's family, or {own}")


def prompts_of(batch: dict[str, Tensor]) -> list[list[int]]:
    """Returns the tokens before the first learned one of each row of a padded micro-batch; [] for rows without any."""
    found = []
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        first = next((i for i, label in enumerate(labels) if label != IGNORE), -1)
        found.append(ids[: first + 1])
    return found
