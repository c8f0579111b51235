"""`transformers serve` on an export, asked by OpenAI's client, gives the greedy answers of lmtrain's own generation."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from chats import write_chats
from inprocess import run
from lmtrain.data.chat.templates import end_ids, own_template
from lmtrain.generation.sampling import sample_text
from lmtrain.run_folder import trained
from ports import free_port
from support import EXPORT, TINY
from tiny_pretrained import save_pretrained


def python() -> str:
    named = os.environ.get("LMTRAIN_SERVE_PYTHON")
    missing = [name for name in ("fastapi", "uvicorn", "openai") if find_spec(name) is None]
    if named is None and missing:
        pytest.skip(
            f'{", ".join(missing)} missing: pip install "transformers[serving]" somewhere, LMTRAIN_SERVE_PYTHON'
        )
    return named or sys.executable


def wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 120
    while "Uvicorn running" not in log.read_text(errors="replace"):
        assert server.poll() is None, f"the server ended before it was ready: {log.read_text()[-2000:]}"
        assert time.monotonic() < end, f"the server is not ready after 120 s: {log.read_text()[-2000:]}"
        time.sleep(0.2)


def end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()


@pytest.mark.slow
def test_the_server_answers_as_the_run_does(tmp_path: Path) -> None:
    command = python()
    base, chats = save_pretrained(tmp_path / "base", max_position_embeddings=512), write_chats(tmp_path / "c.jsonl", 30)
    common = [o for o in TINY if not o.startswith(("tokenizer=", "model.", "data.seq_len"))]
    ended = run("train", *common, "objective=sft", "data=chat_jsonl", f"data.path={chats}", "data.seq_len=512",
                "data.chat_template=vicuna", "data.val_fraction=0", "model=pretrained", f"model.name_or_path={base}",
                EXPORT, "trainer.max_steps=2", "optimizer.lr=0.01", f"run.dir={tmp_path / 'run'}")  # fmt: skip
    assert ended.code == 0, ended.err
    export, port = tmp_path / "run" / "export", str(free_port())
    serve = [command, "-m", "transformers.cli.transformers", "serve", str(export), "--port", port, "--device", "cpu",
             "--dtype", "float32"]  # fmt: skip
    question, prompt = "how far is Oslo?", "Oslo is"
    log = tmp_path / "serve.log"
    with log.open("w") as stderr, subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=stderr) as server:
        try:
            wait_until_ready(server, log)
            script = [command, str(Path(__file__).with_name("serve_client.py")), f"http://localhost:{port}/v1"]
            done = subprocess.run([*script, str(export), question, prompt], capture_output=True, text=True, timeout=120)
        finally:
            end(server)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    model, tokenizer = trained.load(str(tmp_path / "run"), "last", {})
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    ends = end_ids(tokenizer, own_template(tokenizer))
    chat, text = (
        sample_text(model, tokenizer, given, max_new_tokens=12, temperature=0.0, end_ids=ends)
        for given in (asked, prompt)
    )
    assert found == {"chat": chat, "streamed": chat, "text": text}
    assert chat.strip()
