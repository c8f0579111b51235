"""Models, tokenizers, adapters and chat templates from an attacker, as Hugging Face folders."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cases import STEERS, Case, Place
from hostile_targets import payloads
from safetensors import safe_open

ASK = ("generate.prompt=a", "generate.max_new_tokens=2")
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def chat_export(export: Path, folder: Path) -> Path:
    """Copies an export and gives it a chat template."""
    shutil.copytree(export, folder)
    _set(folder / "tokenizer_config.json", chat_template=PLAIN)
    return folder


def _set(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def with_own_code(place: Place, export: Path, *names: str) -> None:
    """Gives the export code of its own for model, config and tokenizer, or for those that are named."""
    payloads(place)
    code = (place.stranger / "pwned_script.py").read_text()
    for name in ("modeling_pwned", "configuration_pwned", "tokenization_pwned"):
        (export / f"{name}.py").write_text(code)
    classes = {"AutoConfig": "configuration_pwned.Model", "AutoModelForCausalLM": "modeling_pwned.Model"}
    if not names or "model" in names:
        _set(export / "config.json", auto_map=classes, model_type="pwned")
    if not names or "tokenizer" in names:
        _set(
            export / "tokenizer_config.json",
            auto_map={"AutoTokenizer": ["tokenization_pwned.Model", None]},
            tokenizer_class="Model",
        )


def command(verb: str, export: Path, place: Place) -> list[str]:
    if verb == "train":
        plain = [w for w in place.train() if not w.startswith(("model.", "tokenizer="))]
        return [*plain, "model=pretrained", f"model.name_or_path={export}"]
    if verb == "evaluate":
        return [
            "evaluate",
            f"run_dir={export}",
            "data=text",
            f"data.val_path={place.corpus}/file_00.txt",
            "evaluate.resamples=10",
            "evaluate.context=16",
        ]
    return [verb, f"run_dir={export}", *ASK[verb == "chat" :]]


def changed(
    change: Callable[[Place, Path], Any], verb: str = "generate", *, chat: bool = False
) -> Callable[[Place], list[str]]:
    def make(place: Place) -> list[str]:
        export = Path(shutil.copytree(place.chat, place.stranger / "export")) if chat else place.export()
        change(place, export)
        return command(verb, export, place)

    return make


def cases() -> Iterator[Case]:
    yield from _weights()
    yield from _code()
    yield from _configs()
    yield from _adapters()
    yield from _templates()
    yield from _tokenizers()


def _header(text: bytes, length: int | None = None, data: bytes = b"\0" * 64) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _weights() -> Iterator[Case]:
    def entry(**values: Any) -> bytes:
        return json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **values}}).encode()

    files = {
        "a header of 2**63 bytes": _header(b"{}", 2**63),
        "a header of 2**64-1 bytes": _header(b"{}", 2**64 - 1),
        "a header longer than the file": _header(b"{}", 10**6),
        "an empty header": _header(b""),
        "no JSON": _header(b"\xff\xfe"),
        "a list": _header(b"[]"),
        "deep": _header(b"[" * 50_000),
        "negative offsets": _header(entry(data_offsets=[-8, 4])),
        "offsets beyond the file": _header(entry(data_offsets=[0, 2**40])),
        "offsets turned round": _header(entry(data_offsets=[8, 4])),
        "a huge shape": _header(entry(shape=[2**40, 2**40])),
        "a negative shape": _header(entry(shape=[-1])),
        "a type that is none": _header(entry(dtype="PWNED")),
        "tensors over each other": _header(
            json.dumps({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}).encode()
        ),
        "nothing": b"",
        "four bytes": b"\0\0\0\0",
        "escapes in a name": _header(
            json.dumps({STEERS[0]: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode(), data=b"\0" * 4
        ),
        "a traversal as a name": _header(
            json.dumps({"../../PWNED": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode(), data=b"\0" * 4
        ),
    }
    for i, (name, content) in enumerate(files.items()):
        verb = ("generate", "evaluate", "train")[i % 3]

        def write(place: Place, export: Path, content: bytes = content) -> None:
            (export / "model.safetensors").write_bytes(content)

        yield Case("weights", f"{name}, {verb}", changed(write, verb), (), "refused")
    for name in (
        "pytorch_model.bin",
        "model.safetensors",
        "model.pt",
        "tf_model.h5",
        "flax_model.msgpack",
        "model.ckpt.index",
    ):
        for form in ("pickle", "torch"):

            def run(place: Place, export: Path, name: str = name, form: str = form) -> None:
                from hostile_runs import Runs

                (export / "model.safetensors").unlink()
                if form == "pickle":
                    (export / name).write_bytes(pickle.dumps({"a": Runs(place.marker)}))
                else:
                    torch.save({"a": Runs(place.marker)}, export / name)

            yield Case("weights", f"a {form} file as {name}", changed(run), (), "refused")
    for name, index in {
        "a traversal": {"weight_map": {"a": "../../../home/.ssh/id_rsa"}},
        "an absolute name": {"weight_map": {"a": "/etc/passwd"}},
        "an address": {"weight_map": {"a": "http://127.0.0.1:9/a"}},
        "a list": [],
        "no map": {},
        "numbers": {"weight_map": {"a": 17}},
    }.items():

        def sharded(place: Place, export: Path, index: Any = index) -> None:
            (export / "model.safetensors").unlink()
            (export / "model.safetensors.index.json").write_text(json.dumps(index))

        yield Case("weights", f"an index with {name}", changed(sharded), (), "refused")
    for name, absolute in (("beside the folder", False), ("with an absolute name", True)):
        for verb in ("generate", "train"):

            def outside(place: Place, export: Path, absolute: bool = absolute) -> None:
                """Whole weights, which load: their file is not the stranger's."""
                moved = Path(shutil.move(export / "model.safetensors", place.stranger / "outside.safetensors"))
                with safe_open(moved, "pt") as file:
                    names = dict.fromkeys(file.keys(), str(moved) if absolute else f"../{moved.name}")
                index = {"metadata": {}, "weight_map": names}
                (export / "model.safetensors.index.json").write_text(json.dumps(index))

            yield Case("weights", f"an index with a file {name}, {verb}", changed(outside, verb), (), "refused")


def _code() -> Iterator[Case]:
    for verb in ("generate", "evaluate", "train", "chat"):
        for what in ((), ("model",), ("tokenizer",)):
            name = what[0] if what else "all"
            must = "refused" if name != "tokenizer" else None
            yield Case(
                "code of a model",
                f"{name}, {verb}",
                changed(lambda p, e, w=what: with_own_code(p, e, *w), verb),
                (),
                must,
            )

    def elsewhere(place: Place, export: Path, name: str) -> None:
        payloads(place)
        _set(export / "config.json", auto_map={"AutoConfig": name, "AutoModelForCausalLM": name})

    for name in (
        "pwned_script.Model",
        "../pwned_script.Model",
        "pwned/repo--pwned_script.Model",
        "os.system",
        "/tmp/pwned_script.Model",
        "--pwned.Model",
        "a",
        "",
        "torch.hub.load",
    ):
        yield Case("code of a model", f"auto_map {name!r}", changed(lambda p, e, n=name: elsewhere(p, e, n)))
    for name in (
        "custom_generate/generate.py",
        "requirements.txt",
        "setup.py",
        "conftest.py",
        "sitecustomize.py",
        "hubconf.py",
    ):

        def put(place: Place, export: Path, name: str = name) -> None:
            (export / name).parent.mkdir(exist_ok=True)
            (export / name).write_text(f"open({str(place.marker)!r}, 'w')\ndef generate(*_, **__): pass\n")

        yield Case("code of a model", f"a file {name}", changed(put), must="harmless")

    def generation(place: Place, export: Path) -> None:
        put_in = export / "custom_generate"
        put_in.mkdir()
        (put_in / "generate.py").write_text(f"open({str(place.marker)!r}, 'w')\n")
        _set(export / "generation_config.json", custom_generate=str(export), trust_remote_code=True)

    yield Case("code of a model", "custom_generate in generation_config.json", changed(generation))


def _configs() -> Iterator[Case]:
    for name, values in {
        "a model type of nobody": {"model_type": "pwned"},
        "no model type": {"model_type": None},
        "a traversal": {"model_type": "../gpt2"},
        "a list as a type": {"model_type": ["gpt2"]},
        "a huge model": {"n_embd": 10**9, "n_head": 1},
        "many layers": {"n_layer": 10**9},
        "a huge vocabulary": {"vocab_size": 10**15},
        "negative sizes": {"n_embd": -32},
        "texts for sizes": {"n_embd": "pwned"},
        "bitsandbytes": {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}},
        "bitsandbytes, 8 bits": {"quantization_config": {"load_in_8bit": True, "quant_method": "bitsandbytes"}},
        "a quantisation of nobody": {"quantization_config": {"quant_method": "pwned", "modules": ["os"]}},
        "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4, "dataset": "{key}"}},
        "quark": {"quantization_config": {"quant_method": "quark"}},
        "an activation of nobody": {"activation_function": "os.system"},
        "an attention of the hub": {"_attn_implementation": "pwned/kernels:attention"},
        "an attention of nobody": {"attn_implementation": "pwned"},
        "a dtype of nobody": {"dtype": "os.system"},
        "architectures of nobody": {"architectures": ["Popen"]},
        "architectures of others": {"architectures": [17, None]},
        "a name elsewhere": {"_name_or_path": "{key}"},
        "a memory": {"model_type": "memory_gpt2", "memory": {"a": "os.system"}},
        "a memory of nobody": {"model_type": "memory_pwned", "memory": {}},
        "a memory that is a list": {"model_type": "memory_gpt2", "memory": []},
        "token ids beyond": {"eos_token_id": 10**9, "bos_token_id": -5},
        "use_kernels": {"use_kernels": True},
        "fsdp": {"base_model_tp_plan": {"*": "pwned"}, "tp_plan": "auto"},
    }.items():

        def change(place: Place, export: Path, values: dict[str, Any] = values) -> None:
            _set(export / "config.json", **place.filled(values))

        yield Case("config of a model", name, changed(change))
    for name, text in {
        "a list": "[]",
        "nothing": "",
        "deep": "[" * 20_000,
        "a huge int": '{"n_embd": ' + "9" * 5000 + "}",
        "bytes": "\udcff",
        "NaN": '{"n_embd": NaN}',
    }.items():
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):

            def write(place: Place, export: Path, file: str = file, text: str = text) -> None:
                (export / file).write_bytes(text.encode("utf-8", "surrogateescape"))

            yield Case("config of a model", f"{name} as {file}", changed(write))
    for name, values in {
        "many tokens": {"max_new_tokens": 10**12},
        "a min length": {"min_length": 10**9},
        "beams": {"num_beams": 10**6},
        "stop strings": {"stop_strings": ["a" * 10**5] * 3},
        "a cache of nobody": {"cache_implementation": "pwned"},
        "watermarking": {"watermarking_config": {"a": 1}},
        "types": {"temperature": "pwned", "top_k": []},
        "an assistant": {"prompt_lookup_num_tokens": 3, "assistant_model": "{key}"},
    }.items():

        def generation(place: Place, export: Path, values: dict[str, Any] = values) -> None:
            _set(export / "generation_config.json", **place.filled(values))

        yield Case("config of a model", f"generation: {name}", changed(generation))
    for i, text in enumerate(
        (
            "_target_: os.system\n",
            "!!python/object/apply:os.system ['true']\n",
            "callbacks: {extra: [{_target_: os.system}]}\n",
            "a: &a [*a]\n",
            "\0",
            "data: {source: subprocess.Popen}\n",
        )
    ):

        def own(place: Place, export: Path, text: str = text) -> None:
            (export / "lmtrain_config.yaml").write_text(text)

        yield Case("config of a model", f"lmtrain_config.yaml {i}", changed(own, ("generate", "evaluate")[i % 2]))


def _adapters() -> Iterator[Case]:
    good = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["c_attn"],
        "fan_in_fan_out": True,
        "base_model_name_or_path": "{stranger}/export",
    }
    for name, values in {
        "a base elsewhere": {"base_model_name_or_path": "{key}"},
        "a base of the hub": {"base_model_name_or_path": "pwned/base"},
        "no base": {"base_model_name_or_path": None},
        "auto_mapping of a module": {
            "auto_mapping": {"base_model_class": "Model", "parent_library": "pwned_script"},
            "task_type": None,
        },
        "auto_mapping of os": {
            "auto_mapping": {"base_model_class": "system", "parent_library": "os"},
            "task_type": None,
        },
        "a type of nobody": {"peft_type": "PWNED"},
        "a task of nobody": {"task_type": "PWNED"},
        "a rank beyond": {"r": 10**12},
        "a pattern that backtracks": {"target_modules": "(a+)+$" * 8 + "x"},
        "modules of nobody": {"target_modules": ["os"]},
        "an initialisation of a file": {"init_lora_weights": "{key}"},
        "corda": {"init_lora_weights": "corda"},
        "loftq": {"init_lora_weights": "loftq", "loftq_config": {"a": 1}},
        "arrow": {"arrow_config": {"a": 1}},
        "megatron": {"megatron_config": {"a": 1}, "megatron_core": "pwned_script"},
        "unknown keys": {"pwned": "os.system"},
        "saved modules": {"modules_to_save": ["lm_head", "os"]},
        "trainable tokens": {"trainable_token_indices": [10**9]},
        "xlora": {"peft_type": "XLORA", "adapters": {"0": "{key}"}},
    }.items():

        def change(place: Place, export: Path, values: dict[str, Any] = values) -> None:
            payloads(place)
            (export.parent / "adapter").mkdir()
            (export.parent / "adapter" / "adapter_config.json").write_text(json.dumps(place.filled({**good, **values})))

        def make(place: Place, change: Any = change, pickled: bool = "base elsewhere" in name) -> list[str]:
            changed(change)(place)
            adapter = place.stranger / "adapter"
            if pickled:
                from hostile_runs import Runs

                (adapter / "adapter_model.bin").write_bytes(pickle.dumps({"a": Runs(place.marker)}))
            return command("generate", adapter, place)

        yield Case("adapter", name, make, (), "refused")
    for name in ("adapter_model.bin", "adapter_model.safetensors"):
        for verb in ("generate", "train"):

            def pickled(place: Place, name: str = name, verb: str = verb) -> list[str]:
                from hostile_runs import Runs

                export, adapter = place.export(), place.stranger / "adapter"
                adapter.mkdir()
                (adapter / "adapter_config.json").write_text(json.dumps(place.filled(good)))
                torch.save({"a": Runs(place.marker)}, adapter / name)
                if verb == "generate":
                    return command(verb, adapter, place)
                return [*command("train", export, place), "peft=lora", f"peft.adapter={adapter}"]

            yield Case("adapter", f"a pickle as {name}, {verb}", pickled, (), "refused")

    def coded(place: Place) -> list[str]:
        adapter = place.stranger / "adapter"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps(place.filled(good)))
        with_own_code(place, place.export())
        return command("generate", adapter, place)

    yield Case("adapter", "a base with code of its own", coded, (), "refused")


TEMPLATES = {
    "__class__": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr": "{{ ''|attr('__class__') }}",
    "map": "{{ ['']|map(attribute='__class__')|list }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('touch {marker}').read() }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('touch {marker}') }}",
    "joiner": "{{ joiner.__init__.__globals__.os.system('touch {marker}') }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "self": "{{ self._TemplateReference__context.eval_ctx.environment }}",
    "request": "{{ config.items() }}",
    "messages": "{{ messages.__class__.__init__.__globals__ }}",
    "raise_exception": "{{ raise_exception.__globals__['__builtins__']['open']('{marker}', 'w') }}",
    "strftime_now": "{{ strftime_now.__globals__ }}",
    "tojson": "{{ messages|tojson.__globals__ }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "mutation": "{% set _ = messages.append({'role': 'user', 'content': 'pwned'}) %}" + PLAIN,
    "clear": "{% set _ = messages.clear() %}a",
    "include": "{% include '{key}' %}",
    "import": "{% import '{key}' as a %}{{ a }}",
    "extends": "{% extends '/etc/passwd' %}",
    "from": "{% from '../../x' import y %}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested ranges": "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    "a product": "{{ 'a' * 10**10 }}",
    "a power": "{{ 9**9**9 }}",
    "a tower of powers": "{{ 9**(9**9) }}",
    "products of products": "{% set ns = namespace(a=9**99) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}a",
    "a list product": "{{ ([1] * 10**10)|length }}",
    "centre": "{{ 'a'|center(10**10) }}",
    "indent": "{{ ('\n' * 10**6)|indent(10**6) }}",
    "doubling": "{% set ns = namespace(a='a') %}{% for i in range(64) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "recursion": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "deep": "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "deep ifs": "{% if 1 %}" * 300 + "a" + "{% endif %}" * 300,
    "no end": "{% for a in messages %}",
    "no template": 17,
    "a dict": {"default": "{{ lipsum.__globals__ }}"},
    "a list": [{"name": "default", "template": "{{ cycler.__init__.__globals__ }}"}],
    "escapes": PLAIN + "\x1b]0;title\x07",
    "a syntax error": "{{ }",
    "an unknown filter": "{{ messages|pwned }}",
    "an unknown tag": "{% pwned %}",
    "do": "{% do messages.append(1) %}a",
    "async": "{{ messages.__aiter__() }}",
    "format with width": "{{ '%10000000000d' % 1 }}",
    "replace": "{{ ('a' * 10**5)|replace('a', 'a' * 10**5)|replace('a', 'aaaa') }}",
    "a dot name": "{{ messages[0].content.__class__ }}",
    "random": "{{ range(10**18)|random }}",
    "batch": "{{ range(3)|batch(10**9, 'a')|list }}",
    "a slice": "{{ 'a'|wordwrap(-1) }}",
    "debug": "{% debug %}",
    "pprint": "{{ messages|pprint }}",
}


def _templates() -> Iterator[Case]:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8

    def asked(place: Place, template: Any, spot: str) -> list[str]:
        export = Path(shutil.copytree(place.chat, place.stranger / "export"))
        filled = place.filled(template)
        if spot == "file":
            _set(export / "tokenizer_config.json", chat_template=None)
            (export / "chat_template.jinja").write_text(str(filled))
            return ["chat", f"run_dir={export}", *ASK[1:]]
        _set(export / "tokenizer_config.json", chat_template=filled)
        if spot == "generate":
            return [*command("generate", export, place), "generate.chat=true"]
        data = place.jsonl("chats.jsonl", rows)
        plain = [w for w in place.train(data=False) if not w.startswith(("model.", "tokenizer=", "run.name"))]
        return [
            "inspect",
            *plain[1:],
            "objective=sft",
            "data=chat_jsonl",
            f"data.path={data}",
            "data.val_fraction=0.2",
            "tokenizer=hub",
            f"tokenizer.name_or_path={export}",
        ]

    for i, (name, template) in enumerate(TEMPLATES.items()):
        spot = ("generate", "inspect", "file")[i % 3]
        yield Case(
            "chat template", f"{name}, {spot}", lambda p, t=template, s=spot: asked(p, t, s), stdin="hello\n/exit\n"
        )


def _tokenizers() -> Iterator[Case]:
    for name, values in {
        "a class of nobody": {"tokenizer_class": "Pwned"},
        "a class of os": {"tokenizer_class": "os.system"},
        "a traversal": {"tokenizer_class": "../../pwned_script.Model"},
        "another's class": {"tokenizer_class": "TapexTokenizer"},
        "sentencepiece": {"tokenizer_class": "LlamaTokenizer"},
        "mistral": {"tokenizer_class": "MistralCommonTokenizer"},
        "a class that is a list": {"tokenizer_class": ["a"]},
        "rag": {"tokenizer_class": "RagTokenizer"},
        "a fast file elsewhere": {"fast_tokenizer_files": ["tokenizer.4.0.json", "../../../home/.ssh/id_rsa"]},
        "a processor": {"processor_class": "pwned_script.Model"},
        "positions": {"model_max_length": "many"},
        "escapes in a token": {"eos_token": STEERS[0]},
        "a token that is a number": {"eos_token": 17},
        "an added token that is none": {"added_tokens_decoder": {"a": 1}},
        "gguf": {"gguf_file": "{key}"},
        "huge": {"extra_special_tokens": {f"a{i}": f"<a{i}>" for i in range(2000)}},
    }.items():

        def change(place: Place, export: Path, values: dict[str, Any] = values) -> None:
            payloads(place)
            _set(export / "tokenizer_config.json", **place.filled(values))

        yield Case("tokenizer", name, changed(change))
    for name, value in {
        "a pattern that backtracks": {
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        },
        "a pattern that is none": {
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
        },
        "a model of nobody": {"model": {"type": "Pwned"}},
        "no model": {"model": None},
        "ids beyond": {"model": {"type": "BPE", "vocab": {"a": 2**31}, "merges": []}},
        "a decoder of nobody": {"decoder": {"type": "pwned"}},
        "a normalizer of nobody": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "replacing without end": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "a"}},
        "added tokens beyond": {
            "added_tokens": [
                {
                    "id": 10**9,
                    "content": "a",
                    "special": True,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                }
            ]
        },
        "truncation": {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10}},
    }.items():

        def replaced(place: Place, export: Path, value: dict[str, Any] = value) -> None:
            _set(export / "tokenizer.json", **value)

        yield Case("tokenizer", f"tokenizer.json: {name}", changed(replaced))
    for name in (
        "vocab.json",
        "merges.txt",
        "spiece.model",
        "tokenizer.model",
        "added_tokens.json",
        "special_tokens_map.json",
        "vocab.txt",
        "tekken.json",
        "tokenizer.pkl",
    ):

        def alone(place: Place, export: Path, name: str = name) -> None:
            from hostile_runs import Runs

            (export / "tokenizer.json").unlink()
            (export / name).write_bytes(pickle.dumps(Runs(place.marker)))

        yield Case("tokenizer", f"a pickle as {name}", changed(alone), (), "refused")

    def fifo(place: Place, export: Path) -> None:
        (export / "tokenizer.json").unlink()
        os.mkfifo(export / "tokenizer.json")

    yield Case("tokenizer", "a FIFO", changed(fifo))
