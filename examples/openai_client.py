"""The openai package against a running server: a whole answer, a stream, and the tokens that were shared.

millpond serve &
python examples/openai_client.py [http://127.0.0.1:8000]
"""

from __future__ import annotations

import sys

from openai import OpenAI

SYSTEM = "You answer in one short sentence. You know everything about ponds, mills and the animals that live there."


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    def messages(question: str) -> list:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]

    whole = client.chat.completions.create(
        model=model, messages=messages("What does a mill do?"), max_tokens=40, temperature=0.0
    )
    print("answer:", whole.choices[0].message.content)

    print("stream:", end=" ")
    stream = client.chat.completions.create(
        model=model,
        messages=messages("What do ducks eat?"),
        max_tokens=40,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details else 0
            print(f"\n{cached} of {chunk.usage.prompt_tokens} prompt tokens came from the request before")


if __name__ == "__main__":
    main(*sys.argv[1:])
