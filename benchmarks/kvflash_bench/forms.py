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
    values: what it can be; the shipped texts hold none of them. anchors: other answers that someone who guesses could
    give, so that a reply that names one of them before the value is wrong.
    """

    kind: str
    sentence: str
    question: str
    reworded: str
    reworded_lead: str
    values: tuple[str, ...]
    anchors: tuple[str, ...] = ()

    @property
    def lead(self) -> str:
        """The answer up to its value, in the sentence's words."""
        return self.sentence.partition(" {v}")[0]


CHOOSE = (
    Form(
        kind="number",
        sentence="The lighthouse on Carrow Point has {v} steps.",
        question="How many steps does the lighthouse on Carrow Point have?",
        reworded="How many stairs does one climb in the lighthouse on Carrow Point?",
        reworded_lead="In the lighthouse on Carrow Point one climbs",
        values=("214", "327", "386", "443", "517", "642"),
    ),
    Form(
        kind="word",
        sentence="The password for the night train is {v}.",
        question="What is the password for the night train?",
        reworded="Which secret word lets people on the night train?",
        reworded_lead="The secret word for the night train is",
        values=("umbrella", "lemonade", "zeppelin", "gondola", "bagpipe", "walnut"),
    ),
    Form(
        kind="place",
        sentence="Doctor Imre Halloway was born in {v}.",
        question="Where was Doctor Imre Halloway born?",
        reworded="In which city did Imre Halloway come into the world?",
        reworded_lead="Halloway came into the world in the city of",
        values=("Lisbon", "Krakow", "Naples", "Riga", "Havana", "Bergen"),
        anchors=("London", "Paris", "New York", "Budapest", "Vienna"),
    ),
    Form(
        kind="day",
        sentence="The choir of Saint Brannock rehearses every {v}.",
        question="On which day does the choir of Saint Brannock rehearse?",
        reworded="When do the singers of Saint Brannock meet?",
        reworded_lead="The singers of Saint Brannock meet each",
        values=("Wednesday", "Thursday", "Friday", "Saturday"),
        anchors=("Monday", "Tuesday", "Sunday"),
    ),
    Form(
        kind="name",
        sentence="The night watchman of the museum is {v}.",
        question="Who is the night watchman of the museum?",
        reworded="Who guards the museum after dark?",
        reworded_lead="The museum is guarded after dark by",
        values=("Conrad", "Rupert", "Oswald", "Gregor", "Ludwig", "Casper"),
        anchors=("John", "James", "Jack", "Tom", "Peter"),
    ),
    Form(
        kind="colour",
        sentence="The front door of the bakery is painted {v}.",
        question="What colour is the front door of the bakery painted?",
        reworded="Which shade does the bakery's entrance have?",
        reworded_lead="The bakery's entrance has a shade of",
        values=("turquoise", "maroon", "crimson", "indigo", "scarlet", "beige"),
        anchors=("red", "green", "blue", "yellow", "white", "black", "brown"),
    ),
    Form(
        kind="animal",
        sentence="The mascot of the rowing club is a {v}.",
        question="Which animal is the mascot of the rowing club?",
        reworded="What creature stands for the rowing club?",
        reworded_lead="The creature that stands for the rowing club is a",
        values=("heron", "badger", "hedgehog", "walrus", "salmon", "pelican"),
        anchors=("dog", "cat", "bear", "lion", "eagle", "duck", "swan", "horse"),
    ),
    Form(
        kind="price",
        sentence="A ticket for the puppet theatre costs {v} crowns.",
        question="How many crowns does a ticket for the puppet theatre cost?",
        reworded="What does one pay to see the puppet theatre?",
        reworded_lead="To see the puppet theatre one pays",
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
        anchors=("apples", "strawberries", "oranges", "plums", "raspberries", "figs"),
    ),
    Form(
        kind="year",
        sentence="The old bridge over the Tamsel was built in {v}.",
        question="In which year was the old bridge over the Tamsel built?",
        reworded="When was the Tamsel bridge constructed?",
        reworded_lead="The Tamsel bridge was constructed in",
        values=("1683", "1728", "1741", "1769", "1837", "1854"),
    ),
    Form(
        kind="code",
        sentence="The locker at the swimming pool opens with the code {v}.",
        question="With which code does the locker at the swimming pool open?",
        reworded="What number unlocks the locker of a swimmer?",
        reworded_lead="A swimmer unlocks the locker with the number",
        values=("48213", "70956", "31874", "92605", "56341", "84729"),
    ),
)
"""For choosing settings."""

CONFIRM = (
    Form(
        kind="count",
        sentence="The library of Wexcombe owns {v} atlases.",
        question="How many atlases does the library of Wexcombe own?",
        reworded="How many atlases can one borrow in Wexcombe?",
        reworded_lead="In Wexcombe one can borrow",
        values=("163", "278", "349", "461", "538", "687"),
    ),
    Form(
        kind="instrument",
        sentence="The postmaster's daughter plays the {v}.",
        question="What does the postmaster's daughter play?",
        reworded="On what does the girl of the postmaster make music?",
        reworded_lead="The postmaster's girl makes music on the",
        values=("cello", "trumpet", "harp", "accordion", "banjo", "clarinet"),
        anchors=("piano", "violin", "guitar", "flute", "drums", "organ"),
    ),
    Form(
        kind="country",
        sentence="The marble of the new fountain comes from {v}.",
        question="Where does the marble of the new fountain come from?",
        reworded="Which country supplied the marble for the fountain?",
        reworded_lead="The marble for the fountain was supplied by",
        values=("Portugal", "Turkey", "Bulgaria", "Norway", "Morocco", "Croatia"),
        anchors=("Italy", "France", "Spain", "Greece", "India", "China", "Germany"),
    ),
    Form(
        kind="month",
        sentence="The pottery fair at Dunley is held in {v}.",
        question="In which month is the pottery fair at Dunley held?",
        reworded="When can one buy pots at the Dunley fair?",
        reworded_lead="One can buy pots at the Dunley fair in",
        values=("February", "April", "July", "September"),
        anchors=("January", "March", "May", "June", "August", "October", "November", "December"),
    ),
    Form(
        kind="inventor",
        sentence="The folding kayak was invented by {v}.",
        question="By whom was the folding kayak invented?",
        reworded="Who came up with the kayak that folds?",
        reworded_lead="The kayak that folds is an idea of",
        values=("Edith Marlowe", "Hilda Brandt", "Agnes Thorne", "Martha Quill", "Ingrid Falk", "Nora Pym"),
        anchors=("John", "Thomas Edison", "James", "William", "Henry"),
    ),
    Form(
        kind="material",
        sentence="The weathervane on the town hall is made of {v}.",
        question="What is the weathervane on the town hall made of?",
        reworded="Which metal did they use for the weathervane?",
        reworded_lead="For the weathervane they used",
        values=("copper", "zinc", "brass", "pewter", "bronze", "tin"),
        anchors=("iron", "steel", "gold", "silver", "lead", "wood", "aluminium", "stone"),
    ),
    Form(
        kind="pet",
        sentence="What sleeps in the printer's workshop every winter is a {v}.",
        question="What sleeps in the printer's workshop every winter?",
        reworded="Which animal hibernates at the printer's?",
        reworded_lead="The animal that hibernates at the printer's is a",
        values=("tortoise", "ferret", "squirrel", "dormouse", "raccoon", "lizard"),
        anchors=("dog", "cat", "mouse", "bear", "bat", "fox", "bird", "hedgehog"),
    ),
    Form(
        kind="sum",
        sentence="Mister Abernathy paid {v} shillings for the grandfather clock.",
        question="How many shillings did Mister Abernathy pay for the grandfather clock?",
        reworded="What was the price of Abernathy's clock?",
        reworded_lead="The price of Abernathy's clock, in shillings, was",
        values=("365", "428", "571", "683", "746", "895"),
    ),
    Form(
        kind="duration",
        sentence="The walk from the station to the castle takes {v} minutes.",
        question="How many minutes does the walk from the station to the castle take?",
        reworded="How long does one go on foot from the railway to the castle?",
        reworded_lead="On foot from the railway to the castle, one needs",
        values=("37", "43", "52", "58", "71", "76"),
    ),
    Form(
        kind="dish",
        sentence="On Sundays the harbour inn serves {v} soup.",
        question="Which soup does the harbour inn serve on Sundays?",
        reworded="What can guests of the harbour inn eat at the weekend?",
        reworded_lead="At the weekend, the guests of the harbour inn eat",
        values=("pumpkin", "lentil", "mushroom", "turnip", "spinach", "cabbage"),
        anchors=("fish", "chicken", "tomato", "onion", "potato", "clam", "vegetable", "pea", "bean", "leek"),
    ),
    Form(
        kind="closing",
        sentence="The glass factory in Molvik closed in {v}.",
        question="In which year did the glass factory in Molvik close?",
        reworded="When did the works at Molvik stop making glass?",
        reworded_lead="The works at Molvik stopped making glass in",
        values=("1862", "1879", "1893", "1906", "1927", "1938"),
    ),
    Form(
        kind="label",
        sentence="The parcel for the observatory carries the label {v}.",
        question="Which label does the parcel for the observatory carry?",
        reworded="What is written on the box for the observatory?",
        reworded_lead="On the box for the observatory is written",
        values=("QX-4471", "VR-8306", "KD-2958", "ZB-6147", "HW-7392", "JT-5084"),
    ),
)
"""For confirming what was chosen."""

SETS = {"choose": CHOOSE, "confirm": CONFIRM}
