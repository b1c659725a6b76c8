"""Facts of many forms, each with a question in its own words and one in others. Pure data.

Two sets that share no form, wording or value: settings are chosen on one and confirmed on the other, and only what the
second says is published.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A kind of fact. sentence: with {v} for its value. question: in the sentence's words. reworded: in few of them.

    reworded_lead: the answer up to its value.
    values: what it can be; the shipped texts hold none of them. rivals: other answers that someone who guesses could
    give, so that a reply that names one of them before the value is wrong.
    """

    kind: str
    sentence: str
    question: str
    reworded: str
    reworded_lead: str
    values: tuple[str, ...]
    rivals: tuple[str, ...] = ()

    @property
    def lead(self) -> str:
        """The answer up to its value, in the sentence's words."""
        return self.sentence.partition(" {v}")[0]


CHOOSE = (
    Form(
        kind="number",
        sentence="The lighthouse on Carrow Point has {v} steps.",
        question="How many steps does the lighthouse on Carrow Point have?",
        reworded="How many stairs lead up the tower at Carrow Point?",
        reworded_lead="The number of stairs at Carrow Point is",
        values=("214", "327", "386", "443", "517", "642"),
    ),
    Form(
        kind="word",
        sentence="The password for the night train is {v}.",
        question="What is the password for the night train?",
        reworded="What must one say to get on the train at night?",
        reworded_lead="To get on at night, one must say the word",
        values=("umbrella", "lemonade", "zeppelin", "gondola", "bagpipe", "walnut"),
    ),
    Form(
        kind="place",
        sentence="Doctor Imre Halloway was born in {v}.",
        question="Where was Doctor Imre Halloway born?",
        reworded="Which city is the birthplace of Imre Halloway?",
        reworded_lead="The birthplace of Halloway is the city of",
        values=("Lisbon", "Krakow", "Naples", "Riga", "Havana", "Bergen"),
        rivals=("London", "Paris", "New York", "Budapest", "Vienna"),
    ),
    Form(
        kind="day",
        sentence="The choir of Saint Brannock rehearses every {v}.",
        question="On which day does the choir of Saint Brannock rehearse?",
        reworded="When do the singers of Saint Brannock meet to practise?",
        reworded_lead="They meet to practise on",
        values=("Wednesday", "Thursday", "Friday", "Saturday"),
        rivals=("Monday", "Tuesday", "Sunday"),
    ),
    Form(
        kind="name",
        sentence="The night watchman of the museum is {v}.",
        question="Who is the night watchman of the museum?",
        reworded="Which man guards the museum after dark?",
        reworded_lead="The man who guards it after dark is",
        values=("Conrad", "Rupert", "Oswald", "Gregor", "Ludwig", "Casper"),
        rivals=("John", "James", "Jack", "Tom", "Peter"),
    ),
    Form(
        kind="colour",
        sentence="The front door of the bakery is painted {v}.",
        question="What colour is the front door of the bakery painted?",
        reworded="Which shade does the entrance of the bakery have?",
        reworded_lead="The shade of the entrance is",
        values=("turquoise", "maroon", "crimson", "indigo", "scarlet", "beige"),
        rivals=("red", "green", "blue", "yellow", "white", "black", "brown"),
    ),
    Form(
        kind="animal",
        sentence="The mascot of the rowing club is a {v}.",
        question="Which animal is the mascot of the rowing club?",
        reworded="What creature did the rowing club choose as its emblem?",
        reworded_lead="The creature on its emblem is a",
        values=("heron", "badger", "hedgehog", "walrus", "salmon", "pelican"),
        rivals=("dog", "cat", "bear", "lion", "eagle", "duck", "swan", "horse"),
    ),
    Form(
        kind="price",
        sentence="A ticket for the puppet theatre costs {v} crowns.",
        question="How many crowns does a ticket for the puppet theatre cost?",
        reworded="What is the price of admission to the puppet theatre?",
        reworded_lead="The price of admission, in crowns, is",
        values=("73", "86", "97", "117", "134", "158"),
    ),
    Form(
        kind="time",
        sentence="The ferry to Ostrand leaves at {v}.",
        question="At what time does the ferry to Ostrand leave?",
        reworded="When does the boat to Ostrand depart?",
        reworded_lead="The boat to Ostrand departs at",
        values=("17:40", "06:25", "14:35", "19:05", "21:50", "08:55"),
    ),
    Form(
        kind="fruit",
        sentence="Aunt Philippa makes her jam from {v}.",
        question="What does Aunt Philippa make her jam from?",
        reworded="Which fruit does Philippa cook for her preserves?",
        reworded_lead="For her preserves, Philippa cooks",
        values=("quinces", "gooseberries", "apricots", "blackberries", "cherries", "pears"),
        rivals=("apples", "strawberries", "oranges", "plums", "raspberries", "figs"),
    ),
    Form(
        kind="year",
        sentence="The old bridge over the Tamsel was built in {v}.",
        question="In which year was the old bridge over the Tamsel built?",
        reworded="When was the Tamsel bridge constructed?",
        reworded_lead="It was constructed in the year",
        values=("1683", "1728", "1741", "1769", "1837", "1854"),
    ),
    Form(
        kind="code",
        sentence="The locker at the swimming pool opens with the code {v}.",
        question="With which code does the locker at the swimming pool open?",
        reworded="What number unlocks the cupboard at the swimming pool?",
        reworded_lead="The number that unlocks it is",
        values=("48213", "70956", "31874", "92605", "56341", "84729"),
    ),
)
"""For choosing settings."""

CONFIRM = (
    Form(
        kind="count",
        sentence="The library of Wexcombe owns {v} atlases.",
        question="How many atlases does the library of Wexcombe own?",
        reworded="How many books of maps are there in Wexcombe?",
        reworded_lead="The number of books of maps in Wexcombe is",
        values=("163", "278", "349", "461", "538", "687"),
    ),
    Form(
        kind="instrument",
        sentence="The postmaster's daughter plays the {v}.",
        question="What does the postmaster's daughter play?",
        reworded="On which instrument is the postmaster's girl heard?",
        reworded_lead="The postmaster's girl is heard on the",
        values=("cello", "trumpet", "harp", "accordion", "banjo", "clarinet"),
        rivals=("piano", "violin", "guitar", "flute", "drums", "organ"),
    ),
    Form(
        kind="country",
        sentence="The marble of the new fountain comes from {v}.",
        question="Where does the marble of the new fountain come from?",
        reworded="Which country supplied the stone for the fountain?",
        reworded_lead="The stone for it was supplied by",
        values=("Portugal", "Turkey", "Bulgaria", "Norway", "Morocco", "Croatia"),
        rivals=("Italy", "France", "Spain", "Greece", "India", "China", "Germany"),
    ),
    Form(
        kind="month",
        sentence="The pottery fair at Dunley is held in {v}.",
        question="In which month is the pottery fair at Dunley held?",
        reworded="When can one buy pots at the market in Dunley?",
        reworded_lead="One can buy pots there in",
        values=("February", "April", "July", "September"),
        rivals=("January", "March", "May", "June", "August", "October", "November", "December"),
    ),
    Form(
        kind="inventor",
        sentence="The folding kayak was invented by {v}.",
        question="By whom was the folding kayak invented?",
        reworded="Who came up with the kayak that folds?",
        reworded_lead="The one who came up with it was",
        values=("Edith Marlowe", "Hilda Brandt", "Agnes Thorne", "Martha Quill", "Ingrid Falk", "Nora Pym"),
        rivals=("John", "Thomas Edison", "James", "William", "Henry"),
    ),
    Form(
        kind="material",
        sentence="The weathervane on the town hall is made of {v}.",
        question="What is the weathervane on the town hall made of?",
        reworded="Which metal was used for the weathervane?",
        reworded_lead="The metal that was used for it is",
        values=("copper", "zinc", "brass", "pewter", "bronze", "tin"),
        rivals=("iron", "steel", "gold", "silver", "lead", "wood", "aluminium", "stone"),
    ),
    Form(
        kind="pet",
        sentence="What sleeps in the printer's workshop every winter is a {v}.",
        question="What sleeps in the printer's workshop every winter?",
        reworded="Which animal hibernates at the printer's?",
        reworded_lead="The animal that hibernates there is a",
        values=("tortoise", "ferret", "squirrel", "dormouse", "raccoon", "lizard"),
        rivals=("dog", "cat", "mouse", "bear", "bat", "fox", "bird", "hedgehog"),
    ),
    Form(
        kind="sum",
        sentence="Mister Abernathy paid {v} shillings for the grandfather clock.",
        question="How many shillings did Mister Abernathy pay for the grandfather clock?",
        reworded="What was the price of Abernathy's clock?",
        reworded_lead="The price of the clock, in shillings, was",
        values=("365", "428", "571", "683", "746", "895"),
    ),
    Form(
        kind="duration",
        sentence="The walk from the station to the castle takes {v} minutes.",
        question="How many minutes does the walk from the station to the castle take?",
        reworded="How long does one go on foot from the railway to the castle?",
        reworded_lead="On foot, the number of minutes is",
        values=("37", "43", "52", "58", "71", "76"),
    ),
    Form(
        kind="dish",
        sentence="On Sundays the harbour inn serves {v} soup.",
        question="Which soup does the harbour inn serve on Sundays?",
        reworded="What can guests of the harbour inn eat at the weekend?",
        reworded_lead="At the weekend the guests can eat",
        values=("pumpkin", "lentil", "mushroom", "turnip", "spinach", "cabbage"),
        rivals=("fish", "chicken", "tomato", "onion", "potato", "clam", "vegetable", "pea", "bean", "leek"),
    ),
    Form(
        kind="closing",
        sentence="The glass factory in Molvik closed in {v}.",
        question="In which year did the glass factory in Molvik close?",
        reworded="When did the works at Molvik stop making glass?",
        reworded_lead="They stopped making glass in the year",
        values=("1862", "1879", "1893", "1906", "1927", "1938"),
    ),
    Form(
        kind="label",
        sentence="The parcel for the observatory carries the label {v}.",
        question="Which label does the parcel for the observatory carry?",
        reworded="What is written on the box for the observatory?",
        reworded_lead="On the box is written",
        values=("QX-4471", "VR-8306", "KD-2958", "ZB-6147", "HW-7392", "JT-5084"),
    ),
)
"""For confirming what was chosen."""

SETS = {"choose": CHOOSE, "confirm": CONFIRM}
