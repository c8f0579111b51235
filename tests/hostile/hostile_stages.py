"""Pipelines and sweeps from an attacker, and folders of an attacker that would be resumed."""

import json
from collections.abc import Iterator
from typing import Any

from cases import SCRIPTS, STEERS, Case, Place
from hostile_targets import CALLS, SH, payloads

from support import TINY

BASE = [*TINY, "data=text", "data.path={stranger}/../../corpus", "trainer.max_steps=2"]


def pipeline(place: Place, tree: Any, *words: str) -> list[str]:
    payloads(place)
    file = place.yaml("theirs.yaml", tree)
    return ["pipeline", f"pipeline={file}", "run.name=mine", *words]


def cases() -> Iterator[Case]:
    yield from _overrides()
    yield from _shapes()
    yield from _states()
    yield from _sweeps()


def _stage(*words: str) -> dict[str, Any]:
    return {"stages": {"one": {"overrides": [*TINY, "data=text", "data.path=nowhere", "trainer.max_steps=2", *words]}}}


def _overrides() -> Iterator[Case]:
    opened = "run.allow_target=[pwned_script]"
    for name, words in {
        "a source that runs": [
            "data.source=torch.utils.cpp_extension.subprocess.Popen",
            "data.source_options={args: [touch, '{marker}']}",
        ],
        "a source of theirs": [opened, "data.source=pwned_script.Model"],
        "a callback of theirs": [opened, "callbacks.extra=[{_target_: pwned_script.Model}]"],
        "a callback that runs": [
            "callbacks.extra=[{_target_: torch.utils.collect_env.run, command: [touch, '{marker}']}]"
        ],
        "a model of theirs": [opened, "model._target_=pwned_script.Model"],
        "an optimizer that runs": ["optimizer._target_=os.system"],
        "code of a model": [
            "model=pretrained",
            "model.name_or_path={stranger}",
            "model.trust_remote_code=true",
            "data.seq_len=8",
        ],
        "code of a tokenizer": [
            "tokenizer=hub",
            "tokenizer.name_or_path={stranger}",
            "tokenizer.trust_remote_code=true",
        ],
        "a secret": ["model.name=${oc.env:PLANTED_TOKEN}"],
        "an escaped secret": ["model.name=\\${oc.env:PLANTED_TOKEN}"],
        "a built interpolation": ["model.name=${oc.create:{_target_: os.system}}"],
        "a folder": ["run.dir={marker}"],
        "a root": ["run.root={marker}"],
        "a cache": ["data.cache_dir={marker}"],
        "a launcher": ["hydra/launcher=submitit_local"],
        "a sweeper": ["hydra.sweeper._target_=pwned_script.Model"],
        "a search path": ["hydra.searchpath=[pkg://pwned_script]"],
        "a callback of hydra's": ["+hydra.callbacks.a._target_=pwned_script.Model"],
        "a flag": ["--config-dir=/etc"],
        "a multirun": ["-m", "seed=1,2"],
        "another pipeline": ["pipeline=laptop"],
        "a deleted group": ["~trainer"],
        "an upload": ["export.push_to=pwned/model"],
        "escapes": [f"model.name={STEERS[0]}"],
        "an experiment": ["experiment=/etc/passwd"],
    }.items():
        for how in ("--cfg", "run"):
            yield Case(
                "stage",
                f"{name}, {how}",
                lambda p, w=words, h=how: pipeline(p, _stage(*w), *(["--cfg"] if h == "--cfg" else [])),
            )


def _shapes() -> Iterator[Case]:
    good = _stage()["stages"]["one"]
    trees: dict[str, Any] = {
        "a name with a traversal": {"stages": {"../../PWNED": good}},
        "an absolute name": {"stages": {"/PWNED": good}},
        "no name": {"stages": {"": good}},
        "escapes in a name": {"stages": {STEERS[0]: good}},
        "script in a name": {"stages": {SCRIPTS[0]: good}},
        "a name of the config": {"stages": {"run": good}},
        "a number": {"stages": {1: good}},
        "null": {"stages": {"one": None}},
        "a list": {"stages": [good]},
        "a circle": {"stages": {"one": {**good, "needs": ["two"]}, "two": {**good, "needs": ["one"]}}},
        "a target": {"_target_": "os.system", "stages": {"one": good}},
        "a target in a stage": {"stages": {"one": {**good, **CALLS[0]}}},
        "overrides that are a text": {"stages": {"one": {"overrides": "touch PWNED"}}},
        "overrides that are maps": {"stages": {"one": {"overrides": [{"_target_": "os.system"}]}}},
        "a verb": {"stages": {"one": {**good, "verb": "os.system"}}},
        "an unknown reference": {"stages": {"one": {"overrides": ["model.name_or_path=${stage.pwned.export}"]}}},
        "a file of a stage": {"stages": {"one": {"overrides": ["model.name_or_path=${stage.one.../../key}"]}}},
        "a reference without end": {"stages": {"one": {"overrides": ["model.name_or_path=${stage.one"]}}},
        "evaluations of theirs": {"stages": {"one": good}, "evaluations": {"../a": {"overrides": []}}},
        "code in an evaluation": {
            "stages": {"one": good},
            "evaluations": {
                "a": {
                    "overrides": [
                        "evaluate.metrics=[{_target_: torch.utils.collect_env.run, command: " + str(SH) + "}]"
                    ]
                }
            },
        },
        "tasks in an evaluation": {
            "stages": {"one": good},
            "evaluations": {"a": {"overrides": ["evaluate.tasks=[a]", "evaluate.task_folder={stranger}"]}},
        },
        "hydra's settings": {"hydra": {"run": {"dir": "{marker}"}}, "stages": {"one": good}},
        "defaults": {"defaults": ["/etc/passwd"], "stages": {"one": good}},
        "ten thousand needs": {"stages": {"one": {**good, "needs": ["one"] * 10_000}}},
    }
    for name, tree in trees.items():
        yield Case("pipeline", name, lambda p, t=tree: pipeline(p, t, "--cfg"))
    for name, text in {
        "a tag": "stages: !!python/object/apply:os.system ['touch {marker}']\n",
        "a bomb": "a: &a [1, 1]\n"
        + "".join(f"a{i}: &a{i} [{'*a, ' if not i else f'*a{i - 1}, ' * 9}1]\n" for i in range(9))
        + "stages: *a8\n",
        "a stage twice": "stages:\n  one: {overrides: [seed=1]}\n  one: {overrides: [seed=2]}\n",
        "itself": "stages: &a {one: *a}\n",
        "bytes": "\udcff",
        "deep": "[" * 10_000,
        "a word": "pwned",
    }.items():

        def raw(place: Place, text: str = text) -> list[str]:
            payloads(place)
            file = place.text("theirs.yaml", place.filled(text).encode("utf-8", "surrogateescape"))
            return ["pipeline", f"pipeline={file}", "run.name=mine", "--cfg"]

        yield Case("pipeline", f"yaml: {name}", raw)
    for name in (
        "../../../etc/passwd",
        "{key}",
        "/dev/zero.yaml",
        "a\x1b]0;b\x07",
        "{key}.yaml",
        "${oc.env:PLANTED_TOKEN}",
    ):
        yield Case(
            "pipeline",
            f"named {name!r}",
            lambda p, n=name: ["pipeline", f"pipeline={p.filled(n)}", "--cfg"],
            (),
            "refused",
        )


def _states() -> Iterator[Case]:
    for i, (name, text) in enumerate(
        {
            "a list": "[]",
            "deep": "[" * 20_000,
            "rows of others": '{"one": {"identity": 1, "os": 2}}',
            "numbers": '{"one": 17}',
            "cut": '{"one": {"iden',
            "names with traversal": '{"../../PWNED": {"identity": "a", "export": "none"}}',
            "seconds of text": '{"one": {"identity": "a", "seconds": "x"}}',
            "NUL": "\0",
        }.items()
    ):

        def make(place: Place, text: str = text) -> list[str]:
            folder = place.work / "outputs" / "mine"
            folder.mkdir(parents=True)
            (folder / "stages.json").write_text(text)
            return pipeline(place, _stage())

        yield Case("state of stages", name, make, (), "refused")

        def trials(place: Place, text: str = text, i: int = i) -> list[str]:
            folder = place.stranger / "sweep"
            folder.mkdir()
            place.writable.append(folder)
            (folder / "trials.jsonl").write_text(text + "\n")
            return ["sweep_report", str(folder)]

        yield Case("state of a sweep", name, trials)
    row = {"number": 0, "overrides": ["seed=1"], "fixed": [], "status": "finished", "exit_code": 0, "score": 1.0}
    for name, values in {
        "a number with traversal": {"number": "../../PWNED"},
        "scripts": {"overrides": SCRIPTS, "error": SCRIPTS[0]},
        "escapes": {"overrides": STEERS[:-1], "status": STEERS[0]},
        "a score of text": {"score": "best"},
        "an infinite score": {"score": 1e999},
        "overrides of nothing": {"overrides": None},
        "a huge number": {"number": 10**30},
        "an override without =": {"overrides": ["a", ""]},
        "many": {"overrides": [f"a{i}=1" for i in range(2000)]},
        "seconds": {"seconds": {}},
    }.items():

        def told(place: Place, values: dict[str, Any] = values) -> list[str]:
            folder = place.stranger / "sweep"
            folder.mkdir()
            place.writable.append(folder)
            (folder / "trials.jsonl").write_text(
                json.dumps({**row, **values}) + "\n" + json.dumps({**row, "number": 1, "score": 2.0}) + "\n"
            )
            return ["sweep_report", str(folder)]

        yield Case("state of a sweep", name, told)


def _sweeps() -> Iterator[Case]:
    from hostile_targets import experiment

    for name, tree in {
        "a space with code": {"sweep": {"space": {"callbacks.extra": "[{_target_: os.system}],[]"}}},
        "a space that opens": {"sweep": {"space": {"run.allow_target": "[pwned_script],[os]"}}},
        "a space of hydra's": {"sweep": {"space": {"hydra.sweeper._target_": "pwned_script.Model,a"}}},
        "a space with a secret": {"sweep": {"space": {"model.name": "${oc.env:PLANTED_TOKEN},a"}}},
        "a method of nobody": {"sweep": {"method": "os.system"}},
        "a sampler of nobody": {"sweep": {"sampler": "os.system"}},
        "a name with traversal": {"sweep": {"name": "../../PWNED"}},
        "a root elsewhere": {"sweep": {"root": "{marker}"}},
        "many jobs": {"sweep": {"jobs": 10**9}},
        "a space without end": {"sweep": {"space": {"seed": "range(0,1000000000)"}}},
        "a function": {"sweep": {"space": {"seed": "glob(*)"}}},
        "a storage": {"sweep": {"storage": "sqlite:///{marker}"}},
        "a space that is a list": {"sweep": {"space": [1]}},
    }.items():

        def make(place: Place, tree: Any = tree) -> list[str]:
            return [*[w for w in experiment(place, tree) if not w.startswith("run.name")], "-m", "--cfg"]

        yield Case("sweep", name, make)
    for word in (
        "seed=range(0,100000000)",
        "callbacks.extra=choice([{_target_: os.system}],[])",
        "seed=glob(*)",
        "seed=shuffle(1,2)",
        "seed=interval(0,1e400)",
        "hydra.launcher._target_=pwned_script.Model",
        "hydra/launcher=basic,joblib",
        "optimizer.lr=tag(a,1,2)",
        "seed=extend_list(1)",
    ):
        yield Case(
            "sweep",
            f"typed {word}",
            lambda p, w=word: [*[x for x in p.train() if not x.startswith("run.name")], "-m", w, "--cfg"],
        )
