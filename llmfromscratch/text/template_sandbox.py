"""Where chat templates run: they come with a model's files, so they see nothing but their arguments and may not waste.

Jinja's own sandbox keeps a template away from Python. It does not keep it from asking for a text of a terabyte or for a
loop of a year; that is done here. Everything a template does is paid for from one purse before it happens: a character
costs 1, a value 50, a copied reference 8, a step of the program 2. The purse holds far more than any chat template
needs, and since no clock is asked, a template that is refused is refused on every machine.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, SecurityError
from jinja2.utils import Namespace

LIMIT = 100_000_000
_VALUE, _REFERENCE, _STEP = 50, 8, 2
_BITS = 10_000  # of a whole number; longer ones are no part of a conversation
_COLLECTIONS: Any = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)

# No chat template lays out text with these, and what they cost cannot be told beforehand.
_FILTERS_LEFT_OUT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_METHODS_LEFT_OUT = frozenset(["encode", "expandtabs", "maketrans", "to_bytes", "translate"])
# Filters that make text of their value, that make many values of a text, or that compare what lies within.
_TEXT = frozenset(
    ["capitalize", "center", "e", "escape", "forceescape", "indent", "join", "lower", "replace", "safe", "string"]
    + ["title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount"]
)
_ESCAPING = frozenset(["e", "escape", "forceescape", "urlencode"])  # up to twelve characters for one
_WITHIN = frozenset(["batch", "dictsort", "groupby", "list", "max", "min", "slice", "sort", "sum", "unique"])
_LENGTHS = frozenset(["batch", "center", "indent", "slice", "truncate"])  # their numbers are lengths
_NOTHING_MADE = frozenset(["count", "d", "default", "first", "last", "length"])
_COSTLY_TESTS = ["!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan"]
_COSTLY_TESTS += ["lower", "lt", "ne", "upper"]
# The sandbox's own filters, put into every program. A template may call them too, and pays.
_PAY, _PAY_ITEMS, _PAY_WITHIN = "pay!", "pay items!", "pay within!"


class Purse:
    """What is left for one compilation or one rendering."""

    def __init__(self) -> None:
        self.left = LIMIT

    def pay(self, amount: int) -> bool:
        """Pays, or raises SecurityError; True, so that it can stand in a condition."""
        self.left -= max(amount, 0)
        if self.left < 0:
            raise SecurityError("it takes more time or memory than any chat template needs.")
        return True

    def pay_items(self, value: Any) -> Any:
        """Pays for a value without what lies within its entries; returns it."""
        if isinstance(value, int) and value.bit_length() > _BITS:
            raise SecurityError(f"it computes with whole numbers of more than {_BITS} bits.")
        entries = _REFERENCE * len(value) if isinstance(value, _COLLECTIONS) else 0
        self.pay(_VALUE + (len(value) if isinstance(value, str) else entries))
        return value

    def pay_within(self, value: Any, indent: int = 0) -> Any:
        """Pays for a value and all within it, as often as it stands there; indent: characters a level. Returns it."""
        waiting = [(value, 0)]
        while waiting:
            item, depth = waiting.pop()
            item = object.__getattribute__(item, "_Namespace__attrs") if isinstance(item, Namespace) else item
            size = len(item) if isinstance(item, str) else item.bit_length() // 3 if isinstance(item, int) else 0
            self.pay(_VALUE + size + indent * depth)
            if isinstance(item, _COLLECTIONS):
                self.pay(_VALUE * len(item))
                waiting += [(inner, depth + 1) for inner in item]
                waiting += [(inner, depth + 1) for inner in item.values()] if isinstance(item, dict) else []
        return value

    def pay_numbers(self, values: Sequence[Any]) -> None:
        """Pays for numbers that may be lengths."""
        self.pay(sum(abs(value) for value in values if isinstance(value, int)))

    def pay_widths(self, form: str) -> None:
        """Pays for the numbers written in a format, which may be widths."""
        self.pay(len(form) + sum(int(run.lstrip("0")[:10] or 0) for run in re.findall(r"\d+", form)))

    def pay_percent(self, form: str, values: Any) -> None:
        """Pays for `form % values` beforehand."""
        before = self.left
        self.pay_within(values)
        self.pay(form.count("%") * (before - self.left))
        self.pay_widths(form)
        if "*" in form:  # then a width may be among the values
            self.pay_numbers(values if isinstance(values, tuple) else [values])

    def pay_replace(self, text: str, given: Sequence[Any]) -> None:
        """Pays for replacing any of the given by any other everywhere: by name they come in any order."""
        self.pay_within(given)
        for old in map(str, given):
            self.pay(len(text) + (text.count(old) + 1) * max(len(str(new)) for new in given))

    def pay_method(self, owner: Any, name: str, given: Sequence[Any]) -> None:
        """Pays for a call of a method of a text, a list, a loop."""
        self.pay_within(given)
        if isinstance(owner, list | tuple):
            self.pay_within(owner)
        if not isinstance(owner, str):
            return
        self.pay(len(owner))
        if name == "replace":
            self.pay_replace(owner, given)
        elif name in ("split", "rsplit", "splitlines"):
            by = given[0] if given and isinstance(given[0], str) and given[0] else None
            self.pay(_VALUE * (owner.count(by) if by else len(owner) // 2))
        elif name == "join":
            self.pay(len(owner) * sum(len(one) for one in given if hasattr(one, "__len__")))
        else:
            self.pay_numbers(given)


class _Formatter(SandboxedFormatter):
    """`str.format`, paid for field by field."""

    def __init__(self, environment: Sandbox):
        super().__init__(environment)
        self._purse = environment.purse

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        value, first = super().get_field(field_name, args, kwargs)
        return self._purse.pay_within(value), first

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._purse.pay_widths(format_spec)
        return super().format_field(value, format_spec)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; for everyone else it is a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with a purse. One for each rendering: the purse is spent."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        self.purse = purse = Purse()

        def emitted(_: Context, value: Any) -> Any:
            return purse.pay_within(value)

        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            optimized=False,  # with finalize, which asks for the context: nothing is computed at compile time
            finalize=pass_context(emitted),
        )
        self.globals.pop("lipsum")
        self.globals |= {"range": self._range, "dict": self._dict, "namespace": _namespace}
        self.globals |= {"raise_exception": self._raise_exception, "strftime_now": self._strftime_now}
        self.filters |= {"tojson": self._tojson, "format": self._format}
        for name in _FILTERS_LEFT_OUT:
            self.filters.pop(name)
        self.filters = {name: self._paid_filter(name, function) for name, function in self.filters.items()}
        self.filters |= {_PAY: purse.pay, _PAY_ITEMS: purse.pay_items, _PAY_WITHIN: purse.pay_within}
        self.tests = {**self.tests, **{name: self._paid_test(name) for name in _COSTLY_TESTS}}

    def _generate(self, source: nodes.Template, *rest: Any, **named: Any) -> str:
        _add_payments(source)
        return super()._generate(source, *rest, **named)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's rule, less some methods of texts and numbers that no chat template needs."""
        return attr not in _METHODS_LEFT_OUT and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `str.format_map` as they are used in the sandbox, or None for anything else."""
        if super().wrap_str_format(value) is None:
            return None
        text, by_mapping = value.__self__, value.__name__ == "format_map"

        def paid(*args: Any, **kwargs: Any) -> str:
            self.purse.pay(len(text))
            return _Formatter(self).vformat(str(text), () if by_mapping else args, args[0] if by_mapping else kwargs)

        return paid

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An entry, by a key that is paid for where it is no plain one."""
        return super().getitem(obj, self.purse.pay_within(argument) if isinstance(argument, tuple) else argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call that a template makes: of a macro, a method, a global function."""
        owner = getattr(obj, "__self__", None)
        if owner is None or owner is self:
            self.purse.pay(_VALUE)
        else:
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            named = [value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")]
            self.purse.pay_method(owner, obj.__name__, [*args, *named])
        return self.purse.pay_items(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every sum, product and so on."""
        pay, whole = self.purse.pay, [abs(side) for side in (left, right) if isinstance(side, int)]
        pay(_VALUE)
        if any(number.bit_length() > _BITS for number in whole) or (
            operator == "**" and len(whole) == 2 and whole[0].bit_length() * whole[1] > _BITS
        ):
            raise SecurityError(f"it computes with whole numbers of more than {_BITS} bits.")
        if operator == "%" and isinstance(left, str):
            self.purse.pay_percent(left, right)
        else:
            sizes = [len(s) * (1 if isinstance(s, str) else _REFERENCE) for s in (left, right) if hasattr(s, "__len__")]
            pay(sum(sizes) * (whole[0] if operator == "*" and whole else 1))
        return super().call_binop(context, operator, left, right)

    def _paid_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(function, "jinja_pass_arg"))  # such a filter is given the context before its value

        @functools.wraps(function)
        def paid(*args: Any, **kwargs: Any) -> Any:
            value, given = args[first], [*args[first + 1 :], *kwargs.values()]
            if name in _NOTHING_MADE:
                self.purse.pay(_VALUE)
                return function(*args, **kwargs)
            within = name in _TEXT or name in _WITHIN
            value = list(value) if within and isinstance(value, Iterator) else value
            before = self.purse.left
            (self.purse.pay_within if within else self.purse.pay_items)(value)
            self._pay_more(name, value, given, before - self.purse.left)
            return self.purse.pay_items(function(*args[:first], value, *args[first + 1 :], **kwargs))

        return paid

    def _pay_more(self, name: str, value: Any, given: Sequence[Any], size: int) -> None:
        """What a filter costs besides its value, whose own cost is `size`."""
        pay = self.purse.pay
        if name in _LENGTHS:
            self.purse.pay_numbers(given)
        if name == "replace":
            self.purse.pay_replace(str(value), given)
        elif name == "join":
            pay(
                sum(len(one) for one in given if isinstance(one, str))
                * (len(value) if hasattr(value, "__len__") else 1)
            )
        elif name == "indent":
            width = sum(len(one) if isinstance(one, str) else abs(one) for one in given if isinstance(one, str | int))
            pay((str(value).count("\n") + 1) * max(width, 4))
        elif name in _ESCAPING:
            pay(11 * size)
        elif isinstance(value, str) and (name in _WITHIN or name in ("title", "wordcount")):
            pay(_VALUE * len(value))
        elif name == "round" and any(isinstance(one, int) and abs(one) > 100 for one in given):
            raise SecurityError("it rounds to more than 100 places.")
        elif name == "sum" and any(isinstance(one, _COLLECTIONS) for one in given):
            raise SecurityError("it adds up lists, which takes time in proportion to the square of their length.")

    def _paid_test(self, name: str) -> Callable[..., Any]:
        function: Any = self.tests[name]

        @functools.wraps(function)
        def paid(*args: Any) -> Any:
            self.purse.pay_within(args)
            return function(*args)

        return paid

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        self.purse.pay(_VALUE * max(0, (numbers.stop - numbers.start) // numbers.step))
        return numbers

    def _dict(self, *args: Any, **kwargs: Any) -> dict:
        self.purse.pay_within(args)
        return dict(*args, **kwargs)

    def _raise_exception(self, message: Any) -> None:
        raise TemplateError(str(self.purse.pay_within(message)))

    def _strftime_now(self, form: str) -> str:
        self.purse.pay_widths(str(form))
        return datetime.now().strftime(form)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        if args and kwargs:
            raise TypeError("format takes values by position or by name, not both")
        form = str(self.purse.pay_within(value))
        self.purse.pay_percent(form, kwargs or args)
        return form % (kwargs or args)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers has it: without escapes for HTML, and letters as they are."""
        width = indent if isinstance(indent, int) else len(indent or "")
        between = sum(len(str(one)) for one in separators or ())
        if not 0 <= width <= 16 or between > 16:
            raise SecurityError("it indents or separates JSON by more than 16 characters.")
        self.purse.pay_within(value, indent=width)
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )  # fmt: skip


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    """A namespace whose names are a template's own; Python's begin with an underscore."""
    names = dict(*args, **kwargs)
    for name in names:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace may not hold {name!r}: the name begins with an underscore.")
    return Namespace(names)


def _add_payments(program: nodes.Template) -> None:
    """Lets a template pay where Jinja asks nobody: at each round of a loop, for slices, joins and comparisons."""

    def filtered(value: nodes.Expr, name: str) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)

    def steps(body: list[nodes.Node]) -> nodes.Const:
        return nodes.Const(_STEP * (10 + sum(1 for node in body for _ in node.find_all(nodes.Node))))

    for node in list(program.find_all(nodes.Node)):
        line = node.lineno
        if isinstance(node, nodes.NSRef) and node.attr.startswith("_"):
            raise SecurityError(f"a namespace may not hold {node.attr!r}: the name begins with an underscore.")
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
            node.body.insert(0, nodes.ExprStmt(filtered(steps(node.body), _PAY), lineno=line))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(filtered(steps([node.test]), _PAY), node.test, lineno=line)
        elif isinstance(node, nodes.Output):
            text = nodes.TemplateData
            node.nodes = [nodes.Const(n.data, lineno=line) if isinstance(n, text) else n for n in node.nodes]
        elif isinstance(node, nodes.Concat):
            node.nodes = [filtered(inner, _PAY_WITHIN) for inner in node.nodes]
        elif isinstance(node, nodes.Compare | nodes.Operand):
            node.expr = filtered(node.expr, _PAY_WITHIN)
        elif isinstance(node, nodes.Pair):
            node.key = filtered(node.key, _PAY_WITHIN)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node.node = filtered(node.node, _PAY_ITEMS)
