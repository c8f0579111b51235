"""Values in metrics.jsonl, recomputed by their definitions from the raw rows and a checkpoint, one row at a time.

Rows have uneven numbers of labels; eleven are trained on in micro-batches of 3 + 3 and 3 + 2, five validated in 3 + 2.
Every name that a run writes has a definition.
"""

import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from grid_runs import MASK, TEMPLATE, recorded, sentence
from plain import EOS, encoded
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import metrics_page
from inprocess import run, train_tiny
from lmtrain.data.order import mix64, stream_rows
from support import SAMPLES, Run, rows
from tiny_pretrained import save_pretrained

TRAIN, BATCH, VAL, SEQ_LEN, STEPS, SEED = 11, 6, 5, 64, 2, 7
PROMPT = "Say a city:"  # of all single answers, so that mismatched prompts are the same
BETA, SFT_WEIGHT, GOOD, BAD = 0.3, 0.5, 1.3, 0.7  # the last two: weights of desirable and undesirable answers
RUN = [
    "model=pretrained", "model.dropout=0.0", f"data.seq_len={SEQ_LEN}", f"data.global_batch_size={BATCH}",
    "trainer.precision=32-true", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "trainer.max_steps=null",
    "trainer.max_epochs=1", "data.micro_batch_size=3", f"seed={SEED}",
    "trainer.val_check_interval=1", "trainer.limit_val_batches=null", "trainer.save_every_n_steps=1",
    "trainer.compile=false", "checkpoint.keep_last=9", "schedule=constant", "optimizer.lr=3e-3",
    "callbacks.samples.every_n_validations=0", "export.enabled=false", "report.enabled=false", "logger=none",
]  # fmt: skip
KINDS = {
    "causal_lm": ["data=jsonl", "data.isolate_documents=true", "data.packing=off"],
    "sft": ["data=chat_jsonl", "data.conversation_format=prompt_completion", "data.packing=off"],
    "dpo": ["data=preference_jsonl", "data.conversation_format=preference_text", f"objective.beta={BETA}",
            f"objective.sft_weight={SFT_WEIGHT}", "objective.reference=frozen_copy"],
    "kto": ["data=unpaired_jsonl", "data.chat_template={template}", f"objective.beta={BETA}",
            f"objective.desirable_weight={GOOD}", f"objective.undesirable_weight={BAD}"],
    "mdlm": ["data=text", "data.isolate_documents=false"],
}  # fmt: skip
Numbers = dict[str, float]
Items = list[dict[str, Any]]


def said(i: int) -> str:
    return sentence(i % 12) + " Ja" * (i % 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the raw training and validation rows of each kind of data, a model, and a mixture of experts."""
    torch.set_num_threads(1)
    found = tmp_path_factory.mktemp("raw")
    for name, numbers in (("train", range(TRAIN)), ("val", range(TRAIN, TRAIN + VAL))):
        kinds: dict[str, Items] = {
            "causal_lm": [{"text": said(i) + " Is it?" * (i % 3)} for i in numbers],
            "sft": [{"prompt": f"Is it{' so' * (i % 4)}? ", "completion": said(i)} for i in numbers],
            "dpo": [{"prompt": f"No. {i}? ", "chosen": said(i), "rejected": "Oslo!" * (1 + i % 3)} for i in numbers],
            "kto": [{"prompt": PROMPT, "completion": said(i), "label": i % 3 != 0} for i in numbers],
        }  # fmt: skip
        for kind, items in kinds.items():
            (found / f"{kind}_{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        text = "".join(said(i) for i in numbers) * 9
        spare = SEQ_LEN - 1 if name == "train" else 0  # training windows begin at a random offset
        (found / f"mdlm_{name}.txt").write_text(text[: len(numbers) * SEQ_LEN + spare])
    (found / "template.jinja").write_text(TEMPLATE)
    save_pretrained(found / "model", spare_rows=1, intermediate_size=64, initializer_range=0.06)
    save_pretrained(found / "mixture", spare_rows=1)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=EOS + 2, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(found / "mixture")
    return found


def argv(kind: str, folder: Path, run_dir: Path, *more: str) -> list[str]:
    own = [word.replace("{template}", str(folder / "template.jinja")) for word in KINDS[kind]]
    suffix = "txt" if kind == "mdlm" else "jsonl"
    files = [f"data.path={folder / kind}_train.{suffix}", f"data.val_path={folder / kind}_val.{suffix}"]
    model = f"model.name_or_path={folder / 'model'}"
    return [*RUN, f"objective={kind}", *own, *files, model, f"run.dir={run_dir}", *more]


def trained(kind: str, folder: Path, run_dir: Path, *more: str) -> Path:
    ended = run("train", *argv(kind, folder, run_dir, *more))
    assert ended.code == 0, ended.err
    return run_dir


def raw(kind: str, folder: Path, row: dict[str, Any]) -> Items:
    """Returns the raw rows that a record covers."""
    if "val/loss" in row:
        return rows(folder / f"{kind}_val.jsonl")
    found = rows(folder / f"{kind}_train.jsonl")
    return [found[i] for i in rows_of(row)]


def rows_of(row: dict[str, Any]) -> list[int]:
    """Returns the row numbers of a record's step, and checks them against the record's checksum."""
    pairs = stream_rows((row["step"] - 1) * BATCH, row["step"] * BATCH, rows=TRAIN, seed=SEED, max_epochs=1)
    assert row["rows"] == f"{zlib.crc32(pairs.tobytes()):08x}"
    found: list[int] = pairs[:, 1].tolist()
    return found


def weights_of(run_dir: Path, folder: Path, step: int, model: str = "model") -> nn.Module:
    """Returns transformers' model with the weights after `step` steps."""
    found: nn.Module = AutoModelForCausalLM.from_pretrained(folder / model, attn_implementation="eager").eval()
    if step:
        saved = torch.load(run_dir / f"checkpoints/step_{step:08d}/model.pt", weights_only=True)
        found.load_state_dict({name.removeprefix("model.model."): w for name, w in saved.items()})
    return found


def log_probs(model: nn.Module, ids: list[int]) -> list[float]:
    """Returns log p of each token after the first, given those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1).tolist()
    return [logits[i][token] for i, token in enumerate(ids[1:])]


def answer(model: nn.Module, prompt: list[int], ids: list[int]) -> float:
    """Returns log p of an answer."""
    return sum(log_probs(model, prompt + ids)[len(prompt) - 1 :])


def ended(text: str) -> list[int]:
    return [*encoded(text), EOS]


def size(item: dict[str, Any]) -> int:
    """Returns the number of tokens of a raw row: of its prompt once, and of each answer or text with its end."""
    answers = [item[key] for key in ("text", "completion", "chosen", "rejected") if key in item]
    return len(encoded(item.get("prompt", ""))) + sum(len(ended(text)) for text in answers)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Recomputes numbers by name from (model, reference, raw rows).
Recompute = Callable[[nn.Module, nn.Module, Items], Numbers]


def likelihoods(model: nn.Module, reference: nn.Module, items: Items) -> Numbers:
    nll: list[float] = []
    for item in items:
        prompt = encoded(item.get("prompt", ""))
        text = ended(item["completion"] if prompt else item["text"])
        nll += [-p for p in log_probs(model, prompt + text)[max(0, len(prompt) - 1) :]]
    return {"loss": mean(nll)}


def pairs(model: nn.Module, reference: nn.Module, items: Items) -> Numbers:
    found: dict[str, list[float]] = {}
    for item in items:
        prompt, chosen, rejected = encoded(item["prompt"]), ended(item["chosen"]), ended(item["rejected"])
        w, l = answer(model, prompt, chosen), answer(model, prompt, rejected)  # noqa: E741
        r_w, r_l = w - answer(reference, prompt, chosen), l - answer(reference, prompt, rejected)
        preference, sft = -math.log(s(BETA * (r_w - r_l))), -w / len(chosen)
        kl = mean([math.exp(-r / n) - 1 + r / n for r, n in ((r_w, len(chosen)), (r_l, len(rejected)))])
        numbers = {
            "loss": preference + SFT_WEIGHT * sft, "preference_loss": preference, "sft_loss": sft, "kl": kl,
            "logps/chosen": w, "logps/rejected": l, "rewards/chosen": BETA * r_w, "rewards/rejected": BETA * r_l,
            "rewards/margin": BETA * (r_w - r_l), "rewards/accuracy": float(r_w > r_l),
        }  # fmt: skip
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
    return {name: mean(values) for name, values in found.items()}


def marked_answers(model: nn.Module, reference: nn.Module, items: Items) -> Numbers:
    """Recomputes KTO's numbers; all rows have the same prompt, so mismatched answers are the answers themselves."""
    prompt, texts = encoded(PROMPT), [ended(item["completion"]) for item in items]
    log_p = [answer(model, prompt, text) for text in texts]
    ratios = [p - answer(reference, prompt, text) for p, text in zip(log_p, texts, strict=True)]
    z = max(0.0, mean(ratios))
    good = [item["label"] for item in items]
    loss = [
        GOOD * (1 - s(BETA * (r - z))) if g else BAD * (1 - s(BETA * (z - r)))
        for r, g in zip(ratios, good, strict=True)
    ]
    chosen = mean([BETA * r for r, g in zip(ratios, good, strict=True) if g])
    rejected = mean([BETA * r for r, g in zip(ratios, good, strict=True) if not g])
    return {
        "loss": mean(loss), "kl": z, "logps/mean": mean(log_p), "rewards/chosen": chosen, "rewards/rejected": rejected,
        "rewards/margin": chosen - rejected,
    }  # fmt: skip


RECOMPUTED: dict[str, Recompute] = {
    "causal_lm": likelihoods, "sft": likelihoods, "dpo": pairs, "kto": marked_answers,
}  # fmt: skip


def undefined(names: set[str], objective: str) -> set[str]:
    """Returns the names in a record that have no definition."""
    own = [*metrics_page.OBJECTIVES[objective], *metrics_page.OF_ANY_OBJECTIVE]
    val = [*own, *metrics_page.OF_VALIDATION]
    known = [re.sub("<[a-z]+>", "[^/]+", name) for name in metrics_page.RECORD]
    known += [f"train/{name}" for name in own] + [f"val/(?:[^/]+/)?{name}" for name in val]
    return {
        name for name in names if not any(re.fullmatch(k, name.replace("router/memory/", "router/")) for k in known)
    }


def names_in(run_dir: Path) -> set[str]:
    return {name for row in rows(run_dir / "metrics.jsonl") for name in row}


def compare(run_dir: Path, folder: Path, kind: str) -> None:
    """Compares all train/ and val/ numbers of every record, except those derived from val/loss."""
    assert undefined(names_in(run_dir), kind) == set()
    reference, compared, seen = weights_of(run_dir, folder, 0), Counter[str](), 0
    for row in rows(run_dir / "metrics.jsonl"):
        name = "train" if "train/loss" in row else "val"
        model = weights_of(run_dir, folder, row["step"] - (name == "train"))
        items = raw(kind, folder, row)
        seen += sum(map(size, items)) if name == "train" else 0
        assert row["tokens_seen"] == seen
        expected = RECOMPUTED[kind](model, reference, items)
        found = {key.removeprefix(f"{name}/"): value for key, value in row.items() if key.startswith(f"{name}/")}
        assert found.keys() - set(metrics_page.OF_VALIDATION) == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-5, abs=5e-6), (row["step"], name, key)
        if "perplexity" in found:
            assert found["perplexity"] == pytest.approx(math.exp(expected["loss"]), rel=1e-4)
        compared[name] += 1
    assert compared == {"train": STEPS, "val": STEPS}


@pytest.fixture(scope="module")
def text_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("causal_lm", folder, tmp_path_factory.mktemp("text") / "run")


def test_likelihoods(text_run: Path, folder: Path, tmp_path: Path) -> None:
    compare(trained("sft", folder, tmp_path / "sft"), folder, "sft")
    compare(text_run, folder, "causal_lm")
    texts = [item["text"] for item in rows(folder / "causal_lm_val.jsonl")]
    for row in rows(text_run / "metrics.jsonl"):
        if "val/loss" in row:
            bits = (
                row["val/loss"] / math.log(2) * sum(len(ended(t)) for t in texts) / sum(len(t.encode()) for t in texts)
            )
            assert row["val/bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_pairs(folder: Path, tmp_path: Path) -> None:
    compare(trained("dpo", folder, tmp_path / "dpo"), folder, "dpo")
    assert any(row.get("val/kl", 0) > 1e-4 for row in rows(tmp_path / "dpo/metrics.jsonl")), "the policy stood still"


def test_marked_answers(folder: Path, tmp_path: Path) -> None:
    compare(trained("kto", folder, tmp_path / "kto"), folder, "kto")
    for part in ("train", "val"):
        assert any(row.get(f"{part}/kl", 0) > 0.01 for row in rows(tmp_path / "kto/metrics.jsonl")), (
            "z was never needed"
        )


def test_step_numbers(text_run: Path, folder: Path) -> None:
    """Counts are right, and the speeds, each measured over one step, agree with each other."""
    seen = 0
    for step, row in enumerate((r for r in rows(text_run / "metrics.jsonl") if "train/loss" in r), 1):
        items = raw("causal_lm", folder, row)
        tokens = sum(map(size, items))
        seen += tokens
        assert (row["step"], row["tokens_seen"], row["bad_steps"], row["lr"]) == (step, seen, 0, 3e-3)
        seconds = row["step_ms"] / 1000
        assert row["tokens_per_s"] * seconds == pytest.approx(tokens, rel=1e-2)
        assert row["samples_per_s"] * seconds == pytest.approx(len(items), rel=1e-2)
        assert 0 <= row["data_wait_ms"] <= row["step_ms"]


def test_the_summary(text_run: Path) -> None:
    found = json.loads((text_run / "summary.json").read_text())
    records = rows(text_run / "metrics.jsonl")
    train, val = ([r for r in records if f"{name}/loss" in r] for name in ("train", "val"))
    assert (found["step"], found["tokens"]) == (STEPS, train[-1]["tokens_seen"])
    for part, row in (("train", train[-1]), ("val", val[-1])):
        own = {k: v for k, v in row.items() if k.startswith(f"{part}/")} | {"step": STEPS}
        assert found["validation" if part == "val" else part] == own
    assert found["best_metric"] == {"val/loss": min(row["val/loss"] for row in val)}
    numbers = {k for k, v in found.items() if isinstance(v, int | float)} | {"train", "validation", "best_metric"}
    numbers |= {f"speed_of.{k}" for k in ("parameters", "trained")}
    assert numbers == set(metrics_page.OF_SUMMARY)


def windows_of(folder: Path, row: dict[str, Any]) -> list[list[int]]:
    """Returns the windows of text that a record covers."""
    name = "val" if "val/loss" in row else "train"
    ids = encoded((folder / f"mdlm_{name}.txt").read_text())
    start = mix64(SEED, 0x0FF5E7, 0, 0) % SEQ_LEN if name == "train" else 0  # depends on the epoch and the file
    found = [ids[i : i + SEQ_LEN] for i in range(start, len(ids) - SEQ_LEN + 1, SEQ_LEN)]
    return found if name == "val" else [found[i] for i in rows_of(row)]


def masked(model: nn.Module, ids: torch.Tensor, hidden: torch.Tensor, time: float) -> float:
    """Computes a row's bound: all tokens but the hidden ones are visible to all. ids int64 [T], hidden bool [T]."""
    seen = torch.zeros(1, 1, len(ids), len(ids))  # added to the scores
    with torch.no_grad():
        logits = model(input_ids=ids.masked_fill(hidden, MASK)[None], attention_mask=seen).logits[0].double()
    found = logits.log_softmax(-1)
    return -sum(found[i, ids[i]].item() / time for i in hidden.nonzero()[:, 0].tolist())


def test_masked_tokens(folder: Path, tmp_path: Path) -> None:
    with recorded() as drawn:
        run_dir = trained("mdlm", folder, tmp_path / "mdlm")
    assert undefined(names_in(run_dir), "mdlm") == set()
    for row in rows(run_dir / "metrics.jsonl"):
        name = "train" if "train/loss" in row else "val"
        model = weights_of(run_dir, folder, row["step"] - (name == "train"))
        parts, drawn = drawn[:2], drawn[2:]  # two micro-batches
        draws = [one for ids, hidden, times in parts for one in zip(ids, hidden, times[:, 0].tolist(), strict=True)]
        found = Counter(tuple(ids.tolist()) for ids, _, _ in draws)
        assert found == Counter(map(tuple, windows_of(folder, row)))
        losses = [masked(model, *draw) / SEQ_LEN for draw in draws]
        assert row[f"{name}/loss"] == pytest.approx(mean(losses), rel=1e-5)
        if name == "val":
            assert all(hidden.sum().item() / SEQ_LEN == pytest.approx(time) for _, hidden, time in draws)
            spread = math.sqrt(sum((x - mean(losses)) ** 2 for x in losses) / (len(losses) - 1))
            assert row["val/loss_se"] == pytest.approx(spread / math.sqrt(len(losses)), rel=1e-4)
            assert row["val/perplexity"] == pytest.approx(math.exp(row["val/loss"]), rel=1e-6)
    assert drawn == []


def routed(model: nn.Module, windows: list[list[int]], how: str) -> tuple[Numbers, list[float]]:
    """Returns the routers' numbers for the tokens of some rows, and each expert's share of choices in thousandths."""
    with torch.no_grad():
        logits = model(torch.tensor(windows), output_router_logits=True).router_logits  # per layer [tokens, experts]
    k, layers = 2, []
    for layer in logits if how == "sum" else [torch.cat(logits)]:
        count, n, choices = Counter[int](), len(layer), layer.shape[1]
        probability, z_loss = [0.0] * choices, 0.0
        for token in layer.double():
            count.update(token.topk(k).indices.tolist())
            z_loss += token.logsumexp(0).item() ** 2 / n
            probability = [p + q / n for p, q in zip(probability, token.softmax(0).tolist(), strict=True)]
        balance = choices * sum(count[i] / n * probability[i] for i in range(choices))
        layers.append({"load_balance": balance / k, "z_loss": z_loss,
                       "deviation": sum((p - 1 / choices) ** 2 for p in probability)})  # fmt: skip
    found = {name: sum(layer[name] for layer in layers) for name in layers[0]}
    found["load_balance"] /= len(layers)
    if how == "joint":
        theirs = load_balancing_loss_func(logits, logits[0].shape[1], k)
        assert found["load_balance"] == pytest.approx(float(theirs) / k, rel=1e-5)
    chosen = [Counter(layer.topk(k).indices.flatten().tolist()) for layer in logits]
    shares = [[c[i] / c.total() for i in range(logits[0].shape[1])] for c in chosen]
    found["entropy"] = mean([-sum(q * math.log(q) for q in share if q) / math.log(len(share)) for share in shares])
    found["dead"] = mean([share.count(0) / len(share) for share in shares])
    return found, [1000 * mean(list(column)) for column in zip(*shares, strict=True)]


@pytest.mark.parametrize(("how", "scope"), [("joint", "micro_batch"), ("sum", "step")])
def test_routers(how: str, scope: str, folder: Path, tmp_path: Path) -> None:
    """They are token-weighted means over micro-batches; in training with router.scope=step, over the whole step."""
    run_dir = trained(
        "mdlm", folder, tmp_path / "run", "objective=causal_lm", f"model.name_or_path={folder / 'mixture'}",
        f"router.scope={scope}", f"router.over_layers={how}", "router.load_balance=0.1", "router.deviation=0.1",
        "router.z_loss=0.01",
    )  # fmt: skip
    assert undefined(names_in(run_dir), "causal_lm") == set()
    for row in rows(run_dir / "metrics.jsonl"):
        name = "train" if "train/loss" in row else "val"
        model = weights_of(run_dir, folder, row["step"] - (name == "train"), "mixture")
        windows = windows_of(folder, row)
        whole = scope == "step" and name == "train"
        split = [windows] if whole else [windows[:3], windows[3:]]
        found = [routed(model, part, how) for part in split]
        for key in found[0][0]:
            value = sum(len(part) * numbers[key] for part, (numbers, _) in zip(split, found, strict=True)) / len(
                windows
            )
            assert row[f"{name}/router/{key}"] == pytest.approx(value, rel=1e-4, abs=1e-7), (row["step"], name, key)
        if name == "train":
            _, shares = routed(model, windows, how)
            assert row["router/experts"] == pytest.approx(shares, abs=0.51)


def test_names_of_other_runs(corpus: Path, folder: Path, tmp_path: Path) -> None:
    """Names are defined for runs with a memory, growing rows and steps, validation sets and scored answers."""
    sets = f"data.val_sets={{small: {{path: {folder / 'causal_lm_val.jsonl'}}}}}"
    ended = train_tiny(
        corpus, sets, "model=memory_nano", "memory.layers=[0]", "memory.num_chapters=4", "memory.chapter_size=4",
        "memory.memory_dim=16", "memory.top_k=2", "data.curriculum={by: length, start_length: 16, steps: 1}",
        "data.batch_warmup={start_size: 2, steps: 1}", "callbacks.samples.metrics=[bleu,rouge2,exact_match]",
        SAMPLES, f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    found = names_in(tmp_path / "run")
    expected = {"router/chapters", "row_length", "step_rows", "val/small/bits_per_byte", "val/rouge2"}
    assert expected <= found, expected - found
    assert undefined(found | {"tokens_seen/wiki"}, "causal_lm") == set()
    assert undefined({"train/rewards/chosen", "train/loss_", "losses"}, "causal_lm") != set()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", RECOMPUTED)
def test_two_ranks(kind: str, folder: Path, tmp_path: Path, forked_lmtrain: Run) -> None:
    """In the last step one rank has three rows and the other two, as in validation."""
    done = forked_lmtrain("train", *argv(kind, folder, tmp_path / "run", "trainer.devices=2"))
    assert done.returncode == 0, done.stderr
    compare(tmp_path / "run", folder, kind)
