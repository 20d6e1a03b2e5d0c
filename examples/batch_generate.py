"""Many prompts in one batch, without a server: every answer, and how fast they came together.

    python examples/batch_generate.py [MODEL]

MODEL is a name (`millpond models list`) or a GGUF file; the default one is pulled on first use.
"""

from __future__ import annotations

import sys
import time

from millpond import LLM, SamplingParams

ANIMALS = ["duck", "otter", "heron", "frog", "pike", "beaver", "newt", "swan"]


def main(model: str = "smollm2-135m") -> None:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=32)
    conversations = [[{"role": "user", "content": f"Say one thing about the {animal}."}] for animal in ANIMALS]
    with LLM(model, max_running=8) as llm:
        began = time.perf_counter()
        answers = llm.chat(conversations, params)
        seconds = time.perf_counter() - began
    for animal, answer in zip(ANIMALS, answers, strict=True):
        print(f"{animal}: {' '.join(answer.text.split())} [{answer.finish_reason.value}]")
    tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"{len(answers)} answers, {tokens} tokens, {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
