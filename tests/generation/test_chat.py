"""`lmtrain.chat` and prompts from a file: what the model is asked, what it answers, and what is saved."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from chats import write_chats
from inprocess import Ended, message, run
from lmtrain.config.compose import check, compose
from lmtrain.data.chat.templates import end_ids, own_template
from lmtrain.errors import UserError
from lmtrain.generation.conversation import Talk
from lmtrain.generation.sampling import prompt_tokens, sample_text
from lmtrain.run_folder import trained
from support import EXPORT, TINY, rows
from tiny_pretrained import save_pretrained

GREEDY = ["generate.temperature=0", "generate.max_new_tokens=12", "generate.checkpoint=last"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run for a few steps on turns of the vicuna template."""
    path = tmp_path_factory.mktemp("chat")
    chats = write_chats(path / "chats.jsonl", 30)
    ended = run("train", *TINY, "data.chat_template=vicuna", "model.max_position_embeddings=256", "data.seq_len=256",
                EXPORT, "data.val_fraction=0.2", "trainer.max_steps=6", "objective=sft", "data=chat_jsonl",
                f"data.path={chats}", "optimizer.lr=0.01", "schedule.warmup_steps=0", "report.enabled=false",
                f"run.dir={path / 'run'}",
                "callbacks.samples.every_n_validations=0", "trainer.val_check_interval=null")  # fmt: skip
    assert ended.code == 0, ended.err
    return path / "run"


def typed(monkeypatch: pytest.MonkeyPatch, verb: str, text: str, *argv: str) -> Ended:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return run(verb, *argv)


def expected(folder: Path, messages: list[dict[str, str]]) -> str:
    """Returns the answer to a whole conversation, with the template rendered by transformers."""
    model, tokenizer = trained.load(str(folder), "last", {})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    stop = end_ids(tokenizer, own_template(tokenizer))
    return sample_text(model, tokenizer, text, max_new_tokens=12, temperature=0.0, end_ids=stop).strip()


def test_turns_follow_one_another_and_are_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "talk.jsonl"
    lines = ["how far is Oslo?", "and Rome?", f"/save {saved}", "/system Be brief.", "how far is Lima?",
             f"/save {saved}", "/reset", "/nonsense", f"/save {saved}", "and home?", f"/save {saved}"]  # fmt: skip
    ended = typed(monkeypatch, "chat", "\n".join(lines), f"run_dir={folder}", *GREEDY)
    assert ended.code == 0, ended.err
    first, second, third = (row["messages"] for row in rows(saved))
    assert [m["role"] for m in first] == ["user", "assistant"] * 2
    for turn in (1, 3):
        assert first[turn]["content"] == expected(folder, first[:turn])
        assert first[turn]["content"] in ended.out
    assert second[0] == {"role": "system", "content": "Be brief."}
    assert second[2]["content"] == expected(folder, second[:2])
    assert third[0] == second[0]  # a new conversation with the same system turn
    assert third[2]["content"] == expected(folder, third[:2])
    assert ended.err.count("there is nothing to save yet") == 1
    assert ended.out.count("/exit") == 2  # the help, at the start and after an unknown command


def test_an_answer_comes_word_by_word_and_an_interrupted_turn_is_forgotten(folder: Path) -> None:
    from lmtrain.config import compose as rules

    settings = rules.check(rules.compose(GREEDY)).generate
    talk = Talk(*trained.load(str(folder), "last", {}), settings, seed=0)
    settings.max_new_tokens = 40
    heard: list[str] = []
    answer = talk.ask("how far is Oslo, and is there a train?", heard.append, print)
    assert "".join(heard).strip() == answer
    assert sum(map(bool, heard)) > 1

    def stop(_: str) -> None:
        raise KeyboardInterrupt

    before = list(talk.turns)
    with pytest.raises(KeyboardInterrupt):
        talk.ask("and Rome?", stop, print)
    assert talk.turns == before
    said: list[str] = []
    for _ in range(6):  # more turns than fit into 256 positions
        talk.ask("Please tell me: how far is Quito?", lambda _: None, said.append)
    assert said
    assert talk.turns[0]["role"] == "user"


def test_a_model_without_a_template_continues_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pretrained(tmp_path / "base", "gpt2")
    saved = tmp_path / "texts.jsonl"
    lines = ["the king", "/system Be brief.", "/reset", "the queen", f"/save {saved}"]
    ended = typed(monkeypatch, "chat", "\n".join(lines), str(tmp_path / "base"), *GREEDY)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("this model has no chat template: it continues each text")
    model, tokenizer = trained.load(str(tmp_path / "base"), "last", {})
    written = sample_text(
        model, tokenizer, "the queen", max_new_tokens=12, temperature=0.0, end_ids=end_ids(tokenizer, None)
    )
    assert rows(saved) == [{"text": f"the queen {written.strip()}"}]
    refused = typed(monkeypatch, "chat", "", str(tmp_path / "base"), "generate.system_prompt=Hi")
    assert "no chat template" in message(refused.err)


def test_a_text_that_goes_on_is_not_ended_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tokenizer that puts the end of text after every text (add_eos_token), the model continues the same ids."""
    lines = ["the king", f"/save {tmp_path / 'texts.jsonl'}"]
    for ends in (False, True):
        base = save_pretrained(tmp_path / f"base_{ends}", "gpt2")
        if ends:
            made = AutoTokenizer.from_pretrained(base)
            eos = (made.eos_token, made.eos_token_id)
            made.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {eos[0]}", special_tokens=[eos])
            made.save_pretrained(base)
        assert typed(monkeypatch, "chat", "\n".join(lines), str(base), *GREEDY).code == 0
    first, second = rows(tmp_path / "texts.jsonl")
    assert first == second


@pytest.mark.parametrize("adds", ["{bos} $A", "$A {eos}", "{bos} $A {eos}", "$A"])
def test_a_prompt_begins_as_transformers_tokenizer_begins_it(adds: str, tmp_path: Path) -> None:
    """Gemma's and Llama's tokenizers put BOS before a text; what ends it is left out, since the text goes on."""
    tokenizer = AutoTokenizer.from_pretrained(save_pretrained(tmp_path))
    tokenizer.add_special_tokens({"bos_token": "<b>", "eos_token": "<e>"})
    special = [(text, tokenizer.convert_tokens_to_ids(text)) for text in ("<b>", "<e>")]
    template = TemplateProcessing(single=adds.format(bos="<b>", eos="<e>"), special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = template
    text = tokenizer("the king", add_special_tokens=False)["input_ids"]
    begins = tokenizer("the king")["input_ids"][: len(text) + ("{bos}" in adds)]
    assert prompt_tokens(tokenizer, "the king") == begins
    assert prompt_tokens(tokenizer, text) == text
    assert prompt_tokens(tokenizer, "") == [special[0 if "{bos}" in adds else 1][1]]


@pytest.mark.parametrize("form", ["txt", "jsonl", "-"])
def test_prompts_of_a_file(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of prompts of different lengths, each greedy answer equals that of the prompt alone."""
    model = save_pretrained(tmp_path / "model", max_position_embeddings=256)
    prompts = ["a", "a longer prompt, much longer", "words", "é", "two\u2028lines"]
    name = {"txt": str(tmp_path / "p.txt"), "jsonl": str(tmp_path / "p.jsonl"), "-": "-"}[form]
    as_json = lambda prompt: json.dumps({"prompt": prompt}, ensure_ascii=False)  # noqa: E731
    text = "".join((as_json(p) if form == "jsonl" else p) + "\n" for p in prompts)
    if form != "-":
        Path(name).write_text(text, encoding="utf-8-sig", newline="\r\n")  # as some Windows programs write
    argv = [f"run_dir={model}", f"generate.prompts_file={name}", "generate.batch_size=2", *GREEDY]
    ended = typed(monkeypatch, "generate", text if form == "-" else "", *argv)
    assert ended.code == 0, ended.err
    found = [json.loads(line) for line in ended.out.strip().split("\n")]
    loaded, tokenizer = trained.load(str(model), "last", {})
    assert [row["prompt"] for row in found] == prompts
    for row in found:
        assert row["text"] == sample_text(loaded, tokenizer, row["prompt"], max_new_tokens=12, temperature=0.0)


def test_a_text_and_its_continuation_are_one_text() -> None:
    """A tokenizer such as Llama 2's decodes a text without its first space, which belongs between the two here."""
    words = ["<eos>", *("▁" + word for word in ["once", "upon", "a", "time", "there", "was"])]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), bos_token_id=0, eos_token_id=0, **shape)).eval()
    given = tokenizer("once upon a", return_tensors="pt")["input_ids"]
    whole = model.generate(given, max_new_tokens=3, do_sample=False, pad_token_id=0)[0]
    expected = tokenizer.decode(whole, skip_special_tokens=True)
    assert len(expected.split()) > 3
    for prompt in ("once upon a", given[0].tolist()):
        assert f"once upon a{sample_text(model, tokenizer, prompt, max_new_tokens=3, temperature=0)}" == expected


def test_answers_in_a_file_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = save_pretrained(tmp_path / "model"), tmp_path / "out.jsonl"
    (tmp_path / "p.txt").write_text("one\ntwo\n\nthree\n")
    argv = [f"run_dir={model}", f"generate.prompts_file={tmp_path / 'p.txt'}", f"generate.out={out}",
            "generate.num_samples=2", "generate.batch_size=2", *GREEDY]  # fmt: skip
    assert run("generate", *argv).code == 0
    whole = out.read_bytes()
    assert [(r["prompt"], r["sample"]) for r in rows(out)] == [(p, i) for p in ("one", "two", "three") for i in (0, 1)]
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]) + b'{"prompt": "tw')
    assert run("generate", *argv).code == 0
    assert out.read_bytes() == whole
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    refused = run("generate", f"run_dir={model}", f"generate.prompts_file={tmp_path / 'bad.jsonl'}")
    assert "line 1 has no" in message(refused.err)


@pytest.mark.parametrize("held", ["other", "mine", "unfinished", "longer"])
def test_a_file_of_anything_else_stays_as_it_is(held: str, tmp_path: Path) -> None:
    """Answers to other prompts would be taken for those asked for, and the end of any other file would be cut off."""
    model, out = save_pretrained(tmp_path / "model"), tmp_path / "out.jsonl"
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    line = '{"prompt": "%s", "sample": 0, "text": "x"}\n'
    text = {"other": line % "uno", "mine": "my notes", "unfinished": line % "one" + '{"prompt": "twa'}
    out.write_text(text.get(held, "".join(line % prompt for prompt in ("one", "two", "three"))))
    before = out.read_bytes()
    ended = run("generate", f"run_dir={model}", f"generate.prompts_file={tmp_path / 'p.txt'}", f"generate.out={out}")
    assert ended.code == 2
    number = {"unfinished": 2, "longer": 3}.get(held, 1)
    assert f"line {number} is not the answer that this command writes there" in message(ended.err)
    assert out.read_bytes() == before


def test_an_empty_prompt_leaves_the_answers_of_its_batch_as_they_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty prompt is continued like text; the turns beside it still end where the model ends a turn."""
    ends: list[Any] = []

    def record(_: Any, __: Any, prompts: Any, *, end_ids: Any, **settings: Any) -> list[str]:
        ends.append(end_ids)
        return [""] * len(prompts)

    monkeypatch.setattr("lmtrain.generation.generate.sample_texts", record)
    for number, prompts in enumerate((["", "how far is Oslo?"], ["how far is Oslo?", ""])):
        name = tmp_path / f"{number}.jsonl"
        name.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
        ended = run("generate", f"run_dir={folder}", f"generate.prompts_file={name}", *GREEDY)
        assert ended.code == 0, ended.err
    assert ends[0] == ends[1] is not None


def test_the_tokenizer_of_an_export_has_the_template(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "export")
    assert tokenizer.chat_template


def test_variables_of_the_template_reach_the_export_and_can_be_typed(tmp_path: Path) -> None:
    """What is set in training becomes the template's default; transformers renders it without being told."""
    template, asked = tmp_path / "thinks.jinja", [{"role": "user", "content": "Why?"}]
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
    )
    out, words = tmp_path / "run", ["model.max_position_embeddings=256", "data.seq_len=256", "data.val_fraction=0"]
    ended = run("train", *TINY, *words, EXPORT, "objective=sft", "data=chat_jsonl", "trainer.max_steps=1",
                f"data.path={write_chats(tmp_path / 'chats.jsonl', 10)}", f"data.chat_template={template}",
                "data.template_options={enable_thinking: true}", "report.enabled=false", f"run.dir={out}")  # fmt: skip
    assert ended.code == 0, ended.err
    for folder in (out / "export", out):
        for typed_options, thinks in ((None, True), ("false", False)):
            more = [] if typed_options is None else [f"generate.template_options={{enable_thinking: {typed_options}}}"]
            config = check(compose([f"run_dir={folder}", "generate.checkpoint=last", "trainer.accelerator=cpu", *more]))
            _, tokenizer = trained.load_asked(config)
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            assert ("<think>" in text) != thinks
    config = check(compose([f"run_dir={out / 'export'}", "generate.template_options={mood: 1}"]))
    with pytest.raises(UserError, match=r"generate\.template_options\.mood: the chat template .* reads no variable"):
        trained.load_asked(config)
