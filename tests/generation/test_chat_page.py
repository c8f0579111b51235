"""`lmtrain chat --web`: what the page's server answers and to whom, and the page itself in a headless browser."""

import asyncio
import contextlib
import copy
import dataclasses
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

import browser
from inprocess import message, run
from lmtrain.config import compose as rules
from lmtrain.data.chat.templates import ChatTemplate, end_ids, own_template
from lmtrain.generation import conversation
from lmtrain.generation.conversation import Talk
from lmtrain.generation.sampling import Continuation, sample_text
from lmtrain.generation.web import _events, _Turns, application
from lmtrain.run_folder import trained
from support import TINY
from tiny_pretrained import save_pretrained

GREEDY = ["generate.temperature=0", "generate.max_new_tokens=90", "generate.checkpoint=last"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LOOPS = (  # for ever on a question with "loop!"
    "{% if 'loop!' in messages[-1].content %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}" + TEMPLATE
)
LEARNED = "<b id=owned>hi</b>"


@pytest.fixture(autouse=True)
def stance() -> Iterator[None]:
    """Restores torch.compile's stance: two models that take turns leave theirs in another order than they set it."""
    with torch.compiler.set_stance("default"):
        yield


HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run that answers every question with markup."""
    path = tmp_path_factory.mktemp("page")
    rows = [{"prompt": f"Question {i}?", "response": LEARNED} for i in range(30)]
    (path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = run("train", *TINY, "data.chat_template=vicuna", "model.max_position_embeddings=512", "data.seq_len=256",
                "trainer.max_steps=150", "objective=sft", "data=chat_jsonl", f"data.path={path}/chats.jsonl",
                "optimizer.lr=0.01", "schedule.warmup_steps=0", f"run.dir={path / 'run'}", "data.val_fraction=0",
                "callbacks.samples.every_n_validations=0", "trainer.log_every_n_steps=20")  # fmt: skip
    assert ended.code == 0, ended.err
    return path / "run"


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Talk:
    """Returns a conversation with an untrained model."""
    base = save_pretrained(tmp_path_factory.mktemp("base") / "base", max_position_embeddings=512)
    model, tokenizer = trained.load(str(base), "last", {})
    tokenizer.chat_template = TEMPLATE
    return Talk(model, tokenizer, rules.check(rules.compose(GREEDY)).generate, seed=0)


@pytest.fixture(scope="module")
def port(talk: Talk) -> Iterator[int]:
    """Serves one model in a thread of this process and yields the port."""
    listening = socket.create_server(("127.0.0.1", 0))
    number = listening.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(application(["mine"], [talk], number), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield number
    server.should_exit = True
    thread.join()


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, str, dict[str, str]]:
    """Sends a request and returns status, text and headers of the answer."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, given)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def question(*texts: str) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": 0, "turns": turns, "temperature": 0, "system": ""}


def test_an_answer_comes_in_events_and_is_the_models(talk: Talk, port: int) -> None:
    status, text, headers = ask(port, "/answer", question("Question 3?", "Yes.", "Question 4?"))
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]
    assert events[-1].items() >= {"end": True}.items()
    assert events[-1]["tokens"] >= sum("text" in event for event in events)
    assert sum("text" in event for event in events) > 1, "word by word"
    model, tokenizer = talk.model, talk.tokenizer
    prompt = tokenizer.apply_chat_template(
        question("Question 3?", "Yes.", "Question 4?")["turns"], add_generation_prompt=True, tokenize=False
    )
    stop = end_ids(tokenizer, own_template(tokenizer))
    expected = sample_text(model, tokenizer, prompt, max_new_tokens=90, temperature=0.0, end_ids=stop)
    assert "".join(event.get("text", "") for event in events).strip() == expected.strip()


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {"Host": "evil.example"}),
        ("/", {"Host": "127.0.0.1"}),
        ("/models", {"Host": "evil.example:{port}"}),
        ("/answer", {"Origin": "http://evil.example"}),
        ("/answer", {"Origin": "http://127.0.0.1:1"}),
        ("/answer", {"Origin": "null"}),
        ("/answer", {"Content_Type": "text/plain"}),
        ("/answer", {"Content_Type": "application/x-www-form-urlencoded"}),
    ],
)
def test_other_pages_are_refused(port: int, path: str, headers: dict[str, str]) -> None:
    """Refuses DNS names that were made to point to this server, and forms and scripts of other pages."""
    named = {name: value.format(port=port) for name, value in headers.items()}
    status, text, _ = ask(port, path, question("Hi") if path == "/answer" else None, **named)
    assert status == 403
    assert "error" in json.loads(text)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"\xff", {"model": 9, "turns": [], "temperature": 0}, {**question("a"), "turns": []},
             {**question("a"), "turns": [{"role": "system", "content": "a"}]}, {**question("a"), "temperature": "hot"},
             {**question("a"), "turns": [{"role": "user", "content": ["a"]}]}, {**question("a"), "system": {"a": 1}},
             json.dumps(question("a")).replace('"model": 0', '"model": 1e400').encode(), b"[" * 200_000],
)  # fmt: skip
def test_what_is_no_conversation_is_answered_so(port: int, body: Any) -> None:
    status, text, _ = ask(port, "/answer", body)
    assert status == 400
    assert "no conversation" in json.loads(text)["error"]


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(port: int, declared: bool) -> None:
    kind = "Content-Length: 600000000" if declared else "Transfer-Encoding: chunked"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
        head = f"POST /answer HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n{kind}\r\n\r\n"
        one.sendall(head.encode())
        if not declared:
            one.sendall(b"%x\r\n" % 1_000_001 + b"x" * 1_000_001)
        said = one.recv(10_000).decode()
        while "}" not in said and (more := one.recv(10_000)):  # head and body may come apart
            said += more.decode()
    assert said.startswith("HTTP/1.1 413")
    assert "at most 1,000,000 bytes" in said


def test_thousands_of_turns_are_cut_to_what_fits(talk: Talk) -> None:
    """In few attempts, and to the longest rest that fits, found here one by one."""
    texts = ["a" * (1 + i % 40) for i in range(10_001)]
    asked = copy.copy(talk)
    asked.turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    began = time.monotonic()
    ids = asked._prompt()
    assert time.monotonic() - began < 5

    def longer(left: int) -> int:
        turns = question(*texts[-left:])["turns"]
        text = talk.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return len(talk.tokenizer(text, add_special_tokens=False)["input_ids"])

    room = 512 - talk.settings.max_new_tokens
    longest = next(left for left in range(1, 10_000, 2) if longer(left + 2) > room)
    assert (len(asked.turns) - asked.left_out, len(ids)) == (longest, longer(longest))
    assert len(asked.turns) == 10_001, "what is saved is whole"


def test_turns_that_are_left_out_are_said_once_and_repeat_no_seed(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed counts all turns; what is saved is whole; and an answer that used up its tokens says so."""
    seeds: list[int] = []

    def continued(model: Any, tokenizer: Any, rows: Any, new: int, seed: int, **settings: Any) -> list[Continuation]:
        seeds.append(seed)
        settings["streamer"].put(torch.tensor(rows))
        settings["streamer"].put(torch.tensor(tokenizer("b" * 30)["input_ids"]))
        return [Continuation("b" * 30, cut=len(seeds) % 2 == 0)]

    monkeypatch.setattr(conversation, "continued", continued)
    asked, said = copy.copy(talk), list[str]()
    asked.turns, asked.left_out = [], 0
    cuts = []
    for _ in range(12):
        asked.ask("a" * 60, lambda _: None, said.append)
        cuts.append(asked.cut_by)
    assert asked.left_out > 2
    assert len(said) == 1
    assert len(set(seeds)) == 12
    assert len(asked.turns) == 24
    assert cuts == [None, "generate.max_new_tokens"] * 6


def test_the_page_hears_what_was_left_out_and_cut(port: int) -> None:
    _, text, _ = ask(port, "/answer", question(*["a" * 100] * 9))
    events = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]
    assert events[-1]["left_out"] in (4, 6, 8)
    assert events[-1]["cut_by"] in (None, "generate.max_new_tokens")
    assert not any("note" in event for event in events)


def test_a_template_that_loops_is_ended_and_the_next_question_answered(
    talk: Talk, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmtrain.data.chat.jinja_rendering.PATIENCE", 0.5)
    monkeypatch.setattr(talk, "template", ChatTemplate(talk.tokenizer, LOOPS, "loops"))
    began = time.monotonic()
    assert "has not rendered a conversation" in ask(port, "/answer", question("loop!"))[1]
    assert time.monotonic() - began < 10
    assert '{"end": true' in ask(port, "/answer", question("Question 1?"))[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_while_a_template_loops(tmp_path: Path, number: signal.Signals) -> None:
    base = save_pretrained(tmp_path / "base", max_position_embeddings=512)
    path = base / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": LOOPS}))
    command = [sys.executable, "-m", "lmtrain.chat", str(base), "--web", "generate.max_new_tokens=4"]
    # Shells start background processes with SIGINT ignored; the server has to see it.
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, restore_signals=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        asked = threading.Thread(target=lambda: _quietly(int(address.rpartition(":")[2])), daemon=True)
        asked.start()
        time.sleep(2)
        server.send_signal(number)
        assert server.wait(timeout=8) in (0, -number)
    finally:
        server.kill()
        server.wait()


def _quietly(port: int) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        ask(port, "/answer", question("loop!"))


def test_what_is_too_long_is_said_and_the_next_question_answered(port: int) -> None:
    _, text, _ = ask(port, "/answer", question("word " * 3000))
    assert "more than the model can take" in json.loads(text.removeprefix("data: "))["error"]
    assert '{"end": true' in ask(port, "/answer", question("Question 1?"))[1]


def test_the_page_needs_no_other_host_and_runs_its_own_script_alone(port: int) -> None:
    _, text, headers = ask(port, "/")
    assert not re.search(r"https?://|//cdn|@import|url\(", text.replace("data:,", ""))
    policy = headers["content-security-policy"]
    nonce = re.findall(r"nonce-([\w-]+)", policy)[0]
    assert policy.startswith("default-src 'none'")
    assert text.count(f'nonce="{nonce}"') == 2
    assert ask(port, "/")[2]["content-security-policy"] != policy
    with socket.create_connection(("127.0.0.1", port)) as loopback:
        assert loopback.getpeername()[0] == "127.0.0.1"


def test_two_models_are_for_the_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert "add --web" in message(run("chat", str(tmp_path), str(tmp_path)).err)


def test_two_models_take_turns_and_answer_as_alone(talk: Talk) -> None:
    """Both stream at once, and the random numbers of one are not disturbed by the other."""
    settings = dataclasses.replace(talk.settings, temperature=1.0, max_new_tokens=24)
    talks = [Talk(copy.deepcopy(talk.model), talk.tokenizer, settings, seed) for seed in (1, 2)]
    alone = [one.ask("Question 5?", lambda _: None, lambda _: None) for one in talks]
    order: list[int] = []

    async def read(number: int, turns: _Turns) -> str:
        talks[number].reset()
        text = ""
        async for event in _events(talks[number], "Question 5?", asyncio.Lock(), turns):
            piece = json.loads(event.removeprefix("data: ")).get("text", "")
            text += piece
            order.extend([number] * bool(piece))
        return text.strip()

    async def both() -> list[str]:
        turns = _Turns()
        return await asyncio.gather(read(0, turns), read(1, turns))

    assert asyncio.run(both()) == alone
    assert alone[0] != alone[1]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0), "the second began before the first had ended"


@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING)
def test_code_and_lists_are_drawn_and_markup_is_text(port: int) -> None:
    text = f"Two ways:\n- a `b < c`\n- **d**\n\n1. one\n```python\nif x < 1:\n    pass\n```\n{HOSTILE}"
    with browser.open_browser() as page:
        page.go(f"http://127.0.0.1:{port}")
        page.wait("return document.querySelectorAll('section').length == 1")
        assert page.said == [], "the icon, say, is blocked by the page's own policy"
        divide = """const list = columns[0].list;
            for (const turn of [0, 2, 4]) add(list, "div", "turn user", "q" + turn).dataset.turn = turn;
            divide(list, 2); divide(list, 4);
            const told = [...list.children].map(e => e.textContent.slice(0, 14)); list.replaceChildren(); return told"""
        assert page.run(divide) == ["q0", "q2", "The model can'", "q4"], "one line, before the first turn that is seen"
        shown = "const box = document.createElement('div'); render(box, arguments[0]); return box.innerHTML"
        html = page.run(shown, text).replace(' class=""', "")
        assert html.startswith("<p>Two ways:</p><ul><li>a <code>b &lt; c</code></li>")
        assert "<strong>d</strong></li></ul><ol><li>one</li></ol>" in html
        assert "<pre><code>if x &lt; 1:\n    pass</code></pre>" in html
        assert "<img" not in html
        assert "&lt;script&gt;" in html


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING)
def test_in_a_browser(folder: Path, tmp_path: Path) -> None:
    """Two models side by side: answers stream in as text, Stop ends one, a new conversation starts; also at 400 px."""
    endless = save_pretrained(tmp_path / "<b>endless", max_position_embeddings=20_000)
    words = [str(folder), str(endless), "--web", "generate.temperature=0", "generate.max_new_tokens=15000"]
    server = subprocess.Popen([sys.executable, "-m", "lmtrain.chat", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        with browser.open_browser() as page:
            page.go(address)
            page.wait("return document.querySelectorAll('section').length == 2")
            headings = page.run("return [...document.querySelectorAll('h2')].map(h => h.textContent)")
            assert headings[0].startswith(str(folder))
            assert "<b>endless" in headings[1]
            page.run(
                "question.value = arguments[0]; document.querySelector('#temperature').value = 0;"
                "document.querySelector('form').requestSubmit()", HOSTILE,
            )  # fmt: skip
            second = "document.querySelectorAll('section')[1].querySelector('.answer > :last-child')"
            page.wait(f"return {second}.textContent.length > 20")
            assert page.run("return document.querySelector('#send').textContent") == "Stop"
            asked, answered = page.run(
                "return [...document.querySelectorAll('section')[0].querySelectorAll('.turn')].map(t => t.textContent)"
            )
            assert asked == HOSTILE
            assert "</b" in answered, "markup, which the model has learned to write"
            assert page.run("return document.querySelectorAll('img, .turn b, main script').length") == 0
            assert page.run("return document.title") != "owned"
            told = "document.querySelectorAll('section')[0].querySelector('.note')?.textContent"
            page.wait(f"return {told}")
            cut = r"(; cut off by the model's 512 positions)?"
            assert re.fullmatch(rf"\d+ tokens, [\d.]+ a second{cut}retry", page.run(f"return {told}"))
            began = time.monotonic()
            page.run("document.querySelector('#send').click()")
            page.wait("return document.querySelector('#send').textContent == 'Send'")
            page.wait(
                "return [...document.querySelectorAll('.note')].some(n => n.textContent.startsWith('stopped'))", 5
            )
            page.run("document.querySelector('section .note button').click()")
            page.wait("return document.querySelectorAll('section')[0].querySelectorAll('.note').length == 1")
            assert page.run("return document.querySelectorAll('section')[0].querySelectorAll('.turn').length") == 2
            page.run("document.querySelector('#new').click()")
            assert page.run("return document.querySelectorAll('.turn').length") == 0
            page.run("question.value = 'again'; document.querySelector('form').requestSubmit()")
            page.wait("return document.querySelectorAll('section')[0].querySelectorAll('.turn')[1]?.textContent")
            assert time.monotonic() - began < 20, "the stopped answer no longer takes the model's time"
            page.resize(400, 800)
            assert page.run("return document.documentElement.scrollWidth <= innerWidth")
            page.run("document.querySelector('#send').click()")
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.wait()
