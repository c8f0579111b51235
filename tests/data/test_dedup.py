"""data.dedup: the documents left out are checked against similarities of complete sets of word n-grams."""

import itertools
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from inprocess import TWO_STEPS, run
from lmtrain.data.store import bins
from lmtrain.data.store.writer import BinWriter
from lmtrain.data.text import repeats
from support import TINY

WORDS = [f"w{n}" for n in range(400)]


def runs(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def similarity(one: str, other: str) -> float:
    a, b = runs(one), runs(other)
    return len(a & b) / len(a | b)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Returns a hundred documents of 60 to 200 words, of which more than half are changed copies of earlier ones."""
    draw = random.Random(3)
    found: list[str] = []
    for number in range(100):
        words = [draw.choice(WORDS) for _ in range(draw.randint(60, 200))]
        if number >= 10 and draw.random() < 0.6:
            words = draw.choice(found).split()
            for _ in range(draw.choice([0, 0, 1, 2, 5, 20])):
                words[draw.randrange(len(words))] = draw.choice(WORDS)
        found.append(" ".join(words))
    return found


def write(file: Path, documents: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return file


def prepare(tmp_path: Path, file: Path, *words: str) -> Path:
    """Prepares a file and returns the folder of the prepared data."""
    cache = tmp_path / "cache"
    done = run("prepare", "data=jsonl", f"data.path={file}", "tokenizer=bytes", f"data.cache_dir={cache}", *words)
    assert done.code == 0, done.err
    return max(cache.glob("*/meta.json"), key=lambda p: p.stat().st_mtime_ns).parent


def documents_of(folder: Path, split: str = "train") -> list[str]:
    found = bins.open_bins(folder, split)
    ids = [int(i) for shard in found.shards for i in shard.read(0, shard.tokens)]
    meta = bins.load_meta(folder)
    end = max(ids)
    assert meta["splits"][split]["documents"] == ids.count(end)
    return [bytes(part).decode() for ends, part in itertools.groupby(ids, lambda i: i == end) if not ends]


def test_near_repeats_are_left_out_and_no_others(texts: list[str], tmp_path: Path) -> None:
    folder = prepare(tmp_path, write(tmp_path / "t.jsonl", texts), "data.dedup=near", "data.val_fraction=0")
    kept = documents_of(folder)
    assert kept == list(dict.fromkeys(t for t in texts if t in kept))  # the first occurrence of each, in order
    assert 40 < len(kept) < 80
    for text in set(texts) - set(kept):  # 0.66: 0.8 less four standard errors of the estimate
        assert max(similarity(text, k) for k in kept) > 0.66
    for one, other in itertools.combinations(kept, 2):
        assert similarity(one, other) < 0.94
    assert f"data.dedup left out {100 - len(kept)} of 100 documents" in " ".join(bins.load_meta(folder)["notes"])


def test_the_share_of_near_repeats_that_is_found() -> None:
    """By their true similarity, that of complete sets: the recall that docs/text.md states."""
    draw, found = random.Random(5), {0.6: [0, 0], 0.8: [0, 0], 0.85: [0, 0], 0.9: [0, 0]}
    index = repeats._Near()
    for number in range(600):
        words = [f"{number}-{place}" for place in range(200)]
        changed = list(words)
        for _ in range(draw.randint(1, 10)):
            changed[draw.randrange(len(words))] = "another"
        alike = similarity(" ".join(words), " ".join(changed))
        assert index.is_new([" ".join(words)])
        least = max((border for border in found if border <= alike), default=None)
        if least is not None:
            found[least][0] += 1
            found[least][1] += not index.is_new([" ".join(changed)])
    shares = {least: left_out / count for least, (count, left_out) in found.items()}
    assert min(count for count, _ in found.values()) >= 50
    assert shares[0.6] < 0.1
    assert 0.65 < shares[0.8] < 0.9  # about 0.78, with a standard error of 0.05
    assert shares[0.85] > 0.95
    assert shares[0.9] == 1


def test_the_bands_find_candidates_as_the_closed_form_says() -> None:
    """1 - (1 - s^r)^b, for pairs whose similarity is exact: sets of 500 n-grams, of which the last differ."""
    from rensa import RMinHashLSH

    index, pairs = repeats._Near(), 400
    for similarity in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        differ = round(500 * (1 - similarity) / (1 + similarity))
        exact = (500 - differ) / (500 + differ)
        found = 0
        for pair in range(pairs):
            signatures = [index.minhash(repeats._SIGNATURE, repeats._SEED) for _ in range(2)]
            words = [f"{pair}-{place}" for place in range(500 + differ)]
            signatures[0].update(words[:500])
            signatures[1].update(words[differ:])
            bands = RMinHashLSH(repeats.NEAR, repeats._SIGNATURE, repeats._BANDS)
            bands.insert(0, signatures[0])
            found += bands.query(signatures[1]) == [0]
        expected = 1 - (1 - exact ** (repeats._SIGNATURE // repeats._BANDS)) ** repeats._BANDS
        error = (expected * (1 - expected) / pairs) ** 0.5
        assert found / pairs == pytest.approx(expected, abs=3 * error + 1 / pairs), similarity


def test_case_does_not_count_wherever_pieces_are_cut() -> None:
    """A capital sigma in lower case depends on the letters around it, which another piece may hold."""
    text = " ".join(f"ΣΟΦΟΣ{number}ΣΑ" for number in range(20))
    index = repeats._Near()
    assert index.is_new([text])
    assert not index.is_new(list(text.lower()))


def test_exact_is_the_text_without_its_repeats(texts: list[str], tmp_path: Path) -> None:
    spaced = [t.replace(" ", "  ", 3) if i % 7 == 0 else t for i, t in enumerate(texts)]
    folder = prepare(tmp_path, write(tmp_path / "t.jsonl", spaced), "data.dedup=exact", "data.val_fraction=0")
    first: dict[str, str] = {}
    for text in spaced:
        first.setdefault(" ".join(text.split()), text)
    assert documents_of(folder) == list(first.values())
    plain = prepare(tmp_path, write(tmp_path / "u.jsonl", list(first.values())), "data.val_fraction=0")
    assert bins.load_meta(plain)["splits"] == bins.load_meta(folder)["splits"]


def test_training_loses_what_a_validation_split_has(texts: list[str], tmp_path: Path) -> None:
    val = write(tmp_path / "v.jsonl", [texts[0], texts[0], texts[5]])
    own = [f"data.val_path={val}", "data.dedup=near"]
    folder = prepare(tmp_path, write(tmp_path / "t.jsonl", texts), *own)
    assert documents_of(folder, "val") == [texts[0], texts[0], texts[5]]  # repeats in validation data are kept
    assert not {texts[0], texts[5]} & set(documents_of(folder))


def test_repeats_are_counted_where_they_stay(texts: list[str], tmp_path: Path) -> None:
    """Without data.dedup the notes say how many exact copies there are, and about how many near ones."""
    folder = prepare(tmp_path, write(tmp_path / "t.jsonl", texts), "data.val_fraction=0")
    assert documents_of(folder) == texts
    exact, near = bins.load_meta(folder)["notes"]
    copies = len(texts) - len(set(texts))
    assert f"{copies} of 100 documents ({copies}%) are exact copies of an earlier one" in exact
    similar = sum(any(similarity(text, earlier) >= 0.8 for earlier in texts[:i]) for i, text in enumerate(texts))
    assert near.endswith("are near or exact copies of an earlier one: data.dedup=near leaves them out")
    assert copies + 6 < similar - 6 <= int(near.split()[0]) <= similar + 6

    different = [text for i, text in enumerate(texts) if all(similarity(text, other) < 0.5 for other in texts[:i])]
    folder = prepare(tmp_path, write(tmp_path / "u.jsonl", different), "data.val_fraction=0")
    assert bins.load_meta(folder)["splits"]["train"]["documents"] > 30
    assert bins.load_meta(folder)["notes"] == []


def test_near_copies_are_counted_in_a_few_short_documents(tmp_path: Path) -> None:
    for number in range(20):  # some have one to three n-grams to compare, some have none
        (folder := tmp_path / str(number)).mkdir()
        with BinWriter(folder, "train", "uint16", 1000) as writer:
            for text in (f"{number} words", "a", f"{number * 7} words", "a"):
                writer.append(np.array([*text.encode(), 256]), ends_document=True, text_bytes=len(text))
            counts = writer.close()
        assert repeats.near_repeats(bins.open_shards(folder, "uint16", counts), 6) == (0, 4)


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("index", [repeats._Exact, repeats._Near])
def test_where_pieces_are_cut_changes_nothing(texts: list[str], size: int, index) -> None:
    whole, cut = index(), index()
    for text in [*texts[:40], "few words", "few  words", ""]:
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert cut.is_new(pieces) == whole.is_new([text])


def test_samples_are_counted_before(texts: list[str], tmp_path: Path) -> None:
    some = ["data.dedup=exact", "data.num_samples=10", "data.val_fraction=0"]
    folder = prepare(tmp_path, write(tmp_path / "t.jsonl", [texts[0]] * 9 + texts), *some)
    assert documents_of(folder) == [texts[0]]  # samples are counted before deduplication


def test_repeats_are_looked_for_once(texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "t.jsonl", texts)
    first = prepare(tmp_path, file, "data.dedup=near", "tokenizer=bytes")
    monkeypatch.setattr(repeats._Near, "is_new", None)  # calling it would fail
    monkeypatch.setitem(sys.modules, "rensa", None)  # reusing prepared data needs no package
    assert prepare(tmp_path, file, "data.dedup=near", "tokenizer=bytes") == first
    other = prepare(tmp_path, file, "data.dedup=near", "tokenizer=bpe", "tokenizer.vocab_size=300")
    assert other != first
    counts = [bins.load_meta(folder)["splits"]["train"]["documents"] for folder in (first, other)]
    assert counts[0] == counts[1]


def test_a_run_says_what_it_left_out(texts: list[str], tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", texts)
    done = run(
        "train", *TINY, *TWO_STEPS, "data=jsonl", f"data.path={file}", "data.dedup=near", f"run.dir={tmp_path}/run"
    )
    assert done.code == 0, done.err
    assert "data.dedup left out" in (tmp_path / "run" / "plan.txt").read_text()


def test_what_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "t.jsonl", ["some text"])
    asked = ["data=jsonl", f"data.path={file}", f"data.cache_dir={tmp_path}/cache"]
    for words, said in {
        ("data.dedup=fuzzy",): "exact, near",
        ("data.dedup=near", "data.streaming=true", "data.ring_bytes=10000000"): "data.dedup",
    }.items():
        ended = run("prepare", *asked, *words)
        assert (ended.code, said in ended.err) == (2, True), ended.err
    monkeypatch.setitem(sys.modules, "rensa", None)
    ended = run("prepare", *asked, "data.dedup=near")
    assert ended.code == 2
    assert 'pip install "lmtrain[dedup]"' in ended.err
