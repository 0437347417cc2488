"""Word lists for stories, sums and spelling. Only data."""

GIRLS: tuple[str, ...] = tuple(
    "Anna Mia Lily Emma Zoe Ruby Nora Clara Lucy Ella Ivy Rosa Maya Sofia Alice Grace "
    "Hana Lena Molly Olive Daisy Bella Freya Greta Holly Iris Jade Kira Luna Nina Pearl "
    "Sara Tara Vera Wendy Amina Fatima Mei Priya Yuki".split()
)
BOYS: tuple[str, ...] = tuple(
    "Tom Ben Max Leo Sam Finn Noah Jack Hugo Oscar Felix Theo Adam Carl Daniel Eric Frank "
    "George Henry Ivan Jacob Karl Luis Mark Nils Otto Paul Peter Ravi Simon Tim Victor "
    "Will Yusuf Zack Ahmed Kenji Omar Pablo Milo".split()
)
GIRL_KINDS: tuple[str, ...] = ("girl", "princess", "queen", "witch", "mermaid", "grandmother")
BOY_KINDS: tuple[str, ...] = ("boy", "prince", "king", "wizard", "knight", "grandfather")
KINDS: tuple[str, ...] = tuple(
    "dragon cat dog fox bear rabbit mouse owl frog duck hen horse pony goat sheep cow pig "
    "lion tiger wolf monkey elephant giraffe zebra penguin turtle whale dolphin octopus "
    "crab fish bird robin crow bee ant spider snail butterfly ladybird squirrel hedgehog "
    "otter beaver deer donkey camel kangaroo koala panda parrot swan goose lizard robot "
    "ghost giant fairy elf unicorn monster pirate farmer baker sailor doctor teacher "
    "painter astronaut gardener toaster teapot snowman star cloud tree potato pumpkin "
    "train".split()
)
FRIENDS: tuple[str, ...] = tuple(
    "cat dog fox bear rabbit mouse owl frog duck goat turtle crow squirrel hedgehog otter "
    "deer donkey robin snail bee".split()
)
PLACES: tuple[tuple[str, str], ...] = (
    *(
        ("in", p)
        for p in "forest garden castle village city jungle desert kitchen library school barn cave "
        "park valley meadow palace museum zoo bakery market harbour tower attic swamp "
        "lighthouse circus snow mountains".split()
    ),
    *(("on", p) for p in "moon farm island beach hill ship mountain train roof bridge".split()),
    *(("by", p) for p in "sea lake river pond waterfall".split()),
    *(("at", p) for p in "station airport fair playground".split()),
    *(("under", p) for p in ("sea", "bed", "bridge")),
)
CITIES: tuple[str, ...] = tuple(
    "Paris London Rome Tokyo Berlin Madrid Cairo Oslo Vienna Lisbon Prague Dublin".split()
)
THINGS: tuple[str, ...] = tuple(
    "ball key lamp kite hat book box bell boat cup coin crown drum flute map mirror ring "
    "rope scarf shell shoe spoon stone sword umbrella wand watch whistle apple cake "
    "cookie carrot pie pear flower feather leaf seed nut egg blanket button basket bucket "
    "candle chair clock coat doll guitar letter lantern pencil photo pillow ribbon rocket "
    "sock star teapot toy wheel bike balloon brush ladder necklace diamond acorn pebble "
    "compass telescope kettle violin trumpet puzzle ticket bottle".split()
)
ADJECTIVES: tuple[str, ...] = tuple(
    "red blue green yellow golden silver white black pink purple orange brown shiny tiny "
    "magic old new wooden broken lucky".split()
)
MOODS: tuple[str, ...] = tuple(
    "little brave kind clever curious shy funny cheerful quiet gentle lazy hungry sleepy "
    "lonely proud small young friendly".split()
)
ABILITIES: tuple[str, ...] = tuple(
    "swim sing fly dance read bake paint whistle skate cook juggle write draw climb".split()
)
COUNTABLES: tuple[tuple[str, str], ...] = tuple(
    (word, word[:-1] + "ies" if word.endswith("rry") else word + "s")
    for word in "apple ball book cookie coin egg flower pear stone shell button candle balloon nut "
    "pencil cake toy star marble sticker plum lemon banana cherry".split()
)
_COMMON = (
    "air arm art baby back bag bank bath bean beef bell belt best big bird blue boot bowl "
    "bread bright brother bus butter camp can car card care carpet chain cheese child "
    "circle class clean clever climb coat coffee cold colour computer cook corn corner "
    "cotton count country cream cross cry dance dark daughter day deep dinner dirty dish "
    "door dream dress drink drive dry ear early earth easy elbow engine evening eye face "
    "fair family fast father field finger fire first five floor fly food foot four fresh "
    "friend front fruit full funny game girl glass gold good grass great green ground "
    "group guitar hair half hand happy hard head heart heavy hello help high holiday home "
    "honey hope hospital hour house hungry ice idea iron jacket jam job juice jump jungle "
    "kind kiss knee knife lady land language large laugh lemon lesson light line lip list "
    "little long love lucky lunch machine magic mango market meat milk minute money "
    "monkey month morning mother mouth music name nature neck needle nest night noise "
    "north nose number nurse ocean office onion orange oven page pain paper parent party "
    "peace peach people pepper phone picture pillow pilot pizza plane planet plant plate "
    "play pocket poem police potato present pretty price prize quick quiet radio rain "
    "rainbow rice river road rocket room rose round sail salad salt sand school science "
    "sea season second secret shadow ship shirt shop short shoulder silent silver simple "
    "sister sky sleep slow smile smoke snow soap soft son song soup south space spring "
    "square stamp station steam story strawberry street strong sugar summer sun sunday "
    "sweet table tail tea teacher ten thing thumb thunder tiger time tomato tooth town "
    "travel treasure triangle truck trust turn uncle under valley vegetable village voice "
    "wall warm wash water weather week wheat white wind window wine winter wise wood word "
    "world yellow year young zero banana chocolate elephant giraffe mississippi alphabet "
    "pencil hippopotamus cucumber raspberry blueberry balloon coffee committee letter "
    "yesterday tomorrow keyboard screen python server model token memory triolet science "
    "dinosaur adventure umbrella butterfly language question answer wonderful beautiful "
    "because friendship knowledge rhythm queue syllable"
)
WORDS: tuple[str, ...] = tuple(
    sorted(
        {
            *_COMMON.split(),
            *(w for w in (*KINDS, *THINGS, *GIRL_KINDS, *BOY_KINDS, *ADJECTIVES)),
            *(place for _, place in PLACES),
        }
    )
)
NUMBER_WORDS: tuple[str, ...] = tuple(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen "
    "fourteen fifteen sixteen seventeen eighteen nineteen twenty".split()
)
