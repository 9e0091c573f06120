"""An LLM in a script: several questions at once, each answer cut into the fields that the script goes on with.

python examples/llm_in_a_script.py
"""

from llmfromscratch import LLM, SamplingParams

QUESTIONS = [
    "Why is the sky blue?",
    "What is the capital of France?",
    "Name a primary colour.",
]


def main() -> None:
    """Asks all questions at once and prints the answers."""
    llm = LLM("smollm2-135m-instruct")  # or a folder, a .gguf, a .safetensors, a hub id
    prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    answers = llm.generate(prompts, SamplingParams(max_tokens=40))  # one batch: they are computed together
    for question, answer in zip(QUESTIONS, answers, strict=True):
        if answer.error:
            print(f"{question}\n  given up: {answer.error}")
            continue
        rest = " …" if answer.finish_reason == "length" else ""
        print(f"{question}\n  {answer.text.strip()}{rest}")
    print(f"{llm.metrics.tokens} tokens in {llm.metrics.busy_seconds:.1f} s of computing")


if __name__ == "__main__":
    main()
