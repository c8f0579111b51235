"""`-m sft.optimizer.lr=1e-4,3e-4`: one pipeline in which a stage is there once for each value, and what follows it too.

What comes before is shared: a stage has as many variants as there are choices for itself and the stages it needs, and
is called sft_0, sft_1, ... where there are any. Imports no torch.
"""

import dataclasses
import itertools
from dataclasses import dataclass

from lmtrain.config.defaults import conf_dir
from lmtrain.errors import UserError
from lmtrain.stages.definition import REFERENCE, Evaluation, Pipeline, Stage
from lmtrain.stages.words import Typed, key_of
from lmtrain.sweeps import search

Choice = dict[str, str]  # the word as typed to one of its values


@dataclass(frozen=True)
class Variant:
    name: str
    choice: Choice


def expand(pipeline: Pipeline, typed: Typed) -> tuple[Pipeline, Typed]:
    """The pipeline with a stage for each choice, and the words typed for each.

    Raises:
        UserError: nothing is swept, or a key that belongs to no stage.
    """
    swept = _swept(pipeline, typed)
    chosen_by = {s.name: _relevant(s, pipeline, swept) for s in pipeline.stages}
    variants = {name: _variants(name, words, swept) for name, words in chosen_by.items()}
    new = dataclasses.replace(typed, of={})
    stages = []
    for stage in pipeline.stages:
        for one in variants[stage.name]:
            renamed = _names(stage.needs, one.choice, variants)
            stages.append(Stage(one.name, _renamed(stage.words, renamed), tuple(renamed.values())))
            new.of[one.name] = [one.choice.get(f"{stage.name}.{w}", w) for w in typed.of.get(stage.name, [])]
    evaluations = []
    for evaluation in pipeline.evaluations:
        for made in _evaluations(evaluation, chosen_by, variants, swept):
            evaluations.append(made)
            new.of[made.name] = typed.of.get(evaluation.name, [])
    return Pipeline(pipeline.name, tuple(stages), tuple(evaluations), pipeline.file), new


def _swept(pipeline: Pipeline, typed: Typed) -> dict[str, list[str]]:
    """Each swept word as typed, STAGE.key=a,b, to what its stage gets for each value."""
    found = {}
    stages = {stage.name for stage in pipeline.stages}
    for name, words in [("", typed.common), *typed.of.items()]:
        for word in words:
            override = search.parse([word], conf_dir())[0]
            if not override.is_sweep_override():
                continue
            if name not in stages:
                raise UserError(f"{word}: a pipeline's sweep is over keys of a stage, -m STAGE.{key_of(word)}=...")
            if override.is_interval_sweep():
                raise UserError(f"{name}.{word}: list the values, {name}.{key_of(word)}=a,b")
            found[f"{name}.{word}"] = search.choices(override)
    if not found:
        raise UserError("-m needs a key of a stage with several values: -m sft.optimizer.lr=1e-4,3e-4")
    return found


def _relevant(stage: Stage, pipeline: Pipeline, swept: dict[str, list[str]]) -> list[str]:
    """The swept words of a stage and of all that it needs, by whatever way."""
    names, todo = set[str](), [stage.name]
    while todo:
        name = todo.pop()
        if name not in names:
            names.add(name)
            todo += pipeline.stage(name).needs
    return [word for word in swept if word.partition(".")[0] in names]


def _variants(name: str, words: list[str], swept: dict[str, list[str]]) -> list[Variant]:
    if not words:
        return [Variant(name, {})]
    combinations = itertools.product(*(swept[word] for word in words))
    return [Variant(f"{name}_{n}", dict(zip(words, values, strict=True))) for n, values in enumerate(combinations)]


def _names(stages: tuple[str, ...], choice: Choice, variants: dict[str, list[Variant]]) -> dict[str, str]:
    """Each stage to its variant with the same choices."""
    return {s: next(v.name for v in variants[s] if v.choice.items() <= choice.items()) for s in stages}


def _renamed(words: tuple[str, ...], names: dict[str, str]) -> tuple[str, ...]:
    return tuple(REFERENCE.sub(lambda m: f"${{stage.{names[m[1]]}.{m[2]}}}", word) for word in words)


def _evaluations(
    one: Evaluation, chosen_by: dict[str, list[str]], variants: dict[str, list[Variant]], swept: dict[str, list[str]]
) -> list[Evaluation]:
    """Of all variants of its stages; once for each choice that the models it names in its words depend on."""
    named = tuple(dict.fromkeys(m[1] for word in one.words for m in REFERENCE.finditer(word)))
    words = [word for word in swept if any(word in chosen_by[name] for name in named)]
    found = []
    for made in _variants(one.name, words, swept):
        names = _names(named, made.choice, variants)
        of = tuple(v.name for s in one.of for v in variants[s] if _goes_with(v.choice, made.choice))
        found.append(Evaluation(made.name, _renamed(one.words, names), of, (*of, *names.values())))
    return found


def _goes_with(a: Choice, b: Choice) -> bool:
    return all(b.get(word, value) == value for word, value in a.items())
