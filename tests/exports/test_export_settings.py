"""generation_config.json and the tokenizer files of an export: the base's own settings, and those a user sets."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from chats import write_chats
from helpers_models import tiny
from inprocess import Ended, message, run, train_tiny
from lmtrain.data import tokenizers
from lmtrain.exports.hf_folder import generation_config
from lmtrain.models.folder import with_earlier_names
from support import EXPORT
from tiny_pretrained import SHORT, save_pretrained

# As published models have it: sampling, several end tokens, a pad token, a value that equals transformers' default.
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 50, "eos_token_id": [0, 7],
            "pad_token_id": 5, "bos_token_id": 0, "repetition_penalty": 1.1, "max_new_tokens": 40}  # fmt: skip
# With a temperature for greedy decoding, which transformers loads but refuses to save.
GREEDY = {"do_sample": False, "temperature": 0.6, "eos_token_id": [0, 7], "max_length": 40}
KINDS = {"full": [], "adapter": ["peft=lora"], "merged": ["peft=lora", "export.merge=true"]}


def train(corpus: Path, base: Path, run_dir: Path, *extra: str) -> Ended:
    return run("train", *SHORT, f"data.path={corpus}", f"model.name_or_path={base}", f"run.dir={run_dir}",
               "trainer.max_steps=1", *extra)  # fmt: skip


def written(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "generation_config.json").read_text())
    found.pop("transformers_version")
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own", [SAMPLING, GREEDY], ids=["sampling", "greedy"])
def test_the_bases_generation_settings_are_kept(own: dict[str, Any], kind: str, corpus: Path, tmp_path: Path) -> None:
    base = save_pretrained(tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps(own))
    done = train(corpus, base, tmp_path / "run", *KINDS[kind])
    assert done.code == 0, done.err
    folder = tmp_path / "run" / ("export_merged" if kind == "merged" else "export")
    assert written(folder) == {**own, "bos_token_id": 0}
    assert GenerationConfig.from_pretrained(folder).temperature == own["temperature"]


def test_a_base_without_generation_settings(corpus: Path, tmp_path: Path) -> None:
    base = save_pretrained(tmp_path / "base")
    (base / "generation_config.json").unlink()
    assert train(corpus, base, tmp_path / "run").code == 0
    found = written(tmp_path / "run" / "export")
    assert (found["eos_token_id"], found["pad_token_id"], "do_sample" in found) == (0, 0, False)


def test_a_chat_model_stops_where_its_template_ends_a_turn(tmp_path: Path) -> None:
    base = save_pretrained(tmp_path / "base", max_position_embeddings=512)
    (base / "generation_config.json").write_text(json.dumps(SAMPLING))
    chat = [key for key in SHORT if not key.startswith("data")] + ["objective=sft", "data=chat_jsonl"]
    chat += [f"data.path={write_chats(tmp_path / 'chats.jsonl', 8)}", "data.chat_template=chatml", "data.seq_len=256"]
    chat += ["data.global_batch_size=2", "data.micro_batch_size=2", "data.val_fraction=0.25", "trainer.max_steps=1"]
    added = 'tokenizer.add_tokens=["<|im_start|>","<|im_end|>"]'
    done = run("train", *chat, f"model.name_or_path={base}", f"run.dir={tmp_path / 'run'}", added)
    assert done.code == 0, done.err
    end = AutoTokenizer.from_pretrained(tmp_path / "run" / "export").convert_tokens_to_ids("<|im_end|>")
    assert written(tmp_path / "run" / "export")["eos_token_id"] == [0, 7, end, 256]  # and the tokenizer's own


def test_from_scratch_they_are_neutral(corpus: Path, tmp_path: Path) -> None:
    """A model from scratch decodes greedily by default and pads with its end token, so transformers doesn't warn."""
    assert train_tiny(corpus, EXPORT, f"run.dir={tmp_path / 'run'}").code == 0
    found = written(tmp_path / "run" / "export")
    assert {k: v for k, v in found.items() if v not in (None, False, True)} == {
        "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256,
    }  # fmt: skip
    assert "do_sample" not in found
    assert "_from_model_config" not in found, "transformers would make them again from config.json"


def test_what_a_user_sets_is_saved(corpus: Path, tmp_path: Path) -> None:
    base = save_pretrained(tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps(GREEDY))
    wanted = "export.generation={do_sample: true, top_p: 0.9}"
    assert train(corpus, base, tmp_path / "run", wanted).code == 0
    assert written(tmp_path / "run" / "export") == {**GREEDY, "bos_token_id": 0, "do_sample": True, "top_p": 0.9}
    done = run("export", f"run_dir={tmp_path / 'run'}", "export.generation={max_new_tokens: 9}")
    assert done.code == 0, done.err
    assert written(tmp_path / "run" / "export")["max_new_tokens"] == 9


@pytest.mark.parametrize(
    ("own", "changes", "samples"),
    [
        ({}, {}, None),
        ({}, {"temperature": 0.7}, True),
        ({}, {"top_p": 0.9}, True),
        ({"temperature": 0.6, "top_p": 0.95}, {}, True),
        ({"do_sample": False, "temperature": 0.6}, {"max_new_tokens": 3}, False),
    ],
)
def test_a_temperature_says_that_the_model_samples(
    own: dict[str, Any], changes: dict[str, Any], samples: bool | None
) -> None:
    model = tiny("llama")
    model.generation_config = GenerationConfig(**own)
    ends = SimpleNamespace(pad_token_id=3)  # the only attribute that is read of the tokenizer
    assert generation_config(model, ends, [3], changes).do_sample is samples


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{temperatur: 0.7}", "export.generation.temperatur: GenerationConfig of transformers has no such field; "
                              "did you mean temperature?"),
        ("{temperature: 0.7, do_sample: false}", "You should set `do_sample=True`"),
        ("{max_new_tokens: -1}", "must be greater than 0"),
    ],
)  # fmt: skip
def test_settings_that_are_refused_before_training(wrong: str, said: str, corpus: Path, tmp_path: Path) -> None:
    done = train_tiny(corpus, EXPORT, f"run.dir={tmp_path / 'run'}", f"export.generation={wrong}")
    assert done.code == 2
    assert said in message(done.err)
    assert not (tmp_path / "run").exists()


def with_sentencepiece(folder: Path) -> Path:
    """Saves a base with a sentencepiece file of arbitrary bytes, since transformers prefers tokenizer.json."""
    base = save_pretrained(folder)
    (base / "tokenizer.model").write_bytes(b"a sentencepiece model")
    return base


@pytest.mark.parametrize("kind", KINDS)
def test_the_sentencepiece_model_is_kept(kind: str, corpus: Path, tmp_path: Path) -> None:
    base = with_sentencepiece(tmp_path / "base")
    done = train(corpus, base, tmp_path / "run", *KINDS[kind], 'tokenizer.add_tokens=["<|a|>","<|b|>"]')
    assert done.code == 0, done.err
    folder = tmp_path / "run" / ("export_merged" if kind == "merged" else "export")
    assert (folder / "tokenizer.model").read_bytes() == b"a sentencepiece model"
    # The sentencepiece model lacks added tokens: llama.cpp's converter reads them from this file.
    stated = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {int(i): t["content"] for i, t in stated.items()} == {
        i: str(t) for i, t in tokenizer.added_tokens_decoder.items()
    }
    assert {"<|a|>", "<|b|>"} <= {t["content"] for t in stated.values()}
    text = "<|a|>some text, <|b|> twice  over\n"
    own = AutoTokenizer.from_pretrained(base)
    own.add_tokens(["<|a|>", "<|b|>"], special_tokens=True)
    assert tokenizer(text)["input_ids"] == own(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    done = run("export", f"run_dir={tmp_path / 'run'}", *KINDS[kind][1:])
    assert done.code == 0, done.err
    assert (folder / "tokenizer.model").exists()


def test_the_sentencepiece_model_of_a_name_on_the_hub(tmp_path: Path) -> None:
    """A sentencepiece model is copied from the hub's cache as it is from a folder."""
    repository = tmp_path / "cache" / "models--acme--tiny"
    with_sentencepiece(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    here = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    tokenizers.save(PreTrainedTokenizerFast.from_pretrained("acme/tiny", **here), tmp_path / "saved")
    tokenizers.save(tokenizers.load_folder(tmp_path / "saved"), tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.model").read_bytes() == b"a sentencepiece model"


def test_no_sentencepiece_model_no_more_files(corpus: Path, tmp_path: Path) -> None:
    base = save_pretrained(tmp_path / "base")
    assert train(corpus, base, tmp_path / "run").code == 0
    folder = tmp_path / "run" / "export"
    assert not list(folder.glob("*.model"))
    assert "added_tokens_decoder" not in json.loads((folder / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("written_by_template", [False, True])
def test_a_template_without_the_beginning_of_text_is_pointed_out(
    written_by_template: bool, corpus: Path, tmp_path: Path
) -> None:
    """llama.cpp begins every chat with the BOS token, which the model would never have seen."""
    base = save_pretrained(tmp_path / "base", max_position_embeddings=1024)
    file = base / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    end = "<|endoftext|>"
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {end: {"id": end, "ids": [256], "tokens": [end]}},
    }
    file.write_text(json.dumps(tokenizer))
    template = tmp_path / "own.jinja"
    template.write_text(
        ("{{ bos_token }}" if written_by_template else "")
        + "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chats = [f"data.path={write_chats(tmp_path / 'chats.jsonl', 20)}", "data=chat_jsonl", "objective=sft"]
    done = run("train", *SHORT, *chats, f"model.name_or_path={base}", "data.seq_len=512", "trainer.max_steps=1",
               f"data.chat_template={template}", f"run.dir={tmp_path / 'run'}", "export.enabled=false")  # fmt: skip
    assert done.code == 0, done.err
    assert ("note: the chat template doesn't write <|endoftext|>" in done.out) != written_by_template


LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}  # fmt: skip


def test_servers_built_on_transformers_4_find_the_rotary_frequencies(corpus: Path, tmp_path: Path) -> None:
    """Version 4.57 computes logits with the names below to 1e-5, and with version 5's alone other ones, silently."""
    base = save_pretrained(tmp_path / "base", rope_parameters=LLAMA_3)
    assert train(corpus, base, tmp_path / "run").code == 0
    found = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert (found["rope_theta"], found["torch_dtype"]) == (5e5, "float32")
    assert found["rope_scaling"] == {name: value for name, value in LLAMA_3.items() if name != "rope_theta"}
    assert AutoConfig.from_pretrained(tmp_path / "run" / "export").rope_parameters == LLAMA_3


# The names and values of files on the hub that version 4 wrote.
AS_ON_THE_HUB = {
    "google/gemma-3-4b-it": {
        "model_type": "gemma3_text",
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "tiiuae/Falcon-H1-0.5B-Instruct": {"model_type": "falcon_h1", "rope_theta": 100000000000.0},
    "stabilityai/stablelm-2-1_6b": {"model_type": "stablelm", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("name", AS_ON_THE_HUB)
def test_names_of_version_4_come_back(name: str, tmp_path: Path) -> None:
    hub = AS_ON_THE_HUB[name]
    (tmp_path / "config.json").write_text(json.dumps(hub))
    config = AutoConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    again = with_earlier_names(json.loads((tmp_path / "config.json").read_text()))
    assert {key: again.get(key) for key in hub} == hub
    (tmp_path / "config.json").write_text(json.dumps(again))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


def test_names_that_would_change_what_version_5_reads_are_left_out() -> None:
    config = CONFIG_MAPPING["gemma4_text"]().to_dict()
    assert with_earlier_names(config)["rope_parameters"] == config["rope_parameters"]
    assert "rope_theta" not in with_earlier_names(config)
