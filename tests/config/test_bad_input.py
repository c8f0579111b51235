"""Mistakes of new users: exit code 2 and one message that names the mistake; no folder left, no earlier run changed.

A full disk is tested in tests/checkpoints/test_full_disk.py.
"""

import json
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from inprocess import TWO_STEPS, Ended, message, run, snapshot, train_tiny
from lmtrain import cli
from lmtrain.config import aliases as neighbours
from lmtrain.config import compose as config
from lmtrain.config import strategies
from lmtrain.errors import UserError
from support import EXPORT, REPO, TINY, Run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to an empty working folder and returns it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def assert_refused(ended: Ended | subprocess.CompletedProcess[str], *said: str) -> None:
    code, err = (ended.code, ended.err) if isinstance(ended, Ended) else (ended.returncode, ended.stderr)
    assert code == 2, err
    text = message(err)
    for words in said:
        assert words in text


def refuse(corpus: Path, here: Path, argv: list[str], *said: str) -> None:
    """Checks that the tiny run with these overrides is refused with all these texts and leaves the folder unchanged."""
    before = snapshot(here)
    assert_refused(train_tiny(corpus, *argv), *said)
    assert snapshot(here) == before


MISSPELT = {
    "optimizer.lrr=1": "did you mean optimizer.lr",
    "traner.max_steps=3": "did you mean trainer.max_steps",
    "trainer.max_step=3": "did you mean trainer.max_steps",
    "warmup_step=10": "did you mean schedule.warmup_steps?",
    "optimizer.warmup_step=10": "did you mean schedule.warmup_steps",
    "max_step=5": "did you mean trainer.max_steps?",
    "dta.path=x": "did you mean data.path",
    "data.global_batchsize=8": "did you mean data.global_batch_size",
    "model=gpt_smal": "did you mean model=gpt_small?",
    "data=wikitex": "did you mean data=wikitext?",
    "optimizer=adam": "did you mean optimizer=adamw?",
    "schedule=cosin": "did you mean schedule=cosine?",
    "experiment=shakespear": "did you mean experiment=shakespeare_char?",
    "peft=lorra": "options: ",
    "++trainer.max_stepz=1": "did you mean trainer.max_steps",
    "+foo=1": "there is no key 'foo'",
    "optimizer.momentum=0.9": "belongs to optimizer=muon",
    "schedule.num_cycles=3": "belongs to schedule=cosine_restarts",
    "logger.wandb.name=x": "belongs to logger=wandb",
    "model.extra.n_positions=3": "+model.extra.n_positions=",
    "+model.extra.foo=1": "GPT2Config of transformers has no such field",
    "hydra.run.dir=x": "here it is run.dir",
}


@pytest.mark.parametrize("override", MISSPELT)
def test_a_misspelt_name_gets_the_nearest_valid_one(override: str, corpus: Path, here: Path) -> None:
    refuse(corpus, here, [override], MISSPELT[override], override.lstrip("+").split("=")[0].split(".")[0])


NEIGHBOURS = {
    "datamodule=text": "here it is data",
    "datamodule.batch_size=3": "here it is data.global_batch_size",
    "datamodule.path=x": "here it is data.path",
    "optim=adamw": "here it is optimizer",
    "optim.lr=1": "here it is optimizer.lr",
    "ckpt_path=x": "here it is run.resume",
    "trainer.ckpt_path=x": "here it is run.resume",
    "lr=1e-3": "here it is optimizer.lr",
    "learning_rate=1e-3": "here it is optimizer.lr",
    "wandb.name=x": "here it is logger.wandb.name",
    "batch_size=4": "here it is data.global_batch_size",
    "block_size=128": "here it is data.seq_len",
    "trainer.accumulate_grad_batches=4": "here it is data.global_batch_size (accumulation is derived",
    "max_steps=10": "here it is trainer.max_steps",
    "model=gpt2": "did you mean model=gpt_small?",
    "schedule=cosine_with_restarts": "did you mean schedule=cosine_restarts?",
    "data=shakespeare_char": "did you mean experiment=shakespeare_char?",
    "n_layer=3": "here it is model.num_hidden_layers",
    "out_dir=x": "here it is run.dir",
    "--learning_rate=1e-3": "without dashes: python -m lmtrain.train optimizer.lr=1e-3",
    "--batch-size": "without dashes: python -m lmtrain.train data.global_batch_size=...",
}


@pytest.mark.parametrize("override", NEIGHBOURS)
def test_a_neighbours_word_gets_the_one_used_here(override: str, corpus: Path, here: Path) -> None:
    refuse(corpus, here, [override], NEIGHBOURS[override])


@pytest.mark.slow
def test_the_words_used_here_exist() -> None:
    """Every setting suggested in place of another project's is a key, a group or an option."""
    more = (["peft=qlora"], ["objective=dpo", "data=preference"], ["objective=sft", "data=mixture"], ["tokenizer=hub"],
            ["schedule=cosine_restarts"], ["model=llama_nano"], ["objective=grpo", "reward=sum"])  # fmt: skip
    trees = [config.compose(argv) for argv in ([], ["logger=wandb"], ["model=pretrained"], *more)]
    for word in neighbours.NEIGHBOURS.values():
        key, equals, option = word.split(" ")[0].partition("=")
        if equals and "." not in key and option != "*":
            assert (REPO / "conf" / key / f"{option}.yaml").is_file(), word
            continue
        assert any(OmegaConf.select(tree, key, default=neighbours) is not neighbours for tree in trees), word
    for option in neighbours.OPTIONS.values():
        config.compose(option.partition(" (")[0].split())  # without the reason


WRONG_VALUES = {
    "trainer.max_steps=many": "a whole number is needed, found str 'many'",
    "trainer.max_steps=1.5": "a whole number is needed, found float 1.5",
    "trainer.max_steps=-5": "at least 1",
    "trainer.max_steps=null": "Set trainer.max_steps or trainer.max_epochs",
    "optimizer.lr=fast": "a number is needed, found str 'fast'",
    "optimizer.lr=inf": "a number from 0 up is needed",
    "optimizer.lr=nan": "a number from 0 up is needed",
    "optimizer.lr=null": "set optimizer.lr=",
    "optimizer.betas=0.9": "two numbers are needed",
    "optimizer.groups=3": "a list is needed",
    "optimizer.groups=[{patern: x, lr: 1}]": "patern is not known (keys: pattern",
    "data.append_eos=perhaps": "true or false is needed",
    "seed=abc": "a whole number is needed",
    "seed=4294967296": "from 0 to 4294967295",
    "evaluate.answers=500": "a whole number from 0 to 256 is needed",
    "model.dropout=1.5": "a share from 0",
    "trainer.gradient_clip_val=0": "null turns clipping off",
    "trainer.devices=0": "a number from 1 up",
    "trainer.devices=-1": "a number from 1 up",
    "trainer.devices=[0]": "a number of devices is needed",
    "trainer.precision=bf16": "write bf16-mixed",
    "trainer.strategy=fsdpp": "options: auto",
    "trainer.accelerator=tpu": "options: auto",
    "trainer.accelerator=mps": "set trainer.accelerator=cpu",
    "callbacks.extra=3": "a list is needed",
    "callbacks.extra=[3]": "a mapping is needed",
    "callbacks.early_stopping=3": "set its keys one by one",
    "checkpoint.monitor=val/los": "no validation reports that; set checkpoint.monitor=val/loss",
    "run.name=a/../b": "no '.' or '-' in front",
    "run.name='a b'": "use a-z",
    "run.name=-rf": "no '.' or '-' in front",
    "run.name=a/-rf": "no '.' or '-' in front",
    "run.time_limit=soon": "HH:MM:SS",
    "run.allow_target=os": "a list is needed",
    "data.text_column=[]": "a name or a list of names",
    "export.dtype=fp32": "options: float32",
    "model.hidden_act=gelo": "did you mean gelu",
    "model.num_attention_heads=3": "set model.num_attention_heads=2",
    "model.family=gpt3": "did you mean",
    "tokenizer.kind=word": "options: hub, bpe",
    "trainer=null": "set by the name of an option",
    "~model": "can't be left out",
    "trainer.max_steps=1,2": "started with -m",
    "data.path=a=b": "needs quotes twice",
    "trainer.max_steps=${nothing}": "'nothing' not found",
    "logger=tensorboard|+logger.tensorboard.colour=red": "unexpected keyword argument 'colour'",
    "logger=csv|+logger.csv.colour=red": "unexpected keyword argument 'colour'",
    "+logger.comet.uri=x": "options: tensorboard, csv, wandb, mlflow",
}


@pytest.mark.parametrize("overrides", WRONG_VALUES)
def test_a_wrong_value_is_told_what_is_needed(overrides: str, corpus: Path, here: Path) -> None:
    refuse(corpus, here, overrides.split("|"), WRONG_VALUES[overrides])


FOREIGN_TARGETS = {
    "{_target_: os.system, command: ls}": "run.allow_target=[os]",
    "{_target_: subprocess.Popen}": "outside the known packages",
    "{_target_: lightningx.Callback}": "outside the known packages",
    "{_target_: lightning.pytorch.callbacks.Nothing}": "has no attribute 'Nothing'",
    "{_target_: lightning.pytorch.callbacks.Timer, colour: red}": "unexpected keyword argument 'colour'",
    "{colour: red}": "names no _target_",
}


@pytest.mark.parametrize("entry", FOREIGN_TARGETS)
def test_a_target_that_may_not_or_can_not_be_built(entry: str, corpus: Path, here: Path) -> None:
    refuse(corpus, here, [f"callbacks.extra=[{entry}]"], FOREIGN_TARGETS[entry])


def test_a_torch_that_can_not_shard_bytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 lets every sharded parameter require a gradient, which bytes can't."""
    monkeypatch.setattr(strategies, "version", lambda _: "2.11.0+cu130")
    words = [
        "model=pretrained",
        "model.name_or_path=x",
        "peft=qlora",
        "objective=sft",
        "data=chat_jsonl",
        "data.path=x",
    ]
    config.check(config.compose(words))
    with pytest.raises(UserError, match=r"needs torch 2\.13 \(here 2\.11\.0\+cu130\)"):
        config.check(config.compose([*words, "trainer.strategy=fsdp"]))


def test_early_stopping_without_validation(corpus: Path, here: Path) -> None:
    argv = ["callbacks.early_stopping.enabled=true", "data.val_fraction=0"]
    refuse(corpus, here, argv, "needs a validation split", "data.val_fraction=0.01")
    argv = ["callbacks.early_stopping.enabled=true", "callbacks.early_stopping.monitor=train/loss"]
    refuse(corpus, here, argv, "callbacks.early_stopping.monitor=train/loss", "val/loss")


@pytest.mark.parametrize("key", ["patience=3", "threshold=0.1", "stop_at=2", "mode=max", "monitor=val/perplexity"])
def test_setting_a_key_of_early_stopping_turns_it_on(key: str) -> None:
    override = f"callbacks.early_stopping.{key}"
    assert config.compose([override]).callbacks.early_stopping.enabled
    off = [override, "callbacks.early_stopping.enabled=false"]
    assert not config.compose(off).callbacks.early_stopping.enabled
    assert not config.compose([]).callbacks.early_stopping.enabled


def test_the_plan_says_when_a_run_stops_early(corpus: Path, here: Path) -> None:
    ended = train_tiny(corpus, "callbacks.early_stopping.patience=3")
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.replace("│", " ").split())
    assert "early stopping when val/loss (min) has not improved for 3 validations" in said


def test_a_run_stops_where_its_score_is_good_enough(corpus: Path, here: Path) -> None:
    six = ["trainer.max_steps=6", "trainer.val_check_interval=2", "run.dir=run"]
    ended = train_tiny(corpus, *six, "callbacks.early_stopping.stop_at=100")
    assert ended.code == 0, ended.err
    assert "early stopping when val/loss reaches 100, or when" in " ".join(ended.out.replace("│", " ").split())
    summary = json.loads(Path("run", "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("stopped_early", 2)


def test_too_little_text_to_validate_on(corpus: Path, here: Path) -> None:
    (here / "small.txt").write_text("a few words " * 25)
    refuse(corpus, here, ["data.path=small.txt"], "val_00000.bin holds", "data.val_fraction")


IMPOSSIBLE_SPLITS = {
    ("data.global_batch_size=7",): ("data.micro_batch_size=1", "data.global_batch_size=8"),
    ("data.micro_batch_size=8",): ("data.micro_batch_size=6", "data.global_batch_size=8"),
    ("data.global_batch_size=9", "data.micro_batch_size=3", "trainer.devices=2", "trainer.accelerator=cpu"): (
        "2 device(s)",
        "data.global_batch_size=12",
    ),
    ("data.global_batch_size=16", "data.micro_batch_size=2", "trainer.devices=7", "trainer.accelerator=cpu"): (
        "16 does not split into 7 device(s)",
        "set data.global_batch_size=14",
    ),
    ("data.global_batch_size=0",): ("a whole number from 1",),
}


@pytest.mark.parametrize("argv", IMPOSSIBLE_SPLITS)
def test_an_impossible_batch_split_gets_the_nearest_that_works(argv: tuple[str], corpus: Path, here: Path) -> None:
    refuse(corpus, here, list(argv), *IMPOSSIBLE_SPLITS[argv])


FILES = {
    "empty.txt": b"",
    "latin.txt": b"f\xc3\xafne\ncaf\xe9 au lait\n",
    "short.txt": b"ab",
    "malformed.jsonl": b'{"text": "a"}\n\n{"text": "broken\n',
    "no_object.jsonl": b'{"text": "a"}\n[1, 2]\n',
    "columns.jsonl": b'{"body": "a", "title": "b"}\n' * 20,
    "numbers.jsonl": b'{"text": 3}\n' * 20,
    "blank.jsonl": b"\n\n",
    "malformed.json": b'[{"text": "a"},\n {"text": }]',
    "no.parquet": b"this is not parquet",
    "table.docx": b"text\na\n",
}
BAD_FILES = {
    ("data=text", "nowhere.txt"): ("data.path=nowhere.txt", "no such file or folder"),
    ("data=text", "*.nothing"): ("as a glob it matches nothing",),
    ("data=text", "empty.txt"): ("empty.txt is empty",),
    ("data=text", "folder"): ("folder holds no text file",),
    ("data=text", "latin.txt"): ("latin.txt, line 2", "not UTF-8", "caf\\xe9", "iconv"),
    ("data=text", "short.txt"): ("fewer than one row of data.seq_len=32", "data.seq_len="),
    ("data=jsonl", "malformed.jsonl"): ("malformed.jsonl, line 3", '{"text": "broken'),
    ("data=jsonl", "no_object.jsonl"): ("no_object.jsonl, line 2", "[1, 2]"),
    ("data=jsonl", "columns.jsonl"): ("no column 'text'", "it has: body, title", "data.text_column=body"),
    ("data=jsonl", "numbers.jsonl"): ("line 1", "holds int", "data.text_column"),
    ("data=jsonl", "blank.jsonl"): ("no text is left to train on",),
    ("data=jsonl", "malformed.json"): ("malformed.json, line 2", '{"text": }'),
    ("data=parquet", "no.parquet"): ("no.parquet can't be read as parquet",),
    ("data=jsonl", "table.docx"): ("the format can't be told", "data.format="),
    ("data=bins", "folder"): ("holds no tokens in a known layout",),
    ("data=bins", "nowhere"): ("data.path=nowhere: no such folder",),
}


@pytest.mark.parametrize("case", BAD_FILES, ids="-".join)
def test_a_file_that_cannot_be_trained_on(case: tuple[str, str], corpus: Path, here: Path) -> None:
    for name, content in FILES.items():
        (here / name).write_bytes(content)
    (here / "folder").mkdir()
    option, path = case
    refuse(corpus, here, [option, f"data.path='{path}'"], *BAD_FILES[case])


def test_a_missing_column_of_parquet_lists_those_that_are(corpus: Path, here: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["a", "b"], "title": ["c", "d"]}), here / "table.parquet")
    argv = ["data=parquet", "data.path=table.parquet", "data.text_column=[title,boddy]"]
    refuse(corpus, here, argv, "no column 'boddy'", "it has: body, title", "data.text_column=body")


@pytest.fixture(scope="module")
def bins(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns bins of the corpus made with tokenizer=bytes."""
    cache = tmp_path_factory.mktemp("bins")
    ended = run("prepare", *TINY, "data=text", f"data.path={corpus}", f"data.cache_dir={cache}")
    assert ended.code == 0, ended.err
    return next(p for p in cache.iterdir() if (p / "meta.json").exists())


def test_bins_of_another_tokenizer(bins: Path, corpus: Path, here: Path) -> None:
    """Bins made with tokenizer=bytes are refused with another tokenizer (the folder of a BPE)."""
    made = run("prepare", *TINY, "tokenizer=bpe", "tokenizer.vocab_size=300", "data=text", f"data.path={corpus}",
               f"data.cache_dir={here.parent}/bpe")  # fmt: skip
    assert made.code == 0, made.err
    bpe = next((here.parent / "bpe").glob("*/tokenizer"))
    argv = ["data=bins", f"data.path={bins}", "tokenizer=hub", f"tokenizer.name_or_path={bpe}"]
    refuse(corpus, here, argv, str(bins), "another", "tokenizer")


def test_bins_with_ids_that_the_tokenizer_does_not_have(corpus: Path, here: Path) -> None:
    np.full(1000, 300, dtype=np.uint16).tofile(here / "train.bin")
    argv = ["data=bins", f"data.path={here}", "tokenizer=bytes"]
    refuse(corpus, here, argv, "token id 300", "only 257 ids", "tokenizer=")


def test_bins_shorter_than_a_row(corpus: Path, here: Path) -> None:
    np.arange(237, 257, dtype=np.uint16).tofile(here / "train.bin")
    argv = ["data=bins", f"data.path={here}", "tokenizer=bytes"]
    refuse(corpus, here, argv, "train.bin holds 20 tokens", "data.seq_len=32", "data.seq_len=19 or less")


def test_a_vocabulary_larger_than_the_models(corpus: Path, here: Path) -> None:
    refuse(corpus, here, ["model.vocab_size=64"], "model.vocab_size=64", "257 tokens", "make it null")


def test_a_vocabulary_larger_than_the_pretrained_models(corpus: Path, here: Path) -> None:
    small = train_tiny(corpus, EXPORT, "run.name=small")
    assert small.code == 0, small.err
    made = run("prepare", *TINY, "tokenizer=bpe", "tokenizer.vocab_size=400", "data=text", f"data.path={corpus}",
               f"data.cache_dir={here.parent}/bpe")  # fmt: skip
    assert made.code == 0, made.err
    bpe = next((here.parent / "bpe").glob("*/tokenizer"))
    before = snapshot(here)
    argv = ["model=pretrained", "model.name_or_path=outputs/small/export", "tokenizer=hub",
            f"tokenizer.name_or_path={bpe}", "data=text", f"data.path={corpus}", "data.seq_len=32"]  # fmt: skip
    assert_refused(run("train", *argv, *TWO_STEPS, "logger=none"), "400 tokens", "embeddings for 320")
    assert snapshot(here) == before


def test_seq_len_past_the_models_positions(corpus: Path, here: Path) -> None:
    """A seq_len beyond the model's positions is refused from the config alone, before anything is tokenized."""
    argv = ["data.seq_len=65", f"data.cache_dir={here}/cache"]
    refuse(corpus, here, argv, "data.seq_len=65", "model.max_position_embeddings=64")


def test_a_pretrained_model_that_is_not_there(corpus: Path, here: Path) -> None:
    base = ["logger=none", "data=text", f"data.path={corpus}", "model=pretrained"]
    assert_refused(run("train", *base, "model.name_or_path=no-such"), "data.seq_len=")
    assert_refused(run("train", *base, "data.seq_len=8"), "model.name_or_path")
    named = [*base, "data.seq_len=8", "tokenizer=bytes", "model.name_or_path=./nowhere"]
    assert_refused(run("train", *named), "./nowhere: no such folder")
    assert not list(here.iterdir())


UNWRITABLE = {
    "run.dir=a_file": "a_file is a file",
    "run.dir=a_file/run": "a_file/run: Not a directory",
    "run.dir=/proc/run": "/proc/run",
    "run.root=/proc": "cannot write the run folder /proc/",
    "data.cache_dir=a_file": "data.cache_dir=a_file can't be written",
    "data.cache_dir=/proc/cache": "data.cache_dir=/proc/cache can't be written",
}


@pytest.mark.parametrize("override", UNWRITABLE)
def test_a_folder_that_cannot_be_written(override: str, corpus: Path, here: Path) -> None:
    (here / "a_file").write_text("mine")
    refuse(corpus, here, [override], UNWRITABLE[override])


def test_a_folder_with_someone_elses_files(corpus: Path, here: Path) -> None:
    (here / "thesis").mkdir()
    (here / "thesis" / "chapter.tex").write_text("mine")
    refuse(corpus, here, ["run.dir=thesis"], "thesis holds files that are not a run", "run.dir")


def test_a_refused_run_keeps_the_folder_that_was_there(corpus: Path, here: Path) -> None:
    (here / "mine").mkdir()
    refuse(corpus, here, ["run.dir=mine", "data.path=nowhere.txt"], "nowhere.txt")
    refuse(corpus, here, ["run.dir=mine/deep/run", "data.path=nowhere.txt"], "nowhere.txt")


@pytest.fixture(scope="module")
def two_steps(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_steps") / "kept"
    ended = train_tiny(corpus, f"run.dir={folder}")
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def kept(two_steps: Path, here: Path) -> Path:
    """Returns a copy of a finished run of two steps, in outputs/kept."""
    return Path(shutil.copytree(two_steps, here / "outputs" / "kept", symlinks=True))


def test_a_folder_that_holds_another_run(kept: Path, corpus: Path, here: Path) -> None:
    refuse(corpus, here, [f"run.dir={kept}"], "holds a run already", "run.resume=auto")
    refuse(corpus, here, ["run.name=kept", "run.resume=none"], "holds a run already", "run.name")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("data.seq_len=16", "data.seq_len (then 32, now 16)"),
        ("optimizer=lion", "now lion)"),
    ],
)
def test_what_makes_it_another_run_is_refused_by_name(
    change: str, name: str, kept: Path, corpus: Path, here: Path
) -> None:
    """A changed setting is refused by name; more in tests/resume: test_changes.py, test_changed_settings.py."""
    refuse(corpus, here, ["run.name=kept", "trainer.max_steps=3", change], name, "run.name", str(kept))


def test_a_checkpoint_to_resume_from_that_is_not_there_or_damaged(kept: Path, corpus: Path, here: Path) -> None:
    checkpoint = kept / "checkpoints" / "step_00000002"
    refuse(corpus, here, ["run.name=new", "run.resume=nowhere"], "run.resume=nowhere", "run.resume=auto")
    refuse(corpus, here, ["run.name=new", f"run.resume={kept}"], "is a run", f"run.dir={kept}")
    weights = (checkpoint / "model.pt").read_bytes()
    (checkpoint / "model.pt").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    refuse(corpus, here, ["run.name=new", f"run.resume={checkpoint}"], "model.pt does not match its checksum")
    (checkpoint / "model.pt").write_bytes(weights)
    (checkpoint / "trainer.pt").unlink()
    refuse(corpus, here, ["run.name=new", f"run.resume={checkpoint}"], "trainer.pt is missing")
    (checkpoint / "manifest.json").write_text('{"step": 2, "fil')
    refuse(corpus, here, ["run.name=new", f"run.resume={checkpoint}"], "manifest.json can't be read")


def test_a_broken_config_or_summary_of_an_earlier_run(kept: Path, corpus: Path, here: Path) -> None:
    (kept / "summary.json").write_text('{"status": "fin')
    refuse(corpus, here, ["run.name=kept"], f"{kept}/summary.json can't be read")


def test_a_wrong_sweep_starts_no_job(corpus: Path, here: Path) -> None:
    refuse(corpus, here, ["-m", "optimizer.lrr=1,2"], "did you mean optimizer.lr")
    refuse(corpus, here, ["-m", "optimizer.lr=1e-3,fast"], "optimizer.lr=fast: a number is needed")
    refuse(corpus, here, ["-m", "model=gpt_nano,gpt_nan"], "did you mean model=gpt_nano?")


def test_a_misspelt_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian", "model=gpt_nano"]) == 2
    assert "did you mean lmtrain train model=gpt_nano?" in message(capsys.readouterr().err)


OTHER_VERBS = {
    ("generate",): "which model? python -m lmtrain.generate outputs/NAME",
    ("generate", "run_dir=./nowhere"): "./nowhere: no such folder",
    ("export",): "which model? python -m lmtrain.export outputs/NAME",
    ("export", "run_dir=nowhere"): "nowhere",
    ("prepare", "data=bins"): "data=bins is prepared already",
    ("prepare", "data=text", "data.path=nowhere.txt"): "nowhere.txt",
    ("train", "--config-dir", "nowhere"): "--config-dir nowhere: no such folder",
    ("train", "--config-name", "nothing"): "no nothing.yaml",
}


@pytest.mark.parametrize("argv", OTHER_VERBS, ids=" ".join)
def test_other_verbs(argv: tuple[str, ...], here: Path) -> None:
    assert_refused(run(*argv), OTHER_VERBS[argv])
    assert not list(here.iterdir())


# The same mistakes as users make them, each in a separate process.


def test_process_misspelt_key(lmtrain: Run, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    assert_refused(lmtrain("train", "optimizer.lrr=1"), "there is no key 'optimizer.lrr'; did you mean optimizer.lr")
    assert snapshot(tmp_path) == before


NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there
UNREACHABLE = {
    ("model=gpt_small", "data=wikitext"): ("tokenizer 'gpt2'", "tokenizer=bpe"),
    ("tokenizer=bytes", "data=wikitext"): ("dataset 'Salesforce/wikitext'", "data.path=<files>"),
    ("tokenizer=bytes", "data.seq_len=8", "model=pretrained", "model.name_or_path=nobody/nothing"): (
        "model 'nobody/nothing'",
        "model=gpt_nano",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("argv", UNREACHABLE, ids=["tokenizer", "dataset", "model"])
def test_process_unreachable_hub(argv: tuple[str, ...], lmtrain: Run, corpus: Path, tmp_path: Path) -> None:
    """An unreachable hub is reported in seconds, mostly imports; the libraries' logged retries take half a minute."""
    before = snapshot(tmp_path)
    hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": NOWHERE, "HF_HOME": str(tmp_path / "hf")}
    data = ["data=text", f"data.path={corpus}"] if "data=wikitext" not in argv else []
    started = time.perf_counter()
    done = lmtrain("train", "logger=none", *data, *argv, env=hub)
    print(f"an unreachable hub was told after {time.perf_counter() - started:.1f} s")
    assert_refused(done, *UNREACHABLE[argv], NOWHERE, "HF_ENDPOINT", "HF_HOME")
    after = {name: file for name, file in snapshot(tmp_path).items() if not name.startswith("hf")}
    assert after == before


@pytest.mark.slow
def test_process_ranks_refuse_alike(lmtrain: Run, corpus: Path, tmp_path: Path) -> None:
    """Mistakes that only the ranks detect give one message and exit code 2, and leave the earlier run unchanged."""
    first = train_tiny(corpus, f"run.dir={tmp_path}/run")
    assert first.code == 0, first.err
    before = snapshot(tmp_path / "run")
    argv = [*TINY, *TWO_STEPS, "data=text", f"data.path={corpus}", f"run.dir={tmp_path}/run", "run.resume=auto",
            "trainer.max_steps=3", "trainer.accelerator=cpu", "trainer.devices=2",
            "data.micro_batch_size=3"]  # fmt: skip
    assert_refused(lmtrain("train", *argv, "seed=7"), "seed (then 1337, now 7)")
    assert snapshot(tmp_path / "run") == before
    fresh = [*argv, f"run.dir={tmp_path}/new/run", "model.hidden_size=33"]
    assert_refused(lmtrain("train", *fresh), "model.hidden_size=33")
    assert not (tmp_path / "new").exists()
