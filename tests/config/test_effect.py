"""No setting is ignored: unread keys are refused, a bare data.path chooses its source, odd values are reported."""

import re
from pathlib import Path

import pytest

from inprocess import message, run, snapshot, train_tiny
from lmtrain.config.checks import time_limit_seconds
from lmtrain.config.compose import check, compose, composition
from lmtrain.config.effect import default_in, without_effect
from lmtrain.data.corpus import check_rows
from lmtrain.errors import UserError
from lmtrain.run.advice import unlikely
from support import EXPORT, TINY

NO_EFFECT = {
    "run_dir=outputs/a": "lmtrain export and lmtrain generate read it; the folder of this run is run.dir",
    "export.checkpoint=last": "lmtrain export reads it",
    "generate.prompt=hello": "lmtrain generate reads it",
    "inspect.samples=9": "lmtrain inspect reads it",
    "trainer.deepspeed.stage=3": "set trainer.strategy=deepspeed",
    "trainer.fsdp.cpu_offload=true": "set trainer.strategy=fsdp",
    "trainer.fsdp.tensor_parallel_size=4": "set trainer.strategy=fsdp_tp",
    "trainer.fp8_recipe=rowwise": "set trainer.precision=fp8",
    "data.fim.spm_rate=0.2": "set data.fim.rate=0.5",
    "data.name=wikitext": "names data of the hub",
    "data.streaming=true": "names data of the hub",
}


@pytest.mark.parametrize("override", NO_EFFECT)
def test_a_key_that_nothing_reads_is_refused(
    override: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = train_tiny(corpus, override)
    assert ended.code == 2
    said = message(ended.err)
    assert said.startswith(f"{override.partition('=')[0]} has no effect ")
    assert NO_EFFECT[override] in said
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("override", ["run_dir=outputs/a", "trainer.fsdp.cpu_offload=false,true"])
def test_a_key_that_no_trial_reads_is_refused(
    override: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    swept = run("train", "-m", *TINY, "data=text", f"data.path={corpus}", override, "seed=1,2")
    assert swept.code == 2
    assert NO_EFFECT[override.replace("false,", "")] in message(swept.err)  # the first trial has the default


# The recipe of a run, a setting without effect in it, and one that gives the setting its effect.
OF_ROWS = {
    "data=unpaired_jsonl objective=kto": ("conversation_format=messages", "prompt_template={a}",
                                          "response_template={b}", "packing=greedy"),
    "data=prompts_jsonl objective=grpo": ("train_on=all", "max_length=32", "prompt_template={a}", "packing=greedy"),
    "data=preference_jsonl objective=dpo": ("response_template={b}",),
}  # fmt: skip


@pytest.mark.parametrize(("words", "key"), [(words, key) for words, keys in OF_ROWS.items() for key in keys])
def test_a_key_that_a_kind_of_rows_does_not_read(words: str, key: str, tmp_path: Path) -> None:
    ended = run("prepare", *words.split(), f"data.path={tmp_path / 'a.jsonl'}", "tokenizer=bytes", "data.seq_len=64",
                f"data.{key}")  # fmt: skip
    assert ended.code == 2
    assert message(ended.err).startswith(f"data.{key.partition('=')[0]} has no effect here: ")


@pytest.mark.parametrize(("words", "policy"), [("data=unpaired_jsonl objective=kto", "split"),
                                               ("data=prompts_jsonl objective=grpo", "truncate_left")])  # fmt: skip
def test_a_policy_for_long_rows_that_their_kind_does_not_have(words: str, policy: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    ended = run("prepare", *words.split(), f"data.path={tmp_path / 'a.jsonl'}", "tokenizer=bytes",
                "data.seq_len=64", "data.chat_template=zephyr", f"data.on_too_long={policy}")  # fmt: skip
    assert ended.code == 2
    assert f"data.on_too_long={policy}" in message(ended.err)


PAIRS, PROMPTS = ["objective=dpo", "data=ultrafeedback"], ["objective=grpo", "data=prompts_jsonl", "data.path=p.jsonl"]
WITH_OTHERS = {
    "objective.label_smoothing=0.1": ([*PAIRS, "objective.loss=ipo"], "set objective.loss=sigmoid or objective.loss="),
    "objective.length_normalize=false": ([*PAIRS, "objective.loss=simpo"], "always take log-probabilities per token"),
    "objective.clip_high=0.3": ([*PROMPTS, "objective.loss=reinforce"], "reinforce has no ratio to clip"),
    "objective.kl_by_ratio=true": (
        [*PROMPTS, "objective.loss=rloo", "objective.kl_coef=0.1", "objective.kl_estimator=k1"],
        "a loss that adds the KL itself",
    ),
    "objective.max_new_tokens=9": (
        ["objective=distill", "data=ultrachat", "objective.teacher=a/b"], "set objective.on_policy=0.5 too"
    ),
    "peft.double_quant=true": (
        ["peft=lora", "model=pretrained", "model.name_or_path=a/b"], "set peft.quantization=nf4 too"
    ),
    "model.vocab_multiple_of=64": (["model=pretrained", "model.name_or_path=a/b"], "keeps the size of its embedding"),
    "schedule.decay_ratio=0.5": (["schedule=wsd", "schedule.decay_from=5"], "set by schedule.decay_from"),
}  # fmt: skip
OF_GENERATE = {
    "generate.out=a.jsonl": ([], "set generate.prompts_file too"),
    "generate.prompt=Hi": (["generate.prompts_file=p.txt"], "generate.prompts_file names the prompts"),
    "generate.system_prompt=Hi": (["generate.chat=false"], "leave generate.chat=false out"),
}


@pytest.mark.parametrize("verb", ["train", "generate"])
def test_a_key_that_others_leave_without_effect_is_refused(verb: str) -> None:
    for typed, (others, words) in (WITH_OTHERS if verb == "train" else OF_GENERATE).items():
        key, default = typed.partition("=")[0], default_in(compose(["data.seq_len=64", *others]))
        said = without_effect(verb, [typed], check(compose(["data.seq_len=64", *others, typed])), default)
        assert said
        assert said[0].startswith(f"{key} has no effect ")
        assert words in said[0]
        assert without_effect(verb, [typed], check(compose(["data.seq_len=64", *others])), default) == []


def test_a_key_set_to_its_default_passes(corpus: Path) -> None:
    assert run("train", "data=text", f"data.path={corpus}", "trainer.fsdp.cpu_offload=false", "--cfg").code == 0
    ended = run("inspect", *TINY, "data=text", f"data.path={corpus}", "trainer.deepspeed.stage=2", "inspect.samples=1")
    assert ended.code == 0, ended.err


def test_verbs_that_read_a_run_refuse_what_only_training_reads(tmp_path: Path) -> None:
    for verb in ("generate", "export", "evaluate"):
        ended = run(verb, f"run_dir={tmp_path}", "trainer.max_steps=3")
        assert ended.code == 2
        assert f"trainer.max_steps has no effect in `lmtrain {verb}`" in message(ended.err)


OF_HELD_OUT = [["data.val_fraction=0.5"], ["data.num_samples=3"], ["data.text_column=body"],
               ["data.val_path=a.txt", "evaluate.data=run"], ["data.path=a.txt", "evaluate.data=run"]]  # fmt: skip


@pytest.mark.parametrize("argv", OF_HELD_OUT, ids=" ".join)
def test_data_keys_without_data_to_evaluate_on(argv: list[str], tmp_path: Path) -> None:
    """What a run held out is read with the run's own settings."""
    ended = run("evaluate", f"run_dir={tmp_path}", *argv)
    assert ended.code == 2
    assert message(ended.err).startswith(f"{argv[0].partition('=')[0]} has no effect in `lmtrain evaluate` on what the")
    named = check(compose([argv[0], "evaluate.data=named"]))
    assert without_effect("evaluate", argv[:1], named, lambda _: None) == []


SOURCES = {
    ("a.txt",): ("files", "text"),
    ("a.jsonl",): ("files", "auto"),
    ("a.csv.gz",): ("files", "auto"),
    ("a.parquet",): ("files", "auto"),
    ("'corpus/**/*.txt'",): ("files", "text"),
    ("chats.jsonl", "objective=sft"): ("files", "auto"),
    ("pairs.jsonl", "objective=dpo"): ("files", "auto"),
    ("answers.jsonl", "objective=kto"): ("files", "auto"),
}


@pytest.mark.parametrize("typed", SOURCES, ids=" ".join)
def test_a_bare_path_chooses_its_source(typed: tuple[str, ...]) -> None:
    config = check(compose([f"data.path={typed[0]}", "data.seq_len=64", *typed[1:]]))
    assert (config.data.source, config.data.format) == SOURCES[typed]
    kind = {"sft": config.data.conversation_format, "dpo": config.data.share_prompts}
    assert kind.get(config.objective.name, "") is not None
    assert config.data.rows == config.objective.rows  # the option follows from the rows of the objective


def test_a_path_whose_name_tells_nothing_is_refused() -> None:
    for argv in (["data.path=book"], ["data.path=book.txt", "objective=sft"]):
        with pytest.raises(UserError, match=r"its name doesn't tell what it holds; say it with data="):
            compose(argv)


def test_rows_of_another_kind_name_the_option_to_choose(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}')
    config = check(compose(["objective=kto", "data=jsonl", f"data.path={path}"]))
    with pytest.raises(UserError, match=r"needs rows such as data=unpaired_jsonl reads, .* choose data=unpaired_jsonl"):
        check_rows(config)


def test_the_plan_says_which_source_a_bare_path_chose(corpus: Path, tmp_path: Path) -> None:
    steps = ["trainer.max_steps=1", "trainer.limit_val_batches=1", f"run.dir={tmp_path / 'run'}", "data.num_workers=0"]
    ended = run("train", *TINY, *steps, f"data.path={corpus}", "optimizer.lr=0", "trainer.val_check_interval=99",
                "router.z_loss=0.001")  # fmt: skip
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.replace("│", " ").split())
    assert "chose its reader, data=text" in said
    assert "20 files" in said or str(corpus) in said
    assert "optimizer.lr=0: nothing will be learned" in said
    assert "router.*: this model has neither" in said
    assert "trainer.val_check_interval=99 exceeds the run" in said


def test_only_a_length_that_nobody_gave_is_said_to_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer:\n  max_epochs: 3\n")
    for typed, is_chosen in (([], True), (["experiment=mine"], False), (["trainer.max_epochs=15"], False)):
        words = [*typed, "data.path=book.txt"]
        notes = composition(words, str(tmp_path)).reasons
        assert any(note.startswith("no length was given") for note in notes) is is_chosen
    assert composition(["experiment=mine"], str(tmp_path)).reasons == []


def test_an_option_and_a_suffix_that_differ_are_refused() -> None:
    for option, path in (("jsonl", "x.txt"), ("text", "x.jsonl"), ("parquet", "x.csv"), ("chat_jsonl", "x.txt")):
        with pytest.raises(UserError, match=f"data={option} data.path={path}: the file's name says"):
            compose([f"data={option}", f"data.path={path}"])
    compose(["data=text", "data.path=x.jsonl", "data.format=text"])
    compose(["data=jsonl", "data.path=x.csv", "data.text_column=body"])


@pytest.mark.parametrize(
    "typed",
    [["budget.updates=0"], ["budget.updates=large"], ["budget.updates=2.5"],
     ["budget.updates=true"], ["optimizer.eps=-1"], ["optimizer.momentum=1.0", "optimizer=muon"],
     ["optimizer.min_parameter_rms=-1", "optimizer=adafactor"],
     ["model.initializer_range=-1"], ["model.rope_theta=0", "model=llama_nano"], ["model.norm_eps=-1"]],
    ids=" ".join,
)  # fmt: skip
def test_what_no_run_can_have_is_refused_before_data_are_prepared(typed: list[str]) -> None:
    with pytest.raises(UserError, match=typed[0].partition("=")[0]):
        check(compose(typed))


def test_values_that_are_rarely_meant() -> None:
    config = check(compose(["schedule.warmup_steps=50", "data.num_workers=64"]))
    notes = " ".join(unlikely(config, total_steps=40, cores=2, typed=[]))
    assert "schedule.warmup_steps=50 of 40 steps" in notes
    constant = check(compose(["schedule=constant_with_warmup", "schedule.warmup_steps=50"]))
    assert "the peak lr" in " ".join(unlikely(constant, total_steps=40, cores=2, typed=[]))
    assert "data.num_workers=64 on 2 cores" in notes
    assert unlikely(check(compose([])), total_steps=100, cores=2, typed=[]) == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("11:50:00", 42600), ("1-12", 129600), ("1-12:30", 131400), ("2-0:0:1", 172801)],
)
def test_time_limits_are_written_as_slurm_writes_them(text: str, seconds: float) -> None:
    assert time_limit_seconds(text) == seconds


def test_a_run_that_ends_on_nan_has_not_finished(corpus: Path, tmp_path: Path) -> None:
    wild = ["optimizer=adamw", "optimizer.lr=1e38", "schedule.warmup_steps=0", "trainer.gradient_clip_val=null"]
    ended = train_tiny(corpus, EXPORT, *wild, f"run.dir={tmp_path / 'run'}", "trainer.max_steps=1")
    assert ended.code == 1, ended.out
    assert "val/loss is nan at step 1: the model has diverged" in ended.err
    assert '"status": "failed"' in (tmp_path / "run" / "summary.json").read_text()
    assert not (tmp_path / "run" / "export").exists()


def test_after_a_divergence_the_newest_sound_checkpoint_is_named(corpus: Path, tmp_path: Path) -> None:
    """The newest one has a score that is NaN; the one named can be continued as the message says."""
    short = [f"run.dir={tmp_path / 'run'}", "trainer.val_check_interval=1", "checkpoint.keep_last=5", "optimizer=adamw",
             "trainer.gradient_clip_val=null", "schedule=constant", "schedule.warmup_steps=0"]  # fmt: skip
    assert train_tiny(corpus, *short, "trainer.max_steps=1", "optimizer.lr=1e-3").code == 0
    wild = ["optimizer.lr=1e38", "run.resume=auto", "trainer.max_steps=2"]
    ended = train_tiny(corpus, *short, *wild)
    assert ended.code == 1, ended.out
    assert "val/loss is nan at step 2" in ended.err
    assert "the newest checkpoint with a finite val/loss is step_00000001; go on from it" in ended.err
    (words,) = re.findall(r"with (run.resume=\S+) run.dir=NEW", ended.err)
    again = [*short[1:], f"run.dir={tmp_path / 'new'}", "optimizer.lr=1e-3", "trainer.max_steps=2", words]
    ended = train_tiny(corpus, *again)
    assert ended.code == 0, ended.err
    assert "continues after step 1" in ended.out
