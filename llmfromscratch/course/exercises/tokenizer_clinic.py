"""Chapter 2's bug hunts: each a broken function, the symptom it causes on a small text, and its check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmfromscratch import learner_engine
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.text.tokenizer_data import AddedToken, TokenizerData

# ---- 2.a ---------------------------------------------------------------------------------------------------------

SPACE_STORY = """
"I asked for a line of Python and got something that looks right. But when the text goes through the tokenizer and back
it is not the text any more. Prose is fine, nearly always." Compare the two texts character by character.
"""


def text_of(pieces: Sequence[bytes]) -> str:
    """The text of the tokens' bytes."""
    text = b"".join(pieces).decode("utf-8", errors="replace")
    for mark in (".", ",", "!", "?", "'s"):
        text = text.replace(f" {mark}", mark)
    return text


def show_spaces() -> None:
    """Texts before and after."""
    for text in ("It is late, isn't it?", "x != y and a.b == c", "f( *args , ...)", "ls . && cat .profile"):
        print(f"before {text!r}\nafter  {text_of(_bytes(text))!r}\n")


def _bytes(text: str) -> list[bytes]:
    return [piece.encode() for piece in text.replace(" ", "\0 ").split("\0") if piece]


def check_text_of(mended: Callable[[Sequence[bytes]], str]) -> None:
    """The way back gives the text, whatever stands in it."""
    texts = ("a.", "a !", "x != y", "f(a , b)", "ls .", "it 's", "  two  spaces", "x != y and a.b == c", "né ?")

    def without_two(pieces: Sequence[bytes]) -> str:
        return " ".join(b"".join(pieces).decode().split())

    compare(
        mended,
        lambda pieces: b"".join(pieces).decode(),
        [
            *(Case(repr(text), _bytes(text)) for text in texts),
            Case("é cut into its two bytes", [b"n", b"\xc3", b"\xa9 ", b"!"]),
        ],
        expected="the text as it was, every space included",
        mistakes=[
            ("a space still goes where a mark follows it; who says that it was not meant?", text_of),
            ("spaces are still taken away before some of the marks", _before_marks(".,?")),
            ("several spaces become one", without_two),
            ("the space at the beginning goes", lambda pieces: b"".join(pieces).decode().lstrip()),
            ("each piece is decoded on its own; a character may lie across two",
             lambda pieces: "".join(piece.decode("utf-8", errors="replace") for piece in pieces)),
        ],
    )  # fmt: skip


def _before_marks(marks: str) -> Callable[[Sequence[bytes]], str]:
    def decode(pieces: Sequence[bytes]) -> str:
        text = b"".join(pieces).decode()
        for mark in marks:
            text = text.replace(f" {mark}", mark)
        return text

    return decode


# ---- 2.b ---------------------------------------------------------------------------------------------------------

STOP_STORY = """
"My stop strings work, I have tests. Only sometimes the model talks on, and I can see the stop string in the text." The
text and the stop string of the report stand below, with what became of them. Go through the text with a finger.
"""


def until_stop(pieces: Sequence[str], stop: str) -> str:
    """The text before the first stop string, however it is cut; all of it where there is none."""
    text, met = "", 0
    for character in "".join(pieces):
        text += character
        met = met + 1 if character == stop[met] else int(character == stop[0])
        if met == len(stop):
            return text[: -len(stop)]
    return text


def show_stop() -> None:
    """Texts that stop and texts that do not."""
    for pieces, stop in (
        (["Yes.", "END of it"], "END"),
        (["aa", "ab", " and more"], "aab"),
        (["Hi.\n", "\n", "\nUser: x"], "\n\nUser:"),
    ):
        print(f"stop {stop!r}, pieces {pieces}: {until_stop(pieces, stop)!r}")


def check_until_stop(mended: Callable[[Sequence[str], str], str]) -> None:
    """Against str.partition on the whole text."""
    compare(
        mended,
        lambda pieces, stop: "".join(pieces).partition(stop)[0],
        [
            Case(f"stop {stop!r}, pieces {pieces}", pieces, stop)
            for pieces, stop in (
                (["axb"], "x"),
                (["ab"], "x"),
                (["xa", "by"], "ab"),
                (["aaab"], "aab"),
                (["a", "a", "a", "a", "b", "c"], "aab"),
                (["ababac", "!"], "abac"),
                (["Hi.\n", "\n", "\nUser: x"], "\n\nUser:"),
                (["aaxaab", "aab"], "aab"),
                (["aaabaab"], "aabaab"),
            )
        ],
        expected="the text before the first stop string",
        mistakes=[
            ("after a character that does not fit, the search still begins from zero, although the text ends with a "
             "beginning of the stop string", until_stop),
            ("each piece is searched on its own", _until_stop_in_pieces),
            ("the stop string itself comes out", lambda pieces, stop: _with_stop("".join(pieces), stop)),
            ("the text before the last stop string comes out, not before the first",
             lambda pieces, stop: _before_last("".join(pieces), stop)),
            ("a character that does not fit sets the count to zero, and is not even looked at as a first one",
             _until_stop_forgetful),
        ],
    )  # fmt: skip


def _until_stop_in_pieces(pieces: Sequence[str], stop: str) -> str:
    text = ""
    for piece in pieces:
        text += piece.partition(stop)[0]
        if stop in piece:
            break
    return text


def _with_stop(text: str, stop: str) -> str:
    before, met, _ = text.partition(stop)
    return before + met


def _before_last(text: str, stop: str) -> str:
    return text.rpartition(stop)[0] if stop in text else text


def _until_stop_forgetful(pieces: Sequence[str], stop: str) -> str:
    text, met = "", 0
    for character in "".join(pieces):
        text += character
        met = met + 1 if character == stop[met] else 0
        if met == len(stop):
            return text[: -len(stop)]
    return text


# ---- 2.c ---------------------------------------------------------------------------------------------------------

BEGIN_STORY = """
"With a plain prompt the model is as good as they say. As a chat it is a little stupid, with one model; with the next it
is fine." Nothing fails, and the two conversations look right as text. Look at them as ids.
"""
_BEGIN = "<s>"


def chat_ids(text: str, tokenizer: Any) -> list[int]:
    """Ids of a conversation that a chat template has laid out, for a model that wants its begin token first.

    Some templates write the begin token, some leave it to us.
    """
    return [tokenizer.bos_id, *tokenizer.encode(text, special=True, add_bos=False)]


def show_begin() -> None:
    """The text of two templates, and its ids."""
    tokenizer = _tokenizer()
    print(f"the begin token {_BEGIN!r} is id {tokenizer.bos_id}")
    for text in ("[u]hi[a]", f"{_BEGIN}[u]hi[a]"):
        print(f"{text!r:18} {chat_ids(text, tokenizer)}")


def _tokenizer() -> Any:
    """A tokenizer of single bytes: ids 0 to 255, and the begin token."""
    module = learner_engine.reference("tokenizer")
    vocab = {character: byte for byte, character in enumerate(module.byte_characters())}
    data = TokenizerData(vocab=vocab, ranks={}, added=(AddedToken(_BEGIN, 256),), bos_id=256)
    return module.Tokenizer(data)


def check_chat_ids(mended: Callable[[str, Any], list[int]]) -> None:
    """On texts with the begin token and without, and with one further inside."""
    tokenizer = _tokenizer()

    def encoded(text: str) -> list[int]:
        return [256 if part == _BEGIN else byte for part in _parted(text) for byte in part.encode()[: _width(part)]]

    def right(text: str) -> list[int]:
        return encoded(text if text.startswith(_BEGIN) else _BEGIN + text)

    compare(
        lambda text: mended(text, tokenizer),
        right,
        [Case(repr(text), text) for text in ("hi", "<s>hi", "", "<s>", "a<s>b", "<s>a<s>b")],
        expected="the begin token once at the front, whether the template wrote it or not, and all else as it was",
        mistakes=[
            ("where the template has written the begin token there are still two", lambda text: encoded(_BEGIN + text)),
            ("where the template leaves the begin token out there is none", encoded),
            ("all begin tokens go but one; a template may put others further inside",
             lambda text: encoded(_BEGIN + text.replace(_BEGIN, ""))),
            ("any begin token counts, wherever it stands, as with `in`; ask whether it stands first",
             lambda text: encoded(text if _BEGIN in text else _BEGIN + text)),
            ("the first begin token goes, wherever it stands, as with `remove`; only one at the front is in the way",
             lambda text: encoded(_BEGIN + text.replace(_BEGIN, "", 1))),
            ("the control tokens are encoded as plain text",
             lambda text: [256, *text.encode()]),
            ("the control tokens are encoded as plain text, and the begin token that was there is one of them",
             lambda text: [256, *text.removeprefix(_BEGIN).encode()]),
        ],
    )  # fmt: skip


def _parted(text: str) -> list[str]:
    between = text.split(_BEGIN)
    return [part for piece in between for part in (_BEGIN, piece)][1:]


def _width(part: str) -> int | None:
    return 1 if part == _BEGIN else None


# ---- 2.d ---------------------------------------------------------------------------------------------------------

SYSTEM_STORY = """
"For the first ten questions the assistant answers in rhyme, as the system message asks. Then it stops, from one answer
to the next, and nobody has touched anything." What the model is given is printed below, for a short and a long talk.
"""
Message = Mapping[str, str]
Count = Callable[[Sequence[Message]], int]


def newest_that_fit(messages: Sequence[Message], count_tokens: Count, limit: int) -> list[Message]:
    """The newest turns of a conversation that fit into `limit` tokens, together with its system message.

    A turn begins with a message of the user; the answer goes with it. The newest turn always stays.
    """
    kept = list(messages)
    while count_tokens(kept) > limit and len(kept) > 1:
        kept.pop(0)
        while len(kept) > 1 and kept[0]["role"] != "user":
            kept.pop(0)
    return kept


def show_system() -> None:
    """What is left of a conversation of two and of four turns."""
    for turns in (2, 4):
        kept = newest_that_fit(_talk(turns, system="Answer in rhyme."), _words, 16)
        print(f"{turns} turns:\n" + "\n".join(f"    {message['role']:9} {message['content']}" for message in kept))


def _talk(turns: int, system: str = "", answered: bool = False) -> list[Message]:
    """A conversation of `turns` questions with their answers; the last is answered where `answered` holds."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for turn in range(1, turns + 1):
        messages.append({"role": "user", "content": f"question {turn}"})
        messages.append({"role": "assistant", "content": f"the answer {turn}"})
    return messages if answered else messages[:-1]


def _words(messages: Sequence[Message]) -> int:
    return sum(len(message["content"].split()) for message in messages)


def check_newest_that_fit(mended: Callable[[Sequence[Message], Count, int], list[Message]]) -> None:
    """Conversations of up to four turns, with limits that let all, some or one of them stay."""
    rhyme = "Answer in rhyme."
    talks = {
        "one question": _talk(1),
        "a system message and one question": _talk(1, rhyme),
        "two turns": _talk(2),
        "a system message and two turns": _talk(2, rhyme),
        "a system message and four turns": _talk(4, rhyme),
        "a system message and three turns, all answered": _talk(3, rhyme, answered=True),
    }

    def contents(fit: Callable[..., list[Message]]) -> Callable[[list[Message], int], list[str]]:
        return lambda messages, limit: [message["content"] for message in fit(messages, _words, limit)]

    compare(
        contents(mended),
        contents(_fitted()),
        [
            Case(f"{text}, {_words(talk)} words, limit {limit}", talk, limit)
            for text, talk in talks.items()
            for limit in (99, 12, 8, 3)
        ],
        expected="the system message, and as many of the newest whole turns as fit beside it, at least one",
        mistakes=[
            ("the system message is dropped with the oldest turn", contents(newest_that_fit)),
            ("the system message stays but is not counted: the conversation is too long",
             contents(_fitted(uncounted=True))),
            ("the newest turns go and the oldest stay", contents(_fitted(oldest=True))),
            ("one message at a time is dropped, so that an answer stands without its question",
             contents(_fitted(singly=True))),
            ("only the newest turn is kept, though more would fit", contents(_fitted(only_one=True))),
            ("the system message stands at the end", contents(_fitted(last=True))),
            ("the first message is kept whatever its role", contents(_fitted(keep_first=True))),
            ("the newest turn is dropped when it alone is too long; it stays", contents(_fitted(drop_newest=True))),
            ("nothing is dropped", contents(lambda messages, count_tokens, limit: list(messages))),
        ],
    )  # fmt: skip


def _fitted(**wrong: bool) -> Callable[[Sequence[Message], Count, int], list[Message]]:
    """Tries every number of turns, the largest first; `wrong` switches one mistake on."""

    def fit(messages: Sequence[Message], count_tokens: Count, limit: int) -> list[Message]:
        first = messages[:1] if wrong.get("keep_first") else []
        system = [message for message in messages if message["role"] == "system" or message in first]
        rest = [message for message in messages if message not in system]
        starts = [i for i, message in enumerate(rest) if message["role"] == "user" or wrong.get("singly")]
        kept = rest
        for number, start in enumerate(starts):
            kept = rest[: len(rest) - start] if wrong.get("oldest") else rest[start:]
            room = limit + (count_tokens(system) if wrong.get("uncounted") else 0)
            enough = not wrong.get("only_one") or number == 0 or number == len(starts) - 1
            if count_tokens([*system, *kept]) <= room and enough:
                break
        else:
            kept = [] if wrong.get("drop_newest") else kept
        return [*kept, *system] if wrong.get("last") else [*system, *kept]

    return fit
