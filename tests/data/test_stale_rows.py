"""Whatever changes the examples on disk gives another folder, so rows prepared before a change are never reused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors

from chats import write_chats
from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import bpe_training, tokenizers
from lmtrain.data.examples.pair_rows import PairRowEncoder
from lmtrain.data.examples.prepare import PreparedExamples, prepare_examples
from lmtrain.data.examples.row_format import ChatRows

CHAT = {"chat_template": "vicuna", "val_fraction": 0.2, "max_length": 512, "seq_len": 512}


@pytest.fixture
def prepared(data_config: Any, tokenizer_config: Any) -> Any:
    def make(option: str, path: Path, tokenizer: TokenizerConfig | None = None, **settings: Any) -> PreparedExamples:
        cfg: DataConfig = data_config(option, source="files", path=str(path), **{**CHAT, **settings})
        encoder = PairRowEncoder if option.startswith("preference") else ChatRows
        return prepare_examples(cfg, tokenizer or tokenizer_config(), encoder, progress=False)

    return make


def texts(prepared: PreparedExamples) -> list[str]:
    split = prepared.split("train")
    assert split is not None
    return [prepared.tokenizer.decode(split.read(i)[0]) for i in range(len(split))]


TURKISH = {"messages": [{"role": "user", "content": "Çay?"}, {"role": "assistant", "content": "Var."}]}


def said(row: dict[str, Any]) -> list[str]:
    """Returns the turns of a row as the template "compact" writes them, without their special tokens."""
    return [f" {turn['content']}" for turn in row["messages"]]


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_a_tokenizer_is_made_of_conversations(kind: str, prepared: Any, tokenizer_config: Any, tmp_path: Path) -> None:
    path, held_out = write_chats(tmp_path / "chats.jsonl", 50), write_chats(tmp_path / "val.jsonl", [TURKISH])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    size = {"vocab_size": 300} if kind == "bpe" else {}
    options = {"chat_template": "compact", "val_path": str(held_out), "max_length": 24, "max_untrained": 1.0}
    options["tokenizer"] = tokenizer_config(kind, add_tokens=["<|user|>", "<|assistant|>"], **size)
    made = prepared("chat_jsonl", path, **options)
    model = json.loads(made.tokenizer.backend_tokenizer.to_str())["model"]
    if kind == "bpe":  # of whole rows, though the examples are cut after 24 tokens
        expected = bpe_training.train(iter(["".join(said(row)) for row in rows]), 300, 2, "<|endoftext|>")
        assert model == json.loads(expected.to_str())["model"]
    else:  # of validation rows too
        assert set(model["vocab"]) == {*"".join(text for row in [*rows, TURKISH] for text in said(row)), "<|unknown|>"}
    assert len(made.tokenizer.encode("<|user|>")) == 1
    again = prepared("chat_jsonl", path, **options)
    assert (again.folder, again.fingerprint) == (made.folder, made.fingerprint)
    assert prepared("chat_jsonl", write_chats(tmp_path / "more.jsonl", 51), **options).folder != made.folder


def test_the_system_prompt(prepared: Any, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 10)
    none, brief = prepared("chat_jsonl", path), prepared("chat_jsonl", path, system_prompt="Be brief.")
    assert none.folder != brief.folder
    assert not any("Be brief." in text for text in texts(none))
    assert all("Be brief." in text for text in texts(brief))
    asked = brief.meta["questions"][0]["prompt_ids"]
    assert "Be brief." in brief.tokenizer.decode(asked), "the stored questions are asked under it too"


def test_templates(prepared: Any, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "rows.jsonl", [{"title": f"t{i}", "body": f"b{i}"} for i in range(10)])
    columns = {"conversation_format": "template", "prompt_template": "{title}:", "response_template": "{body}"}
    base = prepared("chat_jsonl", path, **columns)
    asks = prepared("chat_jsonl", path, **{**columns, "prompt_template": "{title}?"})
    answers = prepared("chat_jsonl", path, **{**columns, "response_template": "{body}!"})
    assert len({base.folder, asks.folder, answers.folder}) == 3
    assert ["t1?" in texts(p)[1] or "t2?" in texts(p)[1] for p in (base, asks)] == [False, True]
    assert answers.meta["questions"][0]["reference"] == base.meta["questions"][0]["reference"] + "!"


def hub_tokenizer(folder: Path, tokenizer_config: Any, change: Any = None) -> TokenizerConfig:
    """Saves a byte tokenizer with a changed backend to a folder and returns the config that names it."""
    made: Any = tokenizers.load_or_train(tokenizer_config(), lambda _: iter(()))
    made.add_tokens([AddedToken("<|x|>", special=True)])
    if change is not None:
        change(made.backend_tokenizer)
    tokenizers.save(made, folder)
    return tokenizer_config("hub", name_or_path=str(folder))


def adds_beginning(backend: Any) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )


def test_a_tokenizers_post_processor(prepared: Any, tokenizer_config: Any, tmp_path: Path) -> None:
    """Another post-processor, which decides whether a plain text begins with BOS, gives another folder."""
    path = write_chats(tmp_path / "plain.jsonl", [{"prompt": f"p{i} ", "completion": f"c{i}"} for i in range(10)])
    plain = {"conversation_format": "prompt_completion", "chat_template": None}
    first = prepared("chat_jsonl", path, hub_tokenizer(tmp_path / "a", tokenizer_config), **plain)
    second = prepared("chat_jsonl", path, hub_tokenizer(tmp_path / "b", tokenizer_config, adds_beginning), **plain)
    assert first.folder.name.rpartition("-")[2] != second.folder.name.rpartition("-")[2]
    for p, begins in ((first, False), (second, True)):
        assert all(text.startswith("<|endoftext|>") == begins for text in texts(p))


def test_flags_of_added_tokens(prepared: Any, tokenizer_config: Any, tmp_path: Path) -> None:
    """Another flag of an added token gives another folder: with rstrip a token includes the white space after it."""
    path = write_chats(tmp_path / "rows.jsonl", [{"prompt": "Say <|x|> it", "response": "now"}] * 10)
    configs = [hub_tokenizer(tmp_path / name, tokenizer_config) for name in ("a", "b")]
    file = tmp_path / "b" / "tokenizer.json"
    tree = json.loads(file.read_text())
    next(t for t in tree["added_tokens"] if t["content"] == "<|x|>")["rstrip"] = True
    file.write_text(json.dumps(tree))
    first, second = (prepared("chat_jsonl", path, c, conversation_format="prompt_response") for c in configs)
    assert first.folder.name.rpartition("-")[2] != second.folder.name.rpartition("-")[2]
    longest = [int(p.split("train").lengths.max()) for p in (first, second)]  # type: ignore[union-attr]
    assert longest[0] == longest[1] + 1


def test_nothing_is_made_again_for_what_shapes_no_token(prepared: Any, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 10)
    base = prepared("chat_jsonl", path)
    same = {"seq_len": 99, "global_batch_size": 2, "num_workers": 3, "packing": "off", "max_untrained": 0.5}
    assert prepared("chat_jsonl", path, **same).folder == base.folder
    moved = write_chats(tmp_path / "moved.jsonl", 10)
    assert prepared("chat_jsonl", moved).folder.name.rpartition("-")[2] == base.folder.name.rpartition("-")[2]
