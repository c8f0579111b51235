"""The plan of a pipeline: its stages and evaluations, composed and checked before any begins. Imports no torch."""

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from lmtrain.config import compose as rules
from lmtrain.config import effect, environment, trust
from lmtrain.config.constraints import MACHINE, SHOWN
from lmtrain.config.fingerprint import short_hash
from lmtrain.config.keys import keys_in, value_of
from lmtrain.config.override_text import bare_or_quoted
from lmtrain.config.proposers import LENGTHS
from lmtrain.config.schema import BUDGETS, Config
from lmtrain.errors import UserError, naming
from lmtrain.stages import definition as command
from lmtrain.stages.definition import REFERENCE, Evaluation, Pipeline, Stage, Typed, needs_of
from lmtrain.sweeps.plan import refuse_without_effect

_OF_BOTH = ("data.cache_dir", "trainer.accelerator", "trainer.num_threads", *trust.CODE)  # apply to evaluations too
_OF_STAGES_FOLDER = ("run.name", "run.root", "run.dir", "run.resume")
# Keys marked SHOWN have no effect on the next stage, except these, which shape the export.
_SHAPES_EXPORT = ("export.enabled", "export.dtype", "export.merge", "export.generation", "checkpoint.monitor")
# And these, which decide how long it trains and from where; left out while unset, as by earlier versions.
_IF_SET = (*(f"budget.{name}" for name in BUDGETS), "run.cooldown_from")


@dataclass
class PlannedStage:
    stage: Stage
    words: list[str]  # arguments of its lmtrain.train
    config: Config
    run: Path
    rows: dict[str, int] = field(default_factory=dict)  # of each split, where they were counted
    data: list[str] = field(default_factory=list)  # digests of the files it reads

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def export(self) -> Path:
        return self.run / "export"

    def settings(self, folder: Path) -> dict[str, object]:
        """Returns the settings that shape the stage's export, with paths relative to the pipeline's folder."""
        found = {}
        for key in keys_in(self.config):
            value = value_of(self.config, key.name)
            always = key.shapes not in (SHOWN, MACHINE) or key.name in _SHAPES_EXPORT
            if always or (key.name in _IF_SET and value is not None):
                found[key.name] = value.replace(str(folder), "") if isinstance(value, str) else value
        return found


@dataclass
class PlannedEvaluation:
    """One evaluation of one stage's export."""

    evaluation: Evaluation
    of: str
    words: list[str]  # arguments of its lmtrain.evaluate
    config: Config
    file: Path

    @property
    def name(self) -> str:
        return f"{self.evaluation.name}-{self.of}"

    @property
    def needs(self) -> set[str]:
        """The stages whose exports it reads."""
        return {self.of, *needs_of(self.evaluation.words)}


@dataclass
class PipelinePlan:
    pipeline: Pipeline
    folder: Path
    flags: list[str]
    stages: list[PlannedStage]
    evaluations: list[PlannedEvaluation]

    def identity(self, one: PlannedStage, exports: dict[str, str]) -> str:
        """Returns a hash that identifies a stage: its settings, the files it reads, and the exports it depends on."""
        inputs = {name: exports[name] for name in one.stage.needs}
        return short_hash([one.settings(self.folder), one.data, inputs])

    def identity_of_scores(self, one: PlannedEvaluation, exports: dict[str, str]) -> str:
        """Returns a hash that identifies an evaluation: its overrides and the exports it reads."""
        needed = {name: exports[name] for name in one.needs}
        return short_hash([[word.replace(str(self.folder), "") for word in one.words], needed])

    def flags_of(self, one: PlannedEvaluation) -> list[str]:
        """Returns the flags of an evaluation's process; it may read the remote data that its stage was allowed to."""
        stage = next(stage for stage in self.stages if stage.name == one.of)
        config = self.folder / one.of / "export" / "lmtrain_config.yaml"
        return [*self.flags, *(["--trust", str(config)] if trust.addresses(stage.config.data) else [])]


def make(pipeline: Pipeline, typed: Typed, config_dir: str | None) -> PipelinePlan:
    """Composes and checks every stage and evaluation.

    Raises:
        UserError: the first mistake in any of them; the message names the stage or evaluation.
    """
    pipeline = command.extended(pipeline, typed)
    composer = _Composer(pipeline.file, typed, typed.folder(pipeline.name), config_dir)
    flags = [*([] if config_dir is None else ["--config-dir", config_dir]), *environment.flags()]
    stages = [composer.stage(one) for one in pipeline.stages]
    if not os.environ.get(effect.TRIAL):
        refuse_without_effect("train", typed.common, [one.config for one in stages], composer.default(typed.common))
    by_name = {one.name: one for one in stages}
    for stage in pipeline.stages:
        _check_uses(stage.name, stage.words, by_name)
    evaluations = [made for one in pipeline.evaluations for made in composer.evaluation(one)]
    for evaluation in pipeline.evaluations:
        _check_uses(evaluation.name, evaluation.words, by_name)
    for made in evaluations:
        if not by_name[made.of].config.export.enabled:
            raise UserError(f"evaluation {made.evaluation.name} needs an export: {made.of}.export.enabled=true")
    return PipelinePlan(pipeline, composer.folder, flags, stages, evaluations)


@dataclass
class _Composer:
    """Composes the overrides in a pipeline's file with those typed on the command line."""

    file: Path
    typed: Typed
    folder: Path
    config_dir: str | None

    def stage(self, one: Stage) -> PlannedStage:
        for word in (*one.words, *self.typed.common):
            if (key := command.key_of(word)) in _OF_STAGES_FOLDER:
                raise UserError(f"stage {one.name} sets {key}: a stage's folder is <pipeline>/{one.name}; leave it out")
        common = [w for w in self.typed.common if not _of_evaluations(w)]
        words, config = self._composed("stage", one, "train", common, [])
        return PlannedStage(one, words, config, self.folder / one.name)

    def evaluation(self, one: Evaluation) -> list[PlannedEvaluation]:
        """Composes an evaluation once and plans it for each of its stages, which differ only in the model."""
        scores, found = self.folder / "evaluations", list[PlannedEvaluation]()
        common = [w for w in self.typed.common if _of_evaluations(w) or command.key_of(w) in _OF_BOTH]
        last = [*common, _quoted("evaluate.dir", scores)]
        shared, config = self._composed("evaluation", one, "evaluate", [], last)
        for of in one.of:
            name = f"{one.name}-{of}"
            words = [*shared, _quoted("run_dir", self.folder / of / "export"), f"evaluate.name={name}"]
            found.append(PlannedEvaluation(one, of, words, config, scores / f"{name}.json"))
        return found

    def _composed(
        self, kind: str, one: Stage | Evaluation, verb: str, before: list[str], after: list[str]
    ) -> tuple[list[str], Config]:
        """Returns the arguments of a stage or evaluation and its checked config.

        Errors name the stage, and overrides of its own that have no effect are errors.

        Args:
            before: words that come before, and yield to, those typed for this stage or evaluation.
            after: words that come last and override all others; the last of them is set by lmtrain itself.
        """
        typed = self.typed.of.get(one.name, [])
        written = one.words[: len(one.words) - len(typed)]
        in_file, own = command.resolved(written, self.folder), command.resolved(typed, self.folder)
        if any(command.key_of(word).startswith("budget.") for word in (*before, *own)):
            in_file = [word for word in in_file if command.key_of(word) not in LENGTHS]
        words, by_user = [*in_file, *before, *own, *after], [*self.typed.common, *own, *after[-1:]]
        # lmtrain.evaluate composes its overrides in the same way.
        composed = [*(["model.max_position_embeddings=1000000"] if verb == "evaluate" else []), *words]
        with naming(f"{kind} {one.name}"):
            config = rules.check(rules.compose(composed, self.config_dir, foreign=trust.Foreign(self.file, by_user)))
            refuse_without_effect(verb, [*in_file, *own], [config], self.default(composed))
        return words, config

    def default(self, words: Iterable[str]) -> Callable[[str], object]:
        """Returns a function that gives the value a key has if it is not typed."""

        @functools.cache
        def tree() -> DictConfig:
            return rules.compose(trust.of_typed(words), self.config_dir, foreign=trust.JUDGED)

        return lambda key: effect.default_in(tree())(key)


def _of_evaluations(word: str) -> bool:
    return command.key_of(word).startswith("evaluate.")


def _quoted(key: str, path: Path) -> str:
    return f"{key}={bare_or_quoted(str(path))}"


def _check_uses(what: str, words: tuple[str, ...], stages: dict[str, PlannedStage]) -> None:
    """Raises UserError if a referenced folder will not exist, or if an exported adapter is used as a model."""
    for word in words:
        for match in REFERENCE.finditer(word):
            used, other = match[2], stages[match[1]]
            export, key = other.config.export, command.key_of(word)
            if used == "export" and not export.enabled:
                raise UserError(f"{what} needs what {other.name} exports: {other.name}.export.enabled=true")
            adapter = other.config.peft.method != "none"
            if used == "export_merged" and not (adapter and export.merge):
                why = "set export.merge=true there" if adapter else "it has no adapter: use .export"
                raise UserError(f"{what}: {match[0]} will not be there ({why})")
            if used == "export" and adapter and key == "model.name_or_path":
                found = f"{what}: {other.name} exports an adapter, not a model"
                merged = f"${{stage.{other.name}.export_merged}}, with export.merge=true in {other.name}"
                raise UserError(f"{found}: go on with peft.adapter={match[0]} and its base, or name {merged}")
