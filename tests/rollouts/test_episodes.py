"""Completions with turns of an environment: masks, log-probabilities and losses against plain loops, and odd input."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

import forked
import odd_environments
from call_templates import DROPPING
from inprocess import Ended, compare_runs, run
from lmtrain.callbacks.metrics import without_times
from support import REPO, Run, rows
from tiny_pretrained import save_pretrained

LETTERS = "a,e,i,o,r,t,P,Q,Z,7,8,9,0,3,4,X,Y,W"
PLAYS = [
    "objective=grpo", "data.val_fraction=0.2", "data.seq_len=64", "data.global_batch_size=4", "data.micro_batch_size=2",
    "data.chat_template=chatml", "tokenizer.add_tokens=[<|im_start|>,<|im_end|>]", "model=pretrained",
    "objective.group_size=3", "objective.max_new_tokens=12", f"objective.stop_tokens=[{LETTERS}]",
    "optimizer.lr=1e-2", "trainer.precision=32-true", "trainer.max_steps=2", "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=2", "logger=none", "export.enabled=false", "report.enabled=false", "run.resume=none",
    "run.allow_target=[odd_environments]",
]  # fmt: skip
ECHO = "objective.environment._target_=odd_environments.Echo"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{'So, ' * (i % 3)}say {i}"}) + "\n" for i in range(20)))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("llama"), max_position_embeddings=384)


def play(prompts: Path, model: Path, run_dir: Path, *argv: str) -> Ended:
    return run("train", *PLAYS, f"data.path={prompts}", f"model.name_or_path={model}", f"run.dir={run_dir}", *argv)


def kept(folder: Path) -> list[list[dict[str, Any]]]:
    return [parquet.read_table(file).to_pylist() for file in sorted((folder / "rollouts").iterdir())]


@pytest.mark.parametrize("name", ["chatml", *DROPPING])
def test_masks_log_probs_and_loss_are_a_plain_loops(name: str, prompts: Path, llama: Path, tmp_path: Path) -> None:
    """Tokens are what transformers' template writes around the sampled ones; only those have a loss."""
    (tmp_path / "own.jinja").write_text(DROPPING.get(name, ""))
    template = f"data.chat_template={tmp_path / 'own.jinja' if name in DROPPING else name}"
    ended = play(prompts, llama, tmp_path / "run", ECHO, "objective.keep_rollouts=true", "trainer.max_steps=1",
                 "export.enabled=true", "optimizer.lr=1e-30", template)  # fmt: skip
    assert ended.code == 0, ended.err
    assert "Echo, up to 8 answers" in ended.out
    (table,) = kept(tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export", dtype="float32").eval()  # hardly trained
    losses, answers = [], 0
    assert max(len(json.loads(row["turns"])) for row in table) == 5, "some episode has three answers"
    for row in table:
        turns = json.loads(row["turns"])
        answers += sum(turn["role"] == "assistant" for turn in turns)
        ids, sampled = row["completion_ids"], row["sampled"]
        assert row["reward"] is None or row["reward"] == pytest.approx(reward_of(row["prompt_ids"], turns, tokenizer))
        check_text(tokenizer, row, turns)
        with torch.no_grad():
            logits = model(torch.tensor([row["prompt_ids"] + ids])).logits[0, len(row["prompt_ids"]) - 1 : -1]
        own = logits.double().log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0][torch.tensor(sampled)]
        torch.testing.assert_close(torch.tensor(row["sampler_log_probs"]), own.float(), rtol=0, atol=2e-5)
        losses.append(-row["advantage"] * sum(sampled) / sum(sampled))  # on-policy: all ratios are 1
    (record,) = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row]
    assert record["train/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    assert record["train/turns"] == pytest.approx(answers / len(table))
    assert record["train/response_length"] == pytest.approx(sum(sum(row["sampled"]) for row in table) / len(table))


def check_text(tokenizer: Any, row: dict[str, Any], turns: list[dict[str, Any]]) -> None:
    """Asserts that prompt and completion are the template's text, which drops thoughts that earlier prompts began."""
    prompt, text = (tokenizer.decode(ids) for ids in (row["prompt_ids"], row["prompt_ids"] + row["completion_ids"]))
    user = prompt.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    begun = prompt.partition("<|im_start|>assistant\n")[2]
    said = turns if turns[-1]["role"] == "assistant" else turns[:-1]  # the last turn of a full episode isn't shown
    before = [{"role": "user", "content": user}, *said[:-1]]
    whole = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
    answers = text.split("<|im_start|>assistant\n")
    assert all(answer.startswith(begun) for answer in answers[1:])
    dropped = [answer.removeprefix(begun) for answer in answers[1:-1]]
    text = "<|im_start|>assistant\n".join([answers[0], *dropped, answers[-1]])
    assert text.removesuffix("<|im_end|>") == whole + said[-1]["content"]


def reward_of(prompt: list[int], turns: list[dict[str, Any]], tokenizer: Any) -> float:
    seed = int(tokenizer.decode(prompt).split(" with ")[1][0])
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    return sum((len(text) + seed) % 5 / 4 for text in said)


def test_any_split_is_one_run(prompts: Path, llama: Path, tmp_path: Path) -> None:
    for name, argv in {"a": ["data.micro_batch_size=1", "objective.rollout_batch_size=2"],
                       "b": ["data.micro_batch_size=4", "objective.updates_per_rollout=2"],
                       "c": ["data.packing=off"]}.items():  # fmt: skip
        ended = play(prompts, llama, tmp_path / name, ECHO, *argv)
        assert ended.code == 0, ended.err
    compare_runs(tmp_path / "a", tmp_path / "c")
    first = [next(row for row in rows(tmp_path / n / "metrics.jsonl") if "train/loss" in row) for n in "ab"]
    assert first[0]["train/reward"] == pytest.approx(first[1]["train/reward"])


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["objective.environment._target_=odd_environments.Raises"], 1,
         "no completion could be scored: reward raised RuntimeError: Raises.step raised ZeroDivisionError: oh dear"),
        (["objective.environment._target_=odd_environments.Exits"], 1, "Exits.step raised SystemExit: 0"),
        (["objective.environment._target_=odd_environments.NeverStarts"], 2,
         "NeverStarts.reset raised ZeroDivisionError: oh dear"),
        (["objective.environment._target_=odd_environments.Sleeps", "objective.tool_timeout=0.05"], 1,
         "Sleeps.step took longer than objective.tool_timeout=0.05 s"),
        (["objective.environment._target_=odd_environments.NoPair"], 2, "NoPair.step returned 'well done': a pair is"),
        (["objective.environment._target_=odd_environments.Undescribed"], 2, "the tool undescribed can't be described"),
        (["objective.environment._target_=odd_environments.add"], 2, "is not a class"),
        (["objective.environment._target_=odd_environments.Adds", "data.chat_template=llama3",
          "tokenizer.add_tokens=[<|start_header_id|>,<|end_header_id|>,<|eot_id|>]"], 2,
         "the row has tools, which the chat template (llama3) never shows the model"),
        (["objective.environment._target_=odd_environments.Echo", "objective.max_total_tokens=40"], 2,
         "exceeds the 40 tokens that the model or objective.max_total_tokens allows"),
        (["reward=length", "objective.max_turns=2"], 2, "name an environment too, with objective.environment._target_"),
    ],
)  # fmt: skip
def test_what_fails(argv: list[str], code: int, words: str, prompts: Path, llama: Path, tmp_path: Path) -> None:
    ended = play(prompts, llama, tmp_path / "run", *argv)
    assert (ended.code, words in " ".join(ended.err.split())) == (code, True), ended.err


def test_an_environment_that_never_ends_is_cut_off(prompts: Path, llama: Path, tmp_path: Path) -> None:
    ended = play(prompts, llama, tmp_path / "run", "objective.environment._target_=odd_environments.NeverEnds",
                 "objective.keep_rollouts=true", "objective.max_total_tokens=100", "trainer.max_steps=1")  # fmt: skip
    assert ended.code == 0, ended.err
    (table,) = kept(tmp_path / "run")
    assert not any(row["ended"] for row in table)
    assert all(len(row["prompt_ids"]) + len(row["completion_ids"]) <= 100 for row in table)
    assert all(row["sampled"][-1] for row in table), "nothing follows the last answer"


def test_an_interrupted_run_continues_exactly(prompts: Path, llama: Path, tmp_path: Path) -> None:
    """Killed inside the environment during the third step's rollout."""
    argv = [*PLAYS, ECHO, f"data.path={prompts}", f"model.name_or_path={llama}", "run.resume=auto",
            "trainer.max_steps=4", "trainer.save_every_n_steps=1", "trainer.accelerator=cpu"]  # fmt: skip
    whole = run("train", *argv, f"run.dir={tmp_path / 'whole'}")
    assert whole.code == 0, whole.err
    counter = tmp_path / "count"
    env = {**os.environ, odd_environments.KILL_AT: f"{counter} 70"}
    killed = forked.run("train", *argv, f"run.dir={tmp_path / 'killed'}", env=env)
    assert killed.returncode == 137
    again = run("train", *argv, f"run.dir={tmp_path / 'killed'}")
    assert again.code == 0, again.err
    for ours, theirs in zip(*(rows(tmp_path / n / "metrics.jsonl") for n in ("whole", "killed")), strict=True):
        assert without_times(ours) == without_times(theirs)


@pytest.mark.slow
def test_two_ranks_play_what_one_does(prompts: Path, llama: Path, tmp_path: Path, forked_lmtrain: Run) -> None:
    env = {"PYTHONPATH": f"{REPO / 'src'}:{REPO / 'tests' / 'helpers'}"}
    for name, argv in {"one": [], "ddp": ["trainer.devices=2"]}.items():
        done = forked_lmtrain("train", *PLAYS, ECHO, f"data.path={prompts}", f"model.name_or_path={llama}",
                       f"run.dir={tmp_path / name}", "trainer.accelerator=cpu", *argv, env=env)  # fmt: skip
        assert done.returncode == 0, done.stderr
    compare_runs(tmp_path / "one", tmp_path / "ddp")
