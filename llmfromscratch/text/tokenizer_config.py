"""How long a prompt may be, what happens to a longer one, and how prompts are padded: settings beside a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmfromscratch.errors import RequestError

TRUNCATIONS = (None, "left", "right", "middle", "chat")


@dataclass(frozen=True)
class TokenizerConfig:
    """What changes with the model around its vocabulary: another model is another config, not other code.

    max_length: tokens a prompt may have; None sets no limit.
    truncation: what happens to a longer one. "left" drops its beginning, "right" its end, "middle" what lies between;
        "chat" drops the oldest turns of a conversation (`tokenizer.truncate_chat`); None refuses it.
    padding_side: "left" (what generation needs: every row ends at the same column) or "right".
    pad_to_multiple_of: the width of a padded batch is rounded up to a multiple of this many tokens.
    pad_id, bos_id, eos_ids: the model's own; None, and no end tokens, where it has none.
    add_bos: every text begins with bos_id.

    Raises RequestError for a value that cannot be meant.
    """

    max_length: int | None = None
    truncation: str | None = None
    padding_side: str = "left"
    pad_to_multiple_of: int = 1
    pad_id: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False

    def __post_init__(self) -> None:
        whole = {"max_length": 1, "pad_to_multiple_of": 1, "pad_id": 0, "bos_id": 0}
        for name, least in whole.items():
            value = getattr(self, name)
            if not (_is_whole(value, least) or (value is None and name != "pad_to_multiple_of")):
                raise RequestError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
        for name, choices in (("truncation", TRUNCATIONS), ("padding_side", ("left", "right"))):
            if getattr(self, name) not in choices:
                raise RequestError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(map(repr, choices))}.")
        if not isinstance(self.eos_ids, Sequence) or not all(_is_whole(index, 0) for index in self.eos_ids):
            raise RequestError(f"eos_ids is {self.eos_ids!r}; it must be a list of token ids, whole numbers from 0 on.")
        object.__setattr__(self, "eos_ids", tuple(self.eos_ids))
        if not isinstance(self.add_bos, bool) or (self.add_bos and self.bos_id is None):
            raise RequestError(f"add_bos is {self.add_bos!r} and bos_id {self.bos_id!r}; True needs the token's id.")

    def within(self, context_length: int) -> TokenizerConfig:
        """The config for a model with this context, which the prompt shares with at least one new token.

        Without max_length the prompt may take all the rest. Raises RequestError for a max_length above that.
        """
        most = context_length - 1
        if self.max_length is not None and self.max_length > most:
            raise RequestError(f"max_length is {self.max_length}; the context leaves {most} tokens to a prompt.")
        return replace(self, max_length=self.max_length or most)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
