"""A run that learns from rewards, killed in a rollout, before its update and in a save, continues bit for bit."""

import json
import random
from pathlib import Path

import pytest
from runs import SETTINGS, STEPS, assert_equal_runs, train_here
from test_kill_matrix import chain

from support import REPO
from tiny_pretrained import save_pretrained

REPLACED = ("model.num_", "model.hidden", "model.max_position", "tokenizer=", "data=", "data.seq_len",
            "data.global_batch")  # fmt: skip
GRPO = ["objective=grpo", "data.val_fraction=0.2", "data.seq_len=64", "data.global_batch_size=4",
        "data.micro_batch_size=2", "optimizer.lr=0.01", "model=pretrained", "objective.group_size=3",
        "objective.max_new_tokens=6", "objective.rollout_batch_size=8", "reward=regex", "reward.whole=false",
        "reward.pattern='[a-p]'", "callbacks.early_stopping.enabled=false"]  # fmt: skip
# With one rollout for three steps, checkpoints, which come after every second step, fall into the middle of one.
KINDS = {"each_step": [], "three_steps": ["objective.updates_per_rollout=3", "objective.kl_coef=0.1"]}
PLACES = ["mid_rollout", "before_backward", "mid_step", "mid_save"]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    base = save_pretrained(tmp_path / "base", attention_dropout=0.1)
    monkeypatch.setattr("runs.SETTINGS", [s for s in SETTINGS if not s.startswith(REPLACED)])
    return [*GRPO, f"model.name_or_path={base}", f"data.cache_dir={tmp_path / 'cache'}"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{'So, ' * (i % 3)}say {i}", "answer": i}) + "\n" for i in range(30))
    )
    return path


def compared(settings: list[str], prompts: Path, tmp_path: Path, kills: list[tuple[str, int]]) -> None:
    (tmp_path / "whole").mkdir()
    done = train_here(prompts, tmp_path / "whole" / "run", *settings)
    assert done.code == 0, done.err
    chain(prompts, tmp_path / "run", kills, *settings)
    assert_equal_runs(tmp_path / "whole" / "run", tmp_path / "run")
    samples = [(tmp_path / which / "samples.jsonl").read_text() for which in ("whole/run", "run")]
    assert samples[0] == samples[1] != ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_in_a_rollout_before_its_update_and_in_a_save(
    kind: str, settings: list[str], prompts: Path, tmp_path: Path
) -> None:
    """Samples, rewards, weights and records are equal; two of the kills are amid a rollout of three steps."""
    kills = [("mid_rollout", 3), ("before_backward", 5), ("mid_save", 8)]
    compared([*settings, *KINDS[kind]], prompts, tmp_path, kills)


# A rollout serves steps 0 to 2, 3 to 5, ...; every second step is saved.
TURNS = [
    *((place, 0) for place in ("mid_rollout", "between_turns", "mid_tool", "mid_later_turn")), ("mid_save", 2),
    *((place, 3) for place in ("between_turns", "mid_later_turn", "mid_rollout", "mid_tool")), ("mid_save", 4),
    *((place, 6) for place in ("mid_tool", "mid_later_turn", "between_turns", "mid_rollout")), ("mid_save", 8),
    *((place, 9) for place in ("mid_later_turn", "mid_rollout", "mid_tool", "between_turns")), ("mid_save", 10),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills", [[TURNS[i] for i in (2, 6, 9, 12)], pytest.param(TURNS, marks=pytest.mark.nightly)], ids=["4", "20"]
)
def test_killed_in_turns_and_tools_of_an_environment(
    kills: list[tuple[str, int]], settings: list[str], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO / "tests" / "helpers"))
    plays = ["objective.environment._target_=odd_environments.Calls", "run.allow_target=[odd_environments]",
             "data.chat_template=chatml", "tokenizer.add_tokens=[<|im_start|>,<|im_end|>]", "data.seq_len=1024",
             "objective.stop_tokens=[a,e,i,o,r,t,P,Q,Z,7,8,9,0,3,4,X,Y,W]", "objective.keep_rollouts=true"]  # fmt: skip
    own = [s for s in settings if not s.startswith(("reward", "data.seq_len", "model.name_or_path"))]
    base = save_pretrained(tmp_path / "longer", attention_dropout=0.1, max_position_embeddings=1024)
    compared([*own, *KINDS["three_steps"], *plays, f"model.name_or_path={base}"], prompts, tmp_path, kills)
    files = [sorted((tmp_path / which / "rollouts").iterdir()) for which in ("whole/run", "run")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    assert len(files[0]) == STEPS


@pytest.mark.slow
@pytest.mark.nightly
def test_killed_at_ten_random_moments(settings: list[str], prompts: Path, tmp_path: Path) -> None:
    rng = random.Random(11)
    steps = sorted(rng.randrange(1, STEPS) for _ in range(10))
    every = {"mid_rollout": 3, "mid_save": 2}  # steps between rollouts, and between saves
    places = [rng.choice([place for place in PLACES if step % every.get(place, 1) == 0]) for step in steps]
    compared([*settings, *KINDS["three_steps"]], prompts, tmp_path, list(zip(places, steps, strict=True)))
