"""What the plan of a pipeline says that its stages take, against models that are there."""

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny, write

from lmtrain.adapters.finetune import build_trainable_model
from lmtrain.data import tokenizers
from lmtrain.distributed import devices
from lmtrain.planning import estimation
from lmtrain.run.plan import gib
from lmtrain.run_folder import folder as run_dir
from lmtrain.run_folder.folder import RunDir
from lmtrain.stages import costs, definition, plan, words

BIG = ["model.hidden_size=512", "model.num_attention_heads=8"]


def planned(tree: dict[str, dict], folder: Path, *argv: str) -> plan.Plan:
    file = write(tree, folder)
    pipeline = definition.read(file)
    return plan.make(pipeline, words.sort([f"pipeline={file}", f"run.dir={folder}/p", *argv], pipeline), None)


def test_memory_of_stages_whose_models_are_not_there_yet(corpus: Path, tmp_path: Path) -> None:
    tree = tiny(corpus, tmp_path)
    tree["stages"]["pretrain"]["overrides"] += BIG
    tree["stages"]["sft"]["overrides"] += ["data.micro_batch_size=2", "tokenizer.add_tokens=[<a>,<b>]"]
    made = planned(tree, tmp_path)
    found = costs.costs(made, {"pretrain", "sft", "dpo"})

    first = copy.deepcopy(made.stages[0].config)
    devices.resolve_auto(first)
    tokenizer = tokenizers.load_or_train(first.tokenizer, lambda _: iter(()))
    for one in made.stages:
        config = copy.deepcopy(one.config)
        devices.resolve_auto(config)
        model = build_trainable_model(first, tokenizer)  # its padding has rows for the added tokens
        assert found[one.name].memory == gib(sum(estimation.memory(model, config).values())), one.name
    sizes = [float(found[name].memory.split()[0]) for name in ("sft", "dpo")]
    assert sizes[0] > 20
    assert sizes[1] > sizes[0] + 10  # pairs, and the reference


def test_a_stage_too_large_for_its_device(corpus: Path, tmp_path: Path) -> None:
    made = planned(tiny(corpus, tmp_path), tmp_path, "pretrain.estimate.device=0.001")
    found = costs.costs(made, {"pretrain"})["pretrain"].memory
    assert "and 1 MiB can be used: python -m lmtrain.estimate shows ways to fit" in found


def test_what_can_not_be_told_is_said(corpus: Path, tmp_path: Path) -> None:
    made = planned(tiny(corpus, tmp_path), tmp_path, "pretrain.tokenizer=char")
    found = costs.costs(made, {"pretrain"})["pretrain"]
    assert found.memory.startswith("not known: how many tokens tokenizer=char will have is in the data")


@pytest.mark.slow
def test_where_torch_is_not_loaded_it_stays_so(corpus: Path, tmp_path: Path) -> None:
    file = write(tiny(corpus, tmp_path), tmp_path)
    code = (
        "import sys; from lmtrain.stages import costs, definition, plan, words\n"
        "if __name__ == '__main__':\n"
        f"    p = definition.read(__import__('pathlib').Path({str(file)!r}))\n"
        f"    made = plan.make(p, words.sort(['pipeline={file}'], p), None)\n"
        "    print(costs.costs(made, {'sft'})['sft'].memory, 'torch' in sys.modules)\n"
    )
    (tmp_path / "main.py").write_text(code)
    done = subprocess.run([sys.executable, str(tmp_path / "main.py")], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.endswith(" MiB False\n"), done.stderr


def test_time_is_told_by_runs_on_the_same_rows_only(corpus: Path, tmp_path: Path) -> None:
    """A step of answers has as many tokens as an earlier step only where nothing that shapes rows has changed."""
    config = planned(tiny(corpus, tmp_path), tmp_path).stages[1].config
    earlier = RunDir(tmp_path / "earlier")
    earlier.path.mkdir()
    run_dir.write_config(earlier, config)
    (earlier.path / "summary.json").write_text('{"status": "completed", "step": 10, "tokens": 700}')
    steps, rows = config.trainer.max_steps, config.data.global_batch_size
    assert steps is not None
    assert costs._tokens(config, earlier) == 70 * steps
    for changes in ({"max_length": 40}, {"train_on": "last_assistant"}, {"global_batch_size": 2 * rows}):
        changed = dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))
        assert costs._tokens(changed, earlier) is None
