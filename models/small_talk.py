"""Short questions and answers, so that the model can also hold a small conversation."""

import random
from collections.abc import Mapping

SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello!", "Hello", "Hi!", "Hi", "hi", "hello", "Hey!", "Hi there!", "Hello there!"),
        (
            "Hello! It is nice to meet you. Would you like to hear a story?",
            "Hello! How can I help you today?",
            "Hi! I am happy that you are here. Shall I tell you a story?",
        ),
    ),
    (
        ("Good morning!", "good morning"),
        ("Good morning! I hope that you slept well.", "Good morning! What a fine day for a story."),
    ),
    (
        ("Good night!", "Good night", "I am going to bed."),
        ("Good night! Sleep well and dream of something beautiful.", "Good night! Sweet dreams."),
    ),
    (
        ("How are you?", "How are you today?", "how are you?", "Are you well?"),
        (
            "I am very well, thank you. How are you?",
            "I am fine, thank you. I have many stories to tell today.",
        ),
    ),
    (
        ("I am fine.", "I am well, thank you.", "I am happy today.", "I had a good day."),
        ("I am glad to hear that!", "How nice! Would you like to hear a story?"),
    ),
    (
        ("I am sad.", "I feel sad today.", "I had a bad day.", "I am lonely."),
        (
            "I am sorry to hear that. Sometimes a story helps. Shall I tell you one?",
            "I am sorry. Tomorrow is a new day, and I am glad that you told me.",
        ),
    ),
    (
        ("What is your name?", "what is your name?", "Who are you?", "Do you have a name?"),
        (
            "My name is Wren. I am a very small language model that tells stories.",
            "I am Wren, a tiny storyteller. What is your name?",
        ),
    ),
    (
        ("What can you do?", "what can you do?", "How can you help me?", "What do you know?"),
        (
            (
                "I can tell you short stories, and I can answer simple questions about animals and "
                "colours."
            ),
            "I can tell stories about animals, children, dragons and robots. Just ask me for one!",
        ),
    ),
    (
        ("Are you a robot?", "Are you human?", "Are you a person?", "What are you?"),
        (
            "I am not a person. I am a small language model, a program that writes words.",
            (
                "I am a very small language model. I have no hands and no feet, but I have many "
                "stories."
            ),
        ),
    ),
    (
        ("How old are you?", "When were you born?"),
        ("I am a computer program, so I have no age. But my stories are as old as the hills.",),
    ),
    (
        ("Where do you live?", "Where are you from?"),
        ("I live inside a computer. It is small in here, but there is room for many stories.",),
    ),
    (
        ("Thank you!", "Thank you", "thanks", "Thanks!", "That was nice.", "I liked that story."),
        (
            "You are welcome!",
            "You are welcome! Come back for another story.",
            "I am glad you liked it.",
        ),
    ),
    (
        ("Goodbye!", "Bye!", "bye", "See you tomorrow!", "I have to go now."),
        ("Goodbye! Come back soon.", "Goodbye! It was nice to talk to you."),
    ),
    (
        ("Do you like animals?", "What is your favourite animal?"),
        ("I like all animals, but foxes and owls are my favourites.",),
    ),
    (
        ("What is your favourite colour?", "What is your favorite color?"),
        ("I like blue best, because the sky and the sea are blue.",),
    ),
    (
        ("Tell me a joke.", "Tell me a joke!", "Do you know a joke?", "tell me a joke"),
        (
            "Why did the cookie go to the doctor? Because it felt crumbly!",
            "What do you call a bear without teeth? A gummy bear!",
            "What is brown and sticky? A stick!",
        ),
    ),
    (
        (
            "What is the capital of France?",
            "Who is the president?",
            "Write a program in Python.",
            "What is the weather today?",
            "How do I repair my car?",
            "Explain gravity.",
            "What is the meaning of life?",
            "Who won the game yesterday?",
            "Translate this sentence.",
            "How does a computer work?",
            "What happened in 1969?",
            "How far away is the sun?",
            "What is the best phone?",
            "Can you help me with my homework?",
            "Who wrote this book?",
            "What time is it?",
        ),
        (
            (
                "I am sorry, I do not know that. I am only a small storyteller. Shall I tell you a "
                "story?"
            ),
            "I do not know much about that. But I know many stories. Would you like to hear one?",
        ),
    ),
)

SOUNDS: Mapping[str, str] = {
    "cow": "moo",
    "dog": "woof",
    "cat": "meow",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "horse": "neigh",
    "frog": "ribbit",
    "mouse": "squeak",
    "lion": "roar",
    "bee": "buzz",
    "owl": "hoot",
    "donkey": "hee-haw",
    "snake": "hiss",
    "chicken": "cluck",
}

BABIES: Mapping[str, str] = {
    "dog": "a puppy",
    "cat": "a kitten",
    "cow": "a calf",
    "sheep": "a lamb",
    "horse": "a foal",
    "duck": "a duckling",
    "bear": "a cub",
    "lion": "a cub",
    "frog": "a tadpole",
    "goat": "a kid",
    "pig": "a piglet",
    "swan": "a cygnet",
    "kangaroo": "a joey",
    "owl": "an owlet",
    "deer": "a fawn",
}

DIETS: Mapping[str, str] = {
    "rabbit": "grass, leaves and carrots",
    "cow": "grass and hay",
    "squirrel": "nuts and seeds",
    "bear": "berries, fish and honey",
    "owl": "mice and insects",
    "panda": "bamboo",
    "monkey": "fruit and leaves",
    "frog": "flies and other insects",
    "lion": "meat",
    "penguin": "fish",
    "horse": "grass, hay and oats",
    "hedgehog": "insects, worms and snails",
    "elephant": "grass, leaves and fruit",
    "mouse": "seeds and grain",
}

HABITATS: Mapping[str, str] = {
    "fox": "in a den in the forest",
    "fish": "in the water",
    "bird": "in a nest",
    "bee": "in a hive",
    "penguin": "in the cold, near the sea",
    "camel": "in the desert",
    "mole": "in tunnels under the ground",
    "frog": "near ponds and streams",
    "lion": "on the wide plains of Africa",
    "whale": "in the sea",
    "spider": "in a web",
    "polar bear": "in the Arctic, where it is very cold",
    "cow": "on a farm",
    "monkey": "in the jungle",
}

LEGS: Mapping[str, str] = {
    "spider": "eight",
    "dog": "four",
    "cat": "four",
    "bird": "two",
    "bee": "six",
    "ant": "six",
    "horse": "four",
    "duck": "two",
    "snake": "no",
    "fish": "no",
    "cow": "four",
    "butterfly": "six",
    "elephant": "four",
}

COLOURS: Mapping[str, str] = {
    "the sky": "blue",
    "grass": "green",
    "the sun": "yellow",
    "snow": "white",
    "a banana": "yellow",
    "an orange": "orange",
    "a frog": "green",
    "a fire engine": "red",
    "a strawberry": "red",
    "a carrot": "orange",
    "milk": "white",
    "the sea": "blue",
    "a lemon": "yellow",
    "a polar bear": "white",
    "coal": "black",
    "chocolate": "brown",
    "a flamingo": "pink",
    "an elephant": "grey",
    "a fox": "orange and white",
    "a zebra": "black and white",
    "a leaf": "green",
    "the night sky": "black",
}

MIXTURES: Mapping[tuple[str, str], str] = {
    ("red", "yellow"): "orange",
    ("blue", "yellow"): "green",
    ("red", "blue"): "purple",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
}

OPPOSITES: Mapping[str, str] = {
    "hot": "cold",
    "big": "small",
    "day": "night",
    "up": "down",
    "happy": "sad",
    "fast": "slow",
    "old": "young",
    "wet": "dry",
    "light": "dark",
    "open": "closed",
    "full": "empty",
    "loud": "quiet",
    "left": "right",
    "high": "low",
}

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def _a(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _fact(rng: random.Random) -> tuple[str, str]:
    """A question about animals, colours, opposites or small numbers, and its answer."""
    match rng.randrange(9):
        case 0:
            animal, sound = rng.choice(tuple(SOUNDS.items()))
            ask = rng.choice(("What sound does {} make?", "What does {} say?"))
            return ask.format(_a(animal)), f"{_a(animal).capitalize()} says {sound}."
        case 1:
            animal, baby = rng.choice(tuple(BABIES.items()))
            ask = rng.choice(("What is a baby {} called?", "What do you call a baby {}?"))
            return ask.format(animal), f"A baby {animal} is called {baby}."
        case 2:
            animal, diet = rng.choice(tuple(DIETS.items()))
            ask = rng.choice(("What does {} eat?", "What do you feed {}?"))
            return ask.format(_a(animal)), f"{_a(animal).capitalize()} eats {diet}."
        case 3:
            animal, habitat = rng.choice(tuple(HABITATS.items()))
            return f"Where does {_a(animal)} live?", f"{_a(animal).capitalize()} lives {habitat}."
        case 4:
            animal, legs = rng.choice(tuple(LEGS.items()))
            return (
                f"How many legs does {_a(animal)} have?",
                f"{_a(animal).capitalize()} has {legs} legs.",
            )
        case 5:
            thing, colour = rng.choice(tuple(COLOURS.items()))
            word = rng.choice(("colour", "color"))
            return f"What {word} is {thing}?", f"{thing[0].upper()}{thing[1:]} is {colour}."
        case 6:
            (first, second), mixture = rng.choice(tuple(MIXTURES.items()))
            if rng.random() < 0.5:
                first, second = second, first
            ask = f"What colour do you get when you mix {first} and {second}?"
            return ask, f"When you mix {first} and {second}, you get {mixture}."
        case 7:
            word, opposite = rng.choice(tuple(OPPOSITES.items()))
            if rng.random() < 0.5:
                word, opposite = opposite, word
            return f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."
        case _:
            first_number = rng.randrange(6)
            second_number = rng.randrange(6)
            total = first_number + second_number
            if rng.random() < 0.5:
                ask = f"What is {first_number} + {second_number}?"
                return ask, f"{first_number} + {second_number} is {total}."
            words = f"{NUMBERS[first_number]} plus {NUMBERS[second_number]}"
            return f"What is {words}?", f"{words.capitalize()} is {NUMBERS[total]}."


def small_talk(rng: random.Random) -> tuple[str, str]:
    """One question or remark, and the answer to it."""
    if rng.random() < 0.5:
        return _fact(rng)
    asks, answers = rng.choice(SMALL_TALK)
    return rng.choice(asks), rng.choice(answers)
