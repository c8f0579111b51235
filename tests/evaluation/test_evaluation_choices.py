"""What is evaluated on which text, in which windows and by which model, without loading one."""

from types import SimpleNamespace
from typing import Any

import pytest

from lmtrain.config import compose as rules
from lmtrain.config.schema import Config
from lmtrain.errors import UserError
from lmtrain.evaluation import data, scoring, subject


def config(*words: str) -> Config:
    return rules.check(rules.compose(["tokenizer=bytes", *words]))


def test_windows_fit_the_model_and_move_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(*words: str, positions: int = 64, seq_len: int | None = None) -> tuple[int, int]:
        monkeypatch.setattr(scoring, "positions", lambda model: positions)
        own = None if seq_len is None else SimpleNamespace(data=SimpleNamespace(seq_len=seq_len))
        who: Any = SimpleNamespace(model=SimpleNamespace(model=None), name="mine", own=own)
        return scoring.window_sizes(who, config(*words))

    assert sizes() == (64, 32)
    assert sizes(seq_len=48) == (48, 24)
    assert sizes(seq_len=99) == (64, 32)
    assert sizes("evaluate.context=64", "evaluate.stride=63", seq_len=8) == (64, 63)
    with pytest.raises(UserError, match=r"evaluate\.context=65: mine has positions for 64 tokens"):
        sizes("evaluate.context=65")
    with pytest.raises(UserError, match=r"no fixed context length: set evaluate\.context=2048"):
        sizes(positions=2**31)
    assert sizes("evaluate.context=100", positions=2**31) == (100, 50)
    with pytest.raises(UserError, match=r"evaluate\.stride=64: less than evaluate\.context=64 is needed"):
        sizes("evaluate.stride=64")


@pytest.mark.parametrize(("words", "said", "set_to"), [
    (["data=text", "data.path=a.txt", "data.val_path=b.txt"], "all of b.txt", ("files", "b.txt", "b.txt")),
    (["data=text", "data.path=[a.txt,c.txt]"], "all of a.txt, c.txt", None),
    (["data=python_stdlib", "evaluate.data=named"], "held-out modules of the standard library",
     ("python_stdlib", None, None)),
    (["data=bins", "data.path=here"], "here, validation part", ("bins", "here", None)),
])  # fmt: skip
def test_what_text_is_scored(words: list[str], said: str, set_to: tuple[Any, ...] | None) -> None:
    asked = config(*words)
    found, named = data.chosen(asked, None)
    assert named == said
    if set_to is not None:
        assert (found.data.source, found.data.path, found.data.val_path) == set_to


def test_a_model_is_placed_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[Any] = []
    model = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    monkeypatch.setattr(subject.trained, "load", lambda *_: (model, "its tokenizer"))
    monkeypatch.setattr(subject.trained, "place", lambda *given: placed.append(given))
    for name in ("refuse_denoising", "check_causal"):
        monkeypatch.setattr(subject, name, lambda *_: None)
    monkeypatch.setattr(subject, "has_scalar_head", lambda _: False)
    monkeypatch.setattr(subject, "LanguageModel", lambda found: SimpleNamespace(eval=lambda: ("evaluated", found)))
    found = subject.load("some/model", "best", config("trainer.accelerator=cpu"))
    assert placed == [(model, "cpu")]
    assert (found.name, found.label, found.model) == ("some/model", "some-model", ("evaluated", model))
