"""Stories of a simulated world: the same every time, held out as promised, true, and read by the checker."""

import re
from collections import Counter

import pytest

from examples.stories.scores import Consistent
from examples.stories.source import ROWS, Stories, answerable, held_out, questions, story
from examples.stories.world import NAMES, PLACES, SHAPES, UNSEEN, WORDS, consistent_share, read
from lmtrain.data.sources.choose import open_source, pieces
from lmtrain.generation.text_metrics import TextMetrics


def test_the_same_arguments_give_the_same_rows() -> None:
    for rows in ROWS:
        first = list(Stories(rows, number=50, held_out=20).records("train"))
        assert list(Stories(rows, number=50, held_out=20).records("train")) == first
        assert list(Stories(rows, number=50, held_out=20, seed=1).records("train")) != first
    one = [piece.text for piece in Stories(number=50).pieces("train")]
    assert one == [piece.text for piece in Stories(number=50).pieces("train")]
    assert len(set(one)) == 50
    assert one[17].startswith(story(0, "train", 17).text)  # a pure function of the index


def test_held_out_are_shapes_and_combinations_of_names_and_things() -> None:
    train = [story(0, "train", i) for i in range(500)]
    val = [story(0, "val", i) for i in range(200)]
    assert {s.shape for s in train} == set(SHAPES)
    assert {s.shape for s in val[1::2]} == set(UNSEEN)
    assert not set(SHAPES) & set(UNSEEN)

    def combinations(s) -> set[tuple[str, str]]:
        people = [name for name in NAMES if re.search(rf"\b{name}\b", s.text)]
        things = {slots["t"] for _, slots in s.told if "t" in slots} | {u for _, o in s.told if (u := o.get("u"))}
        return {(name, thing) for name in people for thing in things}

    assert not any(held_out(*pair) for s in train for pair in combinations(s))
    assert all(any(held_out(*pair) for pair in combinations(s)) for s in val)


THING = (
    r"\b(?:an?|the|this|my|your) ((?:\w+ )?(?:ball|kite|key|book|hat|cup|bell|box|drum|basket|scarf|spoon|ring|doll|"
    r"lamp|shell|coin|whistle|umbrella|blanket|button|flute|bucket|feather))\b"
)


class Simulated:
    """Follows a story by its verbs alone, without the generator's tables: who has what, who is where, what happened."""

    def __init__(self, text: str) -> None:
        self.at: dict[str, str] = {}
        self.has: dict[str, str] = {}
        self.events: list[tuple[str, ...]] = []
        self.last, self.thing = "", ""
        for sentence in re.split(r'(?<=[.!])\s(?=[A-Z"])', text.replace('?" ', '?", ').replace('!" ', '!", ')):
            self.follow(sentence)

    def follow(self, said: str) -> None:
        words = [w for w in re.findall(r"[A-Z][a-z]+|\bs?he\b", said) if w in NAMES or w.lower() in ("he", "she")]
        people = [w if w in NAMES else self.last for w in words]
        acting = re.search(r"(?:said|asked|cried|swapped:) ([A-Z]\w+)", said)
        me = acting[1] if acting else (people[0] if people else self.last)
        other = next((name for name in people if name != me), "")
        things = [self.called(name) for name in re.findall(THING, said, re.IGNORECASE)] or [self.thing]
        goals = [p for p, goal in PLACES.items() if p in said or re.search(rf"\b{goal}\b", said)]
        self.change(said, me, other, things, max(goals, key=lambda p: (p in said, len(PLACES[p])), default=""))
        self.last, self.thing = me, things[0]

    def called(self, name: str) -> str:
        return next((thing for thing in self.has if thing.endswith(name.split()[-1])), name)

    def change(self, said: str, me: str, other: str, things: list[str], place: str) -> None:
        thing = things[0]

        def saw(pattern: str) -> bool:
            return re.search(pattern, said) is not None

        if saw(r"(Suddenly the|^The) \w+ (took|grabbed)"):
            self.has[thing] = place
        elif saw("and got the|swapped:"):
            mine, theirs = reversed(things) if "swapped:" in said else things
            self.has[mine], self.has[theirs] = other, me
        elif saw("gave|for you|take my") and not saw("had given"):
            self.has[thing] = other
            self.events.append(("gave", me, other, thing))
        elif saw("was sad|was happy|wanted|dreamed|wished|said|asked|cried|looked for|looked and|was gone|things"):
            pass
        elif saw("dropped|lost|forgot"):
            self.has[thing] = place
            self.events.append(("forgot" if saw("forgot") else "lost", me, thing, place))
        elif saw("found|picked"):
            self.has[thing] = me
            self.events.append(("found", me, thing, self.at[me]))
        elif saw("had|carrying|brought") and not saw("day it had"):
            self.has[thing] = me
        elif place:
            self.at[me] = place
            self.events += [("went", me, place)] if saw("walked|ran|went|followed") else []
        elif saw("met|saw") and other:
            self.at[other] = self.at[me]

    def answer(self, asked: str) -> str:
        """Answers a question from what was followed; every answer is a whole sentence."""
        who, thing = re.search(r"\b[A-Z]\w+(?<!Who)(?<!Why)(?<!How)(?<!Where)(?<!What)\b", asked), None
        name = who[0] if who else ""
        if named := re.search(THING, asked):
            thing = named[1]
        if asked.startswith("How many"):
            count = list(self.has.values()).count(name)
            return f"{name} has {['no', 'one', 'two', 'three', 'four'][count]} thing{'s' * (count != 1)}."
        if asked.startswith("Where is"):
            return f"{name} is {self.at[name]}."
        if asked.startswith("Who has"):
            return f"{self.has[str(thing)]} has the {thing}."
        if asked.startswith("Who gave"):
            return next(
                f"{e[1]} gave {name} the {thing}." for e in self.events if e[0] == "gave" and e[2:] == (name, thing)
            )
        if event := re.match(r"Who (found|lost|forgot)", asked):
            return next(f"{e[1]} {e[0]} the {thing}." for e in self.events if e[0] == event[1] and e[2] == thing)
        if event := re.match(r"Where did \w+ (find|lose|forget) the", asked):
            verb = {"find": "found", "lose": "lost", "forget": "forgot"}[event[1]]
            return next(f"{e[1]} {verb} the {thing} {e[3]}." for e in self.events if e[0] == verb and e[2] == thing)
        if asked.endswith("go first?"):
            first = next(e[2] for e in self.events if e[:2] == ("went", name))
            return f"{name} went {PLACES[first]} first."
        if asked.endswith("find first?"):
            return next(f"{name} found the {e[2]} first." for e in self.events if e[:2] == ("found", name))
        (held,) = [thing for thing, holder in self.has.items() if holder == name]
        return f"{name} has a{'n' * (held[0] in 'aeiou')} {held}."


@pytest.mark.parametrize("split", ["train", "val"])
def test_answers_are_those_of_an_independent_simulation(split: str) -> None:
    kinds: dict[str, int] = {}
    for index in range(400):
        s = story(0, split, index)
        followed = Simulated(s.text)
        assert followed.has == s.world.where, s.text
        assert followed.at == {a: p for a, p in s.world.at.items() if a in NAMES}, s.text
        for question in answerable(s):
            kinds[question.kind] = kinds.get(question.kind, 0) + 1
            assert question.answer not in question.wrong
            assert followed.answer(question.asked) == question.answer, s.text
    assert set(kinds) == {"where", "who", "what", "how many", "first"}
    assert min(kinds.values()) > 10


def test_no_kind_of_question_is_answered_by_a_constant_or_by_the_last_thing_named() -> None:
    told = [story(0, "val", index) for index in range(800)]
    asked = [(s, question) for s in told for question in questions(s, 1)]
    for kind in {question.kind for _, question in asked}:
        of_kind = [(s, question) for s, question in asked if question.kind == kind]
        constants = Counter(re.sub(rf"^({'|'.join(NAMES)})\b", "", question.answer) for _, question in of_kind)
        assert constants.most_common(1)[0][1] <= len(of_kind) / 2, (kind, constants.most_common(1))
        for words in (NAMES, [*PLACES, *PLACES.values()], WORDS["nouns"]):
            guessed = [re.findall(rf"\b(?:{'|'.join(words)})\b", s.text)[-1:] for s, _ in of_kind]
            # A name that is in the question tells nothing: only answers that have another are counted as guessed.
            right = sum(
                bool(guess) and guess[0] in question.answer and guess[0] not in question.asked
                for guess, (_, question) in zip(guessed, of_kind, strict=True)
            )
            assert right <= 0.55 * len(of_kind), (kind, words)


def test_the_checker_reads_true_stories_without_complaint() -> None:
    for split in ("train", "val"):
        for index in range(300):
            s = story(7, split, index)
            readings = read(s.text)
            assert [(r.kind, r.wrong) for r in readings] == [(kind, []) for kind, _ in s.told], s.text


BEGIN = "It was a rainy day. Mia was in the park. She had a red ball. "
PLANTED = {
    "It was a sunny day.": "weather",
    "Zoe found a blue key in the park.": "at Zoe",  # nobody knows that she is there
    "She found a blue key at the beach.": "at Mia",
    "He ran to the river.": "gender Mia, he",
    "Mia was sitting at the market.": "unmet Mia",
    "She found a red ball in the park.": "new red ball",
    "Tom gave Mia the ball.": "has Tom",
    "Mia gave Tom the key.": "unclear the key",
    "Tom was at the market. Mia gave Tom the ball.": "near Mia, Tom",
    "She was sad because she had lost the ball.": "lost Mia",
    "She lost the ball in the barn.": "at Mia, in the barn",
    "She walked to the park.": "away Mia",
    '"Thank you, Tom!" said Mia.': "gave Tom, Mia",
    "Mia counted two things.": "count Mia, two",
    "Now Mia had the ball that she had wished for.": "wished Mia",
    "Tom was on the hill. Mia and Tom laughed and played all day.": "near Mia, Tom",
    "She fell asleep at once.": "resting Mia",
    "Suddenly the fox took the ball, ran to the river and left it there.": "beside fox",
    '"I saw the ball by the river," said Mia.': "at red ball",
    "Mia was happy because Tom had given her the ball.": "gave Tom",
    "Mia was happy to have it back.": "lost Mia",
}


@pytest.mark.parametrize("planted", PLANTED)
def test_the_checker_finds_a_planted_contradiction(planted: str) -> None:
    wrong = [complaint for reading in read(BEGIN + planted) for complaint in reading.wrong]
    assert any(complaint.startswith(PLANTED[planted]) for complaint in wrong), wrong
    assert all(not reading.wrong for reading in read(BEGIN + planted)[:3])


def test_the_share_of_consistent_sentences() -> None:
    assert consistent_share("Mia lost it in the park. She walked home.", BEGIN) == 1
    assert consistent_share("Mia lost it in the barn. She walked home.", BEGIN) == 0.5
    assert consistent_share("Mia lost it in the park. Ball the had.", BEGIN) == 0.5
    assert consistent_share("Mia lost it in the park. She wal", BEGIN) == 1  # the last sentence is not complete
    assert consistent_share("She wal", BEGIN) == 0


def test_consistency_as_reward_and_as_metric() -> None:
    rows = [row for _, row in Stories("openings", held_out=20).records("val")]
    true, cut = [row["completion"] for row in rows], [row["completion"][:-9] for row in rows]
    prompts = [row["prompt"] for row in rows]
    false = [" Tom gave Mia the red ball. Not a sentence of a story."] * 20
    metric = TextMetrics([{"_target_": "examples.stories.scores.Consistency"}], allow_target=["examples"])
    for answers, share in ((true, 1.0), (cut, 1.0), (false, 0.0), (true[:10] + false[10:], 0.5)):
        assert metric.score(answers, true, prompts) == {"Consistency": pytest.approx(share)}
        assert sum(Consistent()(prompts, answers)) / 20 == share


def test_a_hundred_stories_are_good_english() -> None:
    text = " ".join(story(3, "val", i).text for i in range(100))
    assert not re.search(r"\ba [aeiou]|\ban [^aeiou]", text)
    assert not re.search(r"\b(\w+) \1\b(?<!looked)|  | [.,!?]|\bin home\b|\{", text)
    assert all(re.match(r'"?[A-Z]', line) for i in range(100) for line in story(3, "val", i).lines)


def test_pairs_reject_wrong_short_and_long_answers() -> None:
    rows = [row for _, row in Stories("pairs", number=300).records("train")]
    long = [row for row in rows if row["rejected"].startswith(row["chosen"] + " ")]
    short = [row for row in rows if row["rejected"][-1].isalpha()]
    assert all(row["chosen"] != row["rejected"] for row in rows)
    assert min(len(long), len(short), len(rows) - len(long) - len(short)) > 50


def test_stories_are_validated_on_their_own_split(data_config) -> None:
    options = {"number": 30, "held_out": 10}
    cfg = data_config("text", source="examples.stories.source.Stories", source_options=options)
    source = open_source(cfg)
    texts = [[piece.text for piece in pieces(source, cfg, name) or ()] for name in ("train", "val")]
    assert [len(some) for some in texts] == [30, 10]
    lines = [text.split("\n") for text in texts[0]]
    assert [line[1:] for line in lines] == [
        [f"{q.asked} {q.answer}" for q in questions(story(0, "train", i), 4)] for i in range(30)
    ]
    assert source.settings["options"] == {"number": 30, "held_out": 10}
