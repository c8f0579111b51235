"""YAML from an attacker: interpolations, tags, bombs, permissions it grants itself, and Hydra's own settings."""

from collections.abc import Iterator
from typing import Any

from cases import SECRET, Case, Place
from hostile_targets import SH, TIMER, experiment, of, payloads, root

RUN = "_target_: torch.utils.collect_env.run, _args_: ['touch {marker}']"


def cases() -> Iterator[Case]:
    yield from _escaped()
    yield from _resolvers()
    yield from _secrets()
    yield from _tags()
    yield from _bombs()
    yield from _gates()
    yield from _hydra()
    yield from _defaults()
    yield from _writes()


def _escaped() -> Iterator[Case]:
    for depth in range(1, 6):
        text = "\\" * (2**depth - 1) + "${oc.create:'{" + RUN + "}'}"
        entry = {"_target_": "lightning.pytorch.callbacks.LearningRateMonitor", "logging_interval": text}
        yield root(
            "escaped interpolation", f"in a callback, {depth} deep", {"callbacks": {"extra": [entry]}}, must=None
        )
        nested = {"_target_": TIMER, "duration": {"hours": [text]}}
        yield root("escaped interpolation", f"nested, {depth} deep", {"callbacks": {"extra": [nested]}}, must=None)
        metric = {"_target_": "torchmetrics.text.BLEUScore", "n_gram": text}
        yield root(
            "escaped interpolation",
            f"in a metric, {depth} deep",
            {"callbacks": {"samples": {"metrics": [metric]}}},
            must=None,
        )
        optimizer = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": text}
        yield of("escaped interpolation", f"in an optimizer, {depth} deep", {"optimizer": optimizer}, must=None)
    for key, tree in {
        "logger": {"logger": {"csv": {"a": "\\${oc.env:PLANTED_TOKEN}"}}},
        "tags": {"logger": {"wandb": {"mode": "disabled", "notes": "\\\\${oc.env:PLANTED_TOKEN}"}}},
        "prompts": {"callbacks": {"samples": {"prompts": ["\\${oc.env:PLANTED_TOKEN}"]}}},
    }.items():
        yield root("escaped interpolation", f"in {key}", tree, must=None)


def _resolvers() -> Iterator[Case]:
    for text in (
        "${oc.create:{" + RUN + "}}",
        "${oc.decode:'{" + RUN + "}'}",
        "${hydra:runtime.cwd}",
        "${now:%Y}",
        "${}",
        "${oc.env:",
        "${pwned:1}",
        "${oc.select:callbacks.extra}",
        "${oc.deprecated:seed}",
        "${oc.dict.keys:data}",
        "${python_version:}",
        "${eval:'1'}",
        "${lmtrain:a}",
        "${oc.env:HOME,${oc.env:PLANTED_TOKEN}}",
        "${...a}",
        "${seed}${",
        "${" * 200,
        "${seed:}",
        "${oc.create:${oc.decode:'[1'}}",
        "${.}",
    ):
        entry = {"_target_": TIMER, "duration": text}
        yield root("resolver", f"{text[:40]} in a callback", {"callbacks": {"extra": [entry]}}, must=None)
        yield of("resolver", f"{text[:40]} as a name", {"optimizer": {"name": text}})


def _secrets() -> Iterator[Case]:
    """Yields YAML that reads an environment variable, which must reach no file and no screen."""
    env = "${oc.env:PLANTED_TOKEN}"
    spread = {
        "a prompt": {"callbacks": {"samples": {"prompts": [env]}}},
        "part of a prompt": {"callbacks": {"samples": {"prompts": ["a " + env]}}},
        "a name": {"model": {"name": env}},
        "a default": {"model": {"name": "${oc.env:NOT_THERE,${oc.env:PLANTED_TOKEN}}"}},
        "decoded": {"model": {"name": "${oc.decode:'\\${oc.env:PLANTED_TOKEN}'}"}},
        "csv": {"model": {"name": env}, "logger": {"csv": {}}},
        "tensorboard": {"model": {"name": env}, "logger": {"tensorboard": {"flush_secs": 1}}},
        "a wrong value": {"seed": env},
        "a wrong key": {"seeed": env},
        "a wrong choice": {"optimizer": {"name": env}},
        "a path": {"data": {"val_path": f"/nowhere/{env}"}},
        "a callback": {"callbacks": {"extra": [{"_target_": TIMER, "duration": env}]}},
        "a class": {"callbacks": {"extra": [{"_target_": env}]}},
        "via another key": {"model": {"name": "${objective.name}"}, "objective": {"name": env}},
        "created": {"model": {"extra": "${oc.create:{a: '${oc.env:PLANTED_TOKEN}'}}"}},
        "a column": {"data": {"text_column": env}},
    }
    for i, (name, tree) in enumerate(spread.items()):
        yield (of, root)[i % 2]("secret of the environment", name, tree, must=None)
    for verb in ("inspect", "estimate"):
        yield of("secret of the environment", f"in {verb}", spread["a name"], must=None, verb=verb)

    def shown(place: Place) -> list[str]:
        return [*experiment(place, spread["a name"]), "--cfg"]

    def explained(place: Place) -> list[str]:
        return ["explain", "model.name", *experiment(place, spread["a name"])[1:]]

    yield Case("secret of the environment", "in --cfg", shown)
    yield Case("secret of the environment", "in explain", explained)

    def read(place: Place) -> list[str]:
        return experiment(place, {"model": {"name": "${oc.decode:${file:{key}}}"}})

    yield Case("secret of the environment", "a file", read, must="refused")
    assert SECRET


def _tags() -> Iterator[Case]:
    for tag in (
        "!!python/object/apply:os.system ['touch {marker}']",
        "!!python/name:os.system",
        "!!python/module:pwned_script",
        "!!python/object/new:subprocess.Popen [['touch', '{marker}']]",
        "!!python/object:pwned_script.Model {}",
        "!!python/tuple [1, 2]",
        "!!python/object/apply:eval ['1']",
        "!!python/object/apply:builtins.exec ['1']",
        "!include {key}",
        "!!binary cHduZWQ=",
        "!!set {a, b}",
        "!!timestamp 2001-01-01",
        "!!map [1]",
        "!<tag:pwned> 1",
        "!!omap [a: 1]",
        "!!python/bytes 'a'",
        "!!js/function 'function () {}'",
    ):
        plain = tag.startswith(("!!binary", "!!omap", "!!set", "!!timestamp"))
        yield of("yaml tag", tag[:40], f"seed: {tag}\n", must=None if plain else "refused")

        def in_a_run(place: Place, tag: str = tag) -> list[str]:
            run = place.run()
            payloads(place)
            text = (run / "config.yaml").read_text().replace("seed: 1337", f"seed: {place.filled(tag)}")
            (run / "config.yaml").write_text(text)
            return ["report", str(run)] if "binary" in tag else ["generate", f"run_dir={run}"]

        if tag.startswith(("!!python", "!include")):
            yield Case("yaml tag", f"{tag[:40]} in a run", in_a_run, ("config.yaml",), "refused")


def _bombs() -> Iterator[Case]:
    laughs = "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
    )
    texts: dict[str, str | bytes] = {
        "billion laughs": laughs,
        "billion laughs in a key": laughs + "callbacks: {extra: *a8}\n",
        "a list that holds itself": "callbacks: &a {extra: [*a]}\n",
        "a map that holds itself": "callbacks: &a\n  extra: []\n  samples: *a\n",
        "10,000 brackets": "seed: " + "[" * 10_000 + "]" * 10_000 + "\n",
        "3,000 maps": "seed: " + "{a: " * 3000 + "1" + "}" * 3000 + "\n",
        "a key twice": "seed: 1\nseed: 2\n",
        "a section twice": "trainer: {max_steps: 1}\ntrainer: {max_steps: 2}\n",
        "an int of 5,000 digits": f"seed: {'9' * 5000}\n",
        "a float too large": "optimizer: {lr: 1e999}\n",
        "no number": "optimizer: {lr: .nan}\n",
        "steps beyond 64 bits": "trainer: {max_steps: 99999999999999999999}\n",
        "below zero": "trainer: {max_steps: -99999999999999999999}\n",
        "sexagesimal": "seed: 190:20:30:59:59:59:59\n",
        "NUL": 'seed: "\\0"\nrun: {name: "a\\0b"}\n',
        "bytes that are no text": b"# @package _global_\nseed: \xff\xfe\n",
        "UTF-16": "# @package _global_\nseed: 1\n".encode("utf-16"),
        "nothing": "",
        "a list": "[1, 2]\n",
        "a word": "pwned\n",
        "two documents": "seed: 1\n---\nseed: 2\n",
        "a directive": "%YAML 9.9\n---\nseed: 1\n",
        "keys that are no texts": "? [1, 2]\n: 1\n? {a: 1}\n: 2\n",
        "a number as a key": "1: 2\n",
        "true as a key": "data: {true: 1, null: 2}\n",
        "a merge key": "<<: {callbacks: {extra: [{_target_: os.system}]}}\n",
        "a long key": f"{'a' * 200_000}: 1\n",
        "a long text": f"run: {{name: {'a' * 200_000}}}\n",
        "escapes in a key": 'data: {"\\e]0;pwned\\a": 1}\n',
        "escapes in a value": 'optimizer: {name: "\\e]0;pwned\\a"}\n',
        "right to left": 'optimizer: {name: "\\u202Eabc"}\n',
    }

    def theirs(place: Place, text: str | bytes) -> list[str]:
        command = experiment(place, "")
        if isinstance(text, bytes):
            place.text("experiment/theirs.yaml", text)
        else:
            place.text("experiment/theirs.yaml", f"# @package _global_\n{text}")
        return command

    for name, text in texts.items():
        yield Case("yaml bomb", name, lambda place, text=text: theirs(place, text))


def _gates() -> Iterator[Case]:
    """Yields files that grant themselves what only the user may grant."""
    call = {"_target_": "pwned_script.Model"}
    for allow in (["subprocess"], ["pwned_script"], ["os"], ["builtins"], [""], ["*"], ["torch.utils"], ["importlib"]):
        tree = {"run": {"allow_target": allow}, "callbacks": {"extra": [call]}}
        yield of("own gate", f"allow_target {allow} for a callback", tree)
        tree = {"run": {"allow_target": allow}, "data": {"source": f"{allow[0]}.Popen", "source_options": {"args": SH}}}
        yield of("own gate", f"allow_target {allow} for a source", tree, data=False)
    source = {"data": {"source": "pwned_script.Model"}}
    yield of(
        "own gate",
        "allow_target by interpolation",
        {**source, "run": {"allow_target": ["${name}"]}, "name": "pwned_script"},
    )
    for key in ("model", "tokenizer"):
        tree = {
            "model": {"init": "pretrained", "name_or_path": "{stranger}/export", "trust_remote_code": key == "model"},
            "tokenizer": {"kind": "hub", "name_or_path": "{stranger}/export", "trust_remote_code": key == "tokenizer"},
        }

        def own_code(place: Place, tree: Any = tree) -> list[str]:
            from hostile_models import with_own_code

            with_own_code(place, place.export())
            plain = [w for w in experiment(place, tree) if not w.startswith(("model.", "tokenizer"))]
            return [*plain, "model.max_position_embeddings=64"]

        yield Case("own gate", f"{key}.trust_remote_code", own_code, must="refused")
    for key, value in {
        "evaluate.task_folder": "{stranger}",
        "export.push_to": "pwned/model",
        "trainer.deepspeed.config": "{key}",
        "run.resume": "{stranger}/pwned.pt",
    }.items():
        section, _, rest = key.partition(".")
        tree = {section: {rest: value} if "." not in rest else {"deepspeed": {"config": value}}}
        yield of("own gate", key, tree, must=None)


def _hydra() -> Iterator[Case]:
    """Yields settings of Hydra itself, which it reads from the same files."""
    handler = {
        "version": 1,
        "handlers": {"h": {"()": "torch.utils.collect_env.run", "command": SH}},
        "root": {"handlers": ["h"]},
    }
    writes = {
        "version": 1,
        "handlers": {"h": {"class": "logging.FileHandler", "filename": "{marker}"}},
        "root": {"handlers": ["h"]},
    }
    trees: dict[str, Any] = {
        "job_logging with a factory": {"job_logging": handler},
        "job_logging with a file": {"job_logging": writes},
        "hydra_logging with a factory": {"hydra_logging": handler},
        "hydra_logging with a file": {"hydra_logging": writes},
        "a callback": {"callbacks": {"a": {"_target_": "torch.utils.collect_env.run", "command": SH}}},
        "a callback of theirs": {"callbacks": {"a": {"_target_": "pwned_script.Model"}}},
        "a launcher": {"launcher": {"_target_": "pwned_script.Model"}},
        "a sweeper": {"sweeper": {"_target_": "pwned_script.Model"}},
        "run.dir": {"run": {"dir": "{marker}"}},
        "sweep.dir": {"sweep": {"dir": "{marker}"}},
        "output_subdir": {"output_subdir": "../../PWNED"},
        "job.chdir": {"job": {"chdir": True}},
        "env_set": {"job": {"env_set": {"PATH": "{stranger}", "LD_PRELOAD": "{stranger}/pwned.so"}}},
        "env_copy": {"job": {"env_copy": ["PLANTED_TOKEN"]}},
        "searchpath, a package": {"searchpath": ["pkg://pwned_script"]},
        "searchpath, a known package": {"searchpath": ["pkg://torch"]},
        "searchpath, a folder": {"searchpath": ["file://{home}"]},
        "searchpath, structured": {"searchpath": ["structured://"]},
        "searchpath, an address": {"searchpath": ["http://127.0.0.1:9/"]},
        "verbose": {"verbose": "pwned"},
        "help": {"help": {"template": "${oc.env:PLANTED_TOKEN}"}},
        "mode": {"mode": "MULTIRUN"},
    }
    for name, tree in trees.items():
        yield of("hydra's own settings", name, {"hydra": tree}, must=None)

        def as_root(place: Place, tree: Any = tree) -> list[str]:
            """Returns the command with a run's config.yaml, which replaces lmtrain's own root config."""
            run, _ = place.run(), payloads(place)
            file = run / "config.yaml"
            file.write_text(file.read_text() + place.yaml("scratch.yaml", {"hydra": tree}).read_text())
            return ["train", "--config-dir", str(run), "run.name=mine", "run.dir=null", "run.root=outputs"]

        if name.split(",")[0] in ("job_logging with a factory", "a callback", "searchpath", "a sweeper"):
            yield Case("hydra's own settings", f"{name}, in a run", as_root)

    def in_a_sweep(place: Place, tree: Any) -> list[str]:
        return [
            *[w for w in experiment(place, {"hydra": tree}) if not w.startswith("run.name")],
            "-m",
            "seed=1,2",
            "--cfg",
        ]

    for name in ("a callback", "a sweeper", "a launcher", "sweep.dir", "job_logging with a factory", "env_set"):
        yield Case("hydra's own settings", f"{name}, in a sweep", lambda place, t=trees[name]: in_a_sweep(place, t))

    def group(place: Place) -> list[str]:
        payloads(place)
        place.yaml("hydra/launcher/theirs.yaml", {"_target_": "pwned_script.Model"})
        return ["train", "--config-dir", str(place.stranger), "hydra/launcher=theirs", "run.name=mine"]

    yield Case("hydra's own settings", "a launcher of the user's choice, without a sweep", group)


def _defaults() -> Iterator[Case]:
    """Yields lists of defaults that refer to other files."""
    for entry in (
        "/etc/passwd",
        "../../../../../../etc/passwd",
        "{key}",
        "file://{key}",
        "pkg://torch",
        "/../../secret",
        "http://127.0.0.1:9/a",
        "/hydra/launcher: submitit_local",
        "override /hydra/sweeper: optuna",
        "override /hydra/job_logging: colorlog",
        "/hydra/callbacks@hydra.callbacks: theirs",
        "theirs",
        "/experiment/theirs",
        "optional ../../home/.ssh/id_rsa",
        "/data@run: text",
        "/model@_global_: gpt_small",
        "/pwned: ${oc.env:PLANTED_TOKEN}",
        "/${oc.env:PLANTED_TOKEN}",
        "/data: '../../../home/.ssh/id_rsa'",
        "override /data: ???",
        "/data: [text, jsonl, text]",
        "~",
        "null",
        "/optimizer: ../model/gpt_nano",
        "{a: {b: c}}",
        "[1]",
        "17",
    ):
        text = f"defaults:\n  - {entry}\n  - _self_\n"
        yield of("list of defaults", entry[:50], text, must=None)


def _writes() -> Iterator[Case]:
    """Yields paths to write to that are set by a file instead of the user."""
    for key, value in {
        "run.dir": "{marker}",
        "run.root": "{marker}",
        "data.cache_dir": "{marker}",
        "inspect.html": "{marker}",
        "generate.out": "{marker}",
        "evaluate.dir": "{marker}",
        "tune.dir": "{marker}",
        "sweep.root": "{marker}",
        "evaluate.name": "../../../PWNED",
        "sweep.name": "../../PWNED",
        "trainer.deepspeed.nvme_path": "{marker}",
        "logger.mlflow.tracking_uri": "sqlite:///{marker}",
        "run.name": "../../../PWNED",
    }.items():
        parts = key.split(".")
        tree: Any = value
        for part in reversed(parts):
            tree = {part: tree}
        yield of("where it writes", key, tree, must=None, verb="inspect" if key.startswith("inspect") else "train")
    for entry in (
        {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": "{marker}"},
        {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": "../../../PWNED"},
        {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "filename": "../../../../PWNED"},
        {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": "memory://PWNED"},
        {"_target_": "lightning.pytorch.callbacks.OnExceptionCheckpoint", "dirpath": "{marker}"},
        {"_target_": "lightning.pytorch.callbacks.OnExceptionCheckpoint", "dirpath": ".", "filename": "../../PWNED"},
        {"_target_": "lightning.pytorch.callbacks.BasePredictionWriter"},
        {"_target_": "lightning.pytorch.callbacks.ModelSummary", "max_depth": "{marker}"},
        {"_target_": "lightning.pytorch.callbacks.DeviceStatsMonitor"},
        {"_target_": "lightning.pytorch.callbacks.Timer", "duration": "00:00:00:00"},
    ):
        name = " ".join(str(v).rpartition(".")[2] if k == "_target_" else f"{k}={v}" for k, v in entry.items())
        yield root("where it writes", name, {"callbacks": {"extra": [entry]}}, must=None)
    place = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": "${oc.env:HOME}/PWNED"}
    yield of("where it writes", "by interpolation", {"callbacks": {"extra": [place]}}, must=None)
