"""The controls of a figure, described without any widget library: what each sets, and which values it allows.

`widget(ipywidgets)` makes the live form of one. The library comes in as an argument, because figures must also draw
where it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

# The description stands in front of the control in full length and takes from its width; a row of controls wraps.
_LOOK = {"style": {"description_width": "initial"}, "layout": {"width": "auto", "min_width": "320px"}}
_WIDE_LOOK = {**_LOOK, "layout": {"width": "auto", "min_width": "480px"}}


class Control(Protocol):
    """Something that sets one argument of a drawing function. value is what it starts with."""

    @property
    def name(self) -> str:
        """The argument's name."""
        ...

    @property
    def value(self) -> Any:
        """The value that it starts with."""
        ...

    def allows(self, value: Any) -> bool:
        """Whether the control can be set to this value."""
        ...

    def expects(self) -> str:
        """The allowed values in words, for error messages."""
        ...

    def widget(self, ipywidgets: Any) -> Any:
        """The live control; its `value` is the argument's value."""
        ...


@dataclass(frozen=True)
class _OneOf:
    name: str
    label: str
    options: Mapping[str, Any]
    value: Any

    def allows(self, value: Any) -> bool:
        """Whether the value is one of the options."""
        return value in self.options.values()

    def expects(self) -> str:
        """The options in words."""
        return "one of " + ", ".join(repr(value) for value in self.options.values())

    def _arguments(self) -> dict[str, Any]:
        return {"options": list(self.options.items()), "value": self.value, "description": self.label}


class Choice(_OneOf):
    """A list to choose from. options: text shown -> value."""

    def widget(self, ipywidgets: Any) -> Any:
        """A dropdown list."""
        return ipywidgets.Dropdown(**self._arguments(), **_LOOK)


class Stops(_OneOf):
    """A slider with named stops, for values that are not evenly spaced. options: text shown -> value."""

    def widget(self, ipywidgets: Any) -> Any:
        """A slider over the options."""
        return ipywidgets.SelectionSlider(**self._arguments(), **_WIDE_LOOK)


@dataclass(frozen=True)
class Slider:
    """A number from low to high. Whole numbers where low, high, step and value are integers."""

    name: str
    label: str
    low: float
    high: float
    value: float
    step: float = 1

    def allows(self, value: Any) -> bool:
        """Whether the value is a number between low and high."""
        kinds = int if self._whole() else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.low <= value <= self.high

    def expects(self) -> str:
        """The range in words."""
        return f"a {'whole ' if self._whole() else ''}number from {self.low} to {self.high}"

    def widget(self, ipywidgets: Any) -> Any:
        """A slider."""
        make = ipywidgets.IntSlider if self._whole() else ipywidgets.FloatSlider
        return make(
            min=self.low, max=self.high, step=self.step, value=self.value, description=self.label, **_WIDE_LOOK
        )  # fmt: skip

    def _whole(self) -> bool:
        return all(isinstance(number, int) for number in (self.low, self.high, self.value, self.step))


@dataclass(frozen=True)
class Span:
    """A first and a last whole number, both inside low to high. value: the pair (first, last)."""

    name: str
    label: str
    low: int
    high: int
    value: tuple[int, int]

    def allows(self, value: Any) -> bool:
        """Whether the value is a pair of integers in order and in range."""
        if not isinstance(value, tuple) or len(value) != 2 or not all(type(number) is int for number in value):
            return False
        return self.low <= value[0] <= value[1] <= self.high

    def expects(self) -> str:
        """The range in words."""
        return f"a pair (first, last) of whole numbers with {self.low} <= first <= last <= {self.high}"

    def widget(self, ipywidgets: Any) -> Any:
        """A slider with two handles."""
        return ipywidgets.IntRangeSlider(
            min=self.low, max=self.high, value=self.value, description=self.label, **_WIDE_LOOK
        )  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A line of text."""

    name: str
    label: str
    value: str

    def allows(self, value: Any) -> bool:
        """Whether the value is a text."""
        return isinstance(value, str)

    def expects(self) -> str:
        """What is allowed, in words."""
        return "a text"

    def widget(self, ipywidgets: Any) -> Any:
        """A text field."""
        return ipywidgets.Text(value=self.value, description=self.label, **_LOOK)
