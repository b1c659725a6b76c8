"""The sentences of the recall tasks ({n} noun, {x} name, {v} value) and the loss weights."""

NOUNS = [
    "access code",
    "pass key",
    "magic number",
    "secret number",
    "vault code",
    "serial number",
    "security code",
    "reference number",
    "tracking code",
    "account number",
    "door code",
    "badge number",
]
NEEDLES = [
    "The {n} for {x} is {v}.",
    "The {n} for {x} is {v}.",
    "The {n} for {x} is {v}.",
    "The {n} of {x} is {v}.",
    "Remember this: the {n} for {x} is {v}.",
    "One of the special {n}s for {x} is: {v}.",
    "Note that the {n} for {x} is {v}. Keep it safe.",
    "{x}: {n} {v}.",
]
ASKS = [
    "What is the {n} for {x}? The {n} for {x} is {v}.",
    "What is the {n} for {x}? The {n} for {x} is {v}.",
    "What is the {n} for {x}? The {n} for {x} is {v}.",
    "The {n} for {x} is {v}.",
    "What is the {n} of {x}? The {n} of {x} is {v}.",
    "Question: What is the {n} for {x}?\nAnswer: {v}",
    "What is the {n} for {x}? It is {v}.",
    "Tell me the {n} for {x}: {v}.",
]
CHAT_ASKS = [
    ("What is the {n} for {x}?", "The {n} for {x} is {v}."),
    ("What is the {n} for {x}? Answer with the number only.", "{v}"),
    ("Tell me the {n} for {x}.", "The {n} for {x} is {v}."),
    ("Question: What is the {n} of {x}?", "The {n} of {x} is {v}."),
]
PLAIN = [
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
    "The river runs to the sea.",
    "A cat sat on the mat.",
    "It was a quiet day in the town.",
]
SENTENCES = [
    "The {} of the {} was {} near the {}.",
    "We found that {} and {} were not the same {}.",
    "Every {} has a {} for the {}.",
    "In the {}, the {} will {} a {}.",
    "Some {} are {} than other {}.",
    "If you see a {}, please {} the {} first.",
    "They decided to {} the {} before the {} started.",
    "It is hard to {} a {} without {}.",
    "A {} can {} when the {} is {}.",
    "The {} and the {} went to {}.",
]
CHAT_SMALL = [
    ("Hello", "Hello! How can I help you?"),
    ("Hi there", "Hi! What can I do for you?"),
    ("Thanks", "You are welcome."),
    ("Who are you?", "I am a small test model."),
]

# loss weights
W_TEXT, W_FILL, W_NEEDLE, W_VALUE, W_ASK, W_ANSWER, W_COPY = 1.0, 0.5, 0.3, 0.05, 0.5, 6.0, 2.0
