"""Scores multiple-choice questions by log-likelihood, as evaluation suites do: echo and logprobs, nothing generated.

    millpond serve smollm2-135m --port 8080 &
    python examples/score_choices.py [http://127.0.0.1:8080]

Each ending is scored by the mean log-probability of its tokens behind the beginning; the best is the model's choice.
"""

from __future__ import annotations

import json
import sys
import urllib.request

ITEMS: list[tuple[str, tuple[str, str, str, str]]] = [
    ("When water gets very cold it turns into", ("ice.", "bread.", "music.", "a horse.")),
    ("She was thirsty, so she drank a glass of", ("water.", "sand.", "wood.", "paper.")),
    ("At night the sky is full of", ("stars.", "shoes.", "chairs.", "butter.")),
    ("The dog wagged its", ("tail.", "book.", "window.", "engine.")),
    ("He opened the door with a", ("key.", "cloud.", "river.", "potato.")),
    ("To cut the bread she used a", ("knife.", "pillow.", "cloud.", "song.")),
    ("Birds build their nests in", ("trees.", "ovens.", "books.", "pockets.")),
    ("In winter people wear warm", ("coats.", "lakes.", "plates.", "roads.")),
    ("The baby started to cry because it was", ("hungry.", "a bridge.", "made of stone.", "parked.")),
    ("We use an umbrella when it is", ("raining.", "Tuesday's cousin.", "purple.", "multiplied.")),
    ("The farmer milked the", ("cow.", "fence.", "tractor.", "barn.")),
    ("A week has seven", ("days.", "wheels.", "oceans.", "doors.")),
    ("The capital of France is", ("Paris.", "Tokyo.", "Cairo.", "Lima.")),
    ("The opposite of hot is", ("cold.", "loud.", "square.", "green.")),
    ("Fish live in the", ("sea.", "sky.", "attic.", "oven.")),
    ("The teacher wrote on the", ("board.", "soup.", "wind.", "moon.")),
    ("To see better, he put on his", ("glasses.", "sandwich.", "garage.", "rain.")),
    ("After a long day of work she was very", ("tired.", "triangular.", "wooden.", "liquid.")),
    ("The train arrived at the", ("station.", "spoon.", "feather.", "melody.")),
    ("You can buy books in a", ("bookshop.", "volcano.", "raindrop.", "shadow.")),
    ("The sun rises in the", ("east.", "kitchen.", "bottle.", "sock.")),
    ("Bees make", ("honey.", "cars.", "shirts.", "coins.")),
    ("The heart pumps", ("blood.", "letters.", "gravel.", "furniture.")),
    ("The chef cooked dinner in the", ("kitchen.", "envelope.", "comet.", "pencil.")),
    ("She sent him a birthday", ("card.", "glacier.", "forest.", "ceiling.")),
    ("The ship sailed across the", ("ocean.", "carrot.", "staircase.", "violin.")),
    ("Plants need sunlight and", ("water.", "shoes.", "money.", "noise.")),
    ("The doctor told the patient to take his", ("medicine.", "mountain.", "highway.", "ceiling.")),
    ("He broke his leg, so he went to the", ("hospital.", "spoon.", "alphabet.", "rainbow.")),
    ("My brother plays the", ("guitar.", "wall.", "snow.", "puddle.")),
    ("The cat chased the", ("mouse.", "thunder.", "theory.", "decade.")),
    ("In autumn the leaves fall from the", ("trees.", "stars.", "books.", "fish.")),
    ("Two plus two equals", ("four.", "banana.", "Monday.", "yellow.")),
    ("The children played football in the", ("park.", "teapot.", "sentence.", "sneeze.")),
    ("Please turn off the light before you go to", ("bed.", "gravel.", "algebra.", "velvet.")),
    ("The plane landed at the", ("airport.", "pocket.", "teaspoon.", "poem.")),
    ("She washed her hands with soap and", ("water.", "concrete.", "lightning.", "history.")),
    ("A spider has eight", ("legs.", "opinions.", "kitchens.", "countries.")),
    ("The king lived in a", ("castle.", "comma.", "thimble.", "whisper.")),
    ("The ice cream melted in the", ("sun.", "grammar.", "freezer's name.", "square root.")),
]


def scores(url: str, beginning: str, endings: tuple[str, ...]) -> list[float]:
    """Mean log-probability of each ending's tokens."""
    prompts = [f"{beginning} {ending}" for ending in endings]
    body = {"prompt": prompts, "echo": True, "logprobs": 0, "max_tokens": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        choices = json.load(reply)["choices"]
    means: list[float] = []
    for choice in choices:
        columns = choice["logprobs"]
        pairs = zip(columns["text_offset"], columns["token_logprobs"], strict=True)
        own = [logprob for offset, logprob in pairs if offset >= len(beginning)]
        means.append(sum(own) / len(own))
    return means


def main(url: str = "http://127.0.0.1:8080") -> None:
    right = 0
    for beginning, endings in ITEMS:
        found = scores(url, beginning, endings)
        choice = found.index(max(found))
        right += choice == 0  # the first ending is the right one; the model does not see the others
        print(f"{'ok  ' if choice == 0 else 'miss'} {beginning} {endings[choice]}")
    print(f"{right} of {len(ITEMS)} right; chance is {len(ITEMS) // 4}")


if __name__ == "__main__":
    main(*sys.argv[1:])
