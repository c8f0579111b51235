"""Texts of masked diffusion: a model that has memorized one text writes it from masks, and so does its export."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from inprocess import Ended, run
from lmtrain.generation.sampling import denoise, sample_text
from lmtrain.run_folder import trained
from support import EXPORT, SAMPLES, TINY, rows

UNIT = "the fox. "


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("denoising")
    (folder / "text.txt").write_text(UNIT * 400)
    ended = run("train", *TINY, "objective=mdlm", "model=llama_nano", "model.num_key_value_heads=2", "optimizer=muon",
                "data=text", f"data.path={folder}/text.txt", "data.global_batch_size=16", "data.micro_batch_size=16",
                "data.seq_len=48", EXPORT, SAMPLES,
                "model.hidden_size=64", "model.intermediate_size=128", "optimizer.lr=0.01", "schedule.warmup_steps=5",
                "trainer.max_steps=250", "trainer.val_check_interval=250", "callbacks.samples.max_new_tokens=18",
                "callbacks.samples.temperature=0", "logger=none", "report.enabled=false",
                f"run.dir={folder}/run")  # fmt: skip
    assert ended.code == 0, ended.err
    return folder / "run"


@pytest.fixture(scope="module")
def exported(learned: Path) -> tuple[PreTrainedModel, object]:
    return AutoModelForCausalLM.from_pretrained(learned / "export"), AutoTokenizer.from_pretrained(learned / "export")


def written(model: Path, *argv: str) -> Ended:
    return run("generate", f"run_dir={model}", f"generate.prompt={UNIT}", "generate.max_new_tokens=18", *argv)


def test_a_text_known_by_heart_is_written_from_masks(learned: Path) -> None:
    sample = rows(learned / "samples.jsonl")[-1]
    assert sample["prompt"] + sample["text"] in UNIT * 10
    assert len(sample["text"]) == 18
    for folder in (learned, learned / "export"):
        ended = written(folder, "generate.temperature=0")
        assert (ended.code, ended.out) == (0, f"{UNIT * 3}\n"), ended.err


def test_the_seed_decides(learned: Path) -> None:
    warm = ("generate.temperature=5", "generate.top_k=null")
    first, again, other = (written(learned, *warm, f"seed={seed}").out for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("steps", [1, 5, 7, 100])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 50.0])
def test_no_mask_is_left(exported: tuple[PreTrainedModel, object], steps: int, temperature: float) -> None:
    """For any number of steps all masks are replaced, and only ids of tokens are drawn."""
    model, tokenizer = exported
    n_ids, mask_id = len(tokenizer), model.config.mask_token_id  # type: ignore[arg-type]
    assert mask_id >= n_ids
    for mask in (mask_id, 7):  # the mask may also have the id of a token
        ids = denoise(model.eval(), [116, 104], 13, mask_id=mask, n_ids=n_ids, temperature=temperature, top_k=None,
                      generator=torch.Generator().manual_seed(0), steps=steps)  # fmt: skip
        assert len(ids) == 13
        assert mask not in ids
        assert max(ids) < n_ids


def test_the_surest_are_uncovered_first(exported: tuple[PreTrainedModel, object]) -> None:
    """With one token per step, each step uncovers the likeliest of all predictions, as in this loop of our own."""
    model, tokenizer = exported
    model.eval()
    mask_id, prompt = model.config.mask_token_id, [102, 111, 120]
    ids = prompt + [mask_id] * 6
    for _ in range(6):
        with torch.no_grad():
            shares = model(torch.tensor([ids])).logits[0, :, : len(tokenizer)].softmax(-1)  # type: ignore[arg-type]
        place = max((i for i, token in enumerate(ids) if token == mask_id), key=lambda i: shares[i].max().item())
        ids[place] = int(shares[place].argmax())
    found = sample_text(model, tokenizer, prompt, max_new_tokens=6, temperature=0)
    assert found == tokenizer.decode(ids[3:])  # type: ignore[attr-defined]


def test_the_folder_says_what_it_holds(learned: Path, exported: tuple[PreTrainedModel, object]) -> None:
    """The config makes transformers attend in both directions; servers of causal models don't know the architecture."""
    model, _ = exported
    ids = torch.tensor([[116, 104, 101, 32, 102, 111]])
    changed = ids.index_fill(1, torch.tensor([5]), 33)
    with torch.no_grad():
        assert not torch.equal(model(ids).logits[0, 0], model(changed).logits[0, 0])
    config = json.loads((learned / "export" / "config.json").read_text())
    assert (config["is_causal"], config["architectures"]) == (False, ["LlamaForDenoising"])
    card = (learned / "export" / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card
    assert "**It does not write from left to right**" in card
    assert "model.generate(" not in card
    assert "uncover masked texts" in (learned / "plan.txt").read_text()


def test_the_cards_example_runs(learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(learned / "export")
    code = (learned / "export" / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    exec(code, {})  # noqa: S102
    assert len(capsys.readouterr().out.rstrip("\n")) == 1


@pytest.mark.parametrize("folder", ["run", "export"])
def test_who_asks_for_the_next_token_is_refused(learned: Path, folder: str) -> None:
    path = learned if folder == "run" else learned / "export"
    ended = run("evaluate", f"run_dir={path}", "data=text", f"data.val_path={learned.parent}/text.txt")
    assert ended.code == 2
    assert "predicts masked tokens from both sides, and an evaluation asks for the next token" in ended.err


def test_only_what_works_is_recommended(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(UNIT * 400)
    ended = run("train", *TINY, "objective=mdlm", "data=text", f"data.path={tmp_path}/text.txt", "trainer.max_steps=1",
                "trainer.limit_val_batches=1", "logger=none", "report.enabled=true", EXPORT,
                f"run.dir={tmp_path}/run")  # fmt: skip
    assert ended.code == 0, ended.err
    for said in (ended.out, (tmp_path / "run" / "report.html").read_text()):
        assert "lmtrain.generate" in said
        assert "lmtrain.evaluate" not in said
        assert "lmtrain.chat" not in said


def test_the_run_is_read_as_it_was_trained(learned: Path, exported: tuple[PreTrainedModel, object]) -> None:
    model, _ = trained.load(str(learned), "last", {})
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, exported[0].eval()(ids).logits, rtol=1e-4, atol=1e-4)


def test_next_token_prediction_makes_it_causal_again(learned: Path, tmp_path: Path) -> None:
    ended = run("train", "model=pretrained", f"model.name_or_path={learned}/export", "data=text", "data.seq_len=32",
                f"data.path={learned.parent}/text.txt", "trainer.max_steps=1", "data.global_batch_size=2",
                "data.micro_batch_size=2", "trainer.val_check_interval=1", "trainer.limit_val_batches=1", "logger=none",
                "report.enabled=false", f"run.dir={tmp_path}/run")  # fmt: skip
    assert ended.code == 0, ended.err
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config.get("is_causal", True)
