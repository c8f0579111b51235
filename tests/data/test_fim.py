"""Fill-in-the-middle: documents can be reassembled, draws are uniform and reproducible, and mistakes are reported."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from inprocess import run, stops_at
from lmtrain.callbacks.metrics import without_times
from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import Corpus, build_corpus
from lmtrain.data.text.fim import FillInTheMiddle
from lmtrain.data.text.windows import Windows
from lmtrain.data.val_sets import build_val_sets
from lmtrain.errors import UserError
from support import TINY, rows

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
ADDED = f"tokenizer.add_tokens=[{','.join(MARKS)}]"
RUN = [*TINY, "data=text", "data.sample_by=paragraph", "data.isolate_documents=true", "trainer.limit_val_batches=1",
       "callbacks.samples.every_n_validations=0", "export.enabled=false"]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file of documents of 9 to 58 letters: a row of 32 tokens holds several, or lies inside one."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join("".join(chr(97 + (i + j) % 26) for j in range(9 + i * 7 % 50)) for i in range(600)))
    return path


def overrides(text: Path, *more: str) -> list[str]:
    return [*RUN, f"data.path={text}", f"data.cache_dir={text.parent}/cache", *more]


def corpus_of(text: Path, *more: str) -> Corpus:
    return build_corpus(check(compose(overrides(text, *more))))


def put_together(part: list[int], prefix: int, suffix: int, middle: int) -> tuple[list[int], int | None]:
    """Returns a document as written and the number of tokens before its suffix mark (None if it was not rearranged)."""
    if prefix not in part:
        assert not {suffix, middle} & set(part)
        return part, None
    at, then = part.index(suffix), part.index(middle)
    assert [part.count(mark) for mark in (prefix, suffix, middle)] == [1, 1, 1]
    assert part[0] == prefix
    assert at < then
    return part[1:at] + part[then + 1 :] + part[at + 1 : then], at - 1


def parts_of(tokens: list[int], end: int) -> list[list[int]]:
    """Returns the tokens cut after each `end`, which is left out; the last part has none."""
    ends = [-1, *(at for at, token in enumerate(tokens) if token == end), len(tokens)]
    return [tokens[a + 1 : b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("spm_rate", [0, 1])
def test_every_document_can_be_put_together_again(spm_rate: int, text: Path) -> None:
    """Reassembled documents equal the text in the bins, where documents end with the same token."""
    corpus = corpus_of(text, ADDED, "data.fim.rate=0.7", f"data.fim.spm_rate={spm_rate}")
    marks, end = corpus.tokenizer.convert_tokens_to_ids(MARKS), corpus.tokenizer.eos_token_id
    windows = corpus.train
    assert isinstance(windows, Windows)
    assert windows.fim is not None
    windows.isolate_documents = False
    rearranged = documents = 0
    prefixes = []
    for row in range(len(windows)):
        batch = windows.read(np.array([[2, row]]))
        tokens = [*batch["input_ids"][0].tolist(), int(batch["labels"][0, -1])]
        assert batch["labels"][0].tolist() == tokens[1:]
        shard, start = windows._locate(2, row)
        found = [put_together(part, *marks) for part in parts_of(tokens, end)]
        joined = [token for plain, _ in found for token in [*plain, end]][:-1]
        marked = [(length, plain) for plain, length in found if length is not None]
        assert joined == shard.read(start, 33).tolist()[: 33 - 3 * len(marked)]
        documents += sum(len(plain) > 0 for plain, _ in found)
        rearranged += len(marked)
        prefixes += [length / len(plain) for length, plain in marked if len(plain) > 8]
    # The share is 0.7 within six standard deviations; the smaller of two uniform draws is 1/3 on average.
    assert abs(rearranged / documents - 0.7) < 6 * (0.21 / documents) ** 0.5
    if spm_rate:
        assert not any(prefixes), "the suffix comes first"
    else:
        assert abs(np.mean(prefixes) - 1 / 3) < 6 * 0.24 / len(prefixes) ** 0.5 + 1 / 18  # cuts are at whole tokens


def test_forms_are_the_papers() -> None:
    """Both forms of the paper are right for six tokens and an end, cut after the second and the fifth token."""
    cuts = [0.0, 0.75, 0.3, 0.5]  # the sixth and the third of 7 cut places
    forms = {spm_rate: FillInTheMiddle(1, spm_rate, 90, 91, 92, 0, 7) for spm_rate in (0, 1)}
    made = {n: fim._parts_in_order(np.array([1, 2, 3, 4, 5, 6, 0]), cuts).tolist() for n, fim in forms.items()}
    assert made == {0: [90, 1, 2, 91, 6, 92, 3, 4, 5, 0], 1: [90, 91, 6, 92, 1, 2, 3, 4, 5, 0]}


def test_a_row_is_the_same_whoever_reads_it_and_another_in_another_epoch(text: Path) -> None:
    windows = corpus_of(text, ADDED, "data.fim.rate=1").train
    at = np.array([[1, 5], [0, 9], [1, 0]])
    together = windows.read(at)["input_ids"]
    alone = [windows.read(at[i : i + 1])["input_ids"][0] for i in (2, 0, 1)]
    assert together[[2, 0, 1]].tolist() == [row.tolist() for row in alone]
    windows._offset = lambda *_: 0  # type: ignore[attr-defined]  # the same windows in every epoch
    first, second = (windows.read(np.array([[epoch, 5]]))["input_ids"].tolist() for epoch in (0, 1))
    assert first != second


def test_a_document_that_just_fits_has_its_end_and_one_that_is_cut_has_none() -> None:
    def rearranged(lengths: list[int], rate: float) -> tuple[int, list[int]]:
        fim, ends = FillInTheMiddle(rate, 0.0, 90, 91, 92, 0, 0), np.cumsum(lengths)
        tokens, found = fim.rearrange(np.arange(1, ends[-1] + 1), ends, 0, 0)
        return len(tokens), found.tolist()

    assert rearranged([5], 0.0) == (5, [5]), "as it stands"
    assert rearranged([5, 7], 0.0) == (12, [5, 12])
    assert rearranged([5, 7], 1.0) == (12, [8]), "three marks each; of the second 4 tokens are left"
    assert rearranged([5, 3], 1.0) == (8, [8]), "no room is left for the second"
    assert rearranged([2, 2, 4], 1.0) == (8, [5, 7]), "what has room for marks only is not rearranged"
    assert rearranged([3], 1.0) == (3, [3])
    assert rearranged([4], 1.0) == (4, [])


def test_documents_stay_apart_where_they_end_now(text: Path) -> None:
    corpus = corpus_of(text, ADDED, "data.fim.rate=1")
    batch = corpus.train.read(np.stack([np.zeros(40, dtype=int), np.arange(40)], axis=1))
    ids, end = batch["input_ids"], corpus.tokenizer.eos_token_id
    starts = [32 * b + at for b in range(40) for at in range(32) if at == 0 or ids[b, at - 1] == end]
    assert batch["cu_seqlens"].tolist() == [*starts, ids.numel()]
    assert torch.equal(batch["labels"] == -100, ids == end)


def test_what_is_validated_on_stays_as_it_was_written(text: Path) -> None:
    settings = [ADDED, "data.fim.rate=1", "data.val_train_rows=8"]
    config = check(compose(overrides(text, *settings)))
    corpus = build_corpus(config)
    marks = corpus.tokenizer.convert_tokens_to_ids(MARKS)
    assert corpus.val is not None
    for rows_of_val in (corpus.val, build_val_sets(config, corpus)["train_rows"].rows):
        ids = rows_of_val.read(np.array([[0, row] for row in range(4)]))["input_ids"]
        assert not np.isin(ids.numpy(), marks).any()
    assert np.isin(corpus.train.read(np.array([[0, 0]]))["input_ids"].numpy(), marks).any()


def test_a_run_goes_on_exactly(text: Path, tmp_path: Path) -> None:
    settings = overrides(text, ADDED, "data.fim.rate=0.5", "trainer.max_steps=4")
    assert run("train", *settings, f"run.dir={tmp_path}/whole").code == 0
    assert run("train", *settings, f"run.dir={tmp_path}/parts", *stops_at(2)).code == 75
    assert run("train", *settings, f"run.dir={tmp_path}/parts", "run.resume=auto").code == 0
    whole, parts = (
        [without_times(r) for r in rows(tmp_path / name / "metrics.jsonl") if "train/loss" in r]
        for name in ("whole", "parts")
    )
    assert whole == parts
    assert len(whole) == 4
    plan = " ".join((tmp_path / "whole" / "plan.txt").read_text().replace("│", "").split())
    assert "fill-in-the-middle: 50% of the documents in a row, 50% of those suffix first" in plan


def test_bins_that_do_not_say_where_documents_end(text: Path, tmp_path: Path) -> None:
    (np.arange(2000, dtype=np.uint16) % 256).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=re.escape("train.bin has no document borders (.docs): prepare")):
        build_corpus(
            check(compose([*TINY, "data=bins", f"data.path={tmp_path}", "data.fim.rate=1", "data.append_eos=false"]))
        )


WRONG = {
    "data.fim.rate=0.5":
        "data.fim.rate=0.5: the tokenizer has no <|fim_prefix|> <|fim_suffix|> <|fim_middle|>: add with "
        "'tokenizer.add_tokens=[<|fim_prefix|>,<|fim_suffix|>,<|fim_middle|>]'",
    "data.fim.rate=1.5": "data.fim.rate=1.5: a share from 0 to 1 is needed",
    "data.fim.rate=0.5 data.packing=off": "data.seq_len tokens. Leave one of the two out",
    "data.fim.rate=1 data.curriculum={by: length, start_length: 8, steps: 4}":
        "data.curriculum.by=length does not go with data.fim.rate",
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "said"), WRONG.items())
def test_what_is_wrong_is_said(wrong: str, said: str, text: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        corpus_of(text, *re.split(" (?=data)", wrong))
