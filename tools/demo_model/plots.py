"""Training data of the demo model: sentences of stories, by plot.

Each plot is a list of beats with several wordings each; a story uses one wording of each
beat in turn. Slots: {name} {he} {his} {him} {thing} {place} {friend} {ability}; a capitalised slot
begins a sentence.
"""

OPENINGS: tuple[str, ...] = (
    "Once upon a time, a {mood} {kind} named {name} lived {place}.",
    "Once upon a time, there was a {mood} {kind} called {name} who lived {place}.",
    "{place_cap}, there lived a {mood} {kind} named {name}.",
    "There once was a {mood} {kind} whose name was {name}. {He} lived {place}.",
    "{name} was a {mood} {kind} who lived {place}.",
    "Long ago, a {mood} {kind} named {name} lived {place}.",
)

CLOSINGS: tuple[str, ...] = (
    "From that day on, {name} smiled every morning.",
    "And {name} was happy ever after.",
    "That night, {name} slept very well. The end.",
    "It was the best day of {his} life.",
    "And they all lived happily ever after.",
    "{name} never forgot that day. The end.",
)

PLOTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "lost": (
        (
            "One morning, {his} {thing} was gone.",
            "One day, {he} could not find {his} {thing}.",
            "One day, {name} lost {his} {thing}.",
        ),
        (
            "{He} looked high and low, but it was not there.",
            "{He} looked under every stone and behind every door.",
            "{name} felt sad and began to search everywhere.",
        ),
        (
            'Then a {friend} came by and said, "I can help you look."',
            'A kind {friend} saw this and asked, "What is wrong?"',
            "Soon a {friend} heard {him} cry and came to help.",
        ),
        (
            "Together they found the {thing} under a pile of leaves.",
            "They followed some tiny footprints, and there was the {thing}!",
            "At last, they saw the {thing} shining in the grass.",
        ),
        ("{name} thanked the {friend} and shared {his} lunch.", "They laughed and danced for joy."),
    ),
    "friend": (
        (
            "{name} had a {thing}, but nobody to play with.",
            "{He} loved {his} {thing}, but {he} wanted a friend.",
        ),
        (
            "One day, {he} met a {friend} who was sitting all alone.",
            "One sunny day, a {friend} walked past and looked shy.",
        ),
        (
            '"Would you like to play with my {thing}?" asked {name}.',
            '{name} said, "Hello! Come and look at my {thing}."',
        ),
        (
            'The {friend} smiled and said, "I would love to!"',
            'The {friend} jumped up and said, "Yes, please!"',
        ),
        (
            "They played until the sun went down and became best friends.",
            "Soon they were best friends and met every day.",
        ),
    ),
    "storm": (
        (
            "One evening, a great storm came, and the wind began to howl.",
            "One night, dark clouds rolled in and the thunder roared.",
        ),
        (
            "The wind blew away {his} {thing}, and the rain fell hard.",
            "{name} held on to {his} {thing} and shivered.",
        ),
        (
            "Then {he} heard a small voice. A {friend} was out in the rain!",
            "Outside, a little {friend} was wet and afraid.",
        ),
        (
            "{name} was brave and brought the {friend} to a warm, dry corner.",
            "{name} ran out, took the {friend} by the hand, and led the way home.",
        ),
        (
            "In the morning, a rainbow hung over them, and the {thing} lay safe in the sun.",
            "When the storm was over, they found the {thing} and made hot tea.",
        ),
    ),
    "treasure": (
        (
            "One day, {name} found an old map in a bottle.",
            "One day, a {friend} gave {him} a strange old map.",
        ),
        (
            "A red cross on it showed where a treasure was hidden.",
            '"There must be a treasure!" said {name}.',
        ),
        (
            "{He} walked past three tall trees and dug a deep hole.",
            "{He} followed the map all day, up and down and round and round.",
        ),
        (
            "Deep down was a box, and in the box was a {thing}!",
            "At the end of the path lay a chest with a {thing} inside.",
        ),
        (
            "{name} gave a big cheer and showed it to every {friend} around.",
            "It was worth more than gold to {name}.",
        ),
    ),
    "race": (
        (
            "One day, there was a big race, and the prize was a {thing}.",
            "Every year there was a race. This time, the winner would get a {thing}.",
        ),
        (
            'A fast {friend} said, "Nobody can beat me!"',
            "Everybody thought that the {friend} would win.",
        ),
        (
            "{name} ran as fast as {he} could, but soon {he} was last.",
            "At first {name} was slow, but {he} did not give up.",
        ),
        (
            "Then the {friend} fell asleep under a tree, and {name} went past.",
            "Then the {friend} tripped and fell, and {name} stopped to help.",
        ),
        (
            "In the end, {name} won the {thing}, and everybody clapped.",
            "They crossed the line together and shared the {thing}.",
        ),
    ),
    "birthday": (
        (
            "Today was a special day: it was {his} birthday!",
            "One morning, {name} woke up and remembered that it was {his} birthday.",
        ),
        (
            "But nobody said a word about it, and {name} felt sad.",
            "{He} wanted only one thing in the world: a {thing}.",
        ),
        (
            'Then a {friend} knocked and said, "Come with me!"',
            "In the afternoon, a {friend} took {him} by the hand.",
        ),
        (
            "All {his} friends were there with a cake, and they gave {him} a {thing}.",
            '"Surprise!" they all cried, and in a big box was a {thing}.',
        ),
        ("{name} laughed and blew out the candles.", "They sang and ate cake until night."),
    ),
    "learning": (
        (
            "More than anything, {name} wanted to learn to {ability}.",
            "{name} had one dream: {he} wanted to {ability}.",
        ),
        (
            "{He} tried and tried, but it did not work, and some laughed.",
            "The first time, it went wrong, and {he} fell on {his} {thing}.",
        ),
        (
            'Then a wise {friend} said, "Try a little every day."',
            'A {friend} gave {him} a {thing} and said, "This will bring you luck."',
        ),
        (
            "So {name} practised every day with the {thing} at {his} side.",
            "{name} held the {thing} and tried once more, and once more.",
        ),
        (
            "At last, {he} could {ability} better than anyone!",
            "One day it worked: {name} could {ability}!",
        ),
    ),
    "helping": (
        (
            "One day, {he} met a {friend} who was in trouble.",
            "One day, {he} heard a {friend} call for help.",
        ),
        (
            '"My {thing} fell into a deep hole," said the {friend}.',
            '"I cannot carry this {thing} alone," said the {friend}.',
        ),
        (
            "{name} thought for a while and fetched a long rope.",
            '"Do not worry, I will help you," said {name}.',
        ),
        (
            "They pulled and pulled, and up came the {thing}.",
            "It was hard work, but soon the {thing} was safe.",
        ),
        (
            '"Thank you!" said the {friend}. "You are a true friend."',
            "The {friend} was so glad that it gave {name} a big hug.",
        ),
    ),
    "night": (
        (
            "One night, {name} could not sleep.",
            "It was very late, but {name} was still wide awake.",
        ),
        (
            "{He} looked at the stars and hugged {his} {thing}.",
            "The moon shone on {his} {thing}, and all was quiet.",
        ),
        (
            "A {friend} sat down beside {him} and sang a soft song.",
            'A sleepy {friend} came and said, "Let us count the stars."',
        ),
        (
            "One star, two stars, three stars, and {his} eyes grew heavy.",
            "The song was about the wind, the sea and a {thing}.",
        ),
        ("Soon {name} was fast asleep, dreaming sweet dreams.", "Then they both fell asleep."),
    ),
}

ASKED_AS: dict[str, tuple[str, ...]] = {
    "lost": ("a lost {thing}", "losing a {thing}", "looking for a {thing}"),
    "friend": ("making a new friend", "friendship", "finding a friend"),
    "storm": ("a storm", "a big storm", "a stormy night"),
    "treasure": ("a treasure", "finding a treasure", "a treasure hunt"),
    "race": ("a race", "a big race", "winning a race"),
    "birthday": ("a birthday", "a birthday party", "a birthday surprise"),
    "learning": ("learning to {ability}", "learning how to {ability}"),
    "helping": ("helping a friend", "helping others", "being kind"),
    "night": ("going to sleep", "a quiet night", "falling asleep"),
}

SIGNS: dict[str, tuple[str, ...]] = {
    "lost": ("{thing}",),
    "friend": ("friends",),
    "storm": ("storm", "thunder"),
    "treasure": ("treasure",),
    "race": ("race",),
    "birthday": ("birthday",),
    "learning": ("{ability}",),
    "helping": ("help", "trouble"),
    "night": ("sleep", "asleep"),
}
"""For each plot, words of which at least one shows that the story is about it."""
