"""The parts of a rollout by hand: seeds, random bits, tensors, reports, and what a checkpoint holds of it."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lmtrain
from lmtrain.data.chat.time_limits import TookTooLong
from lmtrain.data.examples.prompt_rows import PromptRow
from lmtrain.data.order import mix64
from lmtrain.errors import UserError
from lmtrain.losses.policy import VARIANTS
from lmtrain.rewards.scoring import ScoredCompletions
from lmtrain.rollouts.engine import Request, SampledText, Sampling, _shifted, _signed, as_keys, draw, noise
from lmtrain.rollouts.episodes import Episode, Limits, Player, answers, report_of_episode, written
from lmtrain.rollouts.rollout import (
    Group,
    Maker,
    after_prompt,
    keep_old,
    pack_groups,
    report_of,
    tensors_of,
    unpack_groups,
)

MASK = 2**64 - 1


def splitmix(key: int, at: int) -> int:
    """Steele et al. 2014, with Python's integers."""
    x = (key + (at + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


KEYS = [0, 1, 7, 2**63, 2**64 - 1, 0x123456789ABCDEF0]


def test_random_bits_are_splitmix64s() -> None:
    keys = as_keys([Request([1], key) for key in KEYS], torch.device("cpu"))
    for at in (0, 1, 1000):
        found = noise(keys, torch.full((len(KEYS),), at)).tolist()
        assert [value & MASK for value in found] == [splitmix(key, at) for key in KEYS]
    assert [_signed(value) for value in (0, 2**63 - 1, 2**63, MASK)] == [0, 2**63 - 1, -(2**63), -1]
    assert _shifted(torch.tensor([-1, 8]), 3).tolist() == [2**61 - 1, 1]


@pytest.mark.parametrize(("temperature", "top_p", "vocabulary"), [(1.0, 1.0, None), (0.7, 1.0, 4), (1.3, 0.7, None)])
def test_a_token_is_where_its_ticket_falls(temperature: float, top_p: float, vocabulary: int | None) -> None:
    """By the inverse of the distribution function, in Python."""
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.5, 1.0], [1.0, 1.0, 1.0, 0.0, -50.0]])
    for key in KEYS:
        keys = as_keys([Request([1], key), Request([1], key ^ 5)], torch.device("cpu"))
        tokens, log_probs, entropy = draw(
            logits, keys, torch.tensor([3, 4]), Sampling(9, temperature, top_p, (), vocabulary)
        )
        for row, at in ((0, 3), (1, 4)):
            shares = [math.exp(x / temperature) for x in logits[row].tolist()]
            probabilities = [share / sum(shares) for share in shares]
            order = list(range(vocabulary or 5))
            if top_p < 1:
                order.sort(key=lambda i: -probabilities[i])  # used at once
                while len(order) > 1 and sum(probabilities[i] for i in order[:-1]) >= top_p:
                    order.pop()
            ticket = (splitmix((keys[row].item()) & MASK, at) >> 11) / 2**53 * sum(probabilities[i] for i in order)
            upto = 0.0
            for token in order:
                upto += probabilities[token]
                if ticket < upto:
                    break
            assert tokens[row] == token
            assert log_probs[row].item() == pytest.approx(math.log(probabilities[token]), abs=1e-5)
            expected = -sum(p * math.log(p) for p in probabilities)
            assert entropy[row].item() == pytest.approx(expected, abs=1e-4)


def test_at_temperature_zero_the_likeliest_known_token_is_taken() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 5.0]])
    one = torch.zeros(1, dtype=torch.int64)
    for vocabulary, token in ((None, 3), (3, 1)):
        tokens, log_probs, _ = draw(logits, one, one, Sampling(1, 0.0, 1.0, (), vocabulary))
        assert tokens.item() == token
        assert log_probs.item() == pytest.approx(logits.log_softmax(-1)[0, token].item(), abs=1e-6)


def text(*ids: int, ended: bool = True, sampled: list[bool] | None = None) -> SampledText:
    written = ids if sampled is None else [i for i, own in zip(ids, sampled, strict=True) if own]
    return SampledText(list(ids), [-i / 10 for i in written], sum(ids) / 100, ended, sampled)


def group(prompt: list[int], completions: list[SampledText], rewards: list[float], compared: list[float]) -> Group:
    row = PromptRow(1, 2, prompt, {"prompt": "p"})
    return Group(row, completions, ["t"] * len(completions), {"a": rewards}, torch.tensor(rewards, dtype=torch.float64),
                 [-0.5] * len(completions), torch.tensor(compared, dtype=torch.float64), resampled=1)  # fmt: skip


def floats(bits: torch.Tensor) -> list[float]:
    return bits.view(torch.float64).tolist()


GROUPS = [group([1, 2, 3], [text(4, 5), text(6, ended=False)], [1.0, 0.0], [0.5, -0.5]),
          group([7], [text(8, 9, 9, sampled=[True, False, True])], [math.nan], [0.0])]  # fmt: skip


def test_the_tensors_of_groups_hold_each_completion_with_its_prompt() -> None:
    found = tensors_of(GROUPS, padded=True, mask_cut_off=True)
    rows = [row[row != 0].tolist() for row in found["input_ids"]]
    assert rows == [[1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 8, 9, 9]]
    assert found["weight"].tolist() == [1, 0, 1]
    assert tensors_of(GROUPS, padded=True, mask_cut_off=False)["weight"].tolist() == [1, 1, 1]
    assert floats(found["sampler"]) == [-0.4, -0.5, -0.6, -0.8, -0.9]
    assert floats(found["advantages"]) == [0.5, -0.5, 0.0]
    assert floats(found["entropy"]) == [0.09, 0.06, 0.26]
    assert floats(found["rewards"])[:2] == [1.0, 0.0]
    assert found["sampled"] == 3
    assert "old" not in found
    shared = tensors_of(GROUPS, padded=False, mask_cut_off=True)
    assert shared["input_ids"].flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9], "a prompt is read once"
    nothing = tensors_of([], padded=False, mask_cut_off=True)
    assert (nothing["sampled"].item(), nothing["weight"].tolist(), nothing["input_ids"].numel()) == (0, [0], 2)
    assert floats(nothing["advantages"]) == [0.0]
    ids, mask = after_prompt([1, 2], [3, 4])
    assert (ids.tolist(), mask.tolist()) == ([1, 2, 3, 4], [False, False, True, True])
    assert after_prompt([1], [3, 4], [False, True])[1].tolist() == [False, False, True]


def test_the_trainers_log_probabilities_are_kept_with_their_completions() -> None:
    some = unpack_groups(pack_groups(GROUPS))
    keep_old(some[:1], torch.tensor([1.0, 2.0, 3.0]))
    assert some[0].old == [[1.0, 2.0], [3.0]]
    assert "old" not in tensors_of(some, padded=True, mask_cut_off=True), "not of all of them"
    keep_old(some[1:], torch.tensor([4.0, 5.0]))
    assert floats(tensors_of(some, padded=True, mask_cut_off=True)["old"]) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_groups_are_packed_into_plain_containers() -> None:
    packed = pack_groups(GROUPS)
    assert packed["prompts"][0] == (1, 2, [1, 2, 3], {"prompt": "p"})
    assert type(packed["completions"][0][0]) is tuple
    for ours, theirs in zip(unpack_groups(packed), GROUPS, strict=True):
        assert ours.prompt == theirs.prompt
        assert ours.completions == theirs.completions
        assert torch.equal(ours.advantages, theirs.advantages)
        assert (ours.resampled, ours.penalties, ours.texts) == (1, theirs.penalties, theirs.texts)
    assert [g.has_signal for g in GROUPS] == [True, False]


def test_a_report_sums_over_completions() -> None:
    GROUPS[0].played = [{"turns": [{"role": "assistant"}, {"role": "tool"}], "tool_calls": 2, "failed_tool_calls": 1},
                        {"turns": [{"role": "assistant"}] * 3, "tool_calls": 1, "failed_tool_calls": 0}]  # fmt: skip
    found = report_of(GROUPS, ["a"], played=True)
    GROUPS[0].played = None
    assert found == {
        "reward": 1.0, "scored": 2, "reward_failures": 1, "reward_spread": pytest.approx(2 * 0.5**0.5, rel=1e-6),
        "advantage_spread": 2 * 0.5, "groups_without_signal": 1, "resampled": 3, "overlong_penalty": -1.5,
        "response_length": 5, "cut_off": 1, "turns": 4, "tool_calls": 3, "failed_tool_calls": 1, "reward/a": 1.0,
        "scored/a": 2,
    }  # fmt: skip
    assert set(report_of([], [])) == set(found) - {"turns", "tool_calls", "failed_tool_calls", "reward/a", "scored/a"}


def test_completions_are_seeded_scored_and_compared_within_their_group() -> None:
    seen: dict[str, Any] = {}

    def generate(requests: Any, sampling: Any) -> list[SampledText]:
        seen["requests"] = list(requests)
        return [text(*[5] * (1 + i), ended=i != 3) for i in range(len(requests))]

    def scorer(prompts: Any, texts: Any, columns: Any) -> ScoredCompletions:
        seen.update(prompts=prompts, texts=texts, columns=columns)
        return ScoredCompletions({"a": [1.0, 2.0, 3.0, 7.0]}, [1.0, 2.0, 3.0, 7.0], [False] * 4, Counter(x=2))

    config = lmtrain.compose(["objective=grpo", "data.path=x.jsonl", "reward=format", "data.seq_len=64"])
    decoder: Any = SimpleNamespace(decode=lambda ids: f"{len(ids)} tokens", tokenizer=None)
    thoughts = SimpleNamespace(begun=lambda tokenizer, ids: f"<{ids[0]}>")
    engine: Any = SimpleNamespace(generate=generate)
    made: Any = (engine, Sampling(4, 1.0, 1.0, ()), scorer, decoder, VARIANTS["grpo"], 2, 2, 4, config.data, 9, None)
    maker = Maker(*made, thoughts)
    prompts = [PromptRow(3, 4, [1, 2], {"prompt": "one", "answer": "x"}), PromptRow(3, 8, [6], {"prompt": "two"})]
    found, reasons = maker.groups(12, prompts)
    keys = [mix64(0x726F6C6C, 9, 12, 3, row, i, 0) for row in (4, 8) for i in range(2)]
    assert seen["requests"] == [
        Request(p.ids, key) for p, key in zip([*prompts[:1] * 2, *prompts[1:] * 2], keys, strict=True)
    ]
    assert seen["prompts"] == ["one", "one", "two", "two"]
    assert seen["texts"] == [f"{n} tokens" for n in (1, 2, 3, 4)]
    columns = seen["columns"]
    assert columns["answer"] == ["x", "x", None, None]
    assert columns["turn_start"] == ["<1>", "<1>", "<6>", "<6>"]
    assert columns["cut_off"] == [False, False, False, True]
    assert [len(ids) for ids in columns["completion_ids"]] == [1, 2, 3, 4]
    assert "prompt" not in columns
    assert reasons == {"x": 2}
    # The penalty of DAPO grows over the last 2 of 4 tokens: 0, 0, -1/2, -1.
    assert [g.penalties for g in found] == [[0, 0], [-0.5, -1]]
    assert [g.rewards.tolist() for g in found] == [[1, 2], [2.5, 6]]
    assert [g.parts for g in found] == [{"a": [1.0, 2.0]}, {"a": [3.0, 7.0]}]
    assert all(g.advantages[0] == -g.advantages[1] < 0 for g in found)
    slots = [PromptRow(5, row, [], {}) for row in (6, 7)]
    found, _ = maker.groups(12, prompts, attempt=2, slots=slots)
    assert [r.key for r in seen["requests"]] == [
        mix64(0x726F6C6C, 9, 12, 5, row, i, 2) for row in (6, 7) for i in range(2)
    ]
    assert [g.resampled for g in found] == [2, 2]
    assert maker.groups(12, []) == ([], Counter())


def test_an_episode_is_reported_and_shown_by_its_turns() -> None:
    turns = [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    episode = Episode(object(), [1], 2, ids=[3], sampled=[True], log_probs=[-1.0], entropy=0.5, ended=True, turns=turns,
                      tool_calls=1)  # type: ignore[arg-type]  # fmt: skip
    assert answers(turns) == 2
    assert written(turns) == "a\n[tool] b\nc"
    assert report_of_episode(episode) == {"turns": turns, "tool_calls": 1, "failed_tool_calls": 0}
    assert episode.completion() == SampledText([3], [-1.0], 0.5, True, [True])


# Episodes


class Played:
    """An environment whose calls give or raise what a test says."""

    tools: tuple[Any, ...] = ()

    def __init__(self, said: Any = (None, 0.5), reward: Any = None) -> None:
        self.said, self.reward = said, reward

    def step(self, answer: str, calls: list[Any]) -> Any:
        return self._of(self.said)

    def get_reward(self) -> Any:
        return self._of(self.reward)

    @staticmethod
    def _of(value: Any) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value


def player() -> Any:
    made = object.__new__(Player)
    made.name, made.limits, made.reader = "Mine", Limits(3, 50, 5.0), None
    return made


def test_rewards_of_the_steps_and_of_the_end_add_up() -> None:
    plays, episode = player(), Episode(Played((None, 0.5), 2), [1], 0)
    assert plays._step(episode, ended=True) is None
    assert episode.reward == 0.5
    plays._end(episode)
    assert episode.reward == 2.5
    episode = Episode(Played(([{"role": "user", "content": "more"}], None), None), [1], 0)
    assert plays._step(episode, ended=False) == [{"role": "user", "content": "more"}]
    plays._end(episode)
    assert episode.reward is None


def test_an_environment_that_fails_ends_its_episode_with_the_reason() -> None:
    plays = player()
    failed = Episode(Played(ZeroDivisionError("by zero"), 1), [1], 0)
    assert plays._step(failed, ended=True) is None
    assert failed.reward == "Mine.step raised ZeroDivisionError: by zero"
    plays._end(failed)
    assert failed.reward == "Mine.step raised ZeroDivisionError: by zero", "its end is not asked for a reward"
    late = Episode(Played(reward=KeyError("score")), [1], 0)
    plays._end(late)
    assert str(late.reward).startswith("Mine.get_reward raised KeyError")
    late = Episode(Played(reward=TookTooLong()), [1], 0)
    plays._end(late)
    assert late.reward == "Mine.get_reward took longer than objective.tool_timeout=5 s"


@pytest.mark.parametrize("said", [5, ([{"role": "user"}], 1), (None, "much"), (None, 1, 2)])
def test_what_a_step_must_return_is_said(said: Any) -> None:
    with pytest.raises(UserError, match=r"objective\.environment: Mine\.step returned .*: a pair is needed"):
        player()._step(Episode(Played(said), [1], 0), ended=True)


def test_what_the_reward_must_be_is_said() -> None:
    with pytest.raises(UserError, match=r"Mine\.get_reward returned 'much': a number or None is needed"):
        player()._end(Episode(Played(reward="much"), [1], 0))
    with pytest.raises(UserError, match="say it"):
        player()._end(Episode(Played(reward=UserError("say it")), [1], 0))
