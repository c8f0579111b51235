"""A finished run of a whole model needs its base no more: its export has the shape, its checkpoint the weights."""

import io
from pathlib import Path

import pytest

from inprocess import run
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir
from tiny_pretrained import SHORT, save_pretrained

GREEDY = ["generate.temperature=0", "generate.max_new_tokens=8"]


def test_the_base_of_a_finished_run_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, text, out = save_pretrained(tmp_path / "base", spare_rows=3), tmp_path / "text.txt", tmp_path / "run"
    text.write_text("one two three four five six seven\n" * 200)
    words = [*SHORT, f"model.name_or_path={base}", f"data.path={text}", "data.val_fraction=0.2",
             "trainer.save_every_n_steps=2", "report.enabled=false",
             "export.dtype=bfloat16", f"run.dir={out}"]  # fmt: skip
    assert run("train", *words).code == 0
    states = {}
    for which in ("step_00000002", "last"):
        model, _, _ = trained.from_run(RunDir(out), which, {})
        states[which] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    commands = (("generate", f"run_dir={out}", "one two", *GREEDY), ("evaluate", str(out)))
    before = [run(*command) for command in commands]
    assert [ended.code for ended in before] == [0, 0], before
    base.rename(tmp_path / "elsewhere")
    config = out / "config.yaml"
    config.write_text(config.read_text().replace(str(base), "nobody/nothing"))
    for which, state in states.items():  # the checkpoint's weights, and not those of the export
        model, _, _ = trained.from_run(RunDir(out), which, {}, to_read=True)
        assert model.state_dict().keys() == state.keys()
        assert all((tensor == state[name]).all() for name, tensor in model.state_dict().items())
    after = [run(*command) for command in commands]
    assert [ended.code for ended in after] == [0, 0], after
    assert after[0].out == before[0].out
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/exit\n"))
    assert run("chat", str(out), *GREEDY).code == 0
    exported = run("export", f"run_dir={out}")  # which writes the folder that it would read
    assert exported.code == 2
    assert "nobody/nothing" in exported.err
