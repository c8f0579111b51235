"""A pipeline as written in conf/pipeline/<name>.yaml: stages and evaluations, each with a list of overrides.

    stages:
      pretrain:
        overrides: [data=text, data.path=book.txt]
      sft:
        overrides: [objective=sft, model=pretrained, 'model.name_or_path=${stage.pretrain.export}', ...]
    evaluations:
      answers:
        of: [pretrain, sft]
        overrides: [data=chat_jsonl, data.val_path=held_out.jsonl]

`${stage.NAME.export}` is the folder that stage NAME exports, `export_merged` that of its merged adapter, `run` its run
folder. A stage depends on the stages that it references this way and on those under `needs`. Imports no torch.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from lmtrain.config import safe_yaml
from lmtrain.config.constraints import name_of_folder
from lmtrain.config.defaults import conf_dir, options_of
from lmtrain.config.override_text import bare_or_quoted
from lmtrain.config.schema import Config
from lmtrain.errors import UserError, did_you_mean
from lmtrain.files import absolute

REFERENCE = re.compile(r"\$\{stage\.([^.}]*)\.?([^}]*)\}")
FOLDERS = ("export", "export_merged", "run")  # the folders of a stage that can be referenced
_NAME = re.compile(r"[a-z][a-z0-9_]*")
SECTIONS = {field.name for field in dataclasses.fields(Config)} | {"stage", "experiment", "evaluations", "stages"}


@dataclass(frozen=True)
class Stage:
    """A run of lmtrain.train, with its overrides as written in the file."""

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Evaluation:
    """A run of lmtrain.evaluate on the export of each of the stages in `of`."""

    name: str
    words: tuple[str, ...]
    of: tuple[str, ...]
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline, with its stages in an order in which each comes after those it needs."""

    name: str
    stages: tuple[Stage, ...]
    evaluations: tuple[Evaluation, ...]
    file: Path


def find(name: str, config_dir: str | None) -> Path:
    """Returns the file of a pipeline: of lmtrain, of --config-dir, or a path. Raises UserError if none exists."""
    folders = [*([Path(config_dir)] if config_dir else []), conf_dir()]
    places = [folder / "pipeline" / f"{name}.yaml" for folder in folders]
    if name.endswith((".yaml", ".yml")):
        places = [Path(name).expanduser()]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        known = options_of("pipeline", folders)
        hint = did_you_mean(name, known)
        raise UserError(f"pipeline={name}: there is no such pipeline{hint} (there are {', '.join(known)}, or a file)")
    return found


def read(path: Path) -> Pipeline:
    """Reads a pipeline from a file.

    Raises:
        UserError: the file can't be read, or a stage needs an unknown stage or, directly or indirectly, itself.
    """
    tree = safe_yaml.read(path)
    _check_keys(tree, ("stages", "evaluations"), str(path))
    stages = {name: _stage(name, node) for name, node in _named(tree, "stages", str(path)).items()}
    if not stages:
        raise UserError(f"{path} has no stages: write them under `stages:`, a name each")
    evaluations = [_evaluation(name, node, stages) for name, node in _named(tree, "evaluations", str(path)).items()]
    for one in evaluations:
        if one.name in stages:
            raise UserError(f"evaluation {one.name} has the name of a stage: choose another")
    _check_needs([*stages.values(), *evaluations], stages)
    return Pipeline(path.stem, tuple(in_order(stages)), tuple(evaluations), path)


def in_order(stages: dict[str, Stage]) -> list[Stage]:
    """Sorts stages so that each comes after those it needs, else as written. Raises UserError for circular needs."""
    try:
        TopologicalSorter({name: stage.needs for name, stage in stages.items()}).prepare()
    except CycleError as error:
        raise UserError(f"stages need one another in a circle: {' needs '.join(reversed(error.args[1]))}") from None
    found: dict[str, Stage] = {}
    while len(found) < len(stages):
        name = next(n for n, stage in stages.items() if n not in found and found.keys() >= {*stage.needs})
        found[name] = stages[name]
    return list(found.values())


def _named(tree: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    found = tree.get(key) or {}
    if not isinstance(found, dict):
        raise UserError(f"{where}: {key} must be a mapping from names to settings")
    for name in found:
        if not _NAME.fullmatch(str(name)) or name in SECTIONS:
            why = "is a part of the config" if name in SECTIONS else "use a-z, 0-9 and _, a letter first"
            raise UserError(f"{where}: {key} can't have one called {name}: {why}")
    return found


def _check_keys(node: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(node, dict):
        raise UserError(f"{where} holds no keys; it may have {', '.join(known)}")
    for key in node:
        if key not in known:
            raise UserError(f"{where}: {key} is not known (keys: {', '.join(known)})")


def _strings(node: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = node.get(key) or []
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise UserError(f"{where}.{key} must be a list of texts, such as [objective=sft, trainer.max_steps=100]")
    for word in value:
        if word.startswith("-"):  # would be a flag of the command that runs the stage
            raise UserError(f"{where}.{key}: {word} is not an override; flags are typed")
    return tuple(value)


def _stage(name: str, node: Any) -> Stage:
    _check_keys(node, ("overrides", "needs"), f"stage {name}")
    words = _strings(node, "overrides", f"stage {name}")
    return Stage(name, words, _all_needs(words, _strings(node, "needs", f"stage {name}")))


def _evaluation(name: str, node: Any, stages: dict[str, Stage]) -> Evaluation:
    _check_keys(node, ("overrides", "of"), f"evaluation {name}")
    words, of = _strings(node, "overrides", name), _strings(node, "of", name) or tuple(stages)
    return Evaluation(name, words, of, _all_needs(words, of))


def _all_needs(words: tuple[str, ...], named: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*named, *needs_of(words)]))


def needs_of(words: tuple[str, ...]) -> list[str]:
    """Returns the stages that overrides reference. Raises UserError if a reference names no folder of a stage."""
    found = [match for word in words for match in REFERENCE.finditer(word)]
    for match in found:
        if match[2] not in FOLDERS:
            raise UserError(f"{match[0]}: of a stage there are {', '.join(FOLDERS)}: ${{stage.{match[1]}.export}}")
    return [match[1] for match in found]


def _check_needs(all_of_them: list[Stage | Evaluation], stages: dict[str, Stage]) -> None:
    for one in all_of_them:
        kind = "stage" if isinstance(one, Stage) else "evaluation"
        for needed in one.needs:
            if needed == one.name:
                raise UserError(f"{kind} {one.name} needs itself: name a stage before it")
            if needed not in stages:
                known = f"{did_you_mean(needed, stages)} ({', '.join(stages)})"
                raise UserError(f"{kind} {one.name} needs {needed}, which is not a stage{known}")


_OWN = ("run.name", "run.root", "run.dir")  # keys of the pipeline's own folder


@dataclass
class Typed:
    """The words of the command line: those for the pipeline, for all stages, and for one stage or evaluation."""

    pipeline: str
    own: dict[str, str] = field(default_factory=dict)
    common: list[str] = field(default_factory=list)
    of: dict[str, list[str]] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        """Returns the folder of pipeline `name`: run.dir, or run.root/run.name, by default outputs/<pipeline>."""
        given = {key: text.strip("'\"") for key, text in self.own.items()}
        name_of_folder("run.name", given.get("run.name"))
        if "run.dir" in given:
            return absolute(given["run.dir"])
        return absolute(given.get("run.root", "outputs")) / given.get("run.name", name)


def pipeline_of(words: list[str]) -> str:
    """Returns the value of pipeline=... on the command line. Raises UserError if there is none."""
    named = [word.partition("=")[2] for word in words if word.startswith("pipeline=")]
    if not named or not named[-1]:
        raise UserError("which pipeline? pipeline=laptop needs no network; pipeline=my_stages.yaml is one of yours")
    return named[-1].strip("'\"")


def key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def sort(words: list[str], pipeline: Pipeline) -> Typed:
    """Assigns the words: sft.optimizer.lr=1e-4 to the stage sft, run.name to the pipeline, others to all stages."""
    typed = Typed(pipeline_of(words))
    names = [*(s.name for s in pipeline.stages), *(e.name for e in pipeline.evaluations)]
    for word in words:
        key = key_of(word)
        first = key.partition(".")[0]
        if key == "pipeline":
            continue
        if key in _OWN:
            typed.own[key] = word.partition("=")[2]
        elif first in names:
            sign = re.match(r"[+~]*", word)[0]  # type: ignore[index]
            typed.of.setdefault(first, []).append(sign + word[len(sign) + len(first) + 1 :])
        elif "." in key and first not in SECTIONS and (near := did_you_mean(first, names)):
            raise UserError(f"{word}: there is no stage {first}{near} ({', '.join(names)})")
        else:
            typed.common.append(word)
    return typed


def extended(pipeline: Pipeline, typed: Typed) -> Pipeline:
    """Returns the pipeline with the words typed for single stages and evaluations appended to their overrides.

    A stage needs the stages that its typed words reference, which must come before it.
    """

    def more(one: Stage | Evaluation, before: list[str]) -> dict[str, Any]:
        name, added = one.name, tuple(typed.of.get(one.name, []))
        if not all("=" in word or word.startswith("~") for word in added):
            raise UserError(f"{name}: write {name}.KEY=VALUE, such as {name}.trainer.max_steps=100")
        for needed in needs_of(added):
            if needed not in before:
                raise UserError(f"{name} can't use stage {needed}: name one that comes before it")
        return {"words": (*one.words, *added), "needs": _all_needs(added, one.needs)}

    names = [stage.name for stage in pipeline.stages]
    stages = tuple(dataclasses.replace(s, **more(s, names[:i])) for i, s in enumerate(pipeline.stages))
    evaluations = tuple(dataclasses.replace(e, **more(e, names)) for e in pipeline.evaluations)
    return dataclasses.replace(pipeline, stages=stages, evaluations=evaluations)


def resolved(words: Sequence[str], folder: Path) -> list[str]:
    """Returns the words with each reference such as `${stage.NAME.export}` replaced by a path."""

    def path(match: re.Match[str]) -> str:
        run = folder / match[1]
        return bare_or_quoted(str(run if match[2] == "run" else run / match[2]))

    return [REFERENCE.sub(path, word) for word in words]
