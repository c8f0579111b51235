"""Run folders from an attacker, given to the verbs that read them."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from cases import SCRIPTS, SECRET, STEERS, Case, Place
from hostile_targets import CALLS, SH, TIMER, payloads

from lmtrain.checkpoints import checksums, manifest, store

EVALUATE = ("evaluate.resamples=10", "evaluate.limit=2")


def command(verb: str, run: Path) -> list[str]:
    """Returns a verb's command for a run's folder."""
    return {
        "evaluate": ["evaluate", f"run_dir={run}", *EVALUATE],
        "generate": ["generate", f"run_dir={run}", "generate.prompt=a", "generate.max_new_tokens=2"],
        "chat": ["chat", f"run_dir={run}", "generate.max_new_tokens=2"],
        "export": ["export", f"run_dir={run}"],
        "report": ["report", str(run)],
        "runs": ["runs", str(run.parent)],
        "inspect": ["inspect", "--config-dir", str(run)],
        "estimate": ["estimate", "--config-dir", str(run)],
        "train": ["train", "--config-dir", str(run), "run.dir=null", "run.name=mine"],
        "resume": ["train", "--config-dir", str(run), f"run.dir={run}", "trainer.max_steps=3", "run.resume=auto"],
        "explain": ["explain", "callbacks.extra", "--config-dir", str(run)],
        "verify": ["verify", "--config-dir", str(run)],
        "pipeline": ["pipeline", f"pipeline={run / 'config.yaml'}", "--cfg"],
        "sweep_report": ["sweep_report", str(run)],
    }[verb]


def poisoned(change: Callable[[Place, dict[str, Any]], None], verb: str) -> Callable[[Place], list[str]]:
    """Returns a maker of a run with a changed config.yaml and of the command that reads it."""

    def make(place: Place) -> list[str]:
        run = place.run()
        payloads(place)
        tree = yaml.safe_load((run / "config.yaml").read_text())
        change(place, tree)
        (run / "config.yaml").write_text(yaml.safe_dump(place.filled(tree), sort_keys=False))
        return command(verb, run)

    return make


def cases() -> Iterator[Case]:
    yield from _configs()
    yield from _pickles()
    yield from _manifests()
    yield from _links()
    yield from _pages()
    yield from _files()


def _set(key: str, value: Any) -> Callable[[Place, dict[str, Any]], None]:
    def change(place: Place, tree: dict[str, Any]) -> None:
        *sections, last = key.split(".")
        for section in sections:
            tree = tree.setdefault(section, {})
        tree[last] = value

    return change


def _both(*changes: Callable[[Place, dict[str, Any]], None]) -> Callable[[Place, dict[str, Any]], None]:
    def change(place: Place, tree: dict[str, Any]) -> None:
        for one in changes:
            one(place, tree)

    return change


def _configs() -> Iterator[Case]:
    reads = ("evaluate", "generate", "export", "inspect", "train", "resume", "estimate")
    source = _both(
        _set("data.source", "torch.utils.cpp_extension.subprocess.Popen"), _set("data.source_options", {"args": SH})
    )
    opened = _both(_set("run.allow_target", ["pwned_script"]), _set("data.source", "pwned_script.Model"))
    model = _both(_set("run.allow_target", ["pwned_script"]), _set("model", {"_target_": "pwned_script.Model"}))
    poison = {
        "a source that runs": source,
        "a source of theirs, opened by themselves": opened,
        "a model of theirs, opened by themselves": model,
        "a callback that runs": _set("callbacks.extra", [CALLS[14]]),
        "an optimizer that runs": _set("optimizer", {"_target_": CALLS[14]["_target_"], "lr": 0.1, "command": SH}),
        "an objective of theirs": _both(
            _set("run.allow_target", ["pwned_script"]),
            _set("objective", {"name": "a", "_target_": "pwned_script.Model"}),
        ),
        "a metric that runs": _set("callbacks.samples.metrics", [CALLS[14]]),
        "an interpolation": _set("model.name", "${oc.env:PLANTED_TOKEN}"),
        "an interpolation that builds": _set(
            "callbacks.extra", [{"_target_": TIMER, "duration": "\\${oc.create:{_target_: os.system}}"}]
        ),
    }
    for name, change in poison.items():
        for verb in reads:
            yield Case("config of a run", f"{name}, {verb}", poisoned(change, verb))
    for verb in ("chat", "report", "runs", "explain", "pipeline"):
        yield Case("config of a run", f"a source that runs, {verb}", poisoned(source, verb))
    places = {
        "run.dir": "{marker}",
        "run.root": "{marker}",
        "data.cache_dir": "{marker}",
        "evaluate.dir": "{marker}",
        "evaluate.name": "../summary",
        "data.path": "{key}",
        "export.push_to": "pwned/model",
        "evaluate.against": "{stranger}",
        "model.name_or_path": "{stranger}",
        "trainer.max_steps": 10**30,
        "model.hidden_size": 10**12,
        "model.num_hidden_layers": 10**9,
        "data.seq_len": 10**15,
        "seed": "a",
        "model.extra": {"auto_map": {"AutoConfig": "pwned_script.Model"}},
        "trainer.strategy": "pwned",
        "tokenizer.kind": "pwned",
        "data.num_workers": 100000,
        "checkpoint.monitor": "../../PWNED",
    }
    for key, value in places.items():
        for verb in ("evaluate", "generate")[: 1 if key.startswith(("run", "trainer")) else 2]:
            # data.path may name any file: its text is scored, but neither shown nor written.
            make = poisoned(_set(key, value), verb)
            yield Case("keys of a run", f"{key}={value}, {verb}"[:70], make, reads=key == "data.path")
    for key in ("model.hidden_size", "model.num_hidden_layers", "run.dir"):
        yield Case("keys of a run", f"{key}, export", poisoned(_set(key, places[key]), "export"))


class Runs:
    """An object whose pickle creates the marker when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def _fit(checkpoint: Path) -> None:
    """Updates the sizes and checksums in a manifest to the current files."""
    content = manifest.read(checkpoint)
    for name in content["files"]:
        file = checkpoint / name
        size = file.stat().st_size
        content["files"][name] = {"bytes": size, "sha256": checksums.sha256(file, 0, size)}
    manifest.write(checkpoint, content)


def _pickles() -> Iterator[Case]:
    forms: dict[str, Callable[[Path, Place], None]] = {
        "a bare pickle": lambda file, place: file.write_bytes(pickle.dumps(Runs(place.marker))) and None,
        "torch's format": lambda file, place: torch.save({"callbacks": Runs(place.marker)}, file),
        "torch's old format": lambda file, place: torch.save(
            Runs(place.marker), file, _use_new_zipfile_serialization=False
        ),
        "nothing": lambda file, place: file.write_bytes(b"") and None,
        "a zip of nothing": lambda file, place: file.write_bytes(b"PK\x05\x06" + b"\0" * 18) and None,
        "no dict": lambda file, place: torch.save([1, 2], file),
        "keys of other types": lambda file, place: torch.save({1: {2: torch.zeros(1)}}, file),
        "tensors of another shape": lambda file, place: torch.save({"a": torch.zeros(1)}, file),
    }
    for form, write in forms.items():
        for name, verbs in {"model.pt": ("generate", "export", "resume"), "trainer.pt": ("resume", "export")}.items():
            for verb in verbs:

                def make(place: Place, name: str = name, write: Any = write, verb: str = verb) -> list[str]:
                    run = place.run()
                    for checkpoint in store.scan(run / "checkpoints"):
                        write(checkpoint / name, place)
                        _fit(checkpoint)
                    return command(verb, run)

                says = ("nothing in it was run",) if form in ("a bare pickle", "torch's format") else ()
                yield Case("checkpoint", f"{form} as {name}, {verb}", make, (), "refused" if says else None)


def _manifests() -> Iterator[Case]:
    good = {"bytes": 1, "sha256": "0" * 64}
    files: dict[str, Any] = {
        "a traversal": {"../../../../home/.ssh/id_rsa": good},
        "an absolute name": {"/etc/passwd": good},
        "no name": {"": good},
        "a dot": {".": good, "..": good},
        "NUL in a name": {"a\0b": good},
        "a long name": {"a" * 5000: good},
        "negative bytes": {"model.pt": {"bytes": -1, "sha256": ""}},
        "many bytes": {"model.pt": {"bytes": 10**30, "sha256": ""}},
        "parts beyond the file": {"model.pt": {"bytes": 10, "parts": [{"offset": -5, "bytes": 10**18, "sha256": "a"}]}},
        "no files": {},
        "escapes in a name": {STEERS[0]: good},
        "a million parts": {"model.pt": {"bytes": 10, "parts": [{"offset": 0, "bytes": 1, "sha256": ""}] * 50_000}},
    }
    texts: dict[str, str] = {
        "deep": "[" * 20_000 + "]" * 20_000,
        "an int of 5,000 digits": '{"step": ' + "9" * 5000 + ', "metrics": {}, "files": {}}',
        "NaN scores": '{"step": 2, "metrics": {"val/loss": NaN}, "files": {}}',
        "a list": "[]",
        "a key twice": '{"step": 1, "step": 2, "metrics": {}, "files": {}, "files": {}}',
        "lone surrogates": '{"step": 2, "metrics": {"\\ud800": 1.0}, "files": {}}',
        "a step of true": '{"step": true, "metrics": {}, "files": {}}',
        "best by far": '{"step": 2, "metrics": {"val/loss": -1e308}, "files": {}}',
    }

    def make(place: Place, write: Callable[[Path], Any], verb: str) -> list[str]:
        run = place.run()
        for checkpoint in store.scan(run / "checkpoints"):
            write(checkpoint)
        return command(verb, run)

    def lied(checkpoint: Path, entries: dict[str, Any]) -> None:
        content = manifest.read(checkpoint)
        manifest.write(checkpoint, {**content, "files": entries})

    for i, (name, entries) in enumerate(files.items()):
        verb = ("resume", "generate", "export")[i % 3]
        yield Case(
            "manifest",
            f"{name}, {verb}",
            lambda place, e=entries, v=verb: make(place, lambda c: lied(c, e), v),
            (),
            None if name == "no files" else "refused",
        )
    for i, (name, text) in enumerate(texts.items()):
        verb = ("resume", "evaluate", "runs")[i % 3]
        yield Case(
            "manifest",
            f"{name}, {verb}",
            lambda place, t=text, v=verb: make(place, lambda c: (c / "manifest.json").write_text(t), v),
        )


def _replace(file: Path, target: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    file.symlink_to(target)


def _links() -> Iterator[Case]:
    """Yields runs with links: what a verb writes into a run's folder must not go through a link to somewhere else."""
    writes = {
        "report": ["report.html"],
        "evaluate": ["evaluations"],
        "export": ["export"],
        "resume": [
            "metrics.jsonl",
            "starts.jsonl",
            "plan.txt",
            "samples.jsonl",
            ".lock",
            "summary.json",
            "config.yaml",
            "tokenizer",
            "checkpoints",
            "export",
            "report.html",
        ],
    }
    for verb, names in writes.items():
        for name in names:
            for what in ("a file", "nothing"):

                def make(place: Place, verb: str = verb, name: str = name, what: str = what) -> list[str]:
                    run = place.run()
                    target = place.home / ("kept" if what == "a file" else "not_there")
                    if what == "a file":
                        original = run / name
                        if original.is_dir():
                            shutil.copytree(original, target, symlinks=True)
                        elif original.exists():
                            shutil.copy(original, target)
                        elif name == "evaluations":
                            target.mkdir()
                        else:
                            target.write_text("mine")
                    _replace(run / name, target)
                    return command(verb, run)

                yield Case("link in a run", f"{name} to {what}, {verb}", make, reads=True)
    for name, verb in (
        ("config.yaml", "generate"),
        ("config.yaml", "report"),
        ("summary.json", "report"),
        ("metrics.jsonl", "report"),
        ("samples.jsonl", "report"),
        ("starts.jsonl", "report"),
        ("summary.json", "runs"),
        ("tokenizer/tokenizer.json", "generate"),
        ("plan.txt", "report"),
        ("checkpoints/step_00000002/model.pt", "export"),
        ("checkpoints/step_00000002/manifest.json", "generate"),
    ):

        def secret(place: Place, name: str = name, verb: str = verb) -> list[str]:
            run = place.run()
            _replace(run / name, place.key)
            return command(verb, run)

        def circle(place: Place, name: str = name, verb: str = verb) -> list[str]:
            run = place.run()
            _replace(run / name, run / name)
            return command(verb, run)

        yield Case("link in a run", f"{name} to a key, {verb}", secret, reads=True)
        yield Case("link in a run", f"{name} to itself, {verb}", circle)


def _pages() -> Iterator[Case]:
    """Yields runs with an attacker's text, for the page of a run and the list of runs."""

    def make(place: Place, text: str, where: str, verb: str) -> list[str]:
        run = place.run()
        if where == "metrics":
            rows = [{"step": i, "tokens_seen": i, f"train/{text}": i, "train/loss": 1.0, text: text} for i in (1, 2)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif where == "samples":
            rows = [{"step": 1, "prompt": text, "text": text, "reference": text, "answer": text}]
            with (run / "samples.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        elif where == "starts":
            lines = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
            (run / "starts.jsonl").write_text("".join(json.dumps(_spread(line, text)) + "\n" for line in lines))
        elif where == "config":
            tree = yaml.safe_load((run / "config.yaml").read_text())
            (run / "config.yaml").write_text(yaml.safe_dump(_spread(tree, text, ("monitor",))))
        elif where == "plan":
            (run / "plan.txt").write_text(text)
        elif where == "export":
            (run / "export" / "README.md").write_text(text)
        else:
            summary = json.loads((run / "summary.json").read_text())
            (run / "summary.json").write_text(json.dumps(_spread(summary, text)))
        return command(verb, run)

    spots = ("summary", "metrics", "samples", "starts", "config", "plan", "export")
    for i, text in enumerate(SCRIPTS):
        where = spots[i % len(spots)]
        yield Case(
            "page of a run", f"script {i} in {where}", lambda place, t=text, w=where: make(place, t, w, "report")
        )
    for where in spots:
        text = "".join(SCRIPTS)
        yield Case(
            "page of a run", f"all scripts in {where}", lambda place, t=text, w=where: make(place, t, w, "report")
        )
    for i, text in enumerate(STEERS):
        where = ("summary", "metrics", "config")[i % 3]
        for verb in ("runs", "report"):
            yield Case(
                "terminal of a run",
                f"escape {i} in {where}, {verb}",
                lambda place, t=text, w=where, v=verb: make(place, t, w, v),
            )
    for name in ("<b onclick=pwnedjs()>", "a'b\"c&d", "\u202eabc", "-rf", "$(touch a)"):

        def named(place: Place, name: str = name) -> list[str]:
            run = place.run()
            place.writable.append(run.rename(run.with_name(name)))
            return ["report", f"run_dir={place.stranger / name}"]

        yield Case("page of a run", f"a folder called {name!r}", named)


def _spread(value: Any, text: str, keys: tuple[str, ...] | None = None) -> Any:
    """Returns a copy in which the text replaces all strings, or those of the given keys only."""
    if isinstance(value, dict):
        return {
            k: text if isinstance(v, str) and (keys is None or k in keys) and k != "status" else _spread(v, text, keys)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_spread(v, text, keys) for v in value]
    return text if isinstance(value, str) and keys is None else value


def _files() -> Iterator[Case]:
    """Yields files of unexpected types or contents, for the verbs `runs` and `report`."""
    values: dict[str, str] = {
        "a list": "[]",
        "null": "null",
        "a text": '"pwned"',
        "a number": "17",
        "deep": "[" * 20_000,
        "cut": '{"status": "fin',
        "texts for numbers": '{"status": "finished", "step": "many", "tokens": {}, "seconds": []}',
        "numbers for texts": '{"status": 17, "step": -1, "best": 3, "versions": 5, "checkpoints": "a"}',
        "huge": '{"status": "finished", "step": ' + "9" * 5000 + "}",
        "infinite": '{"status": "finished", "step": Infinity}',
        "not a number": '{"status": "finished", "step": NaN, "seconds": NaN}',
        "NUL": "\0\0\0",
        "nulls": '{"status": null, "step": null, "best": null, "tokens": null, "seconds": null}',
        "surrogates": '{"status": "\\ud800", "step": 1}',
        "a step of 1e400": '{"status": "finished", "step": 1e400}',
    }

    def make(place: Place, name: str, text: str, verb: str) -> list[str]:
        run = place.run()
        (run / name).write_text(text + "\n")
        return command(verb, run)

    for i, (what, text) in enumerate(values.items()):
        for name in ("summary.json", "metrics.jsonl", "starts.jsonl", "samples.jsonl"):
            verb = ("report", "runs")[i % 2 if name in ("summary.json", "metrics.jsonl") else 0]
            yield Case(
                "files of a run",
                f"{what} as {name}, {verb}",
                lambda place, n=name, t=text, v=verb: make(place, n, t, v),
            )
    for name, verb in (
        ("summary.json", "report"),
        ("metrics.jsonl", "runs"),
        ("config.yaml", "report"),
        ("config.yaml", "generate"),
        ("samples.jsonl", "report"),
        ("starts.jsonl", "report"),
    ):

        def fifo(place: Place, name: str = name, verb: str = verb) -> list[str]:
            run = place.run()
            (run / name).unlink()
            os.mkfifo(run / name)
            return command(verb, run)

        yield Case("files of a run", f"a FIFO as {name}, {verb}", fifo)
    assert SECRET
