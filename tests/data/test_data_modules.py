"""TextDataModule and ChatDataModule: alone, with a LightningModule from outside lmtrain, and in a run."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import lmtrain
from lmtrain.data.modules import ChatDataModule, TextDataModule, module_class
from lmtrain.errors import UserError
from support import REPO

CHAT = [{"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n}."}]}
        for n in range(40)]  # fmt: skip
PAIRS = [{"prompt": f"What is {n}?", "chosen": f"{n}.", "rejected": "No idea."} for n in range(40)]


class Plain(pl.LightningModule):
    """A LightningModule written without lmtrain."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 300))
        self.batches: list[dict[str, Tensor]] = []
        self.validated = 0

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.batches.append(batch)
        logits = self.model(batch["input_ids"])
        if "labels" not in batch:  # a batch of pairs, with both answers in one row
            return logits.mean()
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(data: pl.LightningDataModule, folder: Path, module: Plain | None = None, **arguments: Any) -> Plain:
    module = module or Plain()
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder, **arguments,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return module


@pytest.fixture
def jsonl(tmp_path: Path) -> Any:
    def write(rows: list[dict[str, Any]]) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def text(corpus: Path, folder: Path, **keys: Any) -> TextDataModule:
    settings = {"tokenizer": "bytes", "seq_len": 32, "batch_size": 4, "cache_dir": str(folder / "cache")}
    return lmtrain.TextDataModule("text", path=str(corpus), **{**settings, **keys})


def test_text_trains_a_module_that_is_not_ours(corpus: Path, tmp_path: Path) -> None:
    data = text(corpus, tmp_path, val_fraction=0.1)
    module = trained(data, tmp_path, max_steps=2, val_check_interval=1, limit_val_batches=2)
    assert module.validated == 4
    assert len(module.batches) == 2
    for batch in module.batches:
        assert batch["input_ids"].shape == batch["labels"].shape == (4, 32)
        assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert data.corpus.tokenizer.decode(module.batches[0]["input_ids"][0])


def test_token_bins_are_read_as_they_are(corpus: Path, tmp_path: Path) -> None:
    prepared = text(corpus, tmp_path)
    prepared.setup()
    bins = lmtrain.TextDataModule("bins", path=str(prepared.corpus.folder), tokenizer="bytes", seq_len=32, batch_size=4)
    one, other = (trained(data, tmp_path, max_steps=2) for data in (text(corpus, tmp_path), bins))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one.batches, other.batches, strict=True))


def test_conversations_train_a_module_that_is_not_ours(jsonl: Any, tmp_path: Path) -> None:
    data = lmtrain.ChatDataModule(
        "chat_jsonl", path=jsonl(CHAT), tokenizer="bytes", seq_len=128, batch_size=4, chat_template="zephyr",
        packing="off", val_fraction=0.1, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    module = trained(data, tmp_path, max_steps=2)
    for batch in module.batches:
        learned = batch["labels"][batch["labels"] != -100]
        assert len(batch["input_ids"]) == 4
        assert 0 < len(learned) < batch["labels"].numel() / 2
    assert data.corpus.splits["train"]["rows"] == 36


def test_pairs_train_a_module_that_is_not_ours(jsonl: Any, tmp_path: Path) -> None:
    data = lmtrain.ChatDataModule(
        "preference_jsonl", path=jsonl(PAIRS), tokenizer="bytes", seq_len=128, batch_size=4, chat_template="zephyr",
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    module = trained(data, tmp_path, max_steps=2)
    assert [int(batch["pairs"]) for batch in module.batches] == [4, 4]
    assert [int(batch["lengths"].numel()) for batch in module.batches] == [8, 8]


def test_an_epoch_is_every_row_once_in_an_order_of_its_own(jsonl: Any, tmp_path: Path) -> None:
    data = lmtrain.ChatDataModule(
        "chat_jsonl", path=jsonl(CHAT), tokenizer="bytes", seq_len=128, batch_size=4, chat_template="zephyr",
        packing="off", val_fraction=0.0, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    module = trained(data, tmp_path, max_epochs=2)
    seen = [sorted(map(tuple, np.concatenate([b["input_ids"].numpy()[:, :40] for b in half])))
            for half in (module.batches[:10], module.batches[10:])]  # fmt: skip
    assert len(module.batches) == 20
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 40
    assert not torch.equal(module.batches[0]["input_ids"][:, :40], module.batches[10]["input_ids"][:, :40])


def conversations(path: str, folder: Path, **keys: Any) -> ChatDataModule:
    settings = {"tokenizer": "bytes", "seq_len": 128, "batch_size": 4, "chat_template": "zephyr", "packing": "off",
                "val_fraction": 0.0, "cache_dir": str(folder / "cache")}  # fmt: skip
    return lmtrain.ChatDataModule("chat_jsonl", path=path, **{**settings, **keys})


class Killed(pl.Callback):
    """Ends the training as a kill would: nothing is saved after step `at`."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            raise Ended


class Ended(Exception):
    """Unlike KeyboardInterrupt, after which Lightning ignores Ctrl-C for the rest of the process."""


def rows_of(module: Plain) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() for batch in module.batches]


@pytest.mark.filterwarnings("error:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_plain_trainers_resume_trains_on_the_rows_that_are_left(workers: int, jsonl: Any, tmp_path: Path) -> None:
    """Of 3 epochs of 10 batches, each checkpoint is continued: within epochs, at their last batches, at their ends."""
    path = jsonl(CHAT)

    def train(module: Plain, *callbacks: pl.Callback, ckpt_path: Path | None = None) -> Plain:
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=3,
            default_root_dir=tmp_path, callbacks=list(callbacks), enable_checkpointing=bool(callbacks),
        )  # fmt: skip
        data = conversations(path, tmp_path, num_workers=workers)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
        return module

    whole = rows_of(train(Plain()))
    assert len(whole) == 30
    kept: dict[str, Any] = {"save_top_k": -1, "filename": "{step}"}
    saves = [ModelCheckpoint(tmp_path / "steps", every_n_train_steps=7 if workers else 5, **kept),
             ModelCheckpoint(tmp_path / "epochs", every_n_epochs=1, **kept)]  # fmt: skip
    with pytest.raises(Ended):
        train(Plain(), *saves, Killed(at=28))
    found = sorted(tmp_path.glob("*/step=*.ckpt"))
    assert len(found) >= 5
    for checkpoint in found:
        done = int(checkpoint.stem.removeprefix("step="))
        assert rows_of(train(Plain(), ckpt_path=checkpoint)) == whole[done:], checkpoint


def test_a_resume_in_another_order_is_reported(jsonl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader: Any = conversations(path := jsonl(CHAT), tmp_path)
    loader.setup("fit")
    saved = loader.train_dataloader().state_dict()
    other: Any = conversations(path, tmp_path, batch_size=8, seed=2)
    other.setup("fit")
    other.train_dataloader().load_state_dict(saved)
    words = "the checkpoint was trained with seed=1337 (now 2), batch_size=4 (now 8)"
    assert words in " ".join(capsys.readouterr().out.split())


def test_alone_without_a_trainer(jsonl: Any, tmp_path: Path) -> None:
    data = conversations(jsonl(CHAT), tmp_path, val_fraction=0.1)
    for loader in (data.train_dataloader, data.val_dataloader):
        with pytest.raises(UserError, match=r"ChatDataModule has no rows before setup\(\): call it first"):
            loader()
    data.setup("fit")
    loader = data.train_dataloader()
    epochs = [[batch["input_ids"].tolist() for batch in loader] for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 2 == [9, 9]
    with_trainer = rows_of(trained(conversations(data.config.data.path, tmp_path, val_fraction=0.1), tmp_path,
                                   max_epochs=2))  # fmt: skip
    assert epochs[0] + epochs[1] == with_trainer
    assert len(list(data.val_dataloader())) == 1


def test_a_plain_trainer_overfits_a_few_batches(jsonl: Any, tmp_path: Path) -> None:
    rows = rows_of(trained(conversations(jsonl(CHAT), tmp_path), tmp_path, max_epochs=2, overfit_batches=3))
    assert len(rows) == 6
    assert rows[:3] == rows[3:]


class Seen(Plain):
    """Appends the text of each row to the file of its rank."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def write(self, name: str, batch: dict[str, Tensor]) -> None:
        with (self.folder / f"{name}_{self.trainer.global_rank}").open("a") as file:
            file.writelines(f"{row}\n" for row in batch["input_ids"].tolist())

    def training_step(self, batch: dict[str, Tensor], at: int) -> Tensor:
        self.write("train", batch)
        return super().training_step(batch, at)

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.write("val", batch)


def train_two_ranks(path: str, folder: str) -> None:
    data = lmtrain.ChatDataModule(
        "chat_jsonl", path=path, tokenizer="bytes", seq_len=128, batch_size=2, chat_template="zephyr",
        packing="off", val_fraction=0.2, cache_dir=f"{folder}/cache",
    )  # fmt: skip
    trained(data, Path(folder), Seen(Path(folder)), max_epochs=1, devices=2, strategy="ddp_fork")


def test_two_ranks_share_the_rows(jsonl: Any, tmp_path: Path) -> None:
    """In a process of its own: a fork of one that has used gloo before lacks gloo's thread and waits for ever."""
    code = f"import {__name__} as here; here.train_two_ranks({str(jsonl(CHAT))!r}, {str(tmp_path)!r})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=200)
    for name, count in (("train", 32), ("val", 8)):
        ranks = [(tmp_path / f"{name}_{rank}").read_text().splitlines() for rank in (0, 1)]
        assert [len(rows) for rows in ranks] == [count // 2, count // 2]
        assert len({*ranks[0], *ranks[1]}) == count


def test_the_pages_module_learns(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPO / "docs" / "lightning.md").read_text()
    (code,) = re.findall(r"```python\n# own_module.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "own_module.py").write_text(code)
    (tmp_path / "book.txt").write_text("".join(path.read_text() for path in sorted(corpus.glob("*.txt"))))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMTRAIN_CACHE", str(tmp_path / "cache"))
    made = runpy.run_path(str(tmp_path / "own_module.py"))
    batch = made["data"].train_rows.read(np.array([[0, row] for row in range(8)]))
    trained, fresh = (float(module.training_step(batch, 0)) for module in (made["module"], made["Bigrams"](257)))
    assert trained < fresh - 0.5


def test_what_cannot_be_read_is_said(corpus: Path, jsonl: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data=chat_jsonl holds conversations: ChatDataModule reads it"):
        lmtrain.TextDataModule("chat_jsonl", path=jsonl(CHAT), tokenizer="bytes")
    with pytest.raises(UserError, match="data=text holds text: TextDataModule reads it"):
        lmtrain.ChatDataModule("text", path=str(corpus), tokenizer="bytes")
    with pytest.raises(UserError, match="did you mean"):
        text(corpus, tmp_path, val_fracton=0.1)


def test_a_config_names_the_module_and_an_older_one_has_it_by_its_rows() -> None:
    config = lmtrain.compose(["data=text", "data.path=book.txt"])
    assert module_class(config) is TextDataModule
    chat = lmtrain.compose(["data=alpaca", "objective=sft", "data.seq_len=256"])
    assert module_class(chat) is ChatDataModule
    chat.data._target_ = None  # as in the config.yaml of an older run
    assert module_class(chat) is ChatDataModule
    config.data._target_ = "lmtrain.data.order.Repeats"
    with pytest.raises(UserError, match="is not a CorpusDataModule"):
        module_class(config)
