"""The table of facts: the rows, questions and answer of each relation.

Only data. `{s}` is the subject and `{o}` the object. Some relations also have questions about the
object.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact: rows of (subject, object), questions about the subject, and an answer."""

    name: str
    rows: tuple[tuple[str, str], ...]
    asks: tuple[str, ...]
    answer: str
    follows: tuple[str, ...] = ("And {s}?", "What about {s}?", "and {s}")
    back_asks: tuple[str, ...] = ()
    back_answer: str = ""


def _rows(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [row.split("=") for row in " ".join(text.split()).split(";")]
    return tuple((subject.strip(), obj.strip()) for subject, obj in pairs)


CAPITALS = _rows(
    """France=Paris; Italy=Rome; Spain=Madrid; Germany=Berlin; Japan=Tokyo; China=Beijing;
    India=New Delhi; Egypt=Cairo; Greece=Athens; Norway=Oslo; Sweden=Stockholm;
    Finland=Helsinki; Denmark=Copenhagen; Poland=Warsaw; Portugal=Lisbon; Austria=Vienna;
    Hungary=Budapest; Ireland=Dublin; Russia=Moscow; Turkey=Ankara; Canada=Ottawa;
    Mexico=Mexico City; Brazil=Brasilia; Argentina=Buenos Aires; Peru=Lima; Chile=Santiago;
    Cuba=Havana; Kenya=Nairobi; Morocco=Rabat; Ghana=Accra; Australia=Canberra; New
    Zealand=Wellington; Thailand=Bangkok; Vietnam=Hanoi; South Korea=Seoul; Iran=Tehran;
    Iraq=Baghdad; the United Kingdom=London; the United States=Washington; the
    Netherlands=Amsterdam; Belgium=Brussels; Switzerland=Bern; Iceland=Reykjavik;
    Ukraine=Kyiv; Romania=Bucharest; Bulgaria=Sofia; Croatia=Zagreb"""
)
CONTINENTS = _rows(
    """France=Europe; Italy=Europe; Spain=Europe; Germany=Europe; Poland=Europe; Sweden=Europe;
    Norway=Europe; Greece=Europe; Japan=Asia; China=Asia; India=Asia; Thailand=Asia;
    Vietnam=Asia; Iran=Asia; Egypt=Africa; Kenya=Africa; Ghana=Africa; Morocco=Africa;
    Peru=South America; Chile=South America; Argentina=South America; Canada=North America;
    Mexico=North America; Cuba=North America"""
)
BABIES = _rows(
    """dog=puppy; cat=kitten; cow=calf; horse=foal; sheep=lamb; goat=kid; pig=piglet;
    duck=duckling; chicken=chick; lion=cub; frog=tadpole; kangaroo=joey; swan=cygnet;
    goose=gosling; deer=fawn; owl=owlet; butterfly=caterpillar"""
)
SOUNDS = _rows(
    """cow=moo; dog=woof; cat=meow; sheep=baa; duck=quack; pig=oink; lion=roar; horse=neigh;
    owl=hoot; bee=buzz; snake=hiss; frog=ribbit; mouse=squeak; donkey=hee-haw"""
)
LEGS = _rows(
    """dog=four; cat=four; cow=four; spider=eight; ant=six; bee=six; bird=two; person=two;
    fish=no; snake=no; crab=ten; horse=four; butterfly=six; chicken=two"""
)
COLOURS = _rows(
    """the sky=blue; grass=green; a banana=yellow; snow=white; coal=black; a tomato=red; a
    carrot=orange; a lemon=yellow; milk=white; a frog=green; a strawberry=red;
    chocolate=brown; the sun=yellow; a flamingo=pink; an elephant=grey; a pumpkin=orange; a
    plum=purple; blood=red"""
)
MIXES = _rows(
    """red and yellow=orange; blue and yellow=green; red and blue=purple; black and white=grey;
    red and white=pink"""
)
OPPOSITES = _rows(
    """hot=cold; big=small; up=down; day=night; happy=sad; fast=slow; old=young; open=closed;
    wet=dry; hard=soft; light=dark; long=short; full=empty; loud=quiet; left=right; good=bad;
    clean=dirty; rich=poor; strong=weak; early=late; in=out; yes=no; high=low; first=last"""
)
NEXT_DAY = _rows(
    """Monday=Tuesday; Tuesday=Wednesday; Wednesday=Thursday; Thursday=Friday; Friday=Saturday;
    Saturday=Sunday; Sunday=Monday"""
)
NEXT_MONTH = _rows(
    """January=February; February=March; March=April; April=May; May=June; June=July;
    July=August; August=September; September=October; October=November; November=December;
    December=January"""
)
MONTH_DAYS = _rows(
    """January=31; March=31; April=30; May=31; June=30; July=31; August=31; September=30;
    October=31; November=30; December=31"""
)
HOW_MANY = _rows(
    """days are in a week=There are 7 days in a week; months are in a year=There are 12 months in
    a year; hours are in a day=There are 24 hours in a day; minutes are in an hour=There are
    60 minutes in an hour; seconds are in a minute=There are 60 seconds in a minute; days are
    in a year=There are 365 days in a year, and 366 in a leap year; letters are in the
    alphabet=There are 26 letters in the English alphabet; sides does a triangle have=A
    triangle has 3 sides; sides does a square have=A square has 4 sides; sides does a pentagon
    have=A pentagon has 5 sides; sides does a hexagon have=A hexagon has 6 sides; wheels does
    a bicycle have=A bicycle has 2 wheels; wheels does a car have=A car has 4 wheels; colours
    are in the rainbow=The rainbow has 7 colours; planets are there=There are 8 planets around
    our sun; continents are there=There are 7 continents; strings does a violin have=A violin
    has 4 strings; strings does a guitar have=A guitar has 6 strings; fingers are on one
    hand=One hand has 5 fingers; arms does an octopus have=An octopus has 8 arms; seasons are
    there=There are 4 seasons; eggs are in a dozen=There are 12 eggs in a dozen; years are in
    a century=There are 100 years in a century; legs does a spider have=A spider has eight
    legs"""
)
PLANETS = _rows(
    """first=Mercury; second=Venus; third=Earth; fourth=Mars; fifth=Jupiter; sixth=Saturn;
    seventh=Uranus; eighth=Neptune"""
)
WHICH = _rows(
    """the largest planet=Jupiter is the largest planet; the smallest planet=Mercury is the
    smallest planet; the planet closest to the sun=Mercury is the planet closest to the sun;
    the red planet=Mars is the red planet; the tallest animal=The giraffe is the tallest
    animal; the largest animal=The blue whale is the largest animal; the fastest land
    animal=The cheetah is the fastest land animal; the largest ocean=The Pacific is the
    largest ocean; the highest mountain=Mount Everest is the highest mountain; the largest
    country=Russia is the largest country; the largest continent=Asia is the largest
    continent; the hottest planet=Venus is the hottest planet; the first month of the
    year=January is the first month of the year; the last month of the year=December is the
    last month of the year; the shortest month=February is the shortest month; the largest
    land animal=The elephant is the largest land animal; the coldest continent=Antarctica is
    the coldest continent; the largest hot desert=The Sahara is the largest hot desert"""
)
WHO = _rows(
    """wrote Romeo and Juliet=William Shakespeare wrote Romeo and Juliet; painted the Mona
    Lisa=Leonardo da Vinci painted the Mona Lisa; was the first person on the moon=Neil
    Armstrong was the first person on the moon; wrote Hamlet=William Shakespeare wrote Hamlet;
    wrote Alice in Wonderland=Lewis Carroll wrote Alice in Wonderland; was the first person in
    space=Yuri Gagarin was the first person in space; painted The Starry Night=Vincent van
    Gogh painted The Starry Night; wrote The Odyssey=Homer wrote The Odyssey"""
)
MADE = _rows(
    """bees make=Bees make honey; cows give=Cows give milk; plants need=Plants need water, light
    and air; pandas eat=Pandas eat bamboo; rabbits eat=Rabbits eat grass and leaves; fish
    breathe with=Fish breathe with gills; bread is made of=Bread is made of flour and water;
    cheese is made of=Cheese is made of milk; ice is made of=Ice is frozen water; paper is
    made of=Paper is made of wood; chickens lay=Chickens lay eggs; spiders spin=Spiders spin
    webs; H2O is=H2O is water; birds have instead of hair=Birds have feathers"""
)

RELATIONS: tuple[Relation, ...] = (
    Relation(
        "capital",
        CAPITALS,
        (
            "What is the capital of {s}?",
            "What's the capital of {s}?",
            "capital of {s}",
            "Tell me the capital of {s}.",
            "Which city is the capital of {s}?",
            "Do you know the capital of {s}?",
            "Name the capital of {s}.",
            "{s}: what is its capital?",
        ),
        "The capital of {s} is {o}.",
        ("And {s}?", "And of {s}?", "What about {s}?", "and {s}"),
        (
            "{o} is the capital of which country?",
            "Which country has {o} as its capital?",
            "What country is {o} the capital of?",
        ),
        "{o} is the capital of {s}.",
    ),
    Relation(
        "continent",
        CONTINENTS,
        (
            "Which continent is {s} in?",
            "What continent is {s} in?",
            "On which continent is {s}?",
            "Where is {s}?",
        ),
        "{s} is in {o}.",
    ),
    Relation(
        "baby",
        BABIES,
        (
            "What is a baby {s} called?",
            "What do you call a baby {s}?",
            "baby {s}",
            "What is the name for a young {s}?",
            "How do you call a young {s}?",
        ),
        "A baby {s} is called a {o}.",
        ("And a {s}?", "What about a {s}?", "and a {s}"),
        ("Which animal has a {o} as its baby?", "A {o} is the baby of which animal?"),
        "A {o} is a baby {s}.",
    ),
    Relation(
        "sound",
        SOUNDS,
        (
            "What sound does a {s} make?",
            "What does a {s} say?",
            "What noise does a {s} make?",
            "How does a {s} sound?",
        ),
        "A {s} says {o}.",
        ("And a {s}?", "What about a {s}?", "and a {s}"),
        ("Which animal says {o}?", "What animal goes {o}?"),
        "A {s} says {o}.",
    ),
    Relation(
        "legs",
        LEGS,
        ("How many legs does a {s} have?", "How many legs has a {s}?", "how many legs on a {s}"),
        "A {s} has {o} legs.",
        ("And a {s}?", "What about a {s}?"),
    ),
    Relation(
        "colour",
        COLOURS,
        (
            "What colour is {s}?",
            "What color is {s}?",
            "Which colour is {s}?",
            "colour of {s}",
            "Tell me the colour of {s}.",
        ),
        "{s} is {o}.",
    ),
    Relation(
        "mix",
        MIXES,
        (
            "What do you get if you mix {s}?",
            "What colour do {s} make?",
            "Mix {s}.",
            "Which colour comes from {s}?",
            "What color do {s} make together?",
        ),
        "If you mix {s}, you get {o}.",
    ),
    Relation(
        "opposite",
        OPPOSITES,
        (
            "What is the opposite of {s}?",
            "What's the opposite of {s}?",
            "opposite of {s}",
            "Which word is the opposite of {s}?",
            "Tell me the opposite of {s}.",
        ),
        "The opposite of {s} is {o}.",
        ("And of {s}?", "And {s}?", "What about {s}?"),
        ("What is the opposite of {o}?", "opposite of {o}"),
        "The opposite of {o} is {s}.",
    ),
    Relation(
        "next day",
        NEXT_DAY,
        (
            "What day comes after {s}?",
            "Which day is after {s}?",
            "What is the day after {s}?",
            "What day follows {s}?",
        ),
        "{o} comes after {s}.",
        ("And after {s}?",),
        ("What day comes before {o}?", "Which day is before {o}?", "What is the day before {o}?"),
        "{s} comes before {o}.",
    ),
    Relation(
        "next month",
        NEXT_MONTH,
        (
            "What month comes after {s}?",
            "Which month is after {s}?",
            "What is the month after {s}?",
        ),
        "{o} comes after {s}.",
        ("And after {s}?",),
        ("What month comes before {o}?", "Which month is before {o}?"),
        "{s} comes before {o}.",
    ),
    Relation(
        "month days",
        MONTH_DAYS,
        (
            "How many days does {s} have?",
            "How many days are in {s}?",
            "how many days in {s}",
            "How long is {s}?",
        ),
        "{s} has {o} days.",
        ("And {s}?", "What about {s}?"),
    ),
    Relation(
        "how many",
        HOW_MANY,
        (
            "How many {s}?",
            "how many {s}",
            "Tell me how many {s}.",
            "Can you tell me how many {s}?",
            "Do you know how many {s}?",
        ),
        "{o}.",
        ("And how many {s}?",),
    ),
    Relation(
        "planet",
        PLANETS,
        (
            "Which planet is {s} from the sun?",
            "What is the {s} planet from the sun?",
            "What is the {s} planet?",
            "Which is the {s} planet?",
        ),
        "{o} is the {s} planet from the sun.",
        ("And the {s}?", "What about the {s}?"),
    ),
    Relation(
        "which",
        WHICH,
        ("What is {s}?", "Which is {s}?", "Do you know {s}?", "Tell me {s}.", "Name {s}."),
        "{o}.",
        ("And {s}?", "What about {s}?"),
    ),
    Relation(
        "who",
        WHO,
        (
            "Who {s}?",
            "who {s}",
            "Do you know who {s}?",
            "Tell me who {s}.",
            "Can you tell me who {s}?",
        ),
        "{o}.",
        ("And who {s}?",),
    ),
    Relation(
        "made",
        MADE,
        (
            "What do you know: what {s}?",
            "Tell me what {s}.",
            "Do you know what {s}?",
            "Can you tell me what {s}?",
            "what {s}",
        ),
        "{o}.",
        ("And what {s}?",),
    ),
)

LISTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Name the days of the week.",
            "What are the days of the week?",
            "List the days of the week.",
        ),
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    ),
    (
        ("Name the months of the year.", "What are the months?", "List the months of the year."),
        "January, February, March, April, May, June, July, August, September, October, November, "
        "December",
    ),
    (
        ("Name the planets.", "What are the planets?", "List the planets of the solar system."),
        "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune",
    ),
    (
        ("Name the seasons.", "What are the four seasons?", "List the seasons."),
        "spring, summer, autumn, winter",
    ),
    (
        (
            "What are the colours of the rainbow?",
            "Name the rainbow colours.",
            "List the colors of the rainbow.",
        ),
        "red, orange, yellow, green, blue, indigo, violet",
    ),
    (
        (
            "Say the alphabet.",
            "What is the alphabet?",
            "Can you say the alphabet?",
            "Recite the ABC.",
        ),
        "a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z",
    ),
    (
        ("Name the continents.", "What are the seven continents?", "List the continents."),
        "Africa, Antarctica, Asia, Australia, Europe, North America, South America",
    ),
    (
        ("Name the oceans.", "What are the oceans?", "List the five oceans."),
        "Pacific, Atlantic, Indian, Southern, Arctic",
    ),
)
