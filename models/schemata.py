"""Story outlines: the rules that every outline shares, and one outline per kind of plot.

The outlines are written in the template language of ``grammar.py``. In every scene ``h`` is the
hero, ``f`` the friend, ``g`` a wise elder, ``o`` the thing, ``p`` the place where the story mostly
happens, and ``home`` the place where the hero lives. A schema adds frames:
sets of strings that belong together, of which one is chosen for a story, so that for instance the
fear, the moment of danger and the cure fit each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

RULES: Mapping[str, str] = {
    "opening": """[
        Once upon a time, [there was|there lived] {h.a} named {h.name}. {h.He} lived {home}.
        |Once upon a time, {h.a} named {h.name} lived {home}.
        |Once upon a time, {home}, there lived {h.a} [named|called] {h.name}.
        |Once upon a time, there was {h.a} who lived {home}. {h.His} name was {h.name}.
        |Once upon a time there was {h.a} called {h.name}, who lived {home}.
        |Long ago, {h.a} named {h.name} lived {home}.
        |There once was {h.a} named {h.name}, who lived {home}.
        |{Home}, there lived {h.a} named {h.name}.
        |{h.name} was {h.a}. {h.He} lived {home}.
        |{h.name} the {h.kind} lived {home}.
        |Not so long ago, {home}, there was {h.a} whose name was {h.name}.
        |A {young} {h.kind} named {h.name} lived {home}.
        |The little {h.kind} was called {h.name}, and {h.he} lived {home}.
        ]""",
    "one_day": """[One day|One morning|One sunny morning|One bright morning|One afternoon|
        One windy day|One spring morning|One warm summer day|One autumn day|One quiet afternoon|
        Early one morning|One fine day]""",
    "next_day": """[The next day|The next morning|The following morning|Early the next day|
        The day after that]""",
    "one_day_low": """[one day|one morning|one afternoon|one fine day|one windy day|
        early one morning]""",
    "sad": "[sad|very sad|worried|upset|so sad that {h.he} wanted to cry]",
    "glad": "[happy|very happy|so happy|full of joy|proud and happy]",
    "said": "[said|said|answered|replied]",
    "kindly": "[kindly|gently|softly|with a smile|in a warm voice]",
    "smiled": "[smiled|laughed|nodded|grinned]",
    "joy": """[jumped for joy|clapped {h.his} {h.hands}|danced in a circle|laughed out loud|
        could hardly believe it|smiled from ear to ear]""",
    "small_joy": "[a song|a warm drink|a good story|the first star|a fresh breeze|a funny riddle]",
    "meet": """[Just then, {f.a} named {f.name} came along.
        |Just then, {f.a} named {f.name} walked by.
        |At that moment, {f.name} the {f.kind} came down the path.
        |{f.name}, {f.a}, was passing by and saw {h.him}.
        |On the path {h.he} met {f.a} named {f.name}.
        |Not far away, {f.a} named {f.name} heard {h.him}.]""",
    "ask": """["What is the matter?" asked {f.name}.|"Why do you look so sad?" asked {f.name}.
        |"What happened?" {f.name} asked <kindly>.|"Are you all right?" asked {f.name}.
        |"Can I help you?" asked {f.name}.]""",
    "offer": """["Do not worry," said {f.name}. "I will help you."
        |"I will help you," said {f.name}. "Two friends can do more than one."
        |{f.name} <smiled>. "Let us try together," {f.he} said.
        |"Cheer up," said {f.name}. "We will think of something."]""",
    "elder": """[They went to see {g.name}, {g.a} who lived {g.home}.
        |At last they asked {g.name}, {g.a} who lived {g.home}.
        |{g.name}, {g.a}, was sitting {p.at} and listened to them.]""",
    "thanks": """["Thank you, {f.name}," said {h.name}. "[You are a true friend.
        |I could not have done it without you.|You are very kind.|I will never forget this.]"
        |{h.name} hugged {f.name}. "Thank you for helping me," {h.he} said.
        |"Thank you!" cried {h.name}. "[You are the best friend in the world.
        |You saved the day.|How kind you are.]"]""",
    "evening": """[That evening|That night|When the sun went down|When the stars came out|
        Before bedtime|As the moon rose]""",
    "supper": """[they ate {food} together|they shared {food}|they sat by the fire and ate {food}|
        everyone had {food} for supper]""",
    "friends_end": """[
        From that day on, {h.name} and {f.name} were the best of friends.
        |From then on, {h.name} and {f.name} [played|met|laughed] together every day.
        |<evening>, <supper> and talked about their adventure.
        |<evening>, {h.name} and {f.name} watched the stars and felt happy.
        |And so {h.name} and {f.name} became friends for life.
        |After that day, {h.name} and {f.name} did everything together.
        ]""",
    "home_end": """[
        <evening>, {h.name} [fell asleep with a smile|slept better than ever before|
        curled up in bed and dreamed of {dream}].
        |{h.name} went home, ate {food}, and dreamed of {dream}.
        |And {h.name} lived happily ever after.
        |{h.name} never forgot that day.
        |When {h.he} went to bed that night, {h.name} felt <glad>.
        ]""",
    "end": "[<friends_end>|<friends_end>|<home_end>]",
    "trait": "[{trait_line}|{trait_line}|{trait_line} {like_line}|{like_line}|]",
    "the_end": "[||||The end.]",
}


@dataclass(frozen=True)
class Schema:
    """One kind of plot: how a request may name it, what belongs together in it, and its text."""

    name: str
    topics: tuple[str, ...]
    text: str
    frames: tuple[Mapping[str, str], ...] = field(default=({},))
    traits: tuple[str, ...] = ()
    """The hero's possible traits, or empty where any trait fits the plot."""


LOST_THING = Schema(
    name="lost thing",
    topics=(
        "a {h.kind} and a lost {o.noun}",
        "a {h.kind} who loses {o.a}",
        "a lost {o.noun}",
        "a {h.kind} who is looking for {h.his} {o.noun}",
    ),
    frames=(
        {
            "spot": "hanging on a branch beside the blackberry bush",
            "clue": "picking blackberries",
            "at": "in the forest",
            "to": "into the forest",
        },
        {
            "spot": "lying in the soft grass under the apple tree",
            "clue": "resting under a tree",
            "at": "in the orchard",
            "to": "to the orchard",
        },
        {
            "spot": "resting on a flat stone near the water",
            "clue": "watching the fish",
            "at": "by the river",
            "to": "to the river",
        },
        {
            "spot": "hidden under a pile of golden leaves",
            "clue": "jumping in the leaves",
            "at": "under the big oak tree",
            "to": "to the big oak tree",
        },
        {
            "spot": "lying beside the old wooden gate",
            "clue": "talking to the sheep",
            "at": "at the farm",
            "to": "to the farm",
        },
        {
            "spot": "shining between two roots of a big tree",
            "clue": "playing hide and seek",
            "at": "in the old wood",
            "to": "to the old wood",
        },
        {
            "spot": "tucked between the flowers",
            "clue": "smelling the flowers",
            "at": "in the meadow",
            "to": "to the meadow",
        },
        {
            "spot": "stuck in the warm sand",
            "clue": "building castles of sand",
            "at": "on the beach",
            "to": "down to the beach",
        },
        {
            "spot": "lying on the bench beside the door",
            "clue": "buying bread",
            "at": "at the bakery",
            "to": "to the bakery",
        },
    ),
    text="""
    <opening> <trait>

    [{h.name} had {o.a}|{h.His} favourite thing in the world was {o.a}] [that {h.his} grandmother
    had given {h.him}|that {h.he} had got for {h.his} birthday| that {h.his} father had made|that
    {h.he} took everywhere]. <one_day>, the {o.noun} was gone! {h.name} looked [under the bed|behind
    the door|on the shelf], [inside the basket| in the garden|behind the curtain], and [under the
    table|in every corner|even in the teapot], but [it was not there|{h.he} could not find it].
    {h.He} felt <sad>.

    <meet> <ask> "I have lost my {o.noun}," said {h.name}. "[I have looked everywhere.|I do not know
    where it is. |It means so much to me.]" <offer>

    [First they looked [behind every bush|under every stone] near the house. They found [a feather|a
    shiny pebble|two snails], but no {o.noun}.|] "[Think carefully|Close your eyes and think]," said
    {f.name}. "Where did you go yesterday?" {h.name} thought for a while. "I was {at}," {h.he} said
    slowly. "I was {clue}." "Then let us look there!" said {f.name}.

    [They hurried {to}.|They ran all the way {to}.|So they went {to} together.] And there was the
    {o.name}, {spot}! {h.name} <joy>. <thanks> [{f.name} <smiled>. "[Next time, think before you
    worry|Things are easier to find with a friend]," {f.he} said.|] <end> <the_end>
    """,
)

FEAR = Schema(
    name="fear",
    topics=(
        "a {h.kind} who is afraid of {fear}",
        "being brave",
        "a {h.kind} who learns to be brave",
        "a {h.kind} who is scared of {fear}",
    ),
    traits=("shy", "quiet", "gentle", "kind", "careful", "dreamy", "thoughtful"),
    frames=(
        {
            "fear": "the dark",
            "when": "When the sun went down, {h.he} hid under the blanket and left a candle "
            "burning",
            "advice": "The dark is only the world closing its eyes. Look up, and you will see that "
            "the stars come out only when it is dark",
            "without": "sparrow",
            "danger": "a baby bird fell out of its nest and cried in the dark",
            "act": "walked into the dark, one small step after another, until {h.he} found the "
            "bird and put it back into its nest",
            "after": "looked up at a thousand stars. The dark was not so bad at all",
        },
        {
            "fear": "thunder",
            "when": "Every time the sky rumbled, {h.he} put {h.his} {h.hands} over {h.his} ears",
            "advice": "Thunder is only the clouds bumping into each other. Count slowly, and each "
            "time it will be farther away",
            "without": "mouse",
            "danger": "a storm came, and a tiny mouse stood outside, wet and shaking",
            "act": "ran out into the rain, counting aloud, and carried the mouse inside",
            "after": "counted the thunder together with the mouse until the storm was gone",
        },
        {
            "fear": "deep water",
            "without": "duck frog penguin otter beaver",
            "when": "When the others swam in the lake, {h.he} stayed on the shore and watched",
            "advice": "You do not have to begin with the deep water. Begin with one {h.hand}, then "
            "go a little farther every day",
            "danger": "a small duckling was caught in the reeds and called for help",
            "act": "stepped into the cool water, took a deep breath, and paddled to the duckling",
            "after": "splashed in the lake and laughed. The water was {h.his} friend now",
        },
        {
            "fear": "high places",
            "when": "When the others climbed the hill, {h.he} stayed at the bottom and felt dizzy",
            "advice": "Do not look down at what is behind you. Look at the next step, and only at "
            "the next step",
            "without": "goat",
            "danger": "a little kid goat was stuck on a high rock and could not get down",
            "act": "climbed from stone to stone, looking only at the next step, and led the little "
            "goat safely down",
            "after": "sat on top of the hill and looked out over the whole valley",
        },
        {
            "fear": "the old bridge",
            "when": "The bridge creaked and swayed, and {h.he} never dared to cross it",
            "advice": "A bridge is a path like any other. Hold the rope, sing a song, and keep "
            "walking",
            "without": "lamb",
            "danger": "a lost lamb stood crying on the other side of the river",
            "act": "held the rope, sang a brave song, and walked across to bring the lamb home",
            "after": "crossed the bridge three more times, just because it was fun",
        },
        {
            "fear": "strangers",
            "when": "When somebody new came by, {h.he} hid behind a tree",
            "advice": "A stranger is only a friend whose name you do not know yet. Begin with one "
            "small word",
            "danger": "a tired traveller lost the way and sat down under a tree",
            "act": "stepped out from behind the tree, said hello in a small voice, and showed the "
            "traveller the way",
            "after": "waved until the traveller was out of sight. It had been easy to say hello",
        },
    ),
    text="""
    <opening> <trait>

    {h.name} was afraid of one thing: {fear}. {when}. The others did not [laugh at {h.him}|tease
    {h.him}], but {h.name} felt [ashamed|small|a little sad]. "I wish I were brave," {h.he} [sighed|
    whispered|said].

    [<one_day>, {h.he} told {h.his} friend {f.name}, {f.a}, about it. {f.name} listened. "Everybody
    is afraid of something," {f.he} said. "[I am afraid of spiders.| Even bears are afraid of
    bees.|Even I am afraid sometimes.] {advice}." |<one_day>, {h.he} went to {g.name}, {g.a} who
    lived {g.home}. "How can I become brave?" {h.he} asked. "Being brave does not mean that you are
    never afraid," said {g.name}. "{advice}." {h.name} told this to {f.name}, {h.his} friend, {f.a},
    and they both thought about it.]

    [A few days later|Not long after that|The next evening|One week later], {danger}. {f.name} was
    too far away to help. {h.name}'s heart [beat fast|was pounding], but {h.he} remembered the kind
    words. {h.He} {act}.

    "You did it!" cried {f.name}, [who had come running|out of breath]. "You were so brave!" "I was
    afraid the whole time," said {h.name}. "[That is what being brave means|Then you were even
    braver]," <said> {f.name}. That night {h.name} {after}. [{h.He} felt <glad>.|] <the_end>
    """,
)

LEARNING = Schema(
    name="learning",
    topics=(
        "a {h.kind} who learns to {skill}",
        "a {h.kind} who wants to {skill}",
        "learning something new",
        "never giving up",
        "a {h.kind} who practises every day",
    ),
    frames=(
        {
            "skill": "swim",
            "without": "duck frog penguin otter beaver",
            "place": "at the pond",
            "fail": "{h.he} swallowed water and sank like a stone",
            "tip": "Kick slowly and keep your nose above the water",
            "better": "{h.he} could float for a little while",
            "win": "{h.he} swam all the way across the pond and back again",
        },
        {
            "skill": "whistle",
            "place": "on the garden wall",
            "fail": "only air came out",
            "tip": "Make your mouth round and blow as softly as the wind",
            "better": "a tiny squeak came out",
            "win": "{h.he} whistled a clear, bright tune, and the birds sang along",
        },
        {
            "skill": "skate",
            "place": "on the frozen lake",
            "fail": "{h.he} slipped and sat down hard on the ice",
            "tip": "Bend your knees and look where you want to go",
            "better": "{h.he} could glide for three whole steps",
            "win": "{h.he} glided across the lake like a leaf on the wind",
        },
        {
            "skill": "bake bread",
            "place": "in the kitchen",
            "fail": "the bread came out as flat as a stone",
            "tip": "Let the dough rest in a warm place, and do not hurry it",
            "better": "the bread rose a little and smelled sweet",
            "win": "{h.he} took a round, golden loaf out of the oven, and everyone wanted a slice",
        },
        {
            "skill": "play the flute",
            "place": "under the willow tree",
            "fail": "the flute squealed so loudly that the birds flew away",
            "tip": "Breathe slowly and play one note at a time",
            "better": "{h.he} could play three notes in a row",
            "win": "{h.he} played a sweet song, and everyone stopped to listen",
        },
        {
            "skill": "ride a bicycle",
            "place": "on the path by the mill",
            "fail": "{h.he} wobbled and fell into the tall grass",
            "tip": "Look ahead, not down at the wheel, and keep moving",
            "better": "{h.he} could ride as far as the fence",
            "win": "{h.he} rode all the way around the mill without falling once",
        },
        {
            "skill": "paint",
            "place": "at the big table",
            "fail": "all the colours ran together and turned brown",
            "tip": "Wait until one colour is dry before you begin with the next",
            "better": "{h.he} painted a tree that looked almost like a tree",
            "win": "{h.he} painted the hills at sunset, and everyone thought it was beautiful",
        },
        {
            "skill": "read",
            "place": "in the old library",
            "fail": "the letters danced in front of {h.his} eyes",
            "tip": "Say each letter aloud, and then say them together",
            "better": "{h.he} could read the words sun, cat and tree",
            "win": "{h.he} read a whole story aloud, from the first word to the last",
        },
    ),
    text="""
    <opening> <trait>

    More than anything, {h.name} wanted to learn to {skill}. [All {h.his} friends could do it.|
    {h.He} had seen {f.name}, {f.a}, do it, and it looked so easy.|{h.He} dreamed about it every
    night.] <one_day>, {h.he} tried it for the first time {place}, but {fail}. {h.He} tried again,
    and again it went wrong. "I will never learn to {skill}," {h.he} [sighed|said sadly|cried].

    {f.name} the {f.kind} [had been watching|sat down next to {h.him}]. "[It took me a long time to
    learn it|Nobody can do it on the first day|I made many mistakes, too]," {f.he} <said> <kindly>.
    "{tip}. And then try again tomorrow." "[Will you help me?|Do you think I can do it?]" asked
    {h.name}. "Of course," <said> {f.name}.

    So {h.name} practised every day. On the second day, {h.he} still made mistakes. On the
    [third|fourth|fifth] day, {better}. "[I am getting better!|Look at me!|It works!]" {h.he}
    shouted. [It was hard work, but {h.he} did not give up.|Some days were hard, but {f.name} always
    cheered for {h.him}.] {h.He} kept on trying, even when it rained.

    [At the end of the month|After many days|Then one day], {win}. {h.name} <joy>. "[I knew you
    could do it|You never gave up|Look what you have learned]," said {f.name}. [{h.name} had learned
    that practice makes hard things easy.|"The secret is to try one more time," said {h.name}.|Now
    {h.name} teaches the little ones, and {h.he} always tells them not to give up.] <end> <the_end>
    """,
)

SHARING = Schema(
    name="sharing",
    topics=(
        "sharing",
        "a {h.kind} who learns to share",
        "a {h.kind} who shares {h.his} {treat}",
        "a hungry {f.kind}",
        "a {h.kind} and a hungry {f.kind}",
    ),
    frames=(
        {"treat": "berries", "where": "a basket of sweet berries", "made": "a big berry pie"},
        {"treat": "apples", "where": "a sack of red apples", "made": "a warm apple cake"},
        {"treat": "nuts", "where": "a pile of crunchy nuts", "made": "a sweet nut cake"},
        {"treat": "carrots", "where": "a bundle of orange carrots", "made": "a big pot of soup"},
        {"treat": "honey", "where": "a large jar of golden honey", "made": "honey cakes"},
        {"treat": "pears", "where": "a bowl of yellow pears", "made": "a pear tart"},
        {"treat": "plums", "where": "a bucket of ripe plums", "made": "sweet plum jam"},
    ),
    text="""
    <opening> <trait>

    <one_day>, {h.name} [found|brought home|was given] {where}. "[All of this is mine|I will keep
    all of it for myself|Nobody else will get any of it]," {h.he} thought, and {h.he} hid the
    {treat} [under the bed|behind a big stone|in a secret corner].

    Soon there was a knock at the door. It was {f.name}, {f.a}. "I am so hungry," said {f.name}.
    "[Do you have something to eat?|I have not eaten since yesterday.|Could you give me a little
    food?]" {h.name} looked at the floor. "No, I have nothing," {h.he} said. {f.name} nodded sadly
    and went away.

    {h.name} sat down to eat the {treat}, but they did not taste good. {h.He} [kept thinking
    of|could not forget] {f.name}'s sad face. "[What good is it to eat alone?|I told a lie, and
    {f.name} is still hungry,|That was not kind of me,]" {h.he} said to {h.himself}. {h.He} picked
    up the {treat} and ran {p.to}, where {f.name} was sitting all alone.

    "I am sorry," said {h.name}. "I did have {treat}, and I want to share them with you." {f.name}'s
    eyes [lit up|grew wide|shone]. "Thank you!" {f.he} said. "[I know how to cook.|My mother taught
    me something.|I have some flour and butter.] Let us make something out of them!" Together they
    made {made}, and [it was enough for everybody|they invited all the neighbours|it was the best
    thing {h.name} had ever tasted]. [{h.name} learned that food tastes better when it is
    shared.|"Everything tastes better with a friend," said {h.name}.|{h.name} had less than before,
    but {h.he} felt much richer.] <friends_end> <the_end>
    """,
)

STORM = Schema(
    name="storm",
    topics=(
        "a storm",
        "a {h.kind} in a storm",
        "a {h.kind} who helps {h.his} neighbours",
        "a {h.kind} with a small house",
        "a rainy night",
    ),
    frames=(
        {
            "weather": "rain",
            "without": "princess prince dragon",
            "sky": "Dark clouds covered the sky, and it began to rain hard",
        },
        {
            "weather": "snow",
            "without": "princess prince dragon",
            "sky": "Thick snow began to fall, and an icy wind blew",
        },
        {
            "weather": "wind",
            "without": "princess prince dragon",
            "sky": "The wind howled, and the branches bent and cracked",
        },
    ),
    text="""
    <opening> <trait> {h.His} house was [very small|tiny], with [one bed, one chair, and one warm
    stove|a round door and a little chimney|just enough room for one].

    One night, a great storm came. {sky}. {h.name} [lit the lamp|closed the shutters|put a log on
    the fire] and was glad to be inside. Then {h.he} heard a knock. {f.name}, {f.a}, stood outside
    in the {weather}. "[My house was blown away|I cannot find my way home|My roof is broken]," said
    {f.name}. "May I come in?" "[Of course|Come in, come in|Quickly, come inside]," said {h.name}.

    They had hardly closed the door when there was another knock. It was {g.name}, {g.a}. "Is there
    room for one more?" {g.he} asked. {h.name} looked around. [The house was small, but the night
    was cold.|There was not much room, but nobody should be out in such a storm.] "[There is always
    room for a friend|If we sit close together, there is room]," {h.he} said.

    {h.name} made {food}, and they all sat around the fire. {g.name} told stories of [long ago|the
    sea| the days when {g.he} was young], and {f.name} sang. [Nobody was cold, and nobody was
    afraid.| Outside the storm roared, but inside it was warm.|They laughed so much that they forgot
    the storm.]

    In the morning, the sun was shining. "[You gave us a warm place|You were so kind to us]," said
    {f.name}. "Now we want to do something for you." Together they [built a second room for
    {h.name}'s house|fixed the fence and planted new flowers|made a long bench, so that there would
    always be room for guests]. {h.name} was <glad>. [A small house with friends in it is bigger
    than a castle.|"My house is small," {h.he} said, "but it has room for all of
    you."|<friends_end>] <the_end>
    """,
)

WAY_HOME = Schema(
    name="way home",
    topics=(
        "a {h.kind} who gets lost",
        "a {h.kind} who cannot find the way home",
        "a {h.kind} who follows a {lure}",
        "finding the way home",
        "a lost {h.kind}",
    ),
    frames=(
        {
            "lure": "butterfly",
            "did": "a blue butterfly danced past",
            "near": "hear a little stream",
            "hint": "the stream",
        },
        {
            "lure": "rainbow",
            "did": "a bright rainbow appeared in the sky",
            "near": "hear the bells of the village",
            "hint": "the sound of the bells",
        },
        {
            "lure": "firefly",
            "did": "a small firefly blinked in the bushes",
            "near": "see the windmill on the hill",
            "hint": "the road to the windmill",
        },
        {
            "lure": "balloon",
            "did": "a red balloon floated by",
            "near": "hear a little stream",
            "hint": "the stream",
        },
        {
            "lure": "feather",
            "did": "a white feather sailed on the wind",
            "near": "hear the bells of the village",
            "hint": "the sound of the bells",
        },
        {
            "lure": "leaf",
            "did": "a golden leaf whirled through the air",
            "near": "see the windmill on the hill",
            "hint": "the road to the windmill",
        },
    ),
    text="""
    <opening> <trait> "[Do not go too far|Stay close to home]," {h.his} mother always said.

    <one_day>, {did}. "How beautiful!" cried {h.name}, and {h.he} ran after the {lure}. {h.He} ran
    [over the hill and through the trees|past the mill and over the bridge|through the tall grass
    and into the woods]. When {h.he} finally stopped, the {lure} was gone, and {h.he} did not know
    where {h.he} was. [Everything looked strange.|All the trees looked the same.|There was no path
    at all.] "[Oh no|Oh dear]," said {h.name}. "How will I get home?"

    {h.He} sat down on a [log|stone] and [began to cry|tried not to cry]. Then {h.he} heard a voice.
    "Why are you sitting there?" It was {f.name}, {f.a}. "I am lost," said {h.name}. "I followed a
    {lure}, and now I cannot find my way home." "[I know these woods well|I have lived here all my
    life|I was lost here once, too]," said {f.name}. "What can you [see or hear|remember] near your
    home?"

    {h.name} [thought hard|closed {h.his} eyes]. "Near my home, you can always {near}," {h.he} said.
    "[Good!|That helps!|Wonderful!]" said {f.name}. "Then we only have to follow {hint}." So they
    followed {hint} [step by step|for a long while], and {f.name} told {h.him} [funny stories|the
    names of all the trees|riddles] on the way, so that {h.name} forgot to be afraid.

    At last, {h.name} saw [a light in the window|smoke from the chimney|the garden gate]. [{h.His}
    mother came running and hugged {h.him} tightly.|"There you are!" cried {h.his} mother, and she
    held {h.him} close.] "[I will not run off again without telling you|I am sorry that I went so
    far]," said {h.name}. {h.His} mother thanked {f.name} and gave {f.him} {food}.
    [<friends_end>|{f.name} came to visit every week after that.|And the next time {h.name} wanted
    to explore, {h.he} took {f.name} along.] <the_end>
    """,
)

NEW_NEIGHBOUR = Schema(
    name="new neighbour",
    topics=(
        "a new friend",
        "a {h.kind} who makes a new friend",
        "a shy {f.kind}",
        "friendship",
        "a {h.kind} and a {f.kind}",
        "a new neighbour",
    ),
    frames=(
        {"game": "hide and seek", "bring": "a basket of muffins"},
        {"game": "a game of catch", "bring": "a bunch of wild flowers"},
        {"game": "pirates", "bring": "a jar of jam"},
        {"game": "jumping over puddles", "bring": "a warm loaf of bread"},
        {"game": "building castles of sand", "bring": "a drawing of a rainbow"},
        {"game": "guessing riddles", "bring": "a pot of soup"},
    ),
    text="""
    <opening> <trait>

    <one_day>, a new neighbour moved in next door. It was {f.name}, {f.a}. Everybody wanted to meet
    {f.him}, but {f.name} [hid behind the curtain|did not come out|only peeked through the window].
    "[Perhaps {f.he} does not like us|{f.He} must be very proud]," said the others, and they went
    away. {h.name} was not so sure. "[Maybe {f.he} is only shy|Maybe {f.he} misses {f.his} old
    home]," {h.he} thought.

    <next_day>, {h.name} put {bring} in front of {f.name}'s door, knocked, and [waited a few steps
    away| sat down on the grass]. The door opened a little. Two eyes looked out. "Is this for me?"
    asked {f.name} in a [tiny|quiet|small] voice. "Yes," said {h.name}. "Welcome! My name is
    {h.name}. You do not have to talk if you do not want to." {f.name} took the gift and smiled a
    very small smile.

    The day after that, {h.name} came again, and this time they sat [side by side|together on the
    step] and [watched the clouds|listened to the birds|counted the bees]. On the third day,
    {f.name} asked, "Do you know how to play {game}?" "[It is my favourite game!|I love that!|No,
    but you can teach me!]" said {h.name}. They spent the whole afternoon playing {game}, and
    {f.name} laughed [louder than anyone|until {f.his} belly hurt].

    "At first I was afraid that nobody would like me," said {f.name}. "[Everybody is a little afraid
    in a new place|I like you just the way you are]," said {h.name}. Soon {f.name} knew all the
    others, too. [Sometimes a friendship needs a little time, like a seed that grows under the
    ground.|A small kindness had opened a big door.|<friends_end>] <the_end>
    """,
)

TRUTH = Schema(
    name="truth",
    topics=(
        "telling the truth",
        "a {h.kind} who breaks {broken}",
        "honesty",
        "a {h.kind} who tells the truth",
        "a {h.kind} who makes a mistake",
    ),
    frames=(
        {"broken": "a vase", "thing": "vase", "fix": "glued the pieces together one by one"},
        {"broken": "a window", "thing": "window", "fix": "put in a new piece of glass"},
        {"broken": "a teapot", "thing": "teapot", "fix": "glued the handle back on"},
        {"broken": "a clock", "thing": "clock", "fix": "put all the little wheels back in place"},
        {"broken": "a chair", "thing": "chair", "fix": "carved a new leg out of wood"},
        {"broken": "a mirror", "thing": "mirror", "fix": "put a new glass into the old frame"},
    ),
    text="""
    <opening> <trait>

    <one_day>, {h.name} was [playing with a ball|dancing|running around] in the house of {g.name},
    {g.a}. [{g.name} had told {h.him} to be careful, but {h.he} forgot.|{h.He} was having so much
    fun that {h.he} did not look around.] Crash! {g.name}'s favourite {thing} was broken. {h.name}
    stood very still. [{h.His} face grew hot.|{h.His} heart beat fast.] Nobody had seen it.

    "[I could say that the wind did it|I could hide the pieces|I could just run away]," thought
    {h.name}. {h.He} [went outside|ran {p.to}] and met {h.his} friend {f.name}, {f.a}. "You look
    pale," said {f.name}. "What is wrong?" {h.name} told {f.him} everything. "[What should I do?|I
    am so afraid that {g.name} will be angry.]" {f.name} thought for a moment. "[A lie is like a
    stone in your shoe|A secret like that gets heavier every day]," {f.he} said. "[If you tell the
    truth, you can walk freely again.|Tell the truth, and it will be light again.] I will come with
    you."

    So they went back together. {g.name} was [looking at the broken {thing}|just coming home].
    "{g.name}," said {h.name}, and {h.his} voice shook, "I broke your {thing}. I was not careful. I
    am very sorry." It was quiet for a moment. Then {g.name} [sighed|put down {g.his} hat]. "I am
    sad about my {thing}," {g.he} said. "But I am glad that you told me the truth. That was
    [hard|brave]."

    "[I want to make it right|Let me help to repair it]," said {h.name}. All afternoon the three of
    them worked, and they {fix}. [It did not look quite like before, but {g.name} liked it even
    better.|When it was done, {g.name} smiled.] [{h.name} felt as light as a feather.|"A thing can
    be repaired," said {g.name}, "and trust can, too."|On the way home, {h.name} felt <glad>.]
    <home_end> <the_end>
    """,
)

GARDEN = Schema(
    name="garden",
    topics=(
        "a {h.kind} who plants a seed",
        "a garden",
        "being patient",
        "a {h.kind} and {h.his} garden",
        "a {h.kind} who grows {plant}",
    ),
    traits=("cheerful", "playful", "lively", "merry", "hopeful", "busy", "curious"),
    frames=(
        {"plant": "a sunflower", "grown": "a sunflower as tall as the roof", "top": "golden"},
        {"plant": "a pumpkin", "grown": "a pumpkin as big as a chair", "top": "orange"},
        {"plant": "a rose bush", "grown": "a bush full of red roses", "top": "red"},
        {"plant": "a bean plant", "grown": "a bean plant that reached the window", "top": "green"},
        {"plant": "a strawberry plant", "grown": "a row of sweet strawberries", "top": "red"},
        {
            "plant": "a little apple tree",
            "grown": "a slim tree with white blossoms",
            "top": "white",
        },
    ),
    text="""
    <opening> <trait>

    <one_day>, {h.name} [found a tiny seed {p.at}|got a tiny seed from {g.name}, {g.a}]. "[What will
    it become?|What is hiding inside?]" {h.he} wondered. {h.He} dug a small hole in the garden, put
    the seed in, and [covered it with soft earth|patted the earth flat]. Then {h.he} sat down and
    waited. Nothing happened. {h.He} waited until [noon|supper|it was dark]. Still nothing happened.

    <next_day>, {h.name} ran into the garden. There was only brown earth. "[Grow, little seed!|Hurry
    up!]" {h.he} called. {h.He} wanted to dig it up and look. [Luckily|Just then], {f.name} the
    {f.kind} came by. "Stop!" said {f.name}. "[A seed is shy and works in secret|A seed needs time].
    Give it water, give it sun, and [let it sleep|leave it in peace]."

    So every morning {h.name} [watered|brought water to] the seed, and every evening {h.he} [told it
    a story|sang it a song|wished it good night]. {f.name} helped to [pull the weeds|keep the snails
    away]. Days went by. It was hard to wait. Then, [one morning after the rain|at the end of the
    second week], there was a tiny green tip. "[It is growing!|Look, look!]" shouted {h.name}, and
    {h.he} <joy>.

    The plant grew and grew. By the end of the summer, there stood {grown}, {top} in the sun. [All
    the neighbours came to see it.|The bees came to visit, and the birds did, too.] "How did you do
    it?" they asked. "I did very little," said {h.name}. "[I gave it water, and I waited|The seed
    did the work, and I learned to be patient]." [{h.name} and {f.name} kept the new seeds for the
    next spring.|{h.name} gave a seed to every neighbour.|<end>] <the_end>
    """,
)

RACE = Schema(
    name="race",
    topics=(
        "a race",
        "a {h.kind} who wants to win a race",
        "a {h.kind} and a {f.kind} who race each other",
        "winning and losing",
        "a great race",
    ),
    frames=(
        {"prize": "a golden cup", "trouble": "had fallen and hurt {f.his} leg"},
        {"prize": "a big chocolate cake", "trouble": "had slipped into the mud and was stuck"},
        {"prize": "a silver medal", "trouble": "was caught in a thorn bush"},
        {"prize": "a crown of flowers", "trouble": "had stumbled over a root and could not get up"},
    ),
    text="""
    <opening> <trait> {h.He} loved to run, and {h.he} was [very fast|the fastest of all {h.his}
    friends].

    <one_day>, there was a great race [from the mill to the old bridge|around the lake|{p.to}]. The
    prize was {prize}. "I am going to win," said {h.name}. [{h.He} had practised for weeks.|{h.He}
    already knew where to put the prize.] Next to {h.him} stood {f.name}, {f.a}. "[Good luck|May the
    best one win]," said {f.name} with a smile. {g.name}, {g.a}, [raised a flag|blew a
    whistle|counted to three], and they were off!

    {h.name} and {f.name} were soon ahead of all the others. [They ran past the meadow and over the
    hill.| They ran side by side, and the wind whistled in their ears.] Then, suddenly, {h.name}
    heard a cry. {h.He} turned around. {f.name} {trouble}. {h.name} could already see the finish.
    [It was only a few steps away.|If {h.he} kept running, {h.he} would win.] But {f.name} looked so
    [sad|helpless].

    {h.name} [stopped|did not think for long]. {h.He} ran back. "[Take hold of me|Lean on me|I will
    help you]," {h.he} said. "But the prize!" said {f.name}. "You will lose!" "[You are more
    important than a prize|A prize is only a prize, but you are my friend]," <said> {h.name}.
    Together they went on, slowly, step by step, while the others ran past them. They were the very
    last to cross the line.

    And yet everyone cheered louder for them than for the winner. "[There are many ways to
    win|Whoever helps a friend has already won]," said {g.name}. [The winner shared {prize} with
    them.|The winner came and shook their {h.hands}.|{h.name} had no prize, but {h.he} had a friend,
    and that was better.] <friends_end> <the_end>
    """,
)

SMALL_RESCUE = Schema(
    name="small rescue",
    topics=(
        "a {h.kind} who helps a {tiny}",
        "a {h.kind} and a {tiny}",
        "a small helper",
        "kindness that comes back",
        "a {tiny} who helps a {h.kind}",
    ),
    frames=(
        {
            "tiny": "bee",
            "stuck": "had fallen into a puddle and could not fly",
            "save": "held out a leaf, and the bee climbed up and dried its wings",
            "trouble": "{h.name} was caught in a fog so thick that {h.he} could not see the path",
            "help": "flew ahead and hummed, and {h.name} followed the sound all the way home",
        },
        {
            "tiny": "ant",
            "stuck": "was being swept away by the stream",
            "save": "dropped a twig into the water, and the ant climbed onto it",
            "trouble": "{h.name} was caught in an old net and could not move",
            "help": "called a hundred other ants, and together they bit through the net",
        },
        {
            "tiny": "beetle",
            "stuck": "was lying on its back with its legs in the air",
            "save": "turned it over with a blade of grass",
            "trouble": "{h.name} dropped {h.his} only key into a narrow crack",
            "help": "crawled into the crack and pushed the key out again",
        },
        {
            "tiny": "spider",
            "stuck": "was shivering because the wind had torn its web",
            "save": "carried it to a dry corner and let it build a new web",
            "trouble": "{h.name} tore {h.his} warm coat just before the winter",
            "help": "spun a strong silver thread and sewed the coat all night",
        },
        {
            "tiny": "moth",
            "stuck": "was shut up in a glass jar",
            "save": "opened the lid and let it fly out",
            "trouble": "{h.name}'s lamp went out in the middle of a dark wood",
            "help": "called its friends the fireflies, and they lit the whole path",
        },
        {
            "tiny": "snail",
            "stuck": "was lying in the middle of the road, where the carts went by",
            "save": "carried it safely to the other side",
            "trouble": "{h.name} could not find fresh leaves for {h.his} sick grandmother's tea",
            "help": "showed {h.him} a hidden place where the best leaves grew",
        },
    ),
    text="""
    <opening> <trait>

    <one_day>, {h.name} was walking {p.along} when {h.he} heard a very small voice. "Help! Please
    help me!" {h.He} [looked around|bent down]. A tiny {tiny} {stuck}. [Others had walked by without
    looking.|It was hardly bigger than a seed.] "[Hold on|Do not be afraid]," said {h.name}. {h.He}
    {save}.

    "Thank you!" said the {tiny}. "One day I will help you, too." {f.name} the {f.kind}, who was
    standing nearby, [laughed|shook {f.his} head]. "[How could such a tiny {tiny} ever help
    anybody?|You are so big, and it is so small!]" {f.he} said. {h.name} only smiled. "[I did not
    help it to get something back|It was in trouble, and that is enough for me]," {h.he} said.

    [Weeks went by.|Summer went, and autumn came.|Some time later, nobody thought of it any more.]
    Then one day {trouble}. {h.name} called for help. {f.name} came running, but {f.he} did not know
    what to do. [They had almost given up hope|Both of them were very worried], when they heard a
    very small voice. "I have not forgotten you," it said. It was the {tiny}! It {help}.

    {h.name} <joy>. "Thank you, little {tiny}," {h.he} said. {f.name} [blushed|looked at the
    ground]. "I was wrong," {f.he} said. "[Even the smallest friend can be a great help|Nobody is
    too small to help]." [From then on, {f.name} said hello to every {tiny} {f.he} met.|And the
    three of them sat down and shared {food}.|<home_end>] <the_end>
    """,
)

MYSTERY = Schema(
    name="mystery",
    topics=(
        "a strange noise",
        "a mystery",
        "a {h.kind} who hears a strange noise",
        "a {h.kind} and a {f.kind} who solve a mystery",
        "a noise in the night",
    ),
    traits=("curious", "brave", "clever", "lively", "careful", "cheerful"),
    frames=(
        {
            "sound": "tap, tap, tap",
            "cause": "a loose shutter that knocked in the wind",
            "end": "tied it",
        },
        {"sound": "drip, drop, drip", "cause": "a leaky bucket on the roof", "end": "mended it"},
        {"sound": "squeak, squeak, squeak", "cause": "a rusty weathercock", "end": "oiled it"},
        {
            "sound": "jingle, jingle",
            "without": "kitten cat",
            "cause": "a tiny bell on a lost kitten",
            "end": "took it home",
        },
        {
            "sound": "whoo, whoo",
            "cause": "an empty bottle in which the wind was singing",
            "end": "kept it",
        },
        {
            "sound": "scratch, scratch",
            "without": "hedgehog",
            "cause": "a baby hedgehog in a flower pot",
            "end": "set it free",
        },
    ),
    text="""
    <opening> <trait>

    One [dark|cold|windy] night, {h.name} woke up. There was a strange noise: {sound}. {h.He} pulled
    the blanket up to {h.his} nose. "[What can that be?|Who is there?]" {h.he} whispered. Nobody
    answered, but the noise came again: {sound}. In the morning it was gone. {h.name} told {f.name},
    {f.a}, about it. "[Perhaps it is a ghost|It must be a monster|Maybe it is a dragon]," said
    {f.name} with big eyes. "[I do not believe in that|I want to find out]," said {h.name}. "Will
    you help me tonight?"

    [They asked everyone in the neighbourhood first.|They looked for tracks all day.] {g.name},
    {g.a}, had heard it, too. "[It comes when the wind blows|It always comes after midnight],"
    {g.he} said. "[A good detective listens first and is frightened later.|Listen well, and do not
    be afraid.]"

    That night, {h.name} and {f.name} waited with a lantern. [The clock struck twelve.|An owl
    called.] Then they heard it: {sound}! {f.name} [took {h.name} by the {h.hand}|trembled]. "Come,"
    whispered {h.name}. They crept [up the stairs|around the house|along the wall], closer and
    closer. {h.name} took a deep breath and lifted the lantern. And what did they see? It was only
    {cause}!

    They looked at each other and [laughed until they had tears in their eyes|began to giggle]. "[So
    much fear for such a small thing|What a terrible monster]!" said {f.name}. They {end}, and after
    that, the nights were quiet. [{h.name} had learned that most scary things are small when you
    shine a light on them.|"Next time we hear something strange, we will go and look," said
    {h.name}.|<friends_end>] <the_end>
    """,
)

BIRTHDAY = Schema(
    name="birthday",
    topics=(
        "a birthday",
        "a birthday present",
        "a {h.kind} who looks for a present",
        "a {f.kind}'s birthday",
        "a surprise party",
    ),
    frames=(
        {
            "without": "princess prince",
            "gift": "a chain of shells",
            "part": "shells",
            "from": "on the beach",
        },
        {
            "without": "princess prince",
            "gift": "a picture made of dried flowers",
            "part": "flowers",
            "from": "in the meadow",
        },
        {
            "without": "princess prince",
            "gift": "a small wooden boat",
            "part": "pieces of wood",
            "from": "under the trees",
        },
        {
            "without": "princess prince",
            "gift": "a soft pillow filled with feathers",
            "part": "feathers",
            "from": "along the path",
        },
        {
            "without": "princess prince",
            "gift": "a lantern made of coloured paper",
            "part": "scraps of paper",
            "from": "at home",
        },
        {
            "without": "princess prince",
            "gift": "a song written just for {f.him}",
            "part": "the right words",
            "from": "everywhere",
        },
    ),
    text="""
    <opening> <trait> {h.His} best friend was {f.name}, {f.a}.

    Tomorrow was {f.name}'s birthday, and {h.name} did not have a present yet. {h.He} [looked into
    {h.his} purse| counted {h.his} coins]. There was only one small coin. At the market, {h.he} saw
    [a silk hat|a shiny drum|a big toy ship], but it cost much more than that. "[I cannot buy
    anything|One coin is not enough]," sighed {h.name}. {h.He} felt <sad>.

    On the way home, {h.he} met {g.name}, {g.a}. "Why such a long face?" asked {g.name}. {h.name}
    explained everything. {g.name} [smiled|chuckled]. "[The best presents cannot be bought|Good
    presents do not need money]," {g.he} said. "[They are made with time and love.|What do you think
    would make {f.name} smile?]" {h.name} thought about it, and suddenly {h.he} had an idea.

    {h.He} looked for {part} {from}. Then {h.he} sat down and worked [until late at night|the whole
    evening]. [Twice something went wrong, and twice {h.he} began again.|{h.His} eyes were tired,
    but {h.he} did not stop.] When the sun came up, it was finished: {gift}.

    At the party, there were [big boxes|many presents] on the table. {h.name} [was a little shy|held
    {h.his} gift behind {h.his} back]. "It is not very big," {h.he} said. {f.name} looked at it for
    a long time. "You made this for me?" {f.he} asked. "[It is the most beautiful present of all!|I
    will keep it forever!|Nobody else in the world has one like it!]" {h.name} was <glad>. Then
    everyone [sang|danced] and ate {food}. [And of all the presents, {f.name} loved that one the
    most.|<friends_end>] <the_end>
    """,
)

BUILDING = Schema(
    name="building",
    topics=(
        "a {h.kind} who builds {build}",
        "working together",
        "a {h.kind} and a {f.kind} who build {build}",
        "building {build}",
        "teamwork",
    ),
    traits=("clever", "busy", "cheerful", "hopeful", "lively", "curious", "patient"),
    frames=(
        {
            "build": "a boat",
            "dream": "sail to the little island in the lake",
            "fail": "water came in through a hole, and the boat sank",
            "idea": "close the cracks with sticky sap from the trees",
            "win": "the boat floated like a swan, and they sailed to the island",
        },
        {
            "build": "a bridge",
            "dream": "visit the friends on the other side of the stream",
            "fail": "the logs rolled away and splashed into the stream",
            "idea": "tie the logs together with strong ropes",
            "win": "the bridge stood firm, and everyone walked across it",
        },
        {
            "build": "a kite",
            "dream": "have the highest kite in the whole valley",
            "fail": "the kite spun around and crashed into a bush",
            "idea": "give it a long tail, so that it stays straight",
            "win": "the kite climbed higher and higher until it was only a dot in the sky",
        },
        {
            "build": "a tree house",
            "dream": "sleep close to the stars",
            "fail": "the floor tilted, and everything slid to the ground",
            "idea": "put a strong beam under each corner",
            "win": "the tree house was steady, and they slept in it that very night",
        },
        {
            "build": "a windmill",
            "dream": "grind flour for everyone in the valley",
            "fail": "the sails did not turn at all",
            "idea": "make the sails wider and turn them towards the wind",
            "win": "the sails turned, and soon there was flour for everyone",
        },
        {
            "build": "a snow castle",
            "dream": "have a castle like a real king",
            "fail": "the tower leaned over and fell down",
            "idea": "make the walls thick at the bottom and thin at the top",
            "win": "the tower stood tall and sparkled in the winter sun",
        },
    ),
    text="""
    <opening> <trait>

    {h.name} had a plan: {h.he} wanted to build {build}. "Then I can {dream}!" {h.he}
    [said|explained to everyone]. <one_day>, {h.he} began. {h.He} [collected everything {h.he}
    needed|drew a plan on a big sheet of paper] and worked all day. {f.name}, {f.a}, came by. "May I
    help?" asked {f.name}. "No, thank you," said {h.name}. "[I can do it alone|I do not need any
    help]."

    When it was ready, {h.name} [called everyone to watch|took a step back and was proud]. But
    {fail}. {h.name} [threw {h.his} hat on the ground|sat down with a sigh]. "[All that work for
    nothing!|I will never build anything again!]" {h.he} said.

    {f.name} did not laugh. {f.He} [looked at everything closely|walked around it once]. "It was a
    good try," {f.he} said. "[I have an idea.|Do you know what we could do?] We could {idea}."
    {h.name} [was quiet for a moment|thought about it]. "That is clever," {h.he} said at last. "[I
    am sorry that I did not let you help. |I should have asked you before.] Shall we do it
    together?" "[Gladly|Yes, let us begin]!" said {f.name}.

    So they worked side by side. {h.name} [hammered and tied|measured and sawed], and {f.name} [held
    and pulled| carried and pushed]. It was faster, and it was much more fun. And this time, {win}!
    "[We did it!|It works!|Hooray!]" they shouted. [Two heads are better than one.|"Together we can
    build anything," said {h.name}.|{h.name} had learned that asking for help is not a weakness.]
    <friends_end> <the_end>
    """,
)

JOURNEY = Schema(
    name="journey",
    topics=(
        "a {h.kind} who wants to see {goal}",
        "a long journey",
        "a {h.kind} who travels to {goal}",
        "an adventure",
        "a {h.kind} on an adventure",
    ),
    traits=("curious", "brave", "dreamy", "hopeful", "lively", "cheerful", "playful"),
    frames=(
        {
            "goal": "the sea",
            "without": "penguin",
            "see": "blue water that reached all the way to the sky",
            "keep": "a white shell, in which you could hear the waves",
        },
        {
            "goal": "the top of the mountain",
            "see": "the whole world, with tiny houses and silver rivers",
            "keep": "a small grey stone from the very top",
        },
        {
            "goal": "the great waterfall",
            "see": "water as white as milk, and a rainbow over it",
            "keep": "a smooth round pebble",
        },
        {
            "goal": "the big city",
            "see": "tall towers, bright lights, and more people than leaves on a tree",
            "keep": "a little paper flag",
        },
        {
            "goal": "the end of the rainbow",
            "see": "a wide field of flowers in every colour",
            "keep": "a flower of each colour",
        },
        {
            "goal": "the northern lights",
            "see": "green and purple light that danced across the sky",
            "keep": "a picture that {h.he} drew in {h.his} notebook",
        },
    ),
    text="""
    <opening> <trait>

    {h.name} had never seen {goal}, but {h.he} had heard about it in [a song|many stories|an old
    book]. "One day I will go there," {h.he} always said. And <one_day_low>, {h.he} packed [some
    bread and cheese|a few apples|a small bag], [took a walking stick|put on a hat|said goodbye to
    {h.his} mother], and set off.

    On the first day, {h.he} came {p.to}. There {h.he} met {f.a} named {f.name}. "Where are you
    going?" asked {f.name}. "I want to see {goal}," said {h.name}. "[May I come with you?|I have
    always wanted to see it, too!]" said {f.name}. "[Of course|Gladly]," said {h.name}. "The road is
    shorter when you are not alone." So they went on together.

    The way was [long|hard]. On the second day it rained, and they [hid under a big leaf|slept in a
    hollow tree| shared one small umbrella]. On the third day, they came to a [wide river|steep
    cliff|dark forest] and did not know how to go on. "[Should we turn back?|Perhaps it is too
    far,]" said {f.name}. There they met {g.name}, {g.a}. "[Whoever takes one step after another
    gets everywhere|Do not turn back now]," said {g.name}, and {g.he} showed them [a narrow path|a
    safe way].

    On the [fifth|sixth|seventh] day, they came over a last hill, and there it was: {goal}! They saw
    {see}. {h.name} and {f.name} stood still and [said nothing for a long time|held each other by
    the {h.hand}]. "[It is even more beautiful than in the stories|It was worth every step],"
    whispered {h.name}. Before they went home, {h.name} took {keep}. [Whenever {h.he} looks at it,
    {h.he} thinks of {h.his} friend and of the long road.|But the best thing {h.he} brought home was
    a friend.|<friends_end>] <the_end>
    """,
)

GRUMPY = Schema(
    name="grumpy",
    topics=(
        "a grumpy {giant}",
        "a {h.kind} and a grumpy {giant}",
        "a lonely {giant}",
        "a {h.kind} who meets a {giant}",
        "a {giant}",
    ),
    frames=(
        {
            "giant": "dragon",
            "without": "dragon",
            "lair": "in a cave on the mountain",
            "noise": "breathed smoke",
        },
        {
            "giant": "giant",
            "lair": "in a castle behind the hills",
            "noise": "stamped on the ground",
        },
        {"giant": "troll", "lair": "under the stone bridge", "noise": "growled like thunder"},
        {"giant": "wizard", "lair": "in a crooked tower", "noise": "slammed the door"},
        {
            "giant": "bear",
            "without": "bear",
            "lair": "in the darkest part of the woods",
            "noise": "roared loudly",
        },
    ),
    text="""
    <opening> <trait>

    Not far away, {lair}, lived a grumpy {giant}. Whenever somebody came near, the {giant} {noise}
    and shouted, "[Go away!|Leave me alone!|Get out of here!]" So everyone stayed away. "[Never go
    there|Keep away from that {giant}]," said {f.name}, {h.name}'s friend, {f.a}. But {h.name} often
    thought about it. "[Why is the {giant} so angry?"| Nobody is grumpy without a reason,"] {h.he}
    said.

    <one_day>, {h.name} [baked a small cake|picked a bunch of flowers|made a pot of soup] and went
    there alone. {h.His} knees were shaking. The {giant} came out and {noise}. "What do you want?"
    "[I brought you something| This is for you]," said {h.name} in a small voice. "I thought that
    you might be lonely." The {giant} [stared at {h.him}|opened and closed its mouth]. It was quiet
    for a long time.

    "[Nobody has ever brought me anything|In a hundred years, nobody has asked me how I am]," said
    the {giant} at last, and a big tear rolled down its cheek. "Everybody runs away when they see
    me. That makes me sad, and when I am sad, I shout." "[Then stop shouting, and I will stay|I am
    not running away]," said {h.name}. They sat down together and [shared the gift|talked until
    sunset], and the {giant} told {h.him} [wonderful old stories| about the stars|a joke that was a
    hundred years old].

    <next_day>, {h.name} brought {f.name} along. At first {f.name} [hid behind {h.name}|did not dare
    to speak], but soon {f.he} was laughing, too. After that, the {giant} [carried wood for the
    whole village|gave rides to the children|lit the lamps at the winter feast|helped with the
    harvest], and nobody was afraid any more. [The grumpy {giant} was not grumpy at all, only
    lonely.|A kind word can melt the hardest heart.|And the {giant} never shouted again, except to
    call everyone for {food}.] <the_end>
    """,
)

WISH = Schema(
    name="wish",
    topics=(
        "a wish",
        "a magic {magic}",
        "a {h.kind} who finds a magic {magic}",
        "a {h.kind} who has one wish",
        "magic",
    ),
    frames=(
        {"magic": "stone", "how": "glowed with a soft blue light"},
        {"magic": "fish", "how": "had scales of pure gold"},
        {"magic": "lamp", "how": "was covered with dust and shone when it was rubbed"},
        {"magic": "bird", "how": "had feathers like silver"},
        {"magic": "feather", "how": "shone in all the colours of the rainbow"},
        {"magic": "bell", "how": "rang without being touched"},
    ),
    text="""
    <opening> <trait>

    <one_day>, {h.name} was walking {p.along} when {h.he} found a strange {magic}. It {how}. "Do not
    be afraid," said the {magic}. "[You have found me|You were kind enough to stop], and so you have
    one wish. But think well, for you have only one." {h.name} [could hardly breathe|had to sit
    down]. One wish! {h.He} could wish for [a mountain of sweets|a castle with a hundred rooms|a
    chest full of gold], or for [a ship with white sails|wings to fly with|a new toy for every day
    of the year].

    "[I will think about it until the evening|I must think about it]," said {h.name}. On the way
    home, {h.he} met {f.name}, {f.a}. {f.name} was [coughing|very pale] and could hardly walk. "[I
    have been ill for weeks|I am so weak that I cannot play any more]," said {f.name}. "The doctor
    does not know what to do." {h.name} went home and could not eat. {h.He} thought of all the
    things {h.he} could have, and {h.he} thought of {f.name}.

    <evening>, {h.name} went back to the {magic}. "Well?" it asked. "Have you made up your mind?
    Would you like to be rich?" "No," said {h.name}. "[I wish that {f.name} gets well again|Please
    make my friend {f.name} healthy]." The {magic} was silent for a moment. "[That is the best wish
    I have heard in a thousand years|Most people wish for gold]," it said. "[It shall be so.|Your
    wish comes true.]" There was a flash of light, and the {magic} was gone.

    <next_day>, there was a knock at the door. It was {f.name}, with red cheeks and shining eyes! "I
    feel wonderful!" {f.he} cried. "[Let us go out and play!|I could run all the way around the
    lake!]" {h.name} never told anybody about the wish. [But when {h.he} heard {f.name} laugh,
    {h.he} knew that {h.he} had chosen well.|A healthy friend was worth more than all the gold in
    the world.|{h.He} was the richest {h.kind} in the world, because {h.he} had a friend.] <the_end>
    """,
)

QUARREL = Schema(
    name="quarrel",
    topics=(
        "two friends who quarrel",
        "a {h.kind} and a {f.kind} who have a quarrel",
        "saying sorry",
        "making up after a quarrel",
        "a {h.kind} and {h.his} friend",
    ),
    frames=(
        {
            "cause": "the swing",
            "mine": "I want to swing first",
            "yours": "I want to swing first",
            "solve": "You swing first, then I will",
        },
        {
            "cause": "the last piece of cake",
            "mine": "I saw it first",
            "yours": "It is mine",
            "solve": "Let us cut it in half",
        },
        {
            "cause": "the colour of the boat",
            "mine": "It must be red",
            "yours": "It must be blue",
            "solve": "We will use both",
        },
        {
            "cause": "a game",
            "mine": "I won the game",
            "yours": "I won the game",
            "solve": "Let us play on the same team",
        },
        {
            "cause": "a red ball",
            "mine": "The ball is mine",
            "yours": "The ball belongs to me",
            "solve": "It belongs to both of us",
        },
        {
            "cause": "the best place by the fire",
            "mine": "I sit here",
            "yours": "That is my place",
            "solve": "There is room for two",
        },
    ),
    text="""
    [<opening> {h.His} best friend was {f.name}, {f.a}. |{h.name} and {f.name} were best friends.
    {h.name} was {h.a}, and {f.name} was {f.a}. |Once upon a time, there were two friends, {h.a}
    named {h.name} and {f.a} named {f.name}.] They [did everything together|met every day
    {p.at}|told each other all their secrets].

    But <one_day_low>, they had a quarrel about {cause}. "{mine}!" said {h.name}. "No! {yours}!"
    said {f.name}. They [shouted at each other|stamped their feet|became louder and louder]. "[You
    are not my friend any more!|I will never play with you again!]" cried {h.name}, and they both
    went home in different directions.

    The next day, {h.name} played alone. {h.He} [threw a ball, but nobody threw it back|told a joke,
    but nobody laughed|made tea for two and then remembered]. It was [very quiet|terribly boring].
    {f.name} sat alone, too, and looked out of the window. {g.name}, {g.a}, came by and saw
    {h.name}. "[Where is your friend?|Why are you alone?]" {g.he} asked. "We had a quarrel," said
    {h.name}. "It was {f.name}'s fault." "[And what is more important to you|What would you rather
    have]," asked {g.name}, "to be right or to have a friend?"

    {h.name} thought about that [for a long time|all night]. Then {h.he} got up and went to
    {f.name}. Halfway there, {h.he} saw somebody coming. It was {f.name}! "I am sorry," they both
    said at the same time, and then they had to laugh. "[I was silly|I was stubborn]," said
    {h.name}. "[Me too|So was I]," said {f.name}. "{solve}." And that is what they did.

    [Friends may quarrel, but true friends make up again.|They still quarrel sometimes, but never
    for long.|It takes courage to say sorry, but it is worth it.] <friends_end> <the_end>
    """,
)

FALLEN_STAR = Schema(
    name="fallen star",
    topics=(
        "a fallen star",
        "a little star",
        "a {h.kind} who finds a star",
        "a {h.kind} and a star",
        "the stars",
    ),
    frames=(
        {"way": "climbed the highest hill", "lift": "threw the star as high as {h.he} could"},
        {"way": "climbed the tallest tree", "lift": "held the star up to the moon"},
        {"way": "asked an old eagle for help", "lift": "put the star gently on the eagle's back"},
        {"way": "built a big kite", "lift": "tied the star to the kite and let it rise"},
    ),
    text="""
    <opening> <trait> Every night, {h.he} looked up at the stars [and counted them|and gave them
    names|before going to sleep].

    One night, a star fell from the sky. It landed {p.at} with a soft [plop|sound like a bell].
    {h.name} ran there as fast as {h.he} could. In the grass lay a little star, no bigger than an
    apple, and it was [crying|shivering]. "[I leaned out too far, and I fell|I wanted to see the
    flowers, and I slipped]," said the star. "How will I ever get home?" {h.name} [wrapped it in a
    scarf|held it in {h.his} {h.hands}]. "I will help you," {h.he} said.

    {h.name} went to {f.name}, {f.a}. "[What is that light?|Why is it so bright in here?]" asked
    {f.name}, rubbing {f.his} eyes. When {f.he} heard the story, {f.he} was wide awake. "[We must be
    quick|We have to hurry]," said {f.name}. "When the sun comes up, a star loses its light." So
    they {way}. The night was cold, but the star kept them warm, and it told them [what the world
    looks like from above|how the moon sings|the names of its thousand sisters].

    Just before morning, they were ready. "[I will miss you|I will never forget you]," said the
    star. "I will miss you, too," said {h.name}. Then {h.he} {lift}. The star rose [higher and
    higher|like a spark], until it was back in its place in the sky. It [blinked twice|shone
    brighter than all the others], as if it wanted to say thank you.

    [From that night on, {h.name} had a friend in the sky.|Every evening, {h.name} waves at the sky,
    and one little star always blinks back.|And when {h.name} and {f.name} are out late, one star
    always lights their way home.] <the_end>
    """,
)

ROBOT = Schema(
    name="robot",
    topics=(
        "a robot",
        "a little robot",
        "a robot and a {h.kind}",
        "a {h.kind} who finds an old robot",
        "a rusty robot",
    ),
    frames=(
        {"work": "watered the gardens", "need": "a drop of oil", "who": "an old gardener"},
        {"work": "carried letters from house to house", "need": "a new wheel", "who": "a postman"},
        {"work": "played music for the children", "need": "a small spring", "who": "a clockmaker"},
        {"work": "lit the lamps in the streets", "need": "a fresh battery", "who": "a lamplighter"},
        {"work": "baked bread for the whole street", "need": "a tiny screw", "who": "a baker"},
    ),
    text="""
    <opening> <trait>

    <one_day>, {h.name} was playing {p.at} when {h.he} saw something shiny [under the leaves|behind
    a bush|in the tall grass]. It was an old robot! Its arms were rusty, and its eyes were dark.
    {h.name} [wiped off the dust|knocked carefully on its head]. "Hello?" {h.he} said. One eye began
    to glow. "Hel-lo," said the robot slowly. "My name is {robot}. I cannot move any more."

    "[Where do you come from?|What happened to you?]" asked {h.name}. "I belonged to {who}," said
    {robot}. "I {work}. Then I broke down, and [everybody forgot me|they got a new robot]." {h.name}
    thought that was very sad. {h.He} ran to {h.his} friend {f.name}, {f.a}, who was good at fixing
    things. {f.name} looked into the robot with a lamp. "It only needs {need}," {f.he} said.

    They searched [in every drawer|in the shed|the whole day]. {g.name}, {g.a}, finally found what
    they needed [in an old tin box|at the bottom of a chest]. "[I knew that it would be useful one
    day|Take it, with my best wishes]," {g.he} said. {f.name} set to work, and {h.name} [held the
    lamp|passed {f.him} the tools]. Click! The robot lifted one arm. Then it lifted the other. Then
    it stood up and [took a bow|turned around in a circle]. "I can move!" cried {robot}. "Thank you,
    my friends!"

    After that, {robot} {work} again, and [everybody was glad to see it|nobody could imagine life
    without it]. But every evening, the robot came to see {h.name} and {f.name}, and they [played
    chess|looked at the stars|told each other jokes]. "[You did not throw me away|You saw that I
    could still be useful]," said {robot}. "[That is what friends are for,|Nobody should ever be
    forgotten,]" <said> {h.name}. <the_end>
    """,
)

DRY_WELL = Schema(
    name="dry well",
    topics=(
        "a village without water",
        "a dry summer",
        "a {h.kind} who looks for water",
        "a {h.kind} who saves the village",
        "a thirsty village",
    ),
    traits=("clever", "curious", "brave", "kind", "patient", "hopeful", "thoughtful"),
    frames=(
        {
            "without": "penguin",
            "sign": "a frog that sat on a cool, wet stone",
            "spot": "Under the stone",
        },
        {
            "without": "penguin",
            "sign": "a ring of green grass in the dry field",
            "spot": "Under the green grass",
        },
        {
            "without": "penguin",
            "sign": "a line of bees that flew behind the rocks",
            "spot": "Behind the rocks",
        },
        {
            "without": "penguin",
            "sign": "a small fern that was fresh and green",
            "spot": "Beneath the fern",
        },
    ),
    text="""
    <opening> <trait>

    One summer, it did not rain for [many weeks|two whole months]. The stream dried up, the flowers
    hung their heads, and at last even the well was empty. "[What shall we do?|We will have to leave
    our homes!|There is not a drop left!]" said the neighbours. {h.name} did not want to leave.
    "[There must be water somewhere|I will look for water]," {h.he} said. "[You are too small|We
    have looked everywhere]," said the others. Only {f.name}, {f.a}, wanted to help. "I will come
    with you," {f.he} said.

    They walked {p.to}, but there they found only [dust|dry leaves]. They walked on in the hot sun.
    There they met {g.name}, {g.a}. "[Water leaves signs|Somebody always knows where the water is],"
    said {g.name}. "[Open your eyes and look for small things.|Look for what is still green and
    alive.]" So they [looked at everything twice|went on more slowly]. And then {h.name} saw {sign}.
    "Look!" {h.he} whispered. "[There must be water nearby|That is our sign]."

    They dug and dug until their {h.hands} hurt. {spot}, the earth was dark and cool. {f.name}
    wanted to stop, but {h.name} said, "Just a little more." And suddenly it gurgled and bubbled:
    clear, cold water! They [drank until they were full|splashed each other and laughed]. Then they
    ran back to tell everyone.

    The neighbours came with buckets and jars. They dug a ditch, and [soon the water ran all the way
    to the gardens|that evening the flowers lifted their heads again]. "We said that you were too
    small," said [an old neighbour|one of them], "but you were big enough to find it." {h.name} was
    <glad>. [And they named the new spring after {h.name} and {f.name}.|There was a great feast,
    with {food} for everybody.|<friends_end>] <the_end>
    """,
)

BALLOON = Schema(
    name="balloon",
    topics=("a balloon", "a {h.kind} and a balloon", "a {h.kind} who lets a balloon go"),
    frames=({"colour": "red"}, {"colour": "yellow"}, {"colour": "blue"}, {"colour": "green"}),
    text="""
    <opening> <trait>

    <one_day>, {h.name} got a {colour} balloon at the fair. {h.He} held the string tightly and [ran
    all the way home|danced along the path]. But then a gust of wind came, and the string slipped
    out of {h.his} {h.hands}. The balloon flew up, higher and higher. {h.name} [wanted to cry|felt
    <sad>].

    {h.His} friend {f.name}, {f.a}, looked up, too. "Where do you think it is going?" {f.he} asked.
    {h.name} thought about it. "[Maybe to the moon|Maybe to somebody who has never had a balloon],"
    {h.he} said. "[Then it has a long journey ahead|Then somebody will be happy tonight]," said
    {f.name}. They waved at the balloon until it was a tiny {colour} dot. And {h.name} was not sad
    any more. <end> <the_end>
    """,
)

SNOWMAN = Schema(
    name="snowman",
    topics=("a snowman", "a {h.kind} who builds a snowman", "the first snow", "winter"),
    frames=(
        {"nose": "a carrot", "bye": "Tell the snow hello from me"},
        {"nose": "a pine cone", "bye": "Come back next winter"},
        {"nose": "a red button", "bye": "Sleep well in the river"},
    ),
    text="""
    <opening> <trait>

    One winter morning, everything was white. "Snow!" cried {h.name}, and {h.he} ran outside.
    Together with {f.name}, {f.a}, {h.he} built a snowman with {nose} for a nose and [two stones for
    eyes|an old hat]. "He looks [friendly|a little lonely]," said {f.name}. So they [gave him a
    scarf|built a second snowman next to him|sang him a song].

    All winter long, they visited the snowman every day. But when spring came, the snowman grew
    smaller and smaller. "{bye}," said {h.name} softly. "Is he gone forever?" asked {f.name}. "[No.
    He turns into water, and the water makes the flowers grow,|He is only travelling. He will be a
    cloud, and then he will be snow again,]" said {h.name}. <next_day>, where the snowman had stood,
    there was a [snowdrop|small white flower]. <end> <the_end>
    """,
)

HIGH_APPLE = Schema(
    name="high apple",
    topics=(
        "an apple",
        "a {h.kind} who wants an apple",
        "an apple that hangs too high",
        "helping each other",
    ),
    frames=({"fruit": "apple"}, {"fruit": "pear"}, {"fruit": "plum"}, {"fruit": "peach"}),
    text="""
    <opening> <trait>

    <one_day>, {h.name} saw a big, ripe {fruit} at the top of a tree. {h.He} [jumped|stretched] as
    high as {h.he} could, but {h.he} could not reach it. {h.He} threw a stick, but the stick got
    stuck. Then {f.name}, {f.a}, came by and tried it, but {f.he} was not tall enough either.

    "[What if I stand on your back?|I could climb on your shoulders!]" said {h.name}. {f.name} stood
    [very still|as straight as a post], and {h.name} climbed up. {h.He} stretched [out one
    {h.hand}|and stretched], and plop, the {fruit} fell into the grass! "[Now who gets it?|Is it
    yours or mine?]" asked {f.name}. "[It is ours,|We both get half,]" said {h.name}, and they
    shared the {fruit} under the tree. [It was the sweetest {fruit} they had ever eaten.|It tasted
    twice as good because they had worked together.] <end> <the_end>
    """,
)

CANNOT_SLEEP = Schema(
    name="cannot sleep",
    topics=("bedtime", "a {h.kind} who cannot sleep", "going to sleep", "the moon"),
    frames=(
        {"try": "counted sheep, but the sheep would not stand still", "think": "the rain"},
        {"try": "drank a cup of warm milk, but it did not help", "think": "the wind in the trees"},
        {"try": "turned the pillow around three times", "think": "the song of the crickets"},
    ),
    text="""
    <opening> <trait>

    One night, {h.name} could not sleep. {h.He} {try}. {h.He} looked at the ceiling, and then at the
    window. There was the moon, big and round. "[Moon, why are you awake?|Can you not sleep
    either?]" asked {h.name}. "It is my work to be awake," said the moon. "[I look after everyone
    who is asleep.|Somebody has to keep watch.] But you must rest. Close your eyes and listen to
    {think}."

    {h.name} closed {h.his} eyes and listened to {think}. [It was soft and slow.|It sounded like a
    lullaby.] {h.He} thought of {h.his} friend {f.name}, {f.a}, and of all the games that they would
    play tomorrow. {h.His} eyes grew heavy. "Good night, moon," {h.he} whispered. "Good night,
    {h.name}," said the moon. And {h.name} fell asleep and dreamed of {dream}. <the_end>
    """,
)

PICNIC = Schema(
    name="picnic",
    topics=(
        "a picnic",
        "a {h.kind} who goes on a picnic",
        "a rainy picnic",
        "a {h.kind} and {h.his} friends",
    ),
    frames=(
        {"shelter": "a big tree"},
        {"shelter": "the old bridge"},
        {"shelter": "a red umbrella"},
    ),
    text="""
    <opening> <trait>

    <one_day>, {h.name} invited {h.his} friends to a picnic {p.at}. {f.name}, {f.a}, brought {food},
    and {g.name}, {g.a}, brought a jug of lemonade. {h.name} had baked a cake. They had just spread
    out the blanket when a drop fell on {h.name}'s nose. Then there was another drop, and another.
    It was raining! "[Our picnic is spoiled|All my work was for nothing]," said {h.name} sadly.

    "Not at all," said {g.name}. "[A picnic is where your friends are|Rain is only water]. Come with
    me!" They took everything and ran to {shelter}. There they sat close together, ate the cake, and
    [listened to the rain|told funny stories|sang loud songs]. When the sun came out, there was a
    rainbow over the hills. "[This was the best picnic of all|I am glad that it rained]," said
    {f.name}, and everyone agreed. <home_end> <the_end>
    """,
)

LITTLE_CLOUD = Schema(
    name="little cloud",
    topics=(
        "a cloud",
        "a little cloud",
        "a {h.kind} and a cloud",
        "the rain",
        "a cloud that did not want to rain",
    ),
    frames=({"flower": "sunflower"}, {"flower": "rose"}, {"flower": "daisy"}, {"flower": "tulip"}),
    text="""
    <opening> <trait>

    <one_day>, {h.name} saw a little grey cloud in the sky. It was [crying softly|all alone]. "What
    is wrong, little cloud?" called {h.name}. "Nobody likes me," said the cloud. "[Everybody wants
    the sun.|Whenever I come, everyone goes inside.] Nobody is happy when I rain." {h.name} looked
    around. In the garden stood a {flower} with a hanging head, and the ground was dry.

    "I know somebody who needs you," said {h.name}. "Look at this {flower}. It is so thirsty!" The
    little cloud came closer and let a few drops fall, and then a few more. The {flower} [lifted its
    head|opened its leaves]. "[Thank you, little cloud|That was just what I needed]," it whispered.
    {f.name}, {f.a}, ran out of the house and jumped into a puddle. "Hooray, it is raining!" {f.he}
    cried. The little cloud [laughed so much|was so happy] that it became quite light, and behind
    it, a rainbow appeared. [Since then, {h.name} always waves when it rains.| <friends_end>]
    <the_end>
    """,
)

SCHEMATA: tuple[Schema, ...] = (
    LOST_THING,
    FEAR,
    LEARNING,
    SHARING,
    STORM,
    WAY_HOME,
    NEW_NEIGHBOUR,
    TRUTH,
    GARDEN,
    RACE,
    SMALL_RESCUE,
    MYSTERY,
    BIRTHDAY,
    BUILDING,
    JOURNEY,
    GRUMPY,
    WISH,
    QUARREL,
    FALLEN_STAR,
    ROBOT,
    DRY_WELL,
    BALLOON,
    SNOWMAN,
    HIGH_APPLE,
    CANNOT_SLEEP,
    PICNIC,
    LITTLE_CLOUD,
)
