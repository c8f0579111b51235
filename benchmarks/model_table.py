"""Which models of transformers lmtrain can train: a tiny random one of every causal language model and of every
multimodal wrapper goes through whole runs. `python benchmarks/model_table.py --page` writes docs/models.md.

    python benchmarks/model_table.py --out FILE.jsonl [--only llama,gemma3]
    python benchmarks/model_table.py --out FILE.jsonl --page

Results are appended to FILE.jsonl, and models that it names are not tried again, so a sweep can be continued.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

import torch
from model_page import COLUMNS, PAGE, page, read
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import ANSWERS, QUESTIONS, load, names, save_base, tokenizer_of
from torch import Tensor

import composed_once
from inprocess import run
from lmtrain.checkpoints import store
from lmtrain.errors import UserError
from lmtrain.generation.sampling import sample_texts
from lmtrain.models.attention import generation_mode
from lmtrain.models.blocks import evaluating
from lmtrain.models.wrapper import is_wrapper
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir

# All examples are in the one row of every step.
RUN = [
    *("model=pretrained", "model.dropout=0.0", "objective=sft", "data=chat_jsonl", "data.seq_len=256"),
    *("data.global_batch_size=1", "data.micro_batch_size=1", "trainer.accelerator=cpu", "trainer.precision=32-true"),
    *("trainer.max_steps=4", "trainer.log_every_n_steps=1", "trainer.val_check_interval=4", "optimizer.lr=0.003"),
    *("schedule.warmup_steps=0", "trainer.limit_val_batches=1", "logger=none", "report.enabled=false"),
    *("callbacks.samples.every_n_validations=0", "trainer.save_every_n_steps=2", "checkpoint.keep_last=2"),
]
# What the plan says of a model that can't keep packed examples apart. (That some of a model's layers read each packed
# document as a row of its own is how it can.)
PADDED = "each example is a padded row of its own"
DRAWS = ("phimoe",)  # its routers draw experts at random in training: its validation loss is compared


class Refused(Exception):
    """lmtrain refused the model with one message."""


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model.eval()(input_ids=ids, use_cache=False).logits.float()


def rows_of_chats() -> list[dict[str, Any]]:
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    return [{"messages": each} for each in turns]


def own_loss(model: Any, tokenizer: Any) -> float:
    """Returns transformers' mean loss over all tokens of answers, of each chat alone."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows_of_chats():
        given = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor([given["input_ids"]]), torch.tensor(given["assistant_masks"]).bool()
        log_probs = logits(model, ids)[0, :-1].double().log_softmax(-1)
        total -= log_probs.gather(1, ids[0, 1:, None])[:, 0][mask[1:]].sum()
        count += int(mask[1:].sum())
    return (total / count).item()


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, prompt: str, n: int) -> tuple[str, Tensor]:
    """Continues a prompt without a cache, reading the whole text again for every token; returns text, logits [n, V]."""
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    start, steps = ids.shape[1], []
    for _ in range(n):
        steps.append(logits(model, ids)[:, -1])
        ids = torch.cat([ids, steps[-1].argmax(-1, keepdim=True)], dim=1)
        if ids[0, -1] == tokenizer.eos_token_id:
            break
    text = tokenizer.decode(ids[0, start:], clean_up_tokenization_spaces=False)
    return str(text).removesuffix(tokenizer.eos_token), torch.cat(steps)


def tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of a folder's tensors."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as reader:
            found |= {key: tuple(reader.get_slice(key).get_shape()) for key in reader.keys()}  # noqa: SIM118
    return found


def train(base: Path, folder: Path, *more: str) -> Any:
    ended = run(
        "train", *RUN, f"model.name_or_path={base}", f"data.path={base / 'chats.jsonl'}",
        f"data.val_path={base / 'chats.jsonl'}", f"data.cache_dir={base.parent / 'cache'}", f"run.dir={folder}", *more
    )  # fmt: skip
    if ended.code == 2:
        raise Refused(ended.err.strip().splitlines()[-1].removeprefix("error: ").replace(str(base), "the model"))
    if ended.code != 0:
        raise RuntimeError(ended.err[ended.err.rfind("error: ") :])
    return ended


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> str:
    """Returns "yes", or how far two tensors are apart, relative to the largest value."""
    apart = ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
    return "yes" if apart <= tolerance else f"off by {apart:.1g}"


class Trial:
    """The columns of one model, in order; each method gives "yes", or in a few words what is otherwise."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.base, self.folder = name, folder / "base", folder
        self.run, self.adapted = RunDir(folder / "run"), RunDir(folder / "lora")
        self.cls = save_base(name, self.base)
        self.tokenizer = tokenizer_of(self.base)
        (self.base / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_chats()))
        self.ids = torch.tensor([self.tokenizer("".join(QUESTIONS), add_special_tokens=False)["input_ids"]])
        self.out = ""

    def trains(self) -> str:
        self.out = " ".join(train(self.base, self.run.path).out.split())
        rows = [json.loads(line) for line in self.run.metrics.read_text().splitlines()]
        self.losses = [row["train/loss"] for row in rows if "train/loss" in row]
        self.val_loss = [row["val/loss"] for row in rows if "val/loss" in row][-1]
        if len(self.losses) != 4 or not all(torch.isfinite(torch.tensor(self.losses))):
            return f"losses {self.losses}"
        return "yes" if self.losses[-1] < self.losses[0] else f"the loss rises: {self.losses}"

    def packs(self) -> str:
        draws = self.name in DRAWS
        found = self.val_loss if draws else self.losses[0]
        expected = own_loss(load(self.run.export if draws else self.base), self.tokenizer)
        apart = abs(found - expected) / expected
        if apart > 1e-5:
            return f"off by {apart:.1g}"
        return "as rows" if PADDED in self.out else "yes"

    def resumes(self) -> str:
        again = RunDir(self.folder / "again")
        step = self.run.checkpoints / store.name_of(2)
        train(self.base, again.path, f"run.resume={step}", "export.enabled=false")
        first, second = (store.load_weights(each.checkpoints / "last") for each in (self.run, again))
        same = first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
        return "yes" if same else "other weights"

    def exports(self) -> str:
        before, after = tensors(self.base), tensors(self.run.export)
        if before == after:
            return "yes"
        missing, new = before.keys() - after.keys(), after.keys() - before.keys()
        return f"{len(missing)} tensors missing, {len(new)} new: {sorted(missing)[:1]} {sorted(new)[:1]}"

    def reloads(self) -> str:
        self.live, _, _ = trained.from_run(self.run, "last", {})
        return close(logits(load(self.run.export), self.ids), logits(self.live, self.ids))

    def generates(self) -> str:
        """Texts of a batch of two prompts, and the logits of each of their tokens, are those without a cache."""
        prompts, exported, n = ["q how far a ", "q why"], load(self.run.export), 8
        alone = [greedy(exported, self.tokenizer, prompt, n) for prompt in prompts]
        texts = sample_texts(self.live, self.tokenizer, prompts, max_new_tokens=n, temperature=0.0)
        if texts != [text for text, _ in alone]:
            return f"{texts} instead of {[text for text, _ in alone]}"
        given = self.tokenizer(prompts[0], add_special_tokens=False, return_tensors="pt")["input_ids"]
        with evaluating(self.live), generation_mode(self.live), torch.no_grad():
            options = {"do_sample": False, "max_new_tokens": n, "return_dict_in_generate": True, "output_logits": True}
            steps = self.live.generate(given, attention_mask=torch.ones_like(given), pad_token_id=1, **options).logits
        return close(torch.cat(steps), alone[0][1][: len(steps)])

    def adapts(self) -> str:
        train(self.base, self.adapted.path, "peft=lora", "export.merge=true", "export.enabled=true")
        weights = load_file(self.adapted.export / "adapter_model.safetensors")
        self.live, _, _ = trained.from_run(self.adapted, "last", {})
        whole = load(self.base)
        inside = set((whole.get_decoder() if is_wrapper(whole.config) else whole).modules())
        names = {
            key.removeprefix("base_model.model.").partition(".lora_")[0].replace(".base_layer", "") for key in weights
        }
        outside = sorted(name for name in names if whole.get_submodule(name) not in inside)
        if outside or not names:
            return f"{len(outside)} of {len(names)} adapted modules are outside the language model: {outside[:1]}"
        return close(
            logits(PeftModel.from_pretrained(whole, self.adapted.export), self.ids), logits(self.live, self.ids)
        )

    def merges(self) -> str:
        if not self.adapted.export_merged.exists():
            raise Refused("it has no adapter")
        if tensors(self.adapted.export_merged).keys() != tensors(self.base).keys():
            return "other tensors"
        return close(logits(load(self.adapted.export_merged), self.ids), logits(self.live, self.ids))


def tried(name: str, folder: Path) -> dict[str, str]:
    """Returns each column's outcome, or the reason why the model is refused or can't be tried."""
    try:
        trial = Trial(name, folder)
    except Exception as error:
        return {"not built": error_text(error)}
    found: dict[str, str] = {}
    for column in COLUMNS:
        try:
            found[column] = getattr(trial, column)()
        except (Refused, UserError) as error:
            found[column] = f"refused: {error}"
        except Exception as error:
            traceback.print_exc()
            found[column] = f"error: {error_text(error)}"
        if column == "trains" and found[column] != "yes" and not trial.run.export.exists():
            break
    return found


def error_text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def sweep(out: Path, only: list[str]) -> None:
    done = {found["model"] for found in read(out)}
    for name in only or names():
        if name in done:
            continue
        done.add(name)
        started, folder = time.process_time(), Path(tempfile.mkdtemp())
        found = {"model": name, **tried(name, folder), "seconds": round(time.process_time() - started, 1)}
        shutil.rmtree(folder)
        with out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(page(read(given.out)))
        return
    composed_once.install()
    sweep(given.out, [name for name in given.only.split(",") if name])


if __name__ == "__main__":
    main()
