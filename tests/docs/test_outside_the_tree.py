"""KTO and masked diffusion, copied to a package outside the tree, train to the same numbers: no hook is missing."""

import re
from pathlib import Path

import pytest

from chats import write_rows
from inprocess import TWO_STEPS, run
from support import REPO, TINY, rows

SOURCE, CONF = REPO / "src" / "lmtrain", REPO / "conf"
# The modules and the yamls that each objective consists of.
PARTS = {
    "kto": (
        ["objectives/kto.py", "data/examples/unpaired_rows.py"],
        ["objective/kto.yaml", "data/unpaired_jsonl.yaml"],
    ),
    "mdlm": (["objectives/mdlm.py"], ["objective/mdlm.yaml"]),
}


def copy_out(name: str, folder: Path) -> None:
    """Copies only these parts: modules to the package `my_<name>`, yamls to options whose names begin with `my_`."""
    modules, yamls = PARTS[name]
    moved = {f"lmtrain.{m.removesuffix('.py').replace('/', '.')}": f"my_{name}.{Path(m).stem}" for m in modules}
    (folder / f"my_{name}").mkdir()
    (folder / f"my_{name}" / "__init__.py").touch()
    for part in [*modules, *yamls]:
        text = (SOURCE / part if part in modules else CONF / part).read_text()
        for before, after in moved.items():
            text = text.replace(before, after)
        to = folder / f"my_{name}" / Path(part).name
        if part in yamls:
            text = re.sub(r"^name: (\w+)", r"name: my_\1", text, flags=re.MULTILINE)
            to = folder / "conf" / Path(part).parent / f"my_{Path(part).name}"
            to.parent.mkdir(parents=True)
        to.write_text(text)


@pytest.mark.parametrize("name", [pytest.param("kto", marks=pytest.mark.slow), "mdlm"])
def test_it_trains_as_in_the_tree(name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_out(name, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    answers = write_rows(tmp_path / "answers.jsonl", "unpaired_jsonl")
    common = {
        "kto": [f"data.path={answers}", "data.chat_template=vicuna", "data.seq_len=512", "data.val_fraction=0.1",
                "model.max_position_embeddings=512"],
        "mdlm": ["data=text", f"data.path={corpus}"],
    }[name]  # fmt: skip
    own = {"kto": ["data=unpaired_jsonl"], "mdlm": []}[name]
    found = {}
    for prefix, data in (("", own), ("my_", [word.replace("=", "=my_") for word in own])):
        options = ["--config-dir", str(tmp_path / "conf"), f"run.allow_target=[my_{name}]"] if prefix else []
        ended = run("train", *options, *TINY, *TWO_STEPS, f"objective={prefix}{name}", *data, *common,
                    f"run.dir={tmp_path}/{prefix}run", "export.enabled=false")  # fmt: skip
        assert ended.code == 0, ended.err
        kept = [row for row in rows(tmp_path / f"{prefix}run" / "metrics.jsonl") if "train/loss" in row]
        found[prefix] = [(row["train/loss"], row["grad_norm"]) for row in kept]
    assert found["my_"] == found[""]
    assert len(found[""]) == 2
    assert f"_target_: my_{name}." in (tmp_path / "my_run" / "config.yaml").read_text()


def test_no_other_source_names_them() -> None:
    words = re.compile(r"\b(kto|mdlm|unpaired_rows|UnpairedRow\w*)\b")
    own = {SOURCE / part for modules, _ in PARTS.values() for part in modules}
    naming = [p for p in SOURCE.rglob("*.py") if p not in own and words.search(p.read_text())]
    assert naming == []
