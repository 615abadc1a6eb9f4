"""The text on which the small Llama of this project is trained: short stories and small talk.

Everything is generated from the outlines in ``schemata.py`` and the tables below, and it is a
function of the seed alone: document ``i`` of seed ``s`` is always the same. Run this file to print
samples::

    python -m models.corpus --count 3 --seed 1
"""

import argparse
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from models.grammar import expand
from models.schemata import RULES, SCHEMATA, Schema
from models.small_talk import small_talk

BEGIN = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"

FEMALE_NAMES = [
    "Lily",
    "Mia",
    "Luna",
    "Rosie",
    "Daisy",
    "Clara",
    "Poppy",
    "Ivy",
    "Ruby",
    "Hazel",
    "Nora",
    "Ella",
    "Molly",
    "Willa",
    "Tilly",
    "Anna",
    "Maya",
    "Zoe",
    "Olive",
    "Penny",
    "Fern",
    "Juniper",
    "Bella",
    "Sara",
    "Amara",
    "Nina",
    "Lucy",
    "Emma",
    "Suki",
    "Flora",
]
MALE_NAMES = [
    "Tom",
    "Max",
    "Ben",
    "Leo",
    "Oliver",
    "Finn",
    "Sam",
    "Jack",
    "Theo",
    "Milo",
    "Oscar",
    "Felix",
    "Hugo",
    "Jasper",
    "Toby",
    "Barnaby",
    "Rufus",
    "Otto",
    "Arlo",
    "Henry",
    "Ravi",
    "Kofi",
    "Bruno",
    "Pip",
    "Ned",
    "Charlie",
    "Gus",
    "Diego",
    "Tim",
    "Jonas",
]
ROBOT_NAMES = ("Bolt", "Tick", "Clank", "Rusty", "Pixel", "Sprocket")

TRAITS: Mapping[str, str] = {
    "curious": (
        "[{h.name} asked questions about everything|{h.He} wanted to know everything]: [why "
        "the sky was blue|where the wind slept|how the bees found their way home|what the "
        "moon was made of]."
    ),
    "kind": (
        "[{h.name} always had a kind word for everyone.|If somebody was sad, {h.name} was the"
        " first to notice.|{h.He} liked to help, even with small things.]"
    ),
    "shy": (
        "[{h.name} spoke so softly that few could hear {h.him}.|{h.He} did not talk much, but"
        " {h.he} noticed everything.|{h.He} often hid behind {h.his} mother.]"
    ),
    "brave": (
        "[{h.name} was small, but {h.his} heart was big.|{h.He} was not afraid of the dark, "
        "and not even of thunder.|{h.He} had once chased away a fierce goose.]"
    ),
    "clever": (
        "[{h.name} could solve any riddle.|If something was broken, {h.name} knew what to "
        "do.|{h.He} always had a good idea.]"
    ),
    "cheerful": (
        "[{h.name} sang from morning till night.|{h.He} woke up with a song every "
        "morning.|Even on rainy days, {h.name} was in a good mood.]"
    ),
    "gentle": (
        "[{h.name} never stepped on a flower.|{h.He} was so gentle that butterflies landed on"
        " {h.his} nose.|{h.He} spoke kindly to every bug and bird.]"
    ),
    "playful": (
        "[{h.name} could turn anything into a game.|{h.He} loved games more than anything "
        "else.|{h.He} never sat still for long.]"
    ),
    "patient": (
        "[{h.name} could wait longer than anyone.|{h.He} never hurried and never complained.]"
    ),
    "dreamy": (
        "[{h.name} could look at the clouds for hours.|{h.He} often forgot the time because "
        "{h.he} was dreaming.|In every cloud, {h.he} saw a ship or a whale.]"
    ),
    "lively": (
        "[{h.name} ran, jumped and climbed all day.|{h.He} was always the first one outside.]"
    ),
    "careful": (
        "[{h.name} always looked twice before {h.he} jumped.|{h.He} checked everything two times.]"
    ),
    "quiet": (
        "[{h.name} liked quiet mornings and the sound of rain.|{h.He} did not say much, but "
        "{h.he} listened well.]"
    ),
    "merry": (
        "[{h.name} laughed at every joke, even the old ones.|{h.He} could make anybody laugh.]"
    ),
    "hopeful": (
        "[{h.name} believed that every day brings something good.|{h.He} never stopped hoping.]"
    ),
    "thoughtful": (
        "[{h.name} liked to think before {h.he} spoke.|{h.He} thought about many things.]"
    ),
    "busy": "[{h.name} always had something to do.|From morning till night, {h.he} was busy.]",
}

LIKES = (
    (
        "{h.He} loved to [collect smooth stones|watch the clouds|pick flowers|climb "
        "trees|listen to old stories|draw pictures|jump in puddles|count the stars|play hide "
        "and seek|lie in the soft grass]."
    ),
    ("{h.He} liked {food}, [warm sunshine|long walks|funny songs|rainy days], and <small_joy>."),
    (
        "Every morning, {h.he} [washed {h.his} face in the dew|said hello to the sun|swept "
        "the floor|drank a cup of warm milk] and [went out to play|began the day with a "
        "smile|looked out of the window]."
    ),
)

FOODS = (
    "warm soup",
    "bread and honey",
    "apple pie",
    "pancakes with jam",
    "blueberry muffins",
    "hot porridge",
    "a big bowl of berries",
    "cheese and crackers",
    "honey cakes",
    "roasted chestnuts",
    "vegetable stew",
    "plum cake",
    "bread and butter",
    "fresh strawberries",
)

DREAMS = (
    "flying over the hills",
    "a ship with golden sails",
    "a field full of flowers",
    "friendly whales",
    "a river made of stars",
    "new adventures",
    "sunshine and warm sand",
    "a garden in the clouds",
)

ADJECTIVES = [
    "red",
    "blue",
    "green",
    "yellow",
    "golden",
    "silver",
    "little",
    "old",
    "wooden",
    "shiny",
    "striped",
]
NOUNS = [
    "key",
    "kite",
    "drum",
    "flute",
    "lantern",
    "bell",
    "scarf",
    "hat",
    "ball",
    "button",
    "umbrella",
    "book",
    "map",
    "boat",
    "ring",
    "compass",
]

ELDER_KINDS: Mapping[str, str] = {
    "owl": "in a hollow oak",
    "tortoise": "beside a mossy stone",
    "heron": "among the reeds",
    "goose": "in a cottage by the pond",
    "badger": "under the roots of a great tree",
    "crow": "in the church tower",
    "toad": "under a big mushroom",
    "donkey": "in a barn with a red roof",
}


@dataclass(frozen=True)
class Species:
    """What a kind of character calls its hands and where it may live."""

    hands: str
    homes: tuple[str, ...]
    female: bool | None = None
    """The sex that the word itself implies, if any."""


FOREST = (
    "in a den under an old oak tree",
    "at the edge of a quiet forest",
    "in a small house in the woods",
    "deep in the forest",
)
WATER = (
    "beside a quiet pond",
    "by a clear river",
    "near a little lake",
    "in a cottage among the reeds",
)
FIELD = (
    "on a farm at the foot of a hill",
    "in a green meadow",
    "in a barn with a red roof",
    "on a small farm near the village",
)
WARM = (
    "at the edge of the jungle",
    "under a tall palm tree",
    "on a wide, sunny plain",
    "near a warm river",
)
TOWN = (
    "in a small village by the sea",
    "in a house with a blue door",
    "in a little town between the hills",
    "in a cottage at the edge of the village",
)
CASTLE = ("in a castle on a hill", "in a tall white castle", "in a castle by the sea")

SPECIES: Mapping[str, Species] = {
    "fox": Species("paws", FOREST),
    "rabbit": Species("paws", (*FOREST, *FIELD[:2])),
    "bear": Species("paws", FOREST),
    "mouse": Species("paws", (*FIELD, *TOWN)),
    "hedgehog": Species("paws", (*FOREST, "under a hedge in a big garden")),
    "squirrel": Species("paws", (*FOREST, "at the top of a tall pine tree")),
    "cat": Species("paws", TOWN),
    "kitten": Species("paws", TOWN),
    "dog": Species("paws", (*TOWN, *FIELD)),
    "puppy": Species("paws", (*TOWN, *FIELD)),
    "duck": Species("wings", WATER),
    "frog": Species("hands", WATER),
    "otter": Species("paws", WATER),
    "beaver": Species("paws", WATER),
    "pig": Species("feet", FIELD),
    "goat": Species("hooves", (*FIELD, "high up in the mountains")),
    "lamb": Species("hooves", FIELD),
    "pony": Species("hooves", FIELD),
    "deer": Species("hooves", FOREST),
    "raccoon": Species("paws", FOREST),
    "mole": Species("paws", ("under a green meadow", "in a tunnel under the garden")),
    "sparrow": Species("wings", (*TOWN, "under the roof of an old mill")),
    "elephant": Species("feet", WARM),
    "lion": Species("paws", WARM),
    "monkey": Species("hands", WARM),
    "panda": Species("paws", ("in a bamboo forest", "on a misty mountain")),
    "penguin": Species("wings", ("on a snowy island", "at the edge of the icy sea")),
    "dragon": Species("claws", ("in a cave on a mountain", "in an old tower on a hill")),
    "girl": Species("hands", TOWN, female=True),
    "boy": Species("hands", TOWN, female=False),
    "princess": Species("hands", CASTLE, female=True),
    "prince": Species("hands", CASTLE, female=False),
}


def with_article(words: str) -> str:
    """The words with the indefinite article that their first sound calls for."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


@dataclass(frozen=True)
class Character:
    """Somebody in a story, with the words that refer to them."""

    name: str
    kind: str
    trait: str
    female: bool
    hands: str
    home: str
    description: str

    @property
    def a(self) -> str:
        """How the character is introduced, such as "a curious little fox"."""
        return with_article(self.description)

    @property
    def he(self) -> str:
        """The subject pronoun."""
        return "she" if self.female else "he"

    @property
    def him(self) -> str:
        """The object pronoun."""
        return "her" if self.female else "him"

    @property
    def his(self) -> str:
        """The possessive."""
        return "her" if self.female else "his"

    @property
    def himself(self) -> str:
        """The reflexive pronoun."""
        return "herself" if self.female else "himself"

    @property
    def hand(self) -> str:
        """One of the character's hands."""
        return {"feet": "foot", "hooves": "hoof"}.get(self.hands, self.hands[:-1])


@dataclass(frozen=True)
class Thing:
    """Something a story is about."""

    adjective: str
    noun: str

    @property
    def name(self) -> str:
        """The thing with its adjective."""
        return f"{self.adjective} {self.noun}"

    @property
    def a(self) -> str:
        """The thing as it is introduced."""
        return with_article(self.name)


@dataclass(frozen=True)
class Place:
    """Somewhere, with the phrases for being there, going there and passing it."""

    at: str
    to: str
    along: str


PLACES = (
    Place("in the forest", "into the forest", "through the forest"),
    Place("by the river", "to the river", "along the river"),
    Place("in the meadow", "to the meadow", "across the meadow"),
    Place("on the hill", "up the hill", "over the hill"),
    Place("at the old mill", "to the old mill", "past the old mill"),
    Place("by the pond", "to the pond", "around the pond"),
    Place("in the orchard", "to the orchard", "through the orchard"),
    Place("on the beach", "to the beach", "along the beach"),
    Place("by the big oak tree", "to the big oak tree", "past the big oak tree"),
    Place("in the valley", "into the valley", "through the valley"),
    Place("by the stone wall", "to the stone wall", "along the stone wall"),
)


@dataclass(frozen=True)
class Story:
    """A finished story and what somebody might call it when asking for it."""

    text: str
    topic: str


def _character(
    rng: random.Random, kind: str, names: set[str], traits: tuple[str, ...]
) -> Character:
    """A character of the given kind whose name is not among ``names``, to which it is added."""
    species = SPECIES[kind]
    female = rng.random() < 0.5 if species.female is None else species.female
    name = rng.choice([n for n in (FEMALE_NAMES if female else MALE_NAMES) if n not in names])
    names.add(name)
    trait = rng.choice(traits or tuple(TRAITS))
    # A young animal's own word already says that it is small.
    size = "" if kind in ("puppy", "kitten", "lamb") else rng.choice(("", "little ", "young "))
    home = rng.choice(species.homes)
    return Character(name, kind, trait, female, species.hands, home, f"{trait} {size}{kind}")


def _elder(rng: random.Random, names: set[str]) -> Character:
    """A wise old character who gives advice."""
    kind = rng.choice(tuple(ELDER_KINDS))
    female = rng.random() < 0.5
    name = rng.choice([n for n in (FEMALE_NAMES if female else MALE_NAMES) if n not in names])
    trait = rng.choice(("wise", "old", "wise old", "friendly old"))
    return Character(name, kind, trait, female, "hands", ELDER_KINDS[kind], f"{trait} {kind}")


def _scene(rng: random.Random, schema: Schema) -> dict[str, object]:
    """Cast the characters of an outline and choose everything else that its text mentions."""
    frame = dict(rng.choice(schema.frames))
    excluded = frame.pop("without", "").split()
    kinds = [kind for kind in SPECIES if kind not in excluded]
    hero_kind, friend_kind = rng.sample(kinds, 2)
    names: set[str] = set()
    hero = _character(rng, hero_kind, names, schema.traits)
    friend = _character(rng, friend_kind, names, ())
    return {
        "h": hero,
        "f": friend,
        "g": _elder(rng, names),
        "o": Thing(rng.choice(ADJECTIVES), rng.choice(NOUNS)),
        "p": rng.choice(PLACES),
        "home": hero.home,
        "young": rng.choice(("young", "little", "small", hero.trait)),
        "food": rng.choice(FOODS),
        "dream": rng.choice(DREAMS),
        "robot": rng.choice(ROBOT_NAMES),
        "trait_line": TRAITS[hero.trait],
        "like_line": rng.choice(LIKES),
        **frame,
    }


def tell_story(rng: random.Random, schema: Schema | None = None) -> Story:
    """Tell a story after the given outline, or after a random one."""
    schema = schema or rng.choice(SCHEMATA)
    scene = _scene(rng, schema)
    text = expand(schema.text, scene, RULES, rng)
    general_topics = (
        "a {h.kind}",
        "a {h.kind} named {h.name}",
        "a {h.trait} {h.kind}",
        "{h.name} the {h.kind}",
        "a {h.kind} and a {f.kind}",
    )
    topics = schema.topics if rng.random() < 0.6 else general_topics
    topic = expand(rng.choice(topics), scene, RULES, rng)
    return Story(text, _fix_article(topic))


def _fix_article(topic: str) -> str:
    """Put "an" in front of vowels, which a topic's template cannot know in advance."""
    words = topic.split(" ")
    for i, (word, following) in enumerate(pairwise(words)):
        if word == "a" and following[0] in "aeiou":
            words[i] = "an"
    return " ".join(words)


REQUESTS = (
    "Tell me a story about {topic}.",
    "Tell me a story about {topic}.",
    "Tell me a story about {topic}",
    "tell me a story about {topic}",
    "Can you tell me a story about {topic}?",
    "Could you tell me a story about {topic}, please?",
    "Please tell me a story about {topic}.",
    "Write a story about {topic}.",
    "Write a short story about {topic}.",
    "I would like a story about {topic}.",
    "I want to hear a story about {topic}.",
    "Do you know a story about {topic}?",
    "A story about {topic}, please!",
)
OPEN_REQUESTS = (
    "Tell me a story.",
    "Tell me a story!",
    "tell me a story",
    "Can you tell me a story?",
    "Please tell me a bedtime story.",
    "I want to hear a story.",
    "Write a short story.",
)
PREFACES = ("Of course! Here is a story about {topic}.\n\n", "Here is a story about {topic}.\n\n")
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "You tell short stories to children.",
    "Answer briefly and kindly.",
)


def story_turn(rng: random.Random) -> tuple[str, str]:
    """A request for a story, and the story."""
    story = tell_story(rng)
    if rng.random() < 0.15:
        return rng.choice(OPEN_REQUESTS), story.text
    preface = rng.choice(PREFACES) if rng.random() < 0.25 else ""
    request = rng.choice(REQUESTS).format(topic=story.topic)
    return request, preface.format(topic=story.topic) + story.text


@dataclass(frozen=True)
class Reading:
    """A tiny text about two characters, and questions about what it says."""

    text: str
    questions: tuple[tuple[str, str], ...]


READINGS = (
    Reading(
        "{h.name} has {o.a}. {f.name} has {o2.a}.",
        (
            ("Who has {o.a}?", "{h.name} has {o.a}."),
            ("Who has {o2.a}?", "{f.name} has {o2.a}."),
            ("What does {h.name} have?", "{h.name} has {o.a}."),
            ("What does {f.name} have?", "{f.name} has {o2.a}."),
        ),
    ),
    Reading(
        "{h.name} is {h.a}. {f.name} is {f.a}. {h.name} lives {home}. {f.name} lives {f.home}.",
        (
            ("Who is {h.name}?", "{h.name} is {h.a}."),
            ("Who is {f.name}?", "{f.name} is {f.a}."),
            ("Where does {h.name} live?", "{h.name} lives {home}."),
            ("Where does {f.name} live?", "{f.name} lives {f.home}."),
        ),
    ),
    Reading(
        "{h.name} and {f.name} are friends. {h.name} likes {food}, but {f.name} likes {food2}.",
        (
            ("What does {h.name} like?", "{h.name} likes {food}."),
            ("What does {f.name} like?", "{f.name} likes {food2}."),
            ("Who likes {food}?", "{h.name} likes {food}."),
            ("Who likes {food2}?", "{f.name} likes {food2}."),
        ),
    ),
    Reading(
        "{h.name} went {p.to}. {f.name} gave {h.name} {o.a}. {h.name} said thank you to {f.name}.",
        (
            ("Where did {h.name} go?", "{h.name} went {p.to}."),
            ("What did {f.name} give to {h.name}?", "{f.name} gave {o.a} to {h.name}."),
            ("Who gave {h.name} {o.a}?", "{f.name} gave {h.name} {o.a}."),
            ("Who said thank you?", "{h.name} said thank you to {f.name}."),
        ),
    ),
    Reading(
        "My name is {h.name}.",
        (
            ("What is my name?", "Your name is {h.name}."),
            ("Do you know my name?", "Yes, your name is {h.name}."),
        ),
    ),
)


def reading_turns(rng: random.Random) -> list[tuple[str, str]]:
    """Questions about a tiny text; they teach the model to look up who is who."""
    reading = rng.choice(READINGS)
    scene = _scene(rng, rng.choice(SCHEMATA))
    scene["o2"] = Thing(rng.choice(ADJECTIVES), rng.choice(NOUNS))
    scene["food2"] = rng.choice(FOODS)
    text = expand(reading.text, scene, RULES, rng)
    questions = rng.sample(reading.questions, rng.randint(1, len(reading.questions)))
    turns = [
        (expand(ask, scene, RULES, rng), expand(answer, scene, RULES, rng))
        for ask, answer in questions
    ]
    if text.startswith("My name"):
        greeting = rng.choice(("Hello, {h.name}!", "It is nice to meet you, {h.name}!"))
        return [(text, expand(greeting, scene, RULES, rng)), *turns]
    return [(f"{text} {turns[0][0]}", turns[0][1]), *turns[1:]]


def conversation(turns: list[tuple[str, str]], system: str = "") -> str:
    """A conversation in the form that the chat template gives it."""
    text = "".join(f"{USER}{ask}{END}{ASSISTANT}{answer}{END}" for ask, answer in turns)
    return BEGIN + text.replace(USER, USER + system, 1)


def chat(rng: random.Random) -> str:
    """A conversation: a story, questions about a tiny text, or small talk."""
    turns = []
    kind = rng.random()
    if kind < 0.35:
        turns.append(story_turn(rng))
    elif kind < 0.65:
        turns += reading_turns(rng)
    else:
        turns += [small_talk(rng) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.2:
            turns.append(story_turn(rng))
    system = rng.choice(SYSTEM_MESSAGES) + "\n\n" if rng.random() < 0.15 else ""
    return conversation(turns, system)


def document(seed: int, index: int, chat_share: float = 0.5) -> str:
    """Document ``index`` of the corpus with this seed, special tokens included."""
    rng = random.Random(f"{seed}/{index}")
    if rng.random() < chat_share:
        return chat(rng)
    return BEGIN + tell_story(rng).text + END_OF_TEXT


def documents(seed: int, start: int = 0) -> Iterator[str]:
    """All documents from index ``start`` on, without end."""
    while True:
        yield document(seed, start)
        start += 1


def reading_documents(seed: int) -> Iterator[str]:
    """Conversations about tiny texts only, without end."""
    rng = random.Random(f"{seed}/readings")
    while True:
        yield conversation(reading_turns(rng))


def main() -> None:
    """Print samples."""
    parser = argparse.ArgumentParser(description="Print samples of the training text.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--each", action="store_true", help="one story per outline instead")
    args = parser.parse_args()
    if args.each:
        for schema in SCHEMATA:
            story = tell_story(random.Random(args.seed), schema)
            words = len(story.text.split())
            print(f"=== {schema.name}: {story.topic} ({words} words)\n{story.text}\n")
    else:
        for index in range(args.count):
            print(document(args.seed, index), end="\n\n")


if __name__ == "__main__":
    main()
