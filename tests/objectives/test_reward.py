"""Reward models: a step against its formula for several splits, exports that transformers reads, refused input."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from inprocess import Ended, message, run, stops_at
from lmtrain.callbacks.metrics import without_times
from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import build_corpus
from lmtrain.errors import UserError
from lmtrain.objectives.reward import RewardModel
from lmtrain.rewards.model import ModelReward
from lmtrain.rewards.scoring import Part, Scorer
from lmtrain.run.build import build_objective
from support import REPO, Run, rows
from tiny_pretrained import save_pretrained

REWARD_RUN = [
    "objective=reward", "data=preference_jsonl", "data.chat_template=zephyr", "data.val_fraction=0.2",
    "data.seq_len=256", "data.global_batch_size=6", "data.micro_batch_size=6", "schedule=constant",
    "schedule.warmup_steps=0", "trainer.precision=32-true", "trainer.log_every_n_steps=1", "trainer.max_steps=6",
    "trainer.val_check_interval=3", "trainer.save_every_n_steps=1", "logger=none", "model=pretrained",
    "optimizer.lr=3e-3", "optimizer.weight_decay=0", "objective.center_rewards_coefficient=0.1",
]  # fmt: skip


def write(path: Path, **more: Any) -> Path:
    """Writes twenty pairs of uneven lengths, of which 16 are trained on; most have a margin."""
    found = [
        {"prompt": f"{'Well, ' * (i % 4)}what is {i} plus {i}?", "chosen": f"It is {2 * i}{'!' * (i % 7)}",
         "rejected": f"No{' idea' * (i % 3)}{i}", **({"margin": i % 3 / 2} if i % 5 else {}), **more}
        for i in range(20)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("llama"), max_position_embeddings=256)


def train(pairs: Path, model: Path, run_dir: Path, *argv: str) -> Ended:
    return run("train", *REWARD_RUN, f"data.path={pairs}", f"model.name_or_path={model}", f"run.dir={run_dir}", *argv)


def built(pairs: Path, model: Path, *argv: str) -> tuple[Any, RewardModel]:
    config = check(compose([*REWARD_RUN, f"data.path={pairs}", f"model.name_or_path={model}", *argv]))
    config.trainer.accelerator = "cpu"
    config.trainer.compile = config.trainer.activation_checkpointing = False
    corpus = build_corpus(config)
    objective = build_objective(config, corpus, total_steps=3)
    assert isinstance(objective, RewardModel)
    return corpus, objective


def by_the_formula(objective: RewardModel, corpus: Any, data: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Computes means over pairs from the raw rows, with each answer alone through transformers' own forward."""
    hf, tokenizer = objective.model.model, corpus.tokenizer
    tokenizer.chat_template = corpus.tokenizer.chat_template
    hf.set_attn_implementation("eager")
    each: dict[str, list[torch.Tensor]] = {}
    for row in data:
        rewards = []
        for answer in (row["chosen"], row["rejected"]):
            turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
            ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
            rewards.append(hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 0])
        chosen, rejected = rewards
        loss = -torch.log(torch.sigmoid(chosen - rejected - row.get("margin", 0))) + 0.1 * (chosen + rejected) ** 2
        for name, value in {"loss": loss, "rewards/chosen": chosen, "rewards/margin": chosen - rejected,
                            "rewards/mean": (chosen + rejected) / 2,
                            "rewards/accuracy": (chosen > rejected).float()}.items():  # fmt: skip
            each.setdefault(name, []).append(value)
    return {name: torch.stack(values).mean() for name, values in each.items()}


@pytest.mark.parametrize(
    ("split", "argv"),
    [([6], []), ([4, 2], []), ([1] * 6, []), ([3, 3], ["data.share_prompts=false"]),
     ([2, 4], ["model.attention=sdpa"])],
)  # fmt: skip
def test_a_step_is_its_formula_however_it_is_split(split: list[int], argv: list[str], pairs: Path, llama: Path) -> None:
    """Loss with margins and centering, metrics and gradients are right, also for padded rows (model.attention=sdpa)."""
    corpus, objective = built(pairs, llama, *argv)
    if argv == ["model.attention=sdpa"]:
        corpus.train.pad()
    sums: dict[str, float] = {}
    start = 0
    for size in split:
        batch = corpus.train.read(np.array([[0, row] for row in range(start, start + size)]))
        assert ("cu_seqlens" in batch) == (argv != ["model.attention=sdpa"])
        parts = objective.micro_batch_loss(batch)
        (parts.loss_sum / 6).backward()
        for name, value in parts.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        start += size
    gradients = [p.grad.clone() for p in objective.model.parameters()]
    objective.zero_grad()
    trained = [row for i, row in enumerate(rows(pairs)) if i % 5 != 4][:6]
    expected = by_the_formula(objective, corpus, trained)
    expected["loss"].backward()
    assert {row.get("margin") for row in trained} == {None, 0.5, 1.0, 0}
    for name, value in expected.items():
        assert sums[name] / 6 == pytest.approx(value.item(), rel=1e-5, abs=1e-6), name
    for ours, theirs in zip(gradients, (p.grad for p in objective.model.parameters()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6 * theirs.abs().max().item())


def test_a_quantised_base_is_merged_with_its_head(pairs: Path, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    ended = train(pairs, llama, tmp_path / "run", "peft=qlora", "export.merge=true", "trainer.max_steps=1")
    assert ended.code == 0, ended.err  # an export whose rewards differ from the live model's is refused
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "export_merged").config.num_labels == 1


@pytest.mark.parametrize("argv", [[], ["peft=lora", "export.merge=true"]], ids=["full", "lora"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been_and_its_export_gives_its_rewards(
    argv: list[str], pairs: Path, llama: Path, tmp_path: Path
) -> None:
    """The head is trained, saved and resumed; transformers computes the last validation's rewards from the export."""
    assert train(pairs, llama, tmp_path / "whole", *argv).code == 0
    assert train(pairs, llama, tmp_path / "parts", *argv, *stops_at(2)).code == 75
    ended = train(pairs, llama, tmp_path / "parts", *argv, "run.resume=auto")
    assert ended.code == 0, ended.err
    found = [[without_times(row) for row in rows(tmp_path / name / "metrics.jsonl")] for name in ("whole", "parts")]
    assert found[0] == found[1]
    validated = next(row for row in reversed(found[0]) if "val/loss" in row)

    folder = tmp_path / "parts" / ("export_merged" if argv else "export")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    val = [row for i, row in enumerate(rows(pairs)) if i % 5 == 4]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[which]}], tokenize=False
        )
        for which in ("chosen", "rejected") for row in val
    ]  # fmt: skip
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    rewards = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].view(2, -1)
    assert rewards[0].mean().item() == pytest.approx(validated["val/rewards/chosen"], rel=1e-4, abs=1e-4)
    assert rewards.mean().item() == pytest.approx(validated["val/rewards/mean"], rel=1e-4, abs=1e-4)
    card = (tmp_path / "parts" / "export" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert f"import {'AutoPeftModel' if argv else 'AutoModel'}ForSequenceClassification" in card

    names = ["parts", f"parts/{folder.name}", "parts/export"]
    scores = []
    for name in names:
        out = tmp_path / "evaluations" / name.replace("/", "_")
        data = [f"data.path={pairs}", "data=preference_jsonl", f"data.val_path={pairs}", "data.chat_template=zephyr"]
        done = run("evaluate", f"run_dir={tmp_path / name}", *data, f"evaluate.dir={out}")
        assert done.code == 0, done.err
        scores.append(json.loads(next(out.glob("*.json")).read_text())["scores"])
    assert scores[0]["accuracy"] > 0.5
    for other in scores[1:]:
        assert other == pytest.approx(scores[0], rel=1e-4, abs=1e-4)


def test_where_padding_ends_a_row_the_token_before_it_is_read(pairs: Path, tmp_path: Path) -> None:
    """transformers reads the token before it too, so its batches would otherwise give other rewards."""
    base = save_pretrained(tmp_path / "base", max_position_embeddings=256)
    file = base / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "pad_token": settings["eos_token"]}))
    template = tmp_path / "ends_with_eos.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    corpus, objective = built(pairs, base, f"data.chat_template={template}")
    batch = corpus.train.read(np.array([[0, 0], [0, 1]]))
    assert objective.model.model.config.pad_token_id == corpus.tokenizer.eos_token_id
    assert (batch["input_ids"].flatten()[batch["ends"]] == corpus.tokenizer.eos_token_id).all()
    ids = [torch.tensor(corpus.train.examples.read(row)[0]) for row in range(4)]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=corpus.tokenizer.eos_token_id)
    objective.model.model.set_attn_implementation("eager")
    expected = objective.model.model(input_ids=padded, use_cache=False).logits[:, 0]
    corpus, objective = built(pairs, base, f"data.chat_template={template}")
    rewards, _ = objective.rewards(batch)
    torch.testing.assert_close(rewards.flatten().float(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trainer.strategy=deepspeed"], "Set trainer.strategy=ddp or fsdp"),
        (["objective.center_rewards_coefficient=-1"], "objective.center_rewards_coefficient=-1"),
        (["peft=memory"], "memory=none"),
        (["+export.generation.temperature=0.5"], "does not go with objective=reward: a reward model writes nothing"),
        (["peft=lora", "peft.adapter={adapter}"], "is of a model that predicts tokens"),
        (["model.name_or_path={classes}"], "tells 3 classes apart, and a reward is one number"),
        (["data=chat_jsonl"], "objective=reward needs pairs"),
        (["data.path={backwards}"], "margin is -1: the rejected answer is the better one"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_said_once(
    argv: list[str], words: str, pairs: Path, llama: Path, tmp_path: Path
) -> None:
    places = {"adapter": tmp_path / "adapter", "classes": tmp_path / "classes",
              "backwards": write(tmp_path / "backwards.jsonl", margin=-1)}  # fmt: skip
    if "{adapter}" in argv[-1]:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
        get_peft_model(AutoModelForCausalLM.from_pretrained(llama), config).save_pretrained(places["adapter"])
    if "{classes}" in argv[-1]:
        model = AutoModelForSequenceClassification.from_pretrained(llama, num_labels=3)
        model.save_pretrained(places["classes"])
        AutoTokenizer.from_pretrained(llama).save_pretrained(places["classes"])
    ended = train(pairs, llama, tmp_path / "run", *(word.format(**places) for word in argv))
    assert ended.code == 2, ended.err
    assert words in message(ended.err)


def test_it_writes_nothing_and_scores_no_text(pairs: Path, llama: Path, tmp_path: Path) -> None:
    assert train(pairs, llama, tmp_path / "run", "trainer.max_steps=1").code == 0
    run_dir = str(tmp_path / "run")
    for argv in (
        ["generate", run_dir, "hello"],
        ["evaluate", run_dir, "data=text", f"data.val_path={pairs}"],
        ["chat", str(llama), run_dir, "--web"],
    ):
        ended = run(*argv)
        assert ended.code == 2
        assert "this model gives a reward" in message(ended.err)


LEARNS = [
    "objective=grpo", "data=prompts_jsonl", "data.val_fraction=0", "data.seq_len=64", "data.global_batch_size=4",
    "data.micro_batch_size=2", "model=pretrained", "optimizer.lr=1e-2", "objective.group_size=3",
    "objective.max_new_tokens=6", "objective.keep_rollouts=true", "trainer.precision=32-true", "trainer.max_steps=2",
    "trainer.log_every_n_steps=1", "trainer.save_every_n_steps=1", "logger=none", "export.enabled=false",
    "report.enabled=false", "reward=model", "reward.batch_size=5", "data.chat_template=zephyr",
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{'So, ' * (i % 3)}what is {i}?"}) + "\n" for i in range(8)))
    return path


def learn(prompts: Path, model: Path, rewards: Path, run_dir: Path, *argv: str) -> Ended:
    return run("train", *LEARNS, f"data.path={prompts}", f"model.name_or_path={model}", f"run.dir={run_dir}",
               f"reward.name_or_path={rewards}", *argv)  # fmt: skip


@pytest.mark.parametrize("argv", [[], ["peft=lora"]], ids=["full", "lora"])
def test_a_reward_model_is_a_reward(argv: list[str], pairs: Path, llama: Path, prompts: Path, tmp_path: Path) -> None:
    """A reward is what transformers computes for the conversation alone; resuming with another model is refused."""
    assert train(pairs, llama, tmp_path / "judge", "trainer.max_steps=2", "export.merge=false", *argv).code == 0
    ended = learn(prompts, llama, tmp_path / "judge", tmp_path / "run")
    assert ended.code == 0, ended.err
    folder = tmp_path / "judge" / "export"
    if argv:
        from peft import AutoPeftModelForSequenceClassification

        model = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tables = [parquet.read_table(file).to_pylist() for file in sorted((tmp_path / "run" / "rollouts").iterdir())]
    assert [len(table) for table in tables] == [12, 12]
    asked = rows(prompts)
    for row in [row for table in tables for row in table]:
        turns = [
            {"role": "user", "content": asked[row["row"]]["prompt"]},
            {"role": "assistant", "content": row["text"]},
        ]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        assert row["reward"] == pytest.approx(model(input_ids=ids).logits[0, 0].item(), rel=1e-4, abs=1e-5)
    assert len({row["reward"] for table in tables for row in table}) > 12

    assert train(pairs, llama, tmp_path / "other", "trainer.max_steps=3", *argv).code == 0
    ended = learn(prompts, llama, tmp_path / "other", tmp_path / "run", "run.resume=auto", "trainer.max_steps=3")
    assert ended.code == 2
    assert "reward" in message(ended.err)


def test_a_model_without_a_scalar_head_is_no_reward(llama: Path, prompts: Path, tmp_path: Path) -> None:
    ended = learn(prompts, llama, llama, tmp_path / "run")
    assert ended.code == 2
    assert "has no scalar head (num_labels=1), so it gives no reward" in message(ended.err)
    ended = learn(prompts, llama, tmp_path / "nothing", tmp_path / "run")
    assert ended.code == 2
    assert "nothing" in message(ended.err)
    ended = learn(prompts, llama, llama, tmp_path / "run", "reward.name_or_path=null")
    assert ended.code == 2
    assert "reward=model needs a reward model" in message(ended.err)


def test_a_conversation_too_long_for_the_reward_model_is_a_failed_reward(llama: Path, tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    AutoModelForSequenceClassification.from_pretrained(llama, num_labels=1).save_pretrained(judge)
    AutoTokenizer.from_pretrained(llama).save_pretrained(judge)
    found = Scorer([Part("judge", 1.0, ModelReward(str(judge)))], 60)(["a"] * 3, ["b", "b" * 300, "c"], {})
    assert found.failed == [False, True, False]
    (reason,) = found.reasons
    assert re.search(r"ValueError: prompt and completion have 30\d tokens, and the reward model 256 positions", reason)


def test_a_reward_model_with_a_million_layers_is_refused(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "num_hidden_layers": 1_000_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="1,000,000 layers are more than any model has"):
        ModelReward(str(tmp_path))


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(pairs: Path, llama: Path, tmp_path: Path, forked_lmtrain: Run) -> None:
    for name, argv in {"one": [], "ddp": ["trainer.devices=2"],
                       "fsdp": ["trainer.devices=2", "trainer.strategy=fsdp"]}.items():  # fmt: skip
        done = forked_lmtrain("train", *REWARD_RUN, f"data.path={pairs}", f"model.name_or_path={llama}",
                       f"run.dir={tmp_path / name}", "trainer.accelerator=cpu", "data.micro_batch_size=1",
                       "trainer.max_steps=3", *argv, env={"PYTHONPATH": str(REPO / "src")})  # fmt: skip
        assert done.returncode == 0, done.stderr
    one, *others = (rows(tmp_path / name / "metrics.jsonl") for name in ("one", "ddp", "fsdp"))
    for other in others:
        for ours, theirs in zip(other, one, strict=True):
            slack = 1e-6 if ours["step"] == 1 else 1e-4  # AdamW's first updates divide by gradients near 0
            for key in (key for key in theirs if key.startswith(("train/", "val/", "grad"))):
                assert ours[key] == pytest.approx(theirs[key], rel=slack, abs=slack), (ours["step"], key)
