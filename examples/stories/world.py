"""The world of the stories: what is true at each point of one, and a checker that reads stories.

The kinds of sentences in world.yaml serve both directions: `Story` writes them, and `read` recognises them and
follows what is true, so that it can say which sentences of a story, such as a model's, contradict what was told before.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_DATA = yaml.safe_load(Path(__file__).with_name("world.yaml").read_text(encoding="utf-8"))
WORDS = _DATA["words"]
NAMES = {**dict.fromkeys(WORDS["girls"], "girl"), **dict.fromkeys(WORDS["boys"], "boy")}
NUMBERS: list[str] = WORDS["numbers"]
PLACES: dict[str, str] = WORDS["places"]  # where somebody is: where somebody goes
GOALS = {goal: place for place, goal in PLACES.items()}
Slots = dict[str, Any]


class Kind(NamedTuple):
    """A kind of sentence, an entry of world.yaml."""

    slots: list[str]
    sentences: list[str]
    needs: list[list[str]]  # conditions, such as ["has", "a", "t"]: _HOLDS["has"]
    does: list[list[str]]  # changes, such as ["put", "t", "p"]: World.put


def _kinds() -> dict[str, Kind]:
    found = {}
    for name, entry in _DATA["kinds"].items():
        needs, does = ([t.split() for t in entry[key].split(", ")] if key in entry else [] for key in ("needs", "does"))
        found[name.split()[0]] = Kind(name.split()[1:], entry["say"], needs, does)
    return found


KINDS = _kinds()
PARTS = {name.split()[0]: (name.split()[1:], lines) for name, lines in _DATA["parts"].items()}
SHAPES: dict[str, list[str]] = _DATA["shapes"]
UNSEEN: dict[str, list[str]] = _DATA["unseen"]
EVENTS: dict[str, list[str]] = _DATA["events"]


def article(words: str) -> str:
    """Returns the words with the indefinite article: an old hat."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


@functools.cache
def gendered(name: str) -> dict[str, str]:
    """Returns the words of sentences that depend on whether the person is a girl or a boy."""
    s, m, h = ("she", "her", "her") if NAMES[name] == "girl" else ("he", "him", "his")
    return {"g": NAMES[name], "s": s, "m": m, "h": h}


class World:
    """What is true at a point of a story; each change of world.yaml is a method, each condition in `_HOLDS`."""

    def __init__(self) -> None:
        self.at: dict[str, str] = {}  # the places of people and animals
        self.where: dict[str, str] = {}  # of each thing, its holder or its place
        self.losses: set[tuple[str, str]] = set()  # who has ever lost which thing
        self.gifts: set[tuple[str, str, str]] = set()  # who gave whom which thing
        self.wishes: set[tuple[str, str]] = set()
        self.thefts: set[tuple[str, str]] = set()  # which animal took which thing
        self.sky: str | None = None

    def contradictions(self, kind: str, slots: Slots) -> list[str]:
        """Returns the conditions of a sentence that don't hold before it, each as "condition values"."""
        needs = [(name, [slots[n] for n in names]) for name, *names in KINDS[kind].needs]
        return [f"{name} {', '.join(given)}" for name, given in needs if not _HOLDS[name](self, *given)]

    def change(self, kind: str, slots: Slots) -> None:
        """Makes true what a sentence tells."""
        for name, *names in KINDS[kind].does:
            getattr(self, name)(*[slots[n] for n in names])

    def held(self, a: str) -> int:
        """Returns how many things a person has."""
        return sum(holder == a for holder in self.where.values())

    def weather(self, w: str) -> bool:
        self.sky = self.sky or w
        return self.sky == w

    def go(self, a: str, q: str) -> None:
        self.at[a] = q

    def join(self, b: str, a: str) -> None:
        self.at[b] = self.at.get(a, "")

    def put(self, t: str, where: str) -> None:
        self.where[t] = where

    def lose(self, a: str, t: str) -> None:
        self.losses.add((a, t))

    def rob(self, x: str, t: str) -> None:
        self.losses.add((self.where.get(t, ""), t))
        self.thefts.add((x, t))

    def give(self, a: str, b: str, t: str) -> None:
        self.where[t] = b
        self.gifts.add((a, b, t))

    def wish(self, a: str, t: str) -> None:
        self.wishes.add((a, t))


def _gave(w: World, b: str, a: str, t: str | None = None) -> bool:
    return any(gift[:2] == (b, a) and t in (None, gift[2]) for gift in w.gifts)


_HOLDS: dict[str, Callable[..., bool]] = {
    "met": lambda w, a: a in w.at,
    "unmet": lambda w, a: a not in w.at,
    "new": lambda w, t: t not in w.where,
    "at": lambda w, a, p: (w.at.get(a) or w.where.get(a)) == p,
    "away": lambda w, a, p: w.at.get(a) != p,
    "off": lambda w, t, p: w.where.get(t) != p,
    "near": lambda w, a, b: a in w.at and w.at.get(b, w.at[a]) == w.at[a],  # somebody new comes up where met
    "beside": lambda w, x, t: x in w.at and w.at.get(w.where.get(t, ""), w.where.get(t, "")) == w.at[x],
    "has": lambda w, a, t: w.where.get(t) == a,
    "lacks": lambda w, a, t: w.where.get(t) != a,
    "lost": lambda w, a, t: (a, t) in w.losses,
    "took": lambda w, x, t: (x, t) in w.thefts,
    "gave": _gave,
    "wished": lambda w, a, t: (a, t) in w.wishes,
    "resting": lambda w, a: w.at.get(a) == "at home",
    "count": lambda w, a, n: w.held(a) == NUMBERS.index(n),
    "weather": World.weather,
}


class ReadSentence(NamedTuple):
    """A sentence as the checker reads it: its kind, None if it is none of the world's, and what it contradicts."""

    sentence: str
    kind: str | None
    wrong: list[str]


def _one_of(words: Any) -> str:
    return "(?:" + "|".join(sorted(words, key=len, reverse=True)) + ")"


@functools.cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    name, noun = _one_of(NAMES), _one_of(WORDS["nouns"])
    animal = _one_of(WORDS["animals"])
    thing = f"{_one_of(WORDS['adjectives'])} {noun}"
    slots = {
        "a": f"{name}|[Hh]e|[Ss]he", "c": name, "b": name, "g": "girl|boy", "s": "he|she", "m": "him|her",
        "h": "his|her", "u": thing,
        "t": f"it|the {thing}|the {noun}", "o": f"{thing}|{noun}",
        "T": f"(?:an (?=[aeiou])|a (?![aeiou])){thing}", "p": _one_of(PLACES),
        "q": _one_of(PLACES.values()), "x": animal, "X": f"an? {animal}",
        "n": _one_of(NUMBERS), "w": _one_of(WORDS["weather"]),
    }  # fmt: skip
    found = []
    for kind, entry in KINDS.items():
        for sentence in entry.sentences:
            text = re.escape(sentence).replace(r"\{", "{").replace(r"\}", "}")
            pattern = re.sub(r"{(\w)}", lambda m: f"(?P<{m[1]}>{slots[m[1]]})", _named_once(text))
            found.append((kind, re.compile(pattern)))
    return found


def _named_once(text: str) -> str:
    """Turns a slot's second occurrence into a reference to its first, as a pattern names a group once."""
    seen: set[str] = set()

    def one(match: re.Match[str]) -> str:
        again = match[1] in seen
        seen.add(match[1])
        return f"(?P={match[1]})" if again else match[0]

    return re.sub(r"{(\w)}", one, text)


def sentences(text: str) -> list[str]:
    """Returns the complete sentences of a text; direct speech and who says it are one."""
    parts = re.split(r'(?:(?<=[.!?])|(?<=[.!?]"))\s+(?=["A-Z])', text.strip())
    return [part for part in parts if re.search(r'[.!?]"?$', part)]


def read(text: str) -> list[ReadSentence]:
    """Reads a whole story from its first sentence on, and says which sentences contradict those before them."""
    world, subject, thing, found = World(), "", "", []
    for sentence in sentences(text):
        kind, slots = _parsed(sentence)
        wrong: list[str] = []
        if kind is not None:
            wrong = _named_things(slots, thing, world) + _resolve(slots, subject, world)
            subject, thing = slots.get("a", subject), slots.get("t", thing)
            wrong += world.contradictions(kind, slots)
            world.change(kind, slots)
        found.append(ReadSentence(sentence, kind, wrong))
    return found


@functools.lru_cache(10_000)
def _match(sentence: str) -> tuple[str | None, Slots]:
    for kind, pattern in _patterns():
        if match := pattern.fullmatch(sentence):
            return kind, match.groupdict()
    return None, {}


def _parsed(sentence: str) -> tuple[str | None, Slots]:
    """Returns a sentence's kind and its slots, None and {} if it is none of the world's."""
    kind, slots = _match(sentence)
    if kind is None and not sentence.startswith(tuple(NAMES)):  # the capital is the sentence's, or the name's
        kind, slots = _match(sentence[0].lower() + sentence[1:])
    return kind, dict(slots)


def _named_things(slots: Slots, last: str, world: World) -> list[str]:
    """Replaces words for a thing by its adjective and noun, and for an animal or a goal by its name in the world."""
    slots.update({"q": GOALS[slots["q"]]} if "q" in slots else {})
    slots.update({"x": slots["X"].partition(" ")[2]} if "X" in slots else {})
    if "T" in slots:
        slots["t"] = slots["T"].partition(" ")[2]
    said = slots.get("o") or slots.get("t")
    if said is None:
        return []
    words = said.removeprefix("the ")
    meant = [last] if said == "it" else [t for t in world.where if t.endswith(words)] or [words][: " " in words]
    slots["t"] = meant[0] if meant else words
    return [] if len(meant) == 1 and meant[0] else [f"unclear {said}"]


def _resolve(slots: Slots, subject: str, world: World) -> list[str]:
    """Replaces pronouns by the person who acted last, and what a sentence leaves open by what it means there.

    Returns what is wrong with words for girls and boys.
    """
    a = slots.pop("c", None) or slots.get("a")
    if a is None:
        return []
    pronoun = None if a in NAMES else a.lower()
    slots["a"] = a = a if a in NAMES else subject
    slots.setdefault("p", world.at.get(a, ""))
    if a not in NAMES:
        return ["nobody is meant"]
    words = gendered(a)
    given = {**slots, "s": slots.get("s") or pronoun}
    return [f"gender {a}, {given[w]}" for w in ("g", "s", "m", "h") if given.get(w) not in (None, words[w])]


def consistent_share(text: str, given: str = "") -> float:
    """Returns which share of the sentences of `text` are this world's and contradict nothing that was told before.

    0 where no sentence is complete.

    Args:
        given: the beginning of the story, which `text` continues; its own sentences don't count.
    """
    told = text.partition("\n")[0]  # questions about the story follow it in lines of their own
    readings = read(f"{given} {told}")[len(sentences(given)) :]
    return sum(r.kind is not None and not r.wrong for r in readings) / max(1, len(readings))
