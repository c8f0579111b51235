"""The command line of a pipeline: which word goes to which stage, and what each stage is started with."""

import dataclasses
import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path

from lmtrain.config import trust
from lmtrain.config.constraints import name_of_folder
from lmtrain.errors import UserError
from lmtrain.stages.definition import REFERENCE, SECTIONS, Pipeline, needs_of
from lmtrain.sweeps.trials import quoted

_OWN = ("run.name", "run.root", "run.dir")  # of the pipeline's folder
_OF_BOTH = ("data.cache_dir", "trainer.accelerator", "trainer.num_threads", *trust.CLOSED)  # evaluations too
_OF_STAGES_FOLDER = ("run.name", "run.root", "run.dir", "run.resume")


@dataclass
class Typed:
    """Words of the command line: the pipeline's own, those of all stages, those of one stage or evaluation."""

    pipeline: str
    own: dict[str, str] = field(default_factory=dict)
    common: list[str] = field(default_factory=list)
    of: dict[str, list[str]] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        """Of the pipeline called `name`: run.dir, or run.root/run.name, outputs/<pipeline> unless said otherwise."""
        given = {key: text.strip("'\"") for key, text in self.own.items()}
        name_of_folder("run.name", given.get("run.name"))
        if "run.dir" in given:
            return Path(given["run.dir"]).expanduser().absolute()
        return Path(given.get("run.root", "outputs")).expanduser().absolute() / given.get("run.name", name)


def pipeline_of(words: list[str]) -> str:
    """The value of pipeline=...; UserError where there is none."""
    named = [word.partition("=")[2] for word in words if word.startswith("pipeline=")]
    if not named or not named[-1]:
        raise UserError("which pipeline? pipeline=laptop needs no network; pipeline=my_stages.yaml is one of yours")
    return named[-1].strip("'\"")


def key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def sort(words: list[str], pipeline: Pipeline) -> Typed:
    """Deals the words out: sft.optimizer.lr=1e-4 to the stage sft, run.name to the pipeline, others to all stages."""
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
        elif "." in key and first not in SECTIONS and (near := difflib.get_close_matches(first, names, n=1)):
            raise UserError(f"{word}: there is no stage {first}; did you mean {near[0]}? ({', '.join(names)})")
        else:
            typed.common.append(word)
    return typed


def extended(pipeline: Pipeline, typed: Typed) -> Pipeline:
    """The pipeline with the words typed for single stages and evaluations added to theirs."""

    def more(name: str, words: tuple[str, ...]) -> tuple[str, ...]:
        added = [w for w in typed.of.get(name, []) if "=" in w or w.startswith("~")]
        if len(added) < len(typed.of.get(name, [])):
            raise UserError(f"{name}: write {name}.KEY=VALUE, such as {name}.trainer.max_steps=100")
        known = {s.name for s in pipeline.stages}
        for needed in needs_of(tuple(added)):
            if needed not in known or needed == name:
                raise UserError(f"{name} can't use stage {needed}: name one that comes before it")
        return (*words, *added)

    stages = tuple(dataclasses.replace(s, words=more(s.name, s.words)) for s in pipeline.stages)
    evaluations = tuple(dataclasses.replace(e, words=more(e.name, e.words)) for e in pipeline.evaluations)
    return dataclasses.replace(pipeline, stages=stages, evaluations=evaluations)


def resolved(words: tuple[str, ...], folder: Path) -> list[str]:
    """The words with each `${stage.NAME.export}` as a path."""

    def path(match: re.Match[str]) -> str:
        run = folder / match[1]
        return quoted(str(run if match[2] == "run" else run / match[2]))

    return [REFERENCE.sub(path, word) for word in words]


def of_stage(name: str, words: tuple[str, ...], typed: Typed, folder: Path) -> list[str]:
    """What a stage's lmtrain.train is started with, but for its folder."""
    for word in (*words, *typed.common):
        if key_of(word) in _OF_STAGES_FOLDER:
            raise UserError(f"stage {name} sets {key_of(word)}: a stage's folder is <pipeline>/{name}; leave it out")
    # What is typed for one stage wins over what is typed for all.
    own = typed.of.get(name, [])
    written = words[: len(words) - len(own)]
    trust.refuse_words(written, [*typed.common, *own], f"stage {name} of {typed.pipeline}")
    return [
        *resolved(written, folder),
        *(w for w in typed.common if not _of_evaluations(w)),
        *resolved(tuple(own), folder),
    ]


def of_evaluation(name: str, words: tuple[str, ...], typed: Typed, folder: Path) -> list[str]:
    """What an lmtrain.evaluate is started with, but for the model and where the scores go."""
    own = typed.of.get(name, [])
    written = words[: len(words) - len(own)]
    trust.refuse_words(written, [*typed.common, *own], f"evaluation {name} of {typed.pipeline}")
    common = [w for w in typed.common if _of_evaluations(w) or key_of(w) in _OF_BOTH]
    return [*resolved(words, folder), *common]


def _of_evaluations(word: str) -> bool:
    return key_of(word).startswith("evaluate.")
