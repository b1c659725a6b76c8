"""Beginnings that a model is asked to go on with: chats about topics and passages, chats that it invents, and text.

  python -m scripts.train_draft.prompts MODEL.gguf OUT.npz TEXT...

Needs the package and no torch: the model's own tokenizer and markers are used. They are ChatML's.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
ASSISTANT = "<|im_start|>assistant\n"
HELD_OUT = 30_000  # characters at each text's beginning that are not trained on: measurements read them
LONGEST = 192  # tokens of a beginning

TOPICS = """
photosynthesis; the water cycle; black holes; volcanoes; the French Revolution; the Roman Empire; the Silk Road; jazz
music; impressionist painting; the printing press; steam engines; bicycles; electric cars; solar panels; wind turbines;
nuclear power; vaccines; antibiotics; the human heart; the immune system; sleep; dreams; memory; stress; meditation;
healthy eating; vegetarian cooking; baking bread; growing tomatoes; house plants; dogs; cats; bees; whales; dinosaurs;
elephants; coral reefs; rain forests; deserts; glaciers; earthquakes; the Moon; Mars; comets; the Big Bang; gravity;
magnetism; electricity; light; sound; atoms; chemical reactions; acids and bases; DNA; evolution; cells; viruses;
fractions; prime numbers; triangles; probability; statistics; calculus; algorithms; recursion; sorting; databases;
the internet; email; passwords; encryption; operating systems; Python; JavaScript; spreadsheets; robots; machine
learning; neural networks; video games; chess; football; tennis; swimming; running; hiking; camping; sailing; fishing;
photography; poetry; novels; fairy tales; theatre; cinema; opera; the piano; the guitar; drawing; pottery; knitting;
fashion; architecture; bridges; trains; airplanes; ships; maps; time zones; calendars; money; banks; taxes; inflation;
savings; job interviews; resumes; meetings; teamwork; leadership; negotiation; public speaking; writing letters;
learning a language; studying for exams; reading books; museums; Paris; Japan; Egypt; India; Brazil; Australia; Canada;
New York; London; the ocean; rivers; mountains; weather; climate change; recycling; pollution; biodiversity; democracy;
elections; human rights; laws; courts; police; education; schools; friendship; family; love; honesty; courage; patience;
happiness; kindness; birthdays; weddings; holidays; coffee; tea; chocolate; pizza; soup; salads; rice; cheese; spices;
time management; procrastination; budgeting; first aid; exercise; yoga; teeth; eyes; skin; allergies; headaches; colds
"""

ASKED = """
What is {}?|Explain {} in simple terms.|Tell me about {}.|Write a short paragraph about {}.|Give me five facts about {}.
Why does {} matter?|What are the advantages and disadvantages of {}?|How did {} change over time?|Write a poem about {}.
Write a short story about {}.|List three common misconceptions about {}.|Explain {} to a ten-year-old child.
How can I learn more about {}?|What should a beginner know about {}?|Write an introduction for an essay on {}.
Write an email to a friend about {}.|Give me some tips on {}.|What questions do people ask about {}? Answer them.
Compare {} with {other}.|What do {} and {other} have in common?|Write a dialogue between two people about {}.
Make a plan for a lesson on {}.|Summarize what is known about {} in two sentences.|What is the history of {}?
Describe {} step by step.|Give an example of {} from everyday life.|What are the most important ideas behind {}?
Write a blog post with headings about {}.|Make a list of words that have to do with {}.|Can you explain how {} works?
Write a Python program that has something to do with {}.|Write three quiz questions on {} with their answers.
I am interested in {}. Where do I start?|What is the best way to talk to children about {}?|Is {} dangerous?
"""

ABOUT = """
Summarize the following text.|Rewrite this in plain English.|What is the main point of this text?|Make a bullet list of
the points in this text.|Explain the following to a beginner.|Correct and improve this text.|Continue this text.|Give
this text a title and explain your choice.|Ask three questions about this text and answer them.|Turn this into an email.
"""

CODE = """
Write a Python function that {}.|How do I write code that {} in Python? Give an example.|Explain step by step how a
program {}, with code.|Write a JavaScript function that {}.|Write a function that {} and a test for it.
"""

TASKS = """
reverses a string; counts the words in a text; finds the largest number in a list; checks whether a number is prime;
sorts a list of names; removes duplicates from a list; computes the factorial of a number; reads a file line by line;
computes the average of a list; finds the most common letter; merges two dictionaries; checks for a palindrome; converts
Celsius to Fahrenheit; prints the Fibonacci numbers; flattens a nested list; searches a sorted list; rolls two dice;
counts down from ten; validates an email address; parses a date; draws a triangle of stars; groups words by length
"""

FOLLOW_UPS = """
Can you give an example?|Tell me more.|Why is that?|Summarize that in one sentence.|Make it shorter.|Explain it again in
other words.|What else should I know?|Thank you! Can you make a list of the main points?|Write that as a poem.|Is there
anything that people get wrong about it?|Now write it for an expert.|How would you explain it to a child?|Give me three
more.|Are you sure? Check it once more.|What would be the next step?|Translate the main idea into French.
"""

HELD_OUT_PROMPTS = """
How do I make a good cup of coffee at home?|Why is the sky blue during the day and red at sunset?
Write a function in Python that returns the second largest number of a list.|What was life like in a medieval castle?
My neighbour plays loud music every night. Write a polite note to him.|Give me a recipe for pancakes.
What is the difference between a virus and a bacterium?|Plan a weekend trip to the seaside for a family of four.
Write a limerick about a lazy cat.|How does a refrigerator keep food cold?
Summarize the story of Romeo and Juliet.|What are some good habits for saving money as a student?
Explain what a hash table is and when to use one.|Name five animals that live in Africa and describe each of them.
Write a cover letter for a job in a bookshop.|How many planets are there in the solar system, and which is the largest?
"""


def items(text: str, mark: str = "|") -> list[str]:
    """The parts of a list above; those on lines of their own count too where ``mark`` ends them all."""
    if mark == ";":
        return [" ".join(part.split()) for part in text.split(";")]
    out, open_line = [], ""
    for part in text.replace("\n", " \n").split("|"):
        for line in part.split("\n"):
            open_line = f"{open_line} {line}".strip()
            if open_line.endswith((".", "?", "!")):
                out.append(open_line)
                open_line = ""
    return out


def user(text: str) -> str:
    """A whole turn, up to where the model answers."""
    return f"<|im_start|>user\n{text}<|im_end|>\n{ASSISTANT}"


def passage(rng: random.Random, texts: list[str], words: int) -> str:
    """So many words of a text, from the beginning of a line."""
    text = rng.choice(texts)
    at = text.find("\n", rng.randrange(HELD_OUT, max(HELD_OUT + 1, len(text) - 20 * words))) + 1
    piece = text[at : at + 12 * words]
    return " ".join(piece.split()[:words]) if rng.random() < 0.5 else piece[: 6 * words].strip()


def beginnings(texts: list[str], *, count: int, seed: int) -> list[tuple[str, bool]]:
    """``count`` different beginnings, and of each whether the model invents the user's turn itself."""
    rng, found = random.Random(seed), dict[str, bool]()
    topics, tasks, asked, about, code = items(TOPICS, ";"), items(TASKS, ";"), items(ASKED), items(ABOUT), items(CODE)
    ways = ["topic"] * 5 + ["task"] + ["about"] * 2 * bool(texts) + ["text"] * 2 * bool(texts)
    for _ in range(4 * count):
        way = rng.choice(ways)
        system = SYSTEM if rng.random() < 0.8 else ""
        if way == "topic":
            made = system + user(rng.choice(asked).format(rng.choice(topics), other=rng.choice(topics)))
        elif way == "task":
            made = system + user(rng.choice(code).format(rng.choice(tasks)))
        elif way == "about":
            made = system + user(f"{rng.choice(about)}\n\n{passage(rng, texts, rng.randrange(30, 90))}")
        else:
            made = passage(rng, texts, rng.randrange(20, 110))
        found[made] = False
        if len(found) == count:
            break
    return list(found.items())


def main() -> None:
    """The command line."""
    ap = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    ap.add_argument("model")
    ap.add_argument("out")
    ap.add_argument("text", nargs="*", help="files of plain text to take passages from")
    ap.add_argument("--count", type=int, default=40000)
    ap.add_argument("--invented", type=float, default=0.4, help="share of chats whose user the model plays too")
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    from kvflash_ggml import Llama

    llm = Llama(args.model, n_ctx=512, verbose=False)

    def tokens(text: str) -> list[int]:
        return llm.tokenize(text.encode(), add_bos=False, special=True)

    made = beginnings([Path(p).read_text() for p in args.text], count=args.count, seed=args.seed)
    rows = [(tokens(text)[:LONGEST], invents) for text, invents in made]
    rng = random.Random(args.seed)
    invented = (tokens(SYSTEM + "<|im_start|>user\n"), True)
    rows = [invented if rng.random() < args.invented else row for row in rows]
    held_out = [tokens(SYSTEM + user(text)) for text in items(HELD_OUT_PROMPTS)]
    scripts = [tokens(f"\n{ASSISTANT}"), tokens("\n<|im_start|>user\n")]
    scripts += [tokens("\n" + user(text)) for text in items(FOLLOW_UPS)]
    np.savez_compressed(
        args.out,
        **padded("prompt", [row for row, _ in rows]),
        **padded("held_out", held_out),
        **padded("script", scripts),
        invents=np.array([invents for _, invents in rows]),
    )
    print(f"{len(rows)} beginnings of {np.mean([len(r) for r, _ in rows]):.0f} tokens, {len(held_out)} held out")


def padded(name: str, rows: list[list[int]]) -> dict[str, np.ndarray]:
    """Rows of different lengths as one array, and their lengths."""
    out = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return {name: out, f"{name}_length": np.array([len(r) for r in rows], np.int32)}


if __name__ == "__main__":
    main()
