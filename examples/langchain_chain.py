"""LangChain against the server: a chain of prompt, model and parser, answered as a whole, in a batch, and streamed.

    pip install langchain-openai
    python examples/langchain_chain.py

Here the server runs in the same program. `llmfromscratch serve` in another terminal does as well: then BASE_URL is
http://127.0.0.1:8000/v1, and nothing of llmfromscratch is imported.
"""

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

from llmfromscratch import LLM
from llmfromscratch.server import serve


def main() -> None:
    """Asks in three ways."""
    # in float32 the same question has the same answer, also where its prompt is found in the cache the second time
    with serve(LLM(dtype="float32")) as server:
        model = ChatOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",  # the client wants one; this server asks for none
            model="llmfromscratch",
            temperature=0,
            max_completion_tokens=30,
        )
        prompt = ChatPromptTemplate.from_messages(
            [("system", "You answer in one sentence."), ("user", "What is a {thing}?")]
        )
        chain = prompt | model | StrOutputParser()
        print("whole:", chain.invoke({"thing": "prism"}))
        for answer in chain.batch([{"thing": "lens"}, {"thing": "mirror"}]):
            print("batch:", answer)
        print("stream:", end=" ")
        for piece in chain.stream({"thing": "prism"}):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
