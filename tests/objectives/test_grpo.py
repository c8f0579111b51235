"""Learning from rewards: logged records against a plain loop over the rollouts, and refused input."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import odd_rewards
from inprocess import Ended, compare_runs, run
from lmtrain.callbacks import rollouts
from lmtrain.callbacks.rollouts import shown_prompt
from lmtrain.config.compose import check, compose
from lmtrain.data.examples.prompt_rows import PromptRow
from lmtrain.data.order import step_rows
from lmtrain.errors import UserError
from lmtrain.objectives.grpo import end_ids
from lmtrain.rollouts.rollout import Group
from support import REPO, Run, rows
from tiny_pretrained import save_pretrained

GRPO = [
    "objective=grpo", "data.val_fraction=0.2", "data.seq_len=64", "data.global_batch_size=4", "data.micro_batch_size=2",
    "model=pretrained", "optimizer.lr=1e-2", "objective.group_size=3", "objective.max_new_tokens=6",
    "trainer.precision=32-true", "trainer.max_steps=2", "trainer.log_every_n_steps=1", "trainer.val_check_interval=2",
    "logger=none", "export.enabled=false", "report.enabled=false", "run.resume=none",
]  # fmt: skip
LETTERS = ["reward=regex", "reward.whole=false", "reward.pattern='[a-p]'"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{'So, ' * (i % 3)}say {i}", "answer": i}) + "\n" for i in range(20))
    )
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("llama"))


def grpo(prompts: Path, model: Path, run_dir: Path, *argv: str) -> Ended:
    return run("train", *GRPO, f"data.path={prompts}", f"model.name_or_path={model}", f"run.dir={run_dir}", *argv)


def leads_with_the_reward(ended: Ended, validated: list[float], run_dir: Path) -> None:
    """Lines, end table and page show rewards first, and no loss of a validation, which is minus its reward."""
    assert validated
    lines = [line.split() for line in ended.out.splitlines() if line.startswith("step ")]
    assert all(line[2] == "reward" or line[2:4] == ["val", "reward"] for line in lines), lines
    table = ended.out[ended.out.index("finished at step") :]
    assert table.index("train/reward") < table.index("val/reward") < table.index("train/loss")
    assert f"val/reward {max(validated):.4f} at step" in " ".join(table.split())
    assert "val/loss" not in table
    page = (run_dir / "report.html").read_text() if (run_dir / "report.html").exists() else None
    if page is None:
        assert run("report", str(run_dir)).code == 0
        page = (run_dir / "report.html").read_text()
    assert f"<b>{max(validated):.4g}</b>" in page
    assert page.index('data-chart="reward"') < page.index('data-chart="loss"')


def test_a_record_is_what_a_plain_loop_counts(prompts: Path, llama: Path, tmp_path: Path) -> None:
    """Rewards (by part and summed), spreads, lengths, groups without signal and sampler log-probabilities are right."""
    parts = (
        "+reward.parts={letter: {_target_: lmtrain.rewards.text.Regex, pattern: '[a-p]', whole: false, weight: 2}, "
        "short: {_target_: lmtrain.rewards.text.LengthPenalty, most: 4, scale: 10}}"
    )
    ended = grpo(prompts, llama, tmp_path / "run", "reward=sum", parts, "objective.keep_rollouts=true",
                 "checkpoint.min_val_rows=0")  # fmt: skip
    assert ended.code == 0, ended.err
    everything = rows(tmp_path / "run" / "metrics.jsonl")
    records = [row for row in everything if "train/loss" in row]
    assert len(records) == 2
    leads_with_the_reward(ended, [row["val/reward"] for row in everything if "val/reward" in row], tmp_path / "run")
    for record in records:
        table = parquet.read_table(
            tmp_path / "run" / "rollouts" / f"step_{record['step']:08d}_rank0.parquet"
        ).to_pylist()
        assert len(table) == 12
        groups: dict[Any, list[dict[str, Any]]] = {}
        for row in table:
            letter = 1.0 if any("a" <= c <= "p" for c in row["text"]) else 0.0
            short = -max(0, len(row["completion_ids"]) - 4) / 10
            assert (row["reward_letter"], row["reward_short"]) == (letter, pytest.approx(short))
            assert row["reward"] == pytest.approx(2 * letter + short)
            groups.setdefault((row["epoch"], row["row"]), []).append(row)
        spreads, idle, spread_of_advantages = [], 0, []
        for group in groups.values():
            assert [row["sample"] for row in group] == [0, 1, 2]
            rewards = [row["reward"] for row in group]
            mean = sum(rewards) / 3
            std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 2)
            spreads.append(std)
            expected = [(r - mean) / (std + 1e-4) for r in rewards]
            assert [row["advantage"] for row in group] == pytest.approx(expected, abs=1e-9)
            spread_of_advantages.append(math.sqrt(sum(a * a for a in expected) / 3))
            idle += all(abs(a) < 1e-12 for a in expected)
        lengths = [len(row["completion_ids"]) for row in table]
        counted = {
            "reward": sum(row["reward"] for row in table) / 12,
            "reward/letter": sum(row["reward_letter"] for row in table) / 12,
            "reward/short": sum(row["reward_short"] for row in table) / 12,
            "reward_spread": sum(spreads) / 4,
            "advantage_spread": sum(spread_of_advantages) / 4,
            "groups_without_signal": idle / 4,
            "response_length": sum(lengths) / 12,
            "cut_off": sum(not row["ended"] for row in table) / 12,
            "logps/sampler": sum(sum(row["sampler_log_probs"]) for row in table) / sum(lengths),
            "reward_failures": 0.0,
            "overlong_penalty": 0.0,
            "resampled": 0.0,
        }
        for name, value in counted.items():
            assert record[f"train/{name}"] == pytest.approx(value, abs=1e-9), name
        assert record["train/sampler_difference"] < 1e-5
        assert 0 < record["train/entropy"] < math.log(300)
        prompts = [row["prompt_ids"] for row in table[::3]]  # each is read once for its three completions
        read = sum(map(len, prompts)) + sum(lengths)
        assert record["tokens_seen"] - (records[0]["tokens_seen"] if record["step"] == 2 else 0) == read
    validated = next(row for row in rows(tmp_path / "run" / "metrics.jsonl") if "val/loss" in row)
    assert validated["val/loss"] == -validated["val/reward"]
    shown = [row for row in rows(tmp_path / "run" / "samples.jsonl") if "reward" in row]
    assert [row["which"] for row in shown] == ["best", "worst", "random"] * 2
    assert all(shown[i]["reward"] >= shown[i + 1]["reward"] for i in (0, 3))


def test_any_split_is_one_run(prompts: Path, llama: Path, tmp_path: Path) -> None:
    """Runs agree for micro-batches of one and of four prompts, with rollouts in batches of two and all at once."""
    for name, argv in {"a": ["data.micro_batch_size=1", "objective.rollout_batch_size=2"],
                       "b": ["data.micro_batch_size=4", "objective.rollout_batch_size=64"]}.items():  # fmt: skip
        ended = grpo(prompts, llama, tmp_path / name, *LETTERS, "objective.loss=dapo", *argv)
        assert ended.code == 0, ended.err
    compare_runs(tmp_path / "a", tmp_path / "b")


def test_the_second_update_of_a_rollout_is_weighed_by_what_changed(prompts: Path, llama: Path, tmp_path: Path) -> None:
    """Advantages of a group sum to 0 and so does the loss while all ratios are 1; the weights have moved since."""
    words = ["objective.updates_per_rollout=2", "optimizer.lr=1e-2", "trainer.max_steps=2"]
    ended = grpo(prompts, llama, tmp_path / "run", *LETTERS, *words)
    assert ended.code == 0, ended.err
    first, second = (row["train/loss"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row)
    assert abs(first) < 1e-6
    assert abs(second) > 1e-4


@pytest.mark.slow
def test_two_ranks_sample_what_one_does(prompts: Path, llama: Path, tmp_path: Path, forked_lmtrain: Run) -> None:
    for name, argv in {"one": [], "ddp": ["trainer.devices=2"],
                       "fsdp": ["trainer.devices=2", "trainer.strategy=fsdp"]}.items():  # fmt: skip
        done = forked_lmtrain("train", *GRPO, *LETTERS, f"data.path={prompts}", f"model.name_or_path={llama}",
                       f"run.dir={tmp_path / name}", "trainer.accelerator=cpu", "objective.updates_per_rollout=2",
                       "objective.kl_coef=0.1", *argv, env={"PYTHONPATH": str(REPO / "src")})  # fmt: skip
        assert done.returncode == 0, done.stderr
    compare_runs(tmp_path / "one", tmp_path / "ddp")
    compare_runs(tmp_path / "one", tmp_path / "fsdp")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["reward=none"], "learns from rewards, and there is none"),
        ([*LETTERS, "objective.group_size=1"], "the loss compares the completions of a prompt"),
        ([*LETTERS, "objective.max_new_tokens=60"], r"a prompt has 14 tokens, and the model's 64 positions"),
        ([*LETTERS, "data=prompts_jsonl", "data.max_prompt_length=3", "data.on_too_long=raise"],
         "the prompt has 5 tokens"),
        ([*LETTERS, "objective.stop_tokens=[ab]"], "writes 'ab' as 2 tokens"),
        (["reward=exact_number", "reward.column=solution"], "reads the column solution, and the rows have answer"),
        (["reward=custom", "reward._target_=odd_rewards.Text", "run.allow_target=[odd_rewards]"], "a number is needed"),
        (["reward=custom", "reward._target_=odd_rewards.Few", "run.allow_target=[odd_rewards]"],
         "returned 1 values for 12 completions"),
        (["reward=custom", "reward._target_=odd_rewards.Raises", "run.allow_target=[odd_rewards]"],
         "no completion could be scored: reward raised ZeroDivisionError: oh dear"),
        (["reward=custom", "reward._target_=odd_rewards.Sleeps", "run.allow_target=[odd_rewards]",
          "objective.reward_timeout=0.2"], r"took longer than objective.reward_timeout=0.2 s"),
        ([*LETTERS, "data=prompts_jsonl", "data.chat_template={template}"],
         "the chat template writes nothing that asks for an answer"),
        ([*LETTERS, "trainer.strategy=deepspeed"], "Set trainer.strategy=ddp or fsdp"),
        ([*LETTERS, "objective.loss=rloo", "objective.kl_coef=0.1"], "objective.kl_estimator=k1"),
        ([*LETTERS, "checkpoint.monitor=val/reward"], "takes the worst value for the best: set checkpoint.mode=max"),
        ([*LETTERS, "checkpoint.mode=max"], "takes the worst value for the best: set checkpoint.mode=min"),
        ([*LETTERS, "callbacks.early_stopping.monitor=val/reward"], "set callbacks.early_stopping.mode=max"),
        (["reward=custom", "reward._target_=odd_rewards.lacking", "run.allow_target=[odd_rewards]"],
         "lacking reads the column solution, and the rows have answer: give the parameter a default"),
        (["reward=custom", "reward._target_=odd_rewards.deaf", "run.allow_target=[odd_rewards]"],
         "the function deaf has no parameter completions"),
        (["reward=custom", "reward._target_=odd_rewards.short", "+reward.most=3", "run.allow_target=[odd_rewards]"],
         "the function short has no parameter most"),
        (["reward=custom", "reward._target_=odd_rewards.short"], r"run.allow_target=\[odd_rewards\]"),
        (["reward=custom", "reward._target_=odd_rewards.time.sleep", "run.allow_target=[odd_rewards]"],
         "odd_rewards.time.sleep is not a class"),
        (["reward=custom", "reward._target_=lmtrain.rewards.text.final_number"], "final_number is not a class"),
        (["reward=custom", "reward._target_=odd_rewards.NoValidation", "run.allow_target=[odd_rewards]"],
         "in the validation after step 2 no completion could be scored: reward raised ValueError: no group"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_said_once(
    argv: list[str], words: str, prompts: Path, llama: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}")
    ended = grpo(prompts, llama, tmp_path / "run", *(word.format(template=template) for word in argv))
    assert ended.code in (1, 2), ended.err
    assert ended.err.count("error: ") == 1
    assert re.search(words, ended.err), ended.err


@pytest.mark.parametrize("messages", [False, True])
def test_a_reward_is_a_function_with_trls_signature(messages: bool, llama: Path, tmp_path: Path) -> None:
    """As in TRL, a function gets completions to messages as messages, and those to text as text."""
    path, template = tmp_path / "prompts.jsonl", "data.chat_template=zephyr"
    said = [[{"role": "user", "content": f"say {i}"}] if messages else f"say {i}" for i in range(10)]
    path.write_text("".join(json.dumps({"prompt": p, "answer": i}) + "\n" for i, p in enumerate(said)))
    odd_rewards.SEEN.clear()
    parts = ("+reward.parts={short: {_target_: odd_rewards.short, weight: 2}, "
             "most: {_target_: odd_rewards.at_most, most: 7}}")  # fmt: skip
    ended = grpo(path, llama, tmp_path / "run", "reward=sum", parts, "run.allow_target=[odd_rewards]",
                 "trainer.max_steps=1", *([template] if messages else []))  # fmt: skip
    assert ended.code == 0, ended.err
    assert "2 x short (short) + 1 x at_most (most)" in " ".join(ended.out.split())
    record = next(row for row in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row)
    assert record["train/reward/most"] == 7
    assert record["train/reward/short"] == -record["train/response_length"]
    completions, columns = odd_rewards.SEEN[0]
    assert set(columns) == {"prompts", "answer", "completion_ids", "cut_off", "turn_start"}
    assert all(prompt in said for prompt in columns["prompts"])
    if messages:
        assert all([turn["role"] for turn in completion] == ["assistant"] for completion in completions)
        completions = [completion[0]["content"] for completion in completions]
    assert all(isinstance(completion, str) for completion in completions)


def test_rewards_that_fail_for_some_are_counted_and_steps_without_signal_are_said(
    prompts: Path, llama: Path, tmp_path: Path
) -> None:
    ended = grpo(prompts, llama, tmp_path / "run", "reward=custom", "reward._target_=odd_rewards.NaNs",
                 "run.allow_target=[odd_rewards]", "objective.warn_after_steps=2")  # fmt: skip
    assert ended.code == 0, ended.err
    records = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row]
    assert [row["train/reward_failures"] for row in records] == [1 / 12, 1 / 12]
    assert [row["train/groups_without_signal"] for row in records] == [1.0, 1.0]
    validated = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "val/loss" in row]
    # Of two greedy completions per micro-batch of four prompts, each second one fails; the loss is of those scored.
    assert [(row["val/reward_failures"], row["val/reward"], row["val/loss"]) for row in validated] == [(0.5, 0.5, -0.5)]
    assert ended.out.count("the reward reward returned nan (1 completions)") == 1
    assert ended.out.count("nothing is learned. Where they are low the task is too hard") == 1


def test_a_collapse_is_said_once_with_what_to_change(
    prompts: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "FIRST_STEPS", 1)
    ended = grpo(prompts, llama, tmp_path / "run", *LETTERS, "optimizer.lr=0.5", "trainer.max_steps=12")
    assert ended.code == 0, ended.err
    entropies = [row["train/entropy"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row]
    assert sum(entropy < entropies[0] / 10 for entropy in entropies[1:]) > 1, [*map(round, entropies)]
    assert " ".join(ended.out.split()).count("lower optimizer.lr, or raise objective.temperature") == 1
    first = {"entropy": 2.0, "length": 10.0, "cut_off": 0.0}
    assert rollouts.collapses(first, {"entropy": 0.3, "length": 19.0, "cut_off": 1.0}) == {}
    found = rollouts.collapses(first, {"entropy": 0.3, "length": 21.0, "cut_off": 0.6})
    assert "grown from 10 to 21 tokens" in found["length"]


def test_held_out_rewards_that_fall_while_others_rise_are_said_once(llama: Path, tmp_path: Path) -> None:
    """Held-out prompts are rewarded for the opposite of what training prompts are."""
    for name, wanted in (("train", 1), ("val", -1)):
        lines = [json.dumps({"prompt": f"say {i}", "wanted": wanted}) + "\n" for i in range(12)]
        (tmp_path / name).with_suffix(".jsonl").write_text("".join(lines))
    words = ["reward=custom", "reward._target_=odd_rewards.early_letters", "run.allow_target=[odd_rewards]"]
    size = ["trainer.max_steps=14", "data.global_batch_size=6", "objective.group_size=6", f"run.dir={tmp_path}/run"]
    paths = [f"data.path={tmp_path}/train.jsonl", f"data.val_path={tmp_path}/val.jsonl", f"model.name_or_path={llama}"]
    ended = run("train", *(word for word in GRPO if "val_fraction" not in word), *words, *size, *paths)
    assert ended.code == 0, ended.err
    rewards = [row["val/reward"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "val/reward" in row]
    assert rewards[-1] < rewards[0]
    assert " ".join(ended.out.split()).count("learns the training prompts by heart") == 1
    past = [rollouts.Validated(step, held, trained, 0.5) for step, held, trained in
            ((10, 0.5, 0.2), (20, 0.8, 0.4), (30, 0.5, 0.6), (40, 0.5, 0.7))]  # fmt: skip
    assert rollouts.overfits(past[:3], 100) is None  # once may be chance
    found = rollouts.overfits(past, 100)
    assert found is not None
    assert "fallen from 0.8 (step 20) to 0.5, while train/reward rose from 0.4 to 0.7" in found
    assert rollouts.overfits(past, 10) is None  # 0.3 is less than twice 0.5 * sqrt(2 / 10)
    assert rollouts.overfits([*past[:3], past[3]._replace(trained=0.3)], 100) is None


def test_groups_without_signal_are_replaced(prompts: Path, llama: Path, tmp_path: Path) -> None:
    ended = grpo(prompts, llama, tmp_path / "run", *LETTERS, "objective.loss=dapo", "objective.keep_rollouts=true")
    assert ended.code == 0, ended.err
    tables = [parquet.read_table(file).to_pylist() for file in sorted((tmp_path / "run" / "rollouts").iterdir())]
    records = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row]
    for table, record in zip(tables, records, strict=True):
        assert record["train/resampled"] == pytest.approx(sum(row["resampled"] for row in table) / len(table))
    assert any(row["resampled"] for table in tables for row in table)


@pytest.mark.parametrize("name", ["completions", "cut_off", "completion_ids", "prompts", "self"])
def test_a_column_with_a_name_that_rewards_use_is_refused(name: str, llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}", name: [i]}) + "\n" for i in range(10)))
    ended = grpo(path, llama, tmp_path / "run", *LETTERS)
    assert ended.code == 2
    assert f"prompts.jsonl, line 1: the rows have the column {name}, and rewards get something else" in ended.err


def test_a_stop_token_is_every_token_that_reads_so(llama: Path) -> None:
    """SentencePiece's tokenizers have two full stops: at the beginning of a word, and behind one."""
    words = ["<eos>", "▁", "▁.", ".", "▁x", "▁stop"]
    made = Tokenizer(models.Unigram([(word, -1.0 - i) for i, word in enumerate(words)], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    made.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    assert end_ids(SimpleNamespace(tokenizer=tokenizer, end_ids=[0]), ["."]) == (0, 2, 3)
    bytes_tokenizer = AutoTokenizer.from_pretrained(llama)
    assert end_ids(SimpleNamespace(tokenizer=bytes_tokenizer, end_ids=[0]), [".", "\n"]) == (0, ord("."), ord("\n"))
    with pytest.raises(UserError, match=r"writes 'ok' as 2 tokens, .*: name one of 'o' 'k'"):
        end_ids(SimpleNamespace(tokenizer=bytes_tokenizer, end_ids=[0]), ["ok"])


@pytest.mark.parametrize("others", [12, 1])
def test_replacements_are_new_prompts_and_new_completions(others: int, llama: Path, tmp_path: Path) -> None:
    """Without any signal, every slot of a step of 4 prompts is replaced three times, by 12 others if there are so many.

    If all slots get the same prompt, their completions are still independent.
    """
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(4 + others)))
    never = ["reward=regex", "reward.pattern=never", "data.val_path=null", "data.val_fraction=0"]
    ended = grpo(path, llama, tmp_path / "run", *never, "objective.loss=dapo", "objective.keep_rollouts=true")
    assert ended.code == 0, ended.err
    for step, file in enumerate(sorted((tmp_path / "run" / "rollouts").iterdir())):
        table = parquet.read_table(file).to_pylist()
        own = {int(row) for _, row in step_rows(step, rows=4 + others, global_batch_size=4, seed=1337)}
        used = {row["row"] for row in table}
        assert not used & own
        assert len(used) == min(4, others)
        assert len({tuple(row["completion_ids"]) for row in table}) == len(table) == 12


@pytest.mark.parametrize(("role", "content"), [("role", "content"), ("from", "value")])
def test_of_messages_the_question_is_shown_and_not_the_answer_of_the_data(role: str, content: str) -> None:
    words = ["objective=grpo", "data=prompts_jsonl", "data.path=x", "reward=length", "data.seq_len=64"]
    data = check(compose([*words, "data.chat_template=alpaca"])).data
    said = [("user", "a?"), ("assistant", "b"), ("user", "and c?"), ("assistant", "d")]
    messages = [{role: who, content: text} for who, text in said]
    for column in ({"messages": messages}, {"prompt": ["a?", "b", "and c?"]}):
        group = Group(PromptRow(0, 0, [1], column), [], [], {}, torch.zeros(0), [], torch.zeros(0))
        assert shown_prompt(group, data) == "and c?"


def test_a_run_made_longer_in_the_middle_of_its_last_rollout_goes_on(
    prompts: Path, llama: Path, tmp_path: Path
) -> None:
    for steps in (3, 6):
        ended = grpo(prompts, llama, tmp_path / "run", *LETTERS, "objective.updates_per_rollout=2", "run.resume=auto",
                     f"trainer.max_steps={steps}", "schedule=constant")  # fmt: skip
        assert ended.code == 0, ended.err
    records = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in records] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("called", ["prompt", "question"])
def test_a_column_of_ones_own_holds_the_prompt(called: str, llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"q": f"say {i}", "answer": i}) + "\n" for i in range(20)))
    words = [f"data.columns={{{called}: q}}", "objective.keep_rollouts=true", "objective.loss=dapo"]
    ended = grpo(path, llama, tmp_path / "run", *LETTERS, *words, "trainer.overfit_batches=1")
    assert ended.code == 0, ended.err
    kept = [row for file in (tmp_path / "run" / "rollouts").iterdir() for row in parquet.read_table(file).to_pylist()]
    assert {row["prompt"] for row in kept} <= {f"say {i}" for i in range(20)}
    assert any(row["resampled"] for row in kept)
    assert {row["row"] for row in kept} == {0, 1, 2, 3}, "replaced by others of the same few"
    assert all(row["prompt"] for row in rows(tmp_path / "run" / "samples.jsonl") if "which" in row)
