"""Stories of a small simulated world, with questions whose right answers are known, computed on the fly.

People walk, find, lose, forget, give and swap things; what is true after each sentence is known (`world.World`),
so answers can be scored by the truth. The ideas are those of bAbI's simulated tasks (Weston et al. 2015,
arXiv:1502.05698) and of TinyStories (Eldan & Li 2023, arXiv:2305.07759): text so simple that a small model learns it.

A story is a pure function of (seed, split, index). Held out are a tenth of all combinations of a name and a thing, and
whole shapes of stories: no training story has them.
"""

import functools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from examples.stories import world as facts
from examples.stories.world import Slots, World
from lmtrain.data.order import mix64
from lmtrain.data.sources.pieces import Piece
from lmtrain.errors import UserError

VERSION = 5  # to be raised when the same arguments give other rows than before

ONE = 0.45  # share of those with one thing about whom "how many" is asked, so that it is the answer to less than half
HELD_OUT = 10  # one combination of a name and a thing in this many is held out
_THINGS = [f"{adjective} {noun}" for adjective in facts.WORDS["adjectives"] for noun in facts.WORDS["nouns"]]
_PEOPLE, _AROUND = list(facts.NAMES), [place for place in facts.PLACES if place != "at home"]
_IT = {"drop", "forget", "again", "look", "glad"}  # kinds whose thing may be called it
_EVENTS = facts.EVENTS


class Question(NamedTuple):
    """A question about a story, its right answer, and wrong ones of the same form that fit the story."""

    kind: str  # where, who, what, how many, first
    asked: str
    answer: str
    wrong: list[str]


@functools.cache
def held_out(name: str, thing: str) -> bool:
    """Returns whether no training story has this person together with this thing."""
    return mix64(*name.encode(), 0, *thing.encode()) % HELD_OUT == 0


@functools.cache
def _alternatives(line: str) -> list[list[tuple[int, str, list[str]]]]:
    """Returns the alternative steps of a plot's line: chance in percent, name, what fills its slots."""
    found = []
    for alternative in line.split(" / "):
        steps = [step.rpartition("% ") for step in alternative.split(", ")]
        found.append([(int(chance or 100), *_named(words)) for chance, _, words in steps])
    return found


def _named(words: str) -> tuple[str, list[str]]:
    name, *given = words.split()
    return name, given


class Story:
    """A story with all that is told in it: `lines` are its sentences, `told` their kinds and slots."""

    def __init__(self, draw: random.Random, split: str, shape: str) -> None:
        self.draw, self.shape, self.world = draw, shape, World()
        self.lines: list[str] = []
        self.told: list[tuple[str, Slots]] = []
        cast = draw.sample(_PEOPLE, 4)
        filled = {"home": "at home", "w": draw.choice(facts.WORDS["weather"]), "x": draw.choice(facts.WORDS["animals"])}
        filled |= zip("abcd", cast, strict=True)
        filled |= zip("tuvy", self._things(cast, split), strict=True)
        filled |= zip("pqrz", draw.sample(_AROUND, 4), strict=True)
        self._play({**facts.SHAPES, **facts.UNSEEN}[shape], filled)

    @property
    def text(self) -> str:
        return " ".join(self.lines)

    def _things(self, cast: list[str], split: str) -> list[str]:
        """Returns four different things, of a story that is held out the first one in a new combination."""
        found: list[str] = []
        while len(found) < 4:
            thing = self.draw.choice(_THINGS)
            new = [held_out(name, thing) for name in cast]
            fits = not any(new) if split == "train" else bool(found) or new[0]
            if fits and all(thing.split()[1] not in other for other in found):
                found.append(thing)
        return found

    def _play(self, lines: list[str], filled: Slots) -> None:
        for line in lines:
            for chance, name, given in self.draw.choice(_alternatives(line)):
                if chance < 100 and self.draw.random() * 100 >= chance:
                    continue
                slots = [filled.get(slot) or facts.NUMBERS[self.world.held(filled[given[0]])] for slot in given]
                if name in facts.PARTS:
                    formal, inner = facts.PARTS[name]
                    self._play(inner, dict(zip(formal, slots, strict=True)))
                else:
                    self._tell(name, dict(zip(facts.KINDS[name].slots, slots, strict=True)))

    def _tell(self, kind: str, slots: Slots) -> None:
        """Writes one of the kind's sentences; a person who acted just before may become a pronoun."""
        words, before = dict(slots), self.told[-1][1] if self.told else {}
        if "a" in slots:
            a, other = slots["a"], before.get("b")
            words |= facts.gendered(a)
            words["c"] = a
            clear = before.get("a") == a and not (other and facts.NAMES[other] == facts.NAMES[a])
            words["a"] = words["s"] if clear and self.draw.random() < 0.4 else a
        if "t" in slots:
            words |= self._words_for(kind, slots["t"], before)
        if "q" in slots:
            words["q"] = facts.PLACES[slots["q"]]
        if "x" in slots:
            words["X"] = facts.article(slots["x"])
        line = self.draw.choice(facts.KINDS[kind].sentences).format(**words)
        self.lines.append(line[0].upper() + line[1:])
        self.told.append((kind, slots))
        self.world.change(kind, slots)

    def _words_for(self, kind: str, t: str, before: Slots) -> dict[str, str]:
        """Returns how a thing is called: after its introduction, also by its noun alone; as it, where that is clear."""
        short = t.split()[1] if t in self.world.where and self.draw.random() < 0.5 else t
        clear = kind in _IT and before.get("t") == t and not before.keys() & {"u", "x"}
        return {"T": facts.article(t), "o": short, "t": "it" if clear and self.draw.random() < 0.5 else f"the {short}"}


def story(seed: int, split: str, index: int) -> Story:
    """Returns story `index` of split "train" or "val"; every other story of the latter has an unseen shape."""
    draw = random.Random(mix64(seed, split == "val", index))
    return Story(draw, split, draw.choice(list(facts.UNSEEN if split == "val" and index % 2 else facts.SHAPES)))


def _asked_of_state(s: Story) -> Iterator[Question]:
    """Yields questions about what is true at the end of the story."""
    at, where = s.world.at, s.world.where
    people = [a for a in at if a in facts.NAMES]
    for a in people:
        others = [f"{a} is {p}." for p in _places(s) if p != at[a]]
        yield Question("where", f"Where is {a}?", f"{a} is {at[a]}.", others)
        count, most = s.world.held(a), len(where)
        answers = [f"{a} has {'no' if n == 0 else facts.NUMBERS[n]} thing{'s' * (n != 1)}." for n in range(most + 2)]
        if count != 1 or s.draw.random() < ONE:
            wrong = answers[:count] + answers[count + 1 :]
            yield Question("how many", f"How many things does {a} have?", answers[count], wrong)
        held = [t for t, holder in where.items() if holder == a]
        if len(held) == 1:
            others = [f"{a} has {facts.article(t)}." for t in where if t not in held]
            yield Question("what", f"What does {a} have?", f"{a} has {facts.article(held[0])}.", others)
    for t, holder in where.items():
        if holder in facts.NAMES:
            others = [f"{a} has the {t}." for a in people if a != holder]
            yield Question("who", f"Who has the {t}?", f"{holder} has the {t}.", others)


def _asked_of_events(s: Story) -> Iterator[Question]:
    """Yields questions about what happened once, so that there is one answer."""
    people = [a for a in s.world.at if a in facts.NAMES]
    told = [(kind, slots) for kind, slots in s.told if kind in _EVENTS]
    for kind, slots in told:
        past, verb = _EVENTS[kind]
        same = [o for k, o in told if _EVENTS[k] == _EVENTS[kind] and o["t"] == slots["t"]]
        if len(same) > 1:
            continue
        a, t = slots["a"], slots["t"]
        if verb == "give":
            b, others = slots["b"], [f"{o} gave {slots['b']} the {t}." for o in people if o not in (a, slots["b"])]
            yield Question("who", f"Who gave {b} the {t}?", f"{a} gave {b} the {t}.", others)
            continue
        others = [f"{a} {past} the {t} {p}." for p in _places(s) if p != slots["p"]]
        yield Question("where", f"Where did {a} {verb} the {t}?", f"{a} {past} the {t} {slots['p']}.", others)
        others = [f"{o} {past} the {t}." for o in people if o != a]
        yield Question("who", f"Who {past} the {t}?", f"{a} {past} the {t}.", others)


def _asked_of_order(s: Story) -> Iterator[Question]:
    """Yields what came first."""
    for a in (a for a in s.world.at if a in facts.NAMES):
        goals = [facts.PLACES[slots["q"]] for kind, slots in s.told if kind in ("walk", "follow") and slots["a"] == a]
        found = [f"the {slots['t']}" for kind, slots in s.told if kind == "find" and slots["a"] == a]
        for asked, past, order in ((f"Where did {a} go", "went", goals), (f"What did {a} find", "found", found)):
            if len(set(order)) > 1:
                one, *others = (f"{a} {past} {what} first." for what in dict.fromkeys(order))
                yield Question("first", f"{asked} first?", one, others)


def _places(s: Story) -> list[str]:
    """Returns the places that a story names."""
    return list(dict.fromkeys(slots[slot] for _, slots in s.told for slot in ("p", "q") if slot in slots))


def answerable(s: Story) -> list[Question]:
    """Returns all questions about a story that have a right answer and a wrong one."""
    return [q for q in (*_asked_of_state(s), *_asked_of_events(s), *_asked_of_order(s)) if q.wrong]


def questions(s: Story, count: int) -> list[Question]:
    """Returns `count` different questions about a story, or fewer; each kind is as likely as any other."""
    kinds: dict[str, list[Question]] = {}
    for question in answerable(s):
        kinds.setdefault(question.kind, []).append(question)
    chosen: list[Question] = []
    while kinds and len(chosen) < count:
        kind = s.draw.choice(sorted(kinds))
        chosen.append(kinds[kind].pop(s.draw.randrange(len(kinds[kind]))))
        kinds = {kind: asked for kind, asked in kinds.items() if asked}
    return chosen


def _conversation(s: Story, split: str, asked: int) -> dict[str, Any]:
    """Returns a row with `messages`: a story and up to `asked` questions about it, one in validation."""
    messages: list[dict[str, str]] = []
    for question in questions(s, 1 if split == "val" else asked):
        said = question.asked if messages else f"{s.text}\n{question.asked}"
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": question.answer}]
    return {"messages": messages}


def _pair(s: Story, split: str, asked: int) -> dict[str, Any]:
    """Returns a row whose rejected answer is wrong, is no whole sentence, or goes on with sentences of the story."""
    question, how = questions(s, 1)[0], s.draw.randrange(4)
    rejected = s.draw.choice(question.wrong)
    if how == 0:
        rejected = " ".join(question.answer[:-1].split(" ")[-2:])
    elif how == 1:
        rejected = f"{question.answer} {' '.join(s.draw.sample(s.lines, 2))}"
    return {"prompt": f"{s.text}\n{question.asked}", "chosen": question.answer, "rejected": rejected}


def _prompt(s: Story, split: str, asked: int) -> dict[str, Any]:
    question = questions(s, 1)[0]
    return {"prompt": f"{s.text}\n{question.asked}", "answer": question.answer, "kind": question.kind,
            "shape": s.shape}  # fmt: skip


def _opening(s: Story, split: str, asked: int) -> dict[str, Any]:
    """Returns a row with a story's first two sentences, and with the others as what follows them."""
    return {"prompt": " ".join(s.lines[:2]), "completion": f" {' '.join(s.lines[2:])}"}


ROWS = {"questions": _conversation, "pairs": _pair, "prompts": _prompt, "openings": _opening}


class Stories:
    """A source of stories, or of rows about them; `data.source` names the class."""

    label, resolved = "stories", str(VERSION)
    settings: dict[str, Any]
    notes: list[str] = []  # noqa: RUF012

    def __init__(
        self, rows: str = "questions", number: int = 20_000, held_out: int = 400, seed: int = 0, asked: int = 4
    ) -> None:
        """
        Args:
            rows: what `records` yields: questions, conversations about a story; pairs; prompts, with the right answer;
                openings, the beginnings of stories with what follows.
            number: number of stories to train on.
            held_out: number of stories to validate on.
            seed: other seeds give other stories; what is held out does not depend on it.
            asked: number of questions in a training conversation, or fewer where a story has no more.

        Raises:
            UserError: there are no such rows.
        """
        if rows not in ROWS:
            raise UserError(f"data.source_options.rows={rows}: one of {', '.join(ROWS)}")
        self.row, self.seed = functools.partial(ROWS[rows], asked=asked), seed
        self.numbers = {"train": number, "val": held_out}
        options = {"rows": rows, "number": number, "held_out": held_out, "seed": seed, "asked": asked}
        self.settings = {"kind": "stories", **options}

    def _told(self, split: str) -> Iterator[Story]:
        return (story(self.seed, split, index) for index in range(self.numbers[split]))

    def pieces(self, name: str) -> Iterator[Piece]:
        for s in self._told(name):
            asked = [f"\n{question.asked} {question.answer}" for question in questions(s, self.settings["asked"])]
            yield Piece(s.text + "".join(asked), ends=True)

    def text_bytes(self, name: str) -> int:
        return 480 * self.numbers[name]

    def records(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((f"story {i + 1:,}", self.row(s, name)) for i, s in enumerate(self._told(name)))
