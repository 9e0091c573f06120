"""Chapter 3's last bug hunts, around the blocks: a broken piece, the symptom it causes, and its check each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llmfromscratch.course.comparing import Case, compare

# ---- 3.d ---------------------------------------------------------------------------------------------------------

OWNERS_STORY = """
"Once in a thousand requests a user gets lines that belong to someone else. It happens in the evening, when many people
close the page before the answer is complete." Below: what the pool hands out after one of them has gone.
"""


class BlockPool:
    """Blocks of memory for requests: `tables` says who has which, `free` which are left."""

    def __init__(self, num_blocks: int):
        self.free = list(range(num_blocks))
        self.tables: dict[int, list[int]] = {}

    def begin(self, request: int, blocks: int) -> None:
        """Gives a new request its blocks. A number may come again once its request has ended."""
        self.tables[request] = [self.free.pop(0) for _ in range(blocks)]

    def finish(self, request: int) -> None:
        """Takes a request's blocks back. It may be said twice: the answer ends, and the client goes away."""
        self.free.extend(self.tables[request])


def show_owners() -> None:
    """Two requests after a third one has ended twice."""
    pool = BlockPool(3)
    pool.begin(1, 2)
    print(f"request 1 has {pool.tables[1]}, free {pool.free}")
    pool.finish(1)
    pool.finish(1)
    print(f"request 1 has ended, and its client has gone: free {pool.free}")
    pool.begin(2, 2)
    pool.begin(3, 2)
    print(f"request 2 has {pool.tables[2]}, request 3 has {pool.tables[3]}, free {pool.free}")


def check_block_pool(pool_class: Callable[[int], Any]) -> None:
    """Along histories, by what must hold whichever block is whose."""
    histories = (
        "begin 1",
        "begin 1, finish 1",
        "begin 1, finish 1, finish 1",
        "begin 1, begin 2, finish 1, finish 1, begin 3",
        "begin 1, finish 1, begin 2, begin 3, finish 1",
        "begin 1, finish 1, begin 1, finish 1, begin 2, begin 3",
        "begin 1, begin 2, finish 2, begin 3, finish 2, finish 1, finish 3, begin 4",
    )
    compare(
        partial(_pooled, pool_class),
        partial(_pooled, _pool(lambda pool, request: pool.free.extend(pool.tables.pop(request, [])))),
        [Case(history, history) for history in histories],
        expected="every block free or with one owner, however often the end of a request is reported",
        mistakes=[
            ("the blocks still come back with every report of the end, although they are gone from the request",
             partial(_pooled, BlockPool)),
            ("a block that is free is not freed again, but when it has a new owner the second report takes it away",
             partial(_pooled, _pool(_free_unless_free))),
            ("the second report of an end raises an error; it says nothing new, so nothing should happen",
             partial(_pooled, _pool(lambda pool, request: pool.free.extend(pool.tables.pop(request))))),
            ("a number that is used again never gives its blocks back: its end has been seen once, long ago",
             partial(_pooled, _pool(_free_once))),
            ("the blocks never come back", partial(_pooled, _pool(lambda pool, request: None))),
        ],
        what="step",
    )  # fmt: skip


def _pool(finish: Callable[[Any, int], Any]) -> Any:
    return type("BlockPool", (BlockPool,), {"finish": finish})


def _free_unless_free(pool: Any, request: int) -> None:
    pool.free += [block for block in pool.tables[request] if block not in pool.free]


def _free_once(pool: Any, request: int) -> None:
    ended = vars(pool).setdefault("ended", set())
    if request not in ended:
        ended.add(request)
        pool.free.extend(pool.tables[request])


def _pooled(pool_class: Callable[[int], Any], history: str) -> dict[str, str]:
    """After each step: how many blocks are free, and whether one has two owners. A request has two of four blocks."""
    pool, held, log = pool_class(4), dict[int, list[int]](), {}
    for number, step in enumerate(history.split(", "), 1):
        what, request = step.split()[0], int(step.split()[1])
        try:
            if what == "begin":
                pool.begin(request, 2)
                held[request] = list(pool.tables[request])
            else:
                pool.finish(request)
                held.pop(request, None)
        except (KeyError, IndexError, ValueError) as error:
            log[f"{number}. {step}"] = f"raises {type(error).__name__}"
            break
        owners = Counter([*pool.free, *(block for blocks in held.values() for block in blocks)])
        doubled = sorted(block for block, count in owners.items() if count > 1)
        log[f"{number}. {step}"] = f"{len(pool.free)} free, twice in `free` and the tables: {doubled or 'none'}"
    return log


# ---- 3.e ---------------------------------------------------------------------------------------------------------

FORK_STORY = """
"I ask for two continuations of one beginning. The beginning is computed once and forked, as in the PagedAttention
paper (Kwon et al., section 4.4). Then words of the second continuation turn up in the first." Only some lengths of the
beginning do it: 4 and 8 tokens are fine.
"""


class SharedPages:
    """Texts in pages of 4 tokens; a fork shares all pages with the text it comes from, until one of them is written."""

    def __init__(self) -> None:
        self.pages: list[list[int]] = []  # the tokens in each
        self.holders: list[int] = []  # how many tables name each
        self.tables: dict[int, list[int]] = {}  # request -> its pages in order

    def fork(self, request: int, new_request: int) -> None:
        """Lets a new request go on from the same text."""
        self.tables[new_request] = list(self.tables[request])
        for page in self.tables[request]:
            self.holders[page] += 1

    def new_page(self, tokens: list[int]) -> int:
        """A page with one holder."""
        self.pages.append(tokens)
        self.holders.append(1)
        return len(self.pages) - 1

    def append(self, request: int, token: int) -> None:
        """Adds a token to a text."""
        table = self.tables.setdefault(request, [])
        if not table or len(self.pages[table[-1]]) == 4:
            table.append(self.new_page([]))
        self.pages[table[-1]].append(token)

    def text(self, request: int) -> list[int]:
        """All tokens of a request."""
        return [token for page in self.tables[request] for token in self.pages[page]]


def show_fork() -> None:
    """A fork after 4 and after 6 tokens, and a token more for each text."""
    for length in (4, 6):
        texts = SharedPages()
        for token in range(1, length + 1):
            texts.append(1, token)
        texts.fork(1, 2)
        texts.append(1, 100)
        texts.append(2, 200)
        print(f"forked after {length} tokens: text 1 {texts.text(1)}, text 2 {texts.text(2)}")


_FORKS = (
    "1 x3",
    "1 x5",
    "1 x4, fork 1 2, 1 x1, 2 x1",
    "1 x2, fork 1 2, 1 x1",
    "1 x2, fork 1 2, 1 x1, 2 x1",
    "1 x6, fork 1 2, 2 x3, 1 x1",
    "1 x6, fork 1 2, fork 1 3, 3 x1, 1 x1, 2 x1, 1 x2",
    "1 x7, fork 1 2, fork 2 3, 2 x2, 3 x1, fork 2 4, 4 x1, 2 x4",
)


def check_shared_pages(pages_class: Callable[[], Any]) -> None:
    """Texts against plain lists; then whether holders and tables agree, and no page was copied for nothing."""
    compare(
        partial(_written, pages_class),
        partial(_written, _pages()),
        [Case(history.replace(" x", " gets ").replace("fork", "fork of"), history) for history in _FORKS],
        expected="every text as it was written, pages shared until one of their holders writes, and right counts",
        mistakes=[
            ("a page that two texts share is still written in place", partial(_written, SharedPages)),
            ("the page is copied, but the table still names the old one",
             partial(_written, _pages(untold=True))),
            ("the new page is the same list under another number; it needs a list of its own",
             partial(_written, _pages(alias=True))),
            ("a fresh page is begun behind the shared one, which is not full: copy its tokens into the new page, and "
             "put that in its place, or every fork leaves a gap",
             partial(_written, _pages(behind=True))),
            ("the new page is empty: the tokens that stood in the old one are lost",
             partial(_written, _pages(empty=True))),
            ("the old page still counts this text among its holders",
             partial(_written, _pages(unreleased=True))),
            ("a page that belongs to one text alone is copied with every token",
             partial(_written, _pages(always=True))),
            ("a full page is copied, though nothing is written to it",
             partial(_written, _pages(full=True))),
            ("every page is copied at the fork; they may be shared until one is written",
             partial(_written, _pages(eager="all"))),
            ("the last page is copied at the fork; it may be shared until one of the two writes",
             partial(_written, _pages(eager="last"))),
            ("nothing is shared any more: the new text begins empty",
             partial(_written, _pages(eager="none"))),
        ],
        what="after step",
    )  # fmt: skip


def _written(pages_class: Callable[[], Any], history: str) -> dict[str, Any]:
    """All texts after each step, and at the end the pages and whether the counts are right."""
    texts, log, token = pages_class(), dict[str, Any](), Counter[int]()
    for number, step in enumerate(history.split(", "), 1):
        words = step.split()
        if words[0] == "fork":
            texts.fork(int(words[1]), int(words[2]))
        else:
            request = int(words[0])
            for _ in range(int(words[1][1:])):
                token[request] += 1
                texts.append(request, 100 * request + token[request])
        for request in sorted(texts.tables):
            log[f"{number}: text {request}"] = list(texts.text(request))
    held = Counter(page for table in texts.tables.values() for page in table)
    log["the end: holders of each page are the tables that name it"] = texts.holders == [
        held[page] for page in range(len(texts.pages))
    ]
    log["the end: pages taken"] = len(texts.pages)
    return log


def _pages(eager: str = "", **wrong: bool) -> Any:
    """Pages that are copied when a shared one is written, with one mistake switched on."""

    def append(self: SharedPages, request: int, token: int) -> None:
        table = self.tables.setdefault(request, [])
        full = bool(table) and len(self.pages[table[-1]]) == 4
        shared = bool(table) and (self.holders[table[-1]] > 1 or wrong.get("always", False))
        if shared and wrong.get("behind"):
            full, shared = True, False  # goes on as after a full page
        page = table[-1] if table else -1
        if shared and (not full or wrong.get("full")):
            page = self.new_page(self.pages[page] if wrong.get("alias") else list(self.pages[page]))
            if wrong.get("empty"):
                self.pages[page] = []
            self.holders[table[-1]] -= not wrong.get("unreleased")
            if not wrong.get("untold"):
                table[-1] = page
        if full or not table:
            page = self.new_page([])
            table.append(page)
        self.pages[page].append(token)

    def fork(self: SharedPages, request: int, new_request: int) -> None:
        old = self.tables[request]
        copied = {"": [], "all": old, "last": old[-1:], "none": []}[eager]
        table = [self.new_page(list(self.pages[page])) if page in copied else page for page in old]
        self.tables[new_request] = [] if eager == "none" else table
        for page in self.tables[new_request]:
            self.holders[page] += page in old

    return type("SharedPages", (SharedPages,), {"append": append, "fork": fork})


# ---- 3.f ---------------------------------------------------------------------------------------------------------

TWICE_STORY = """
"The second time I send a prompt it takes no time at all, as promised. But with some prompts the server stops:
a request has no new tokens, it says. An older version went on, and the second answer began with a word that had been
computed for somebody else." Count what is left to compute.
"""


def tokens_to_take_over(ids: Sequence[int], known: Sequence[Sequence[int]], block_size: int) -> int:
    """How many tokens at the front of a prompt need not be computed: those of whole blocks that are in the cache.

    known: the beginnings of texts, whole blocks long, whose keys and values are there.
    """
    taken = 0
    while len(ids) >= taken + block_size and list(ids[: taken + block_size]) in known:
        taken += block_size
    return taken


_KNOWN = [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9]]


def show_twice() -> None:
    """What is taken over of prompts that were sent before, and what is left."""
    for length in (7, 8, 9):
        ids = list(range(1, length + 1))
        taken = tokens_to_take_over(ids, _KNOWN, 4)
        rows = f"the logits of token {length}" if taken < length else "no row, and so no logits"
        print(f"prompt of {length} tokens: {taken} taken over, {length - taken} computed: {rows}")


def check_tokens_to_take_over(mended: Callable[..., int]) -> None:
    """Against a search of all whole blocks that leave a token over."""

    def whole(ids: Sequence[int], known: Sequence[Sequence[int]], size: int, left: int = 1) -> int:
        ends = range(size, len(ids) - left + 1, size)
        return max([end for end in ends if all(list(ids[:e]) in known for e in range(size, end + 1, size))], default=0)

    compare(
        mended,
        whole,
        [
            Case(f"prompt {ids}, known {_KNOWN}", ids, _KNOWN, 4)
            for ids in (
                [5, 6],
                [1, 2, 3, 4],
                [1, 2, 3, 4, 5],
                [1, 2, 3, 4, 5, 6, 7, 8],
                [1, 2, 3, 4, 5, 6, 7, 8, 9],
                [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
                [9, 9, 9, 9, 5, 6, 7, 8],
                [5, 6, 7, 8, 1, 2, 3, 4],
                [],
            )
        ],
        expected="whole blocks that are known from the beginning on, and at least one token left to compute",
        mistakes=[
            ("where the prompt ends with a block that is known, nothing is left to compute, and nothing gives logits",
             tokens_to_take_over),
            *(("only whole blocks can be taken over: a token is left, but part of a block is taken, and its rest would "
               "be written where others read",
               lambda ids, known, size, least=least: max(least, min(whole(ids, known, size, 0), len(ids) - 1)))
              for least in (0, -1)),
            ("where everything is known nothing is taken over; the blocks before the last one can be",
             lambda ids, known, size: whole(ids, known, size, 0) % max(1, len(ids))),
            ("the last known block is always given up, even where tokens are left behind it",
             lambda ids, known, size: max(0, whole(ids, known, size, 0) - size)),
            ("more than one token is left over; one is enough",
             lambda ids, known, size: whole(ids, known, size, 2)),
            ("a whole block is left over; one token is enough",
             lambda ids, known, size: whole(ids, known, size, size)),
            ("nothing is taken over any more", lambda ids, known, size: 0),
        ],
        what="the tokens taken over",
    )  # fmt: skip
