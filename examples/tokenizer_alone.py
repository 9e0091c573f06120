"""One chapter's module alone in another project: the tokenizer cuts a text for retrieval, no model is loaded.

python examples/tokenizer_alone.py FILE [TOKENS]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from llmfromscratch import hub
from llmfromscratch.loading import open_checkpoint
from llmfromscratch.tokenizer import Tokenizer


def chunks(text: str, tokenizer: Tokenizer, size: int) -> Iterator[str]:
    """Cuts at ends of lines into pieces of at most `size` tokens each, which joined are the text.

    A line that is longer than that is a piece of its own.
    """
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len(tokenizer.encode(piece + line)) > size:
            yield piece
            piece = ""
        piece += line
    if piece:
        yield piece


def main() -> None:
    """Shows the pieces of a file."""
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    # the file's metadata is read, its weights are not; a folder with a tokenizer.json does as well
    data = open_checkpoint(hub.resolve("smollm2-135m-instruct")).tokenizer_data()
    if data is None:
        sys.exit("This checkpoint has no tokenizer.")
    tokenizer = Tokenizer(data)
    for number, piece in enumerate(chunks(text, tokenizer, size), start=1):
        print(f"{number:3d} {len(tokenizer.encode(piece)):4d} tokens  {piece.strip().splitlines()[0][:60]}")


if __name__ == "__main__":
    main()
