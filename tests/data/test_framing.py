"""What stands before and after a text is the same wherever ids are made, for tokenizers in the styles of 13 families.

The expected ids are put together here, from the tokenizer's ids without special tokens and from what each family is
known to put before a text.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from inprocess import run, train_tiny
from lmtrain.config import compose as rules
from lmtrain.data import framing, tokenizers
from lmtrain.data.chat.conversations import Completion, Conversation
from lmtrain.data.chat.templates import ChatEncoder, end_ids, own_template, user_turn
from lmtrain.data.examples.pair_rows import PairRowEncoder
from lmtrain.data.examples.row_format import ChatRows
from lmtrain.data.text.prepare import prepare
from lmtrain.evaluation import harness
from lmtrain.evaluation.data import ScoredDocuments
from lmtrain.generation.sampling import prompt_tokens
from lmtrain.rewards.model import ModelReward
from tokenizer_families import FAMILIES, load_family, save_family

TEXT = "the king went home"
LINES = [TEXT, "and the queen too.", "once upon a time"]
# What the family's tokenizer puts before a text. DeepSeek's says so in tokenizer_config.json alone.
STARTS = {"llama2": ["<s>"], "llama3": ["<|begin_of_text|>"], "opt": ["</s>"], "gemma": ["<bos>"], "mistral": ["<s>"],
          "deepseek": ["<｜begin▁of▁sentence｜>"], "glm": ["[gMASK]", "<sop>"]}  # fmt: skip
PLAIN_PAIRS = {"chat_template": None, "conversation_format": "preference_text", "max_length": None}
NO_BOS = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TURNS = [{"role": "user", "content": "Two plus two?"}, {"role": "assistant", "content": "Four."}]


def bare(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def start(family: str, tokenizer: Any, prepend_bos: bool | str) -> list[int]:
    own = tokenizer.convert_tokens_to_ids(STARTS.get(family, []))
    return {"auto": own, True: own or [tokenizer.bos_token_id], False: []}[prepend_bos]


@pytest.mark.parametrize("prepend_bos", ["auto", True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_command_begins_a_text_alike(
    family: str, prepend_bos: bool | str, data_config: Any, tokenizer_config: Any, tmp_path: Path
) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(LINES))
    cfg = data_config(path=str(tmp_path / "lines.txt"), sample_by="line", val_fraction=0, prepend_bos=prepend_bos)
    named = tokenizer_config("hub", name_or_path=str(save_family(family, tmp_path / "base")))
    tokenizer = load_family(family, tmp_path / "base")
    if prepend_bos is True and family == "qwen":  # which has no BOS
        with pytest.raises(Exception, match="no BOS token"):
            prepare(cfg, named, progress=False)
        return
    first = start(family, tokenizer, prepend_bos)
    expected, end = first + bare(tokenizer, TEXT), tokenizer.eos_token_id

    prepared = prepare(cfg, named, progress=False)
    train = prepared.splits["train"]
    put = [] if first == [end] and prepend_bos == "auto" else first  # one token is between documents
    documents = [[*put, *bare(tokenizer, line), end] for line in LINES]
    assert train.shards[0].read(0, train.tokens).tolist() == [i for ids in documents for i in ids]

    config = rules.check(rules.compose(["model=gpt_nano", f"data.prepend_bos={prepend_bos}".lower()]))
    own = framing.follow(prepared.tokenizer, framing.wanted(prepared.tokenizer, config.data))
    tokenizers.save(own, tmp_path / "run")
    exported = AutoTokenizer.from_pretrained(tmp_path / "run")
    again = load_family(family, tmp_path / "again") if prepend_bos == "auto" else exported
    for made in (own, exported, again, PreTrainedTokenizerFast.from_pretrained(tmp_path / "run")):
        assert made(TEXT)["input_ids"] == expected
        assert (
            made(TEXT, return_offsets_mapping=True)["offset_mapping"][len(first) :]
            == (tokenizer(TEXT, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"])
        )
        assert prompt_tokens(made, TEXT) == expected
        assert prompt_tokens(made, f"{tokenizer.decode(first)}{TEXT}")[: len(first) + 1] == (
            first + bare(tokenizer, f"{tokenizer.decode(first)}{TEXT}")[len(first) :][:1]
        )
        assert framing.before_documents(made) == (first or [end])
        assert ModelReward._ids(reward_model(made), TEXT, "") == [*expected, end]
    learned = ChatEncoder(tokenizer, data_config("chat", prepend_bos=prepend_bos, chat_template=None, max_length=None))
    ids, trained = learned.completion(Completion(TEXT, " and the queen", ""))
    whole = [*first, *bare(tokenizer, f"{TEXT} and the queen"), end]
    assert ids == whole
    assert not trained[0]
    assert learned.prompt_ids(Completion(TEXT, "", "")) == expected
    scored = data_config(path=str(tmp_path / "lines.txt"), val_path=str(tmp_path / "lines.txt"), sample_by="line")
    read = ScoredDocuments(SimpleNamespace(data=scored), None).read(exported)  # type: ignore[arg-type]
    assert [ids.tolist() for ids, _ in read] == [bare(tokenizer, line) for line in LINES]


def reward_model(tokenizer: Any) -> Any:
    shape = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace()))
    plain = SimpleNamespace(chat_template=None, eos_token_id=tokenizer.eos_token_id)
    plain_call = type("Plain", (), {"__call__": lambda self, *a, **k: tokenizer(*a, **k)})()
    vars(plain_call).update(vars(plain))
    return SimpleNamespace(tokenizer=plain_call, model=shape)


@pytest.mark.parametrize("prepend_bos", ["auto", True, False])
@pytest.mark.parametrize(
    "family", ["llama2", "llama3", "qwen", "gemma", "phi3", "deepseek", "mistral", "smollm2", "glm"]
)
def test_a_chat_begins_as_its_template_writes_it(
    family: str, prepend_bos: bool | str, data_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is put before a text: in training, generation, lm-evaluation-harness and by transformers."""
    tokenizer = load_family(family, tmp_path)
    if prepend_bos is True and tokenizer.bos_token_id is None:
        pytest.skip("has no BOS")
    tokenizer.chat_template = tokenizer.chat_template or NO_BOS
    made = ChatEncoder(tokenizer, data_config("chat", prepend_bos=prepend_bos, chat_template=None, max_length=None))
    framing.follow(tokenizer, framing.wanted(tokenizer, made.cfg))
    rendered = tokenizer.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    expected = bare(tokenizer, rendered)
    assert expected == tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=True)["input_ids"]
    conversation = Conversation(TURNS, None, "")
    assert made.prompt_ids(conversation) == expected
    (example,) = made.encode(conversation)
    assert example.input_ids[: len(expected)] == expected
    template = own_template(tokenizer)
    assert template is not None
    assert user_turn(tokenizer, template, TURNS[0]["content"], None) == expected
    last = max(at for at, is_trained in enumerate(example.trained) if is_trained)
    assert example.input_ids[last] in end_ids(tokenizer, template)
    assert asked_by_harness(tokenizer, rendered, True, monkeypatch) == expected
    assert asked_by_harness(tokenizer, TEXT, False, monkeypatch) == prompt_tokens(tokenizer, TEXT)


def asked_by_harness(tokenizer: Any, text: str, chat: bool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the ids of a request as HFLM of lm-evaluation-harness 0.4.13 makes them of what it is built with."""
    given: dict[str, Any] = {}

    class HFLM:
        def __init__(self, model: Any, **options: Any) -> None:
            given.update(options)

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lm_eval.models", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", SimpleNamespace(HFLM=HFLM))
    config = rules.check(rules.compose(["model=gpt_nano", f"evaluate.chat={chat}".lower(), "evaluate.context=64"]))
    hf_model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace()))
    harness._model(SimpleNamespace(model=SimpleNamespace(model=hf_model), tokenizer=tokenizer), config)  # type: ignore[arg-type]
    prefix = given.get("prefix_token_id") or tokenizer.bos_token_id or tokenizer.eos_token_id
    adds = {} if given.get("add_bos_token") is None else {"add_special_tokens": given["add_bos_token"]}
    if text.startswith(tokenizer.decode([prefix])):
        adds = {"add_special_tokens": False}
    return list(given["tokenizer"].encode(text, **adds))


def test_an_end_that_a_row_has_written_is_not_learned_twice(data_config: Any, tmp_path: Path) -> None:
    tokenizer = load_family("llama2", tmp_path)
    made = ChatEncoder(tokenizer, data_config("chat", max_length=None, chat_template=None))
    plain, written = (made.completion(Completion(TEXT, f" home{end}", "")) for end in ("", "</s>"))
    assert written == plain
    as_text = ChatEncoder(tokenizer, data_config("chat", max_length=None, chat_template=None, allow_special_text=False))
    assert as_text.completion(Completion(TEXT, " home</s>", ""))[0][-1] == tokenizer.eos_token_id
    assert len(as_text.completion(Completion(TEXT, " home</s>", ""))[0]) > len(plain[0]) + 1


@pytest.mark.parametrize("family", ["llama2", "glm", "mistral", "smollm2"])
def test_what_stands_first_stays_when_prompts_are_cut(family: str, data_config: Any, tmp_path: Path) -> None:
    tokenizer = load_family(family, tmp_path)
    first = tokenizer.convert_tokens_to_ids(STARTS.get(family, []))
    long = " ".join(f"line {n} of many lines" for n in range(20))
    cut = {"max_length": 40, "on_too_long": "truncate_left", "chat_template": None}
    row = {"prompt": long, "completion": " and the queen."}
    ids = ChatRows(tokenizer, data_config("chat", **cut)).encode(row, "", data_config("chat", **cut), False).examples[0]
    whole = [*first, *bare(tokenizer, row["prompt"] + row["completion"]), tokenizer.eos_token_id]
    assert ids[0] == first + whole[len(whole) - 40 + len(first) :]
    answer = len(bare(tokenizer, row["prompt"] + row["completion"])) - len(bare(tokenizer, row["prompt"])) + 1
    assert ids[1][-answer:] == [True] * answer
    assert not any(ids[1][: len(ids[1]) - answer - 2])
    for limit in ({"max_prompt_length": 20}, cut):
        cfg = data_config("preference", **PLAIN_PAIRS | limit)
        pair = {"prompt": long, "chosen": " yes", "rejected": " no"}
        both = PairRowEncoder(tokenizer, cfg).encode(pair, "", cfg, False).examples
        for (kept, scored), text in zip(both, (" yes", " no"), strict=True):
            all_of = [*first, *bare(tokenizer, long + text), tokenizer.eos_token_id]
            assert kept[: len(first)] == first
            assert kept[len(first) :] == all_of[len(all_of) - len(kept) + len(first) :]
            assert scored.index(True) == (20 if "max_prompt_length" in limit else scored.index(True))


def test_generation_keeps_bos_of_a_prompt_that_is_too_long() -> None:
    assert framing.last_of([1, 5, 6, 7, 8], 3, [1]) == [1, 7, 8]
    assert framing.last_of([1, 5, 6], 3, [1]) == [1, 5, 6]
    assert framing.last_of([4, 5, 6, 7], 2, [1]) == [6, 7]
    assert framing.last_of([1, 5, 6], 1, [1]) == [6]


def test_bos_that_a_run_was_trained_with_reaches_its_tokenizer_and_export(corpus: Path, tmp_path: Path) -> None:
    """data.prepend_bos=true, where the tokenizer itself puts none; the run goes on, and begins again as it did."""
    folder = tmp_path / "run"
    words = [
        "data.prepend_bos=true",
        "export.enabled=true",
        "data.sample_by=line",
        f"run.dir={folder}",
        "run.resume=auto",
    ]
    assert train_tiny(corpus, *words, "trainer.max_steps=2").code == 0
    assert train_tiny(corpus, *words, "trainer.max_steps=3").code == 0
    for name in ("tokenizer", "export"):
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        assert tokenizer("x")["input_ids"] == [tokenizer.bos_token_id, *bare(tokenizer, "x")]
    assert json.loads((folder / "export" / "tokenizer_config.json").read_text())["add_bos_token"] is True
    ended = run("evaluate", f"run_dir={folder}", "evaluate.name=now", "trainer.accelerator=cpu")
    assert ended.code == 0, ended.err
    (found,) = folder.glob("evaluations/now.json")
    assert json.loads(found.read_text())["settings"]["start_token"] == [tokenizer.bos_token_id]
