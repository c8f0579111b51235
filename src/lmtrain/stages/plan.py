"""Every stage and evaluation of a pipeline composed and checked, before the first of them begins. Imports no torch."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from lmtrain.config import compose as rules
from lmtrain.config import effect, environment, places, trust
from lmtrain.config.constraints import MACHINE, SHOWN
from lmtrain.config.fingerprint import short_hash
from lmtrain.config.keys import keys_in, value_of
from lmtrain.config.override_text import bare_or_quoted
from lmtrain.config.schema import Config
from lmtrain.errors import UserError
from lmtrain.stages import definition as command
from lmtrain.stages.definition import REFERENCE, Evaluation, Pipeline, Stage, Typed, needs_of

# What is shown of a run decides nothing in the next stage, but for what is exported of it.
_SHAPES_EXPORT = ("export.enabled", "export.dtype", "export.merge", "export.generation", "checkpoint.monitor")


@dataclass
class PlannedStage:
    stage: Stage
    words: list[str]  # of its lmtrain.train
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
        """What shapes the stage's export; other stages' folders by their names, wherever the pipeline lies."""
        found = {}
        for key in keys_in(self.config):
            if key.shapes not in (SHOWN, MACHINE) or key.name in _SHAPES_EXPORT:
                value = value_of(self.config, key.name)
                found[key.name] = value.replace(str(folder), "") if isinstance(value, str) else value
        return found


@dataclass
class PlannedEvaluation:
    """One evaluation of one stage's export."""

    evaluation: Evaluation
    of: str
    words: list[str]  # of its lmtrain.evaluate
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
        """What identifies a stage: its settings, the files it reads, and what the stages it needs have exported."""
        inputs = {name: exports[name] for name in one.stage.needs}
        return short_hash([one.settings(self.folder), one.data, inputs])

    def identity_of_scores(self, one: PlannedEvaluation, exports: dict[str, str]) -> str:
        """What identifies an evaluation: its words and the models it reads."""
        needed = {name: exports[name] for name in one.needs}
        return short_hash([[word.replace(str(self.folder), "") for word in one.words], needed])

    def flags_of(self, one: PlannedEvaluation) -> list[str]:
        """What its process is told: addresses of data that its stage was allowed to read, it may read again."""
        stage = next(stage for stage in self.stages if stage.name == one.of)
        config = self.folder / one.of / "export" / "lmtrain_config.yaml"
        return [*self.flags, *(["--trust", str(config)] if any(places.addresses(vars(stage.config.data))) else [])]


def make(pipeline: Pipeline, typed: Typed, config_dir: str | None) -> PipelinePlan:
    """Composes and checks every stage and evaluation.

    Raises:
        UserError: the first mistake in any of them, and in which.
    """
    pipeline = command.extended(pipeline, typed)
    folder = typed.folder(pipeline.name)
    flags = [*([] if config_dir is None else ["--config-dir", config_dir]), *environment.flags()]
    stages = [_stage(one, typed, folder, config_dir, pipeline.file) for one in pipeline.stages]
    _refuse_common_without_effect(typed, stages, config_dir)
    by_name = {one.name: one for one in stages}
    for one in stages:
        _check_uses(one.name, one.stage.words, by_name)
    evaluations = [
        made for one in pipeline.evaluations for made in _evaluation(one, typed, folder, config_dir, pipeline.file)
    ]
    for name, written in {e.evaluation.name: e.evaluation.words for e in evaluations}.items():
        _check_uses(name, written, by_name)
    for made in evaluations:
        if not by_name[made.of].config.export.enabled:
            raise UserError(
                f"evaluation {made.evaluation.name} needs what {made.of} exports: {made.of}.export.enabled=true"
            )
    return PipelinePlan(pipeline, folder, flags, stages, evaluations)


def _default(config_dir: str | None, words: Iterable[str]) -> Callable[[str], object]:
    @functools.cache
    def tree() -> DictConfig:
        return rules.compose(trust.of_typed(words), config_dir)

    return lambda key: effect.default_in(tree())(key)


def _composed(
    what: str, verb: str, words: list[str], own: list[str], config_dir: str | None, file: Path, typed: list[str]
) -> Config:
    """The checked config; mistakes name the stage, and of its own words (not those of all stages) none is ignored.

    Args:
        own: the stage's words, those in `file` and those that are typed for it.
        typed: all that is typed.
    """
    with command.naming(what):
        tree = rules.compose(words, config_dir)
        written = [word for word in own if word not in typed]
        environment.refuse_words(tree, written, typed, file)
        places.refuse_words(tree, written, typed, file)
        config = rules.check(tree)
        for message in effect.without_effect(verb, own, config, _default(config_dir, words)):
            raise UserError(message)
        return config


def _stage(one: Stage, typed: Typed, folder: Path, config_dir: str | None, file: Path) -> PlannedStage:
    words = command.of_stage(one.name, one.words, typed, folder)
    own = command.resolved(one.words, folder)
    told = [*typed.common, *command.resolved(tuple(typed.of.get(one.name, [])), folder)]
    config = _composed(f"stage {one.name}", "train", words, own, config_dir, file, told)
    return PlannedStage(one, words, config, folder / one.name)


def _evaluation(
    one: Evaluation, typed: Typed, folder: Path, config_dir: str | None, file: Path
) -> list[PlannedEvaluation]:
    """Composes an evaluation once and gives it to each of its stages: they differ in the model alone."""
    scores, found = folder / "evaluations", list[PlannedEvaluation]()
    shared = [*command.of_evaluation(one.name, one.words, typed, folder), f"evaluate.dir={bare_or_quoted(str(scores))}"]
    composed = ["model.max_position_embeddings=1000000", *shared]  # as lmtrain.evaluate composes them
    own = command.resolved(one.words, folder)
    told = [
        *typed.common,
        *command.resolved(tuple(typed.of.get(one.name, [])), folder),
        f"evaluate.dir={bare_or_quoted(str(scores))}",
    ]
    config = _composed(f"evaluation {one.name}", "evaluate", composed, own, config_dir, file, told)
    for of in one.of:
        name, model = f"{one.name}-{of}", bare_or_quoted(str(folder / of / "export"))
        words = [*shared, f"run_dir={model}", f"evaluate.name={name}"]
        found.append(PlannedEvaluation(one, of, words, config, scores / f"{name}.json"))
    return found


def _refuse_common_without_effect(typed: Typed, stages: list[PlannedStage], config_dir: str | None) -> None:
    """Raises UserError for a word of all stages that has no effect in any."""
    found = [
        effect.without_effect("train", typed.common, one.config, _default(config_dir, typed.common)) for one in stages
    ]
    for message in found[0]:
        if all(message in others for others in found):
            raise UserError(message)


def _check_uses(what: str, words: tuple[str, ...], stages: dict[str, PlannedStage]) -> None:
    """Raises UserError where a stage is asked for a folder that it won't have, or an adapter is taken for a model."""
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
                raise UserError(
                    f"{what}: {other.name} exports an adapter, not a model: go on training it with "
                    f"peft.adapter={match[0]} and its base as model.name_or_path, or name "
                    f"${{stage.{other.name}.export_merged}} and set export.merge=true in {other.name}"
                )
