"""export.push_to with huggingface_hub's real client and a stand-in for the hub that stores what is uploaded."""

import base64
import dataclasses
import json
import shlex
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from inprocess import message, run, train_tiny
from lmtrain.errors import RunError
from lmtrain.exports.export import push
from support import EXPORT


class Hub(ThreadingHTTPServer):
    """A stand-in for the hub that handles an upload: a repository is created, and the files come inside the commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.made: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.tokens: set[str | None] = set()
        self.refuses = False


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def _answer(self, body: Any, code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_POST(self) -> None:
        body, hub = self._body(), self.server
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.refuses:
            return self._answer({"error": "you may not write here"}, 403)
        address = f"http://127.0.0.1:{hub.server_port}"
        if self.path == "/api/repos/create":
            hub.made = json.loads(body)
            self._answer({"url": f"{address}/me/tiny", "name": "me/tiny"})
        elif "/preupload/" in self.path:
            names = [f["path"] for f in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self._answer({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "header":
                    hub.commits.append(line["value"]["summary"])
            self._answer({"commitUrl": f"{address}/me/tiny/commit/1", "commitOid": "1" * 40, "success": True})
        else:  # a request to validate-yaml
            self._answer({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        self._answer({"id": "me/tiny", "sha": "0" * 40, "siblings": [], "private": True})

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield server
    server.shutdown()


def test_a_run_uploads_its_export_and_the_verb_does_it_again(hub: Hub, corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, EXPORT, f"run.dir={tmp_path / 'run'}", "export.push_to=me/tiny")
    assert ended.code == 0, ended.err
    assert f"uploaded to http://127.0.0.1:{hub.server_port}/me/tiny" in ended.out
    assert hub.made["visibility"] == "private"
    assert hub.commits == ["run, step 2"]
    assert hub.tokens == {"Bearer hf_test"}
    export = tmp_path / "run/export"
    written = {p.name: p.read_bytes() for p in export.iterdir() if p.name != "lmtrain_config.yaml"}
    assert hub.files == written
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= set(hub.files)
    assert str(tmp_path).encode() not in b"".join(hub.files.values())
    words = ["export.checkpoint=last", "export.push_to=me/tiny", "export.push_private=false"]
    ended = run("export", f"run_dir={tmp_path / 'run'}", *words)
    assert ended.code == 0, ended.err
    assert hub.made["visibility"] == "public"
    assert len(hub.commits) == 2


def test_an_upload_that_is_refused_leaves_the_export(hub: Hub, corpus: Path, tmp_path: Path) -> None:
    hub.refuses = True
    own = ["export.dtype=bfloat16", "export.push_private=false", "export.generation={temperature: 0.5}"]
    ended = train_tiny(corpus, EXPORT, f"run.dir={tmp_path / 'run'}", "export.push_to=me/tiny", *own)
    assert ended.code == 1
    assert "is written but not uploaded" in ended.err
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"
    written = (tmp_path / "run/export/model.safetensors").read_bytes()
    hub.refuses = False
    argv = shlex.split(ended.err.partition("python -m lmtrain.export ")[2].splitlines()[0])
    shutil.rmtree(tmp_path / "run/export")
    ended = run("export", *argv)  # writes the same weights, in the same dtype, of the same step
    assert ended.code == 0, ended.err
    assert hub.made["visibility"] == "public"
    assert hub.commits == ["run, step 2"]
    assert hub.files["model.safetensors"] == written
    assert json.loads(hub.files["generation_config.json"])["temperature"] == 0.5


def test_what_could_not_be_uploaded_is_refused_before_training(
    hub: Hub, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, words in (("tiny", "<user or organisation>/<name>"), ("me/a b", "the hub's names")):
        ended = train_tiny(corpus, EXPORT, f"run.dir={tmp_path / 'run'}", f"export.push_to='{name}'")
        assert ended.code == 2
        assert words in message(ended.err)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    ended = train_tiny(corpus, EXPORT, f"run.dir={tmp_path / 'run'}", "export.push_to=me/tiny")
    assert ended.code == 2
    assert "HF_TOKEN" in message(ended.err)
    assert not (tmp_path / "run").exists()
    assert not hub.made


@pytest.mark.parametrize("base", ["/home/me/models/base", "org/base"])
def test_an_uploaded_adapter_names_no_folder_of_this_machine(
    base: str, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmtrain.config.compose import check, compose

    config = {"base_model_name_or_path": base, "peft_type": "LORA", "r": 4}
    (tmp_path / "templates").mkdir()
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "templates" / "tool.jinja").write_text("{{ messages }}")
    (tmp_path / "lmtrain_config.yaml").write_text(f"model: {{name_or_path: {base}}}")
    push(tmp_path, check(compose(["export.push_to=me/tiny"])).export, 7)
    local = base.startswith("/")
    uploaded = json.loads(hub.files.pop("adapter_config.json"))
    assert uploaded == config | ({"base_model_name_or_path": None} if local else {})
    assert hub.files == {"adapter_model.safetensors": b"weights", "templates/tool.jinja": b"{{ messages }}"}
    assert ("names none" in " ".join(capsys.readouterr().out.split())) is local
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == config, "the folder here still loads"


def test_a_hub_that_is_gone(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmtrain.config.compose import check, compose

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    folder = tmp_path / "my run" / "export_merged"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    settings = check(compose(["export.push_to=me/tiny", "export.dtype=bfloat16", "export.push_private=false"])).export
    with pytest.raises(RunError, match="not uploaded") as refused:
        push(folder, settings, 7)
    again = shlex.split(str(refused.value).rpartition("To try again: ")[2])
    assert again[:3] == ["python", "-m", "lmtrain.export"]
    typed = compose(again[3:])
    assert typed.run_dir == str(folder.parent)
    assert (typed.export.checkpoint, typed.export.merge) == ("step_00000007", True)  # not the best, but what failed
    assert check(typed).export == dataclasses.replace(settings, checkpoint="step_00000007", merge=True)
