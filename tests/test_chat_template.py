"""Templates render as in transformers; whatever goes wrong in one is a TokenizerError; they reach nothing of ours, and
what they ask for of memory and time has a limit."""

from __future__ import annotations

import enum
import time
import tracemalloc
from datetime import datetime
from typing import Any

import numpy
import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from llmfromscratch.errors import TokenizerError
from llmfromscratch.text import chat_template, template_sandbox

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Häuser & <b>\n"},
    {"role": "assistant", "content": "Ja."},
    {"role": "user", "content": "x"},
]
TEMPLATES = {
    "ChatML": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks on lines of their own": """
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {{ m.content | trim }}
    {% else %}
<{{ m.role }}> {{ m.content.strip() }}
    {% endif %}
{%- endfor %}
{% if add_generation_prompt %}
<assistant>
{% endif %}
""",
    "namespaces, slices and loop controls": "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n > 2 %}{% break %}{% endif %}"
    "{{ loop.index0 }}{{ m.content }}{% endfor %}{{ ns.n }}",
    "json": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}",
    "special tokens and what is not defined": "{{ bos_token }}{{ eos_token }}{{ nothing }}"
    "{{ tools is none }}{{ x is defined }}",
}


# In the manner of the families' own templates, written for these tests.
STYLES = {
    "ChatML with a system message of its own": """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a test.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "Llama 2": """
{%- if messages[0]['role'] == 'system' %}
    {%- set rest = messages[1:] %}{% set system = '<<SYS>>\n' ~ messages[0]['content'] ~ '\n<</SYS>>\n\n' %}
{%- else %}
    {%- set rest = messages %}{% set system = '' %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "Llama 3 with a date and tools": """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- macro header(role) %}{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' }}{% endmacro %}
{{- header('system') }}
{{- 'Today Date: ' + date_string + '\n\n' }}
{%- if tools is not none %}
    {{- 'You have these functions:\n\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\n\n' }}
    {%- endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role in ['tool', 'ipython'] %}
        {{- header('ipython') }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- elif 'tool_calls' in message and message.tool_calls | length != 0 %}
        {%- set call = message.tool_calls[0].function %}
        {{- header('assistant') }}{{ '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}' }}
    {%- else %}
        {{- header(message.role) }}{{ message['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}""",
    "Mistral with tools": """
{%- set user = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == user[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set f = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in f.items() if key != 'return' %}
                    {%- if value is string %}{{ '"' + key + '": "' + value + '"' }}{% else %}
                    {{- '"' + key + '": ' + value | tojson }}{% endif %}
                    {%- if not loop.last %}{{ ', ' }}{% endif %}
                {%- endfor %}
                {{- '}}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' }}{% endif %}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message['content'] + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{ out[:-1] }}{{ ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{- ' ' + message['content'] | trim + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}""",
    "Qwen with tools and thoughts": """
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and not (message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{% set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant' }}
        {%- if loop.index0 > ns.last and thought %}{{ '\n<think>\n' ~ thought.strip('\n') ~ '\n</think>\n' }}{% endif %}
        {{- '\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\n<tool_call>\n{"name": "%s", "arguments": ' | format(call.name) }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}""",
    "documents": """
{%- for document in documents or [] %}
Document: {{ loop.index0 }}
Title: {{ document.title | upper | replace('_', ' ') }}
{{ document['text'] | indent(2) | default('nothing', true) }}
{% endfor %}
{{- messages | map(attribute='role') | join(', ') }}{{ {'b': 1, 'a': [2.5, true, none]} | tojson }}
{{- messages | map(attribute='role') | unique | sort | list }}{{ [3, 1, 2] | sum + [[1, 2], [3]] | length }}
{{- '{}-{:>4}|{x}'.format(1, 'a', x=2) }}{{ 'abc'[::-1] ~ 7 // 2 ~ 2 ** 10 ~ -3 % 5 }}{{ dict(a=1).items() | list }}
{{- range(3, 12, 4) | list }}{{ 1700000000 | tojson }}{{ namespace(a=1).a }}{{ 'a,b'.split(',') | last | title }}""",
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather in a <town> & "its" surroundings, °C',
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
CALLING = [
    {"role": "user", "content": " Wetter in Köln? "},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a1b2c3d4e", "type": "function", "function": {"name": "weather", "arguments": {"town": "Köln"}}}
        ],
    },
    {"role": "tool", "content": '{"sky": "<grau>"}', "tool_call_id": "a1b2c3d4e"},
    {"role": "assistant", "content": "<think>\nGrau.\n</think>\n\nGrau. "},
    {"role": "user", "content": "Danke"},
    {"role": "assistant", "content": "<think>Höflich.</think>Bitte!"},
]
ASKED: dict[str, dict[str, Any]] = {
    "a conversation": {"conversation": MESSAGES},
    "a conversation without a system message": {"conversation": MESSAGES[1:]},
    "tools": {"conversation": MESSAGES[1:], "tools": [WEATHER, WEATHER]},
    "calls and results": {"conversation": CALLING, "tools": [WEATHER]},
    "the end of an answer": {"conversation": CALLING[-2:]},
    "documents": {
        "conversation": MESSAGES,
        "documents": [{"title": "a_b", "text": "one\ntwo"}, {"title": "", "text": ""}],
    },
    "switches": {"conversation": MESSAGES, "enable_thinking": False, "date_string": "26 Jul 2024"},
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def in_transformers(template: str, generation: bool, asked: dict[str, Any]) -> str | Exception:
    fast = PreTrainedTokenizerFast(tokenizer_object=tiny_models.byte_tokenizer(), chat_template=template, **TOKENS)
    try:
        return fast.apply_chat_template(**asked, tokenize=False, add_generation_prompt=generation)
    except Exception as error:
        return error


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("style", STYLES)
def test_the_families_templates_render_as_in_transformers(style, kind, generation):
    asked = dict(ASKED[kind])
    expected = in_transformers(STYLES[style], generation, asked)
    messages = asked.pop("conversation")
    if isinstance(expected, Exception):
        with pytest.raises(TokenizerError) as refused:
            chat_template.render(STYLES[style], messages, generation, **asked, **TOKENS)
        assert str(expected) in str(refused.value)
    else:
        assert chat_template.render(STYLES[style], messages, generation, **asked, **TOKENS) == expected


@pytest.mark.parametrize("style", STYLES)
def test_every_style_renders_more_than_it_refuses(style):
    found = [in_transformers(STYLES[style], True, asked) for asked in ASKED.values()]
    assert sum(isinstance(text, str) for text in found) >= 5


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name, generation):
    expected, _ = render_jinja_template(
        [MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=generation, **TOKENS
    )
    assert chat_template.render(TEMPLATES[name], MESSAGES, generation, **TOKENS) == expected[0]


@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "{% if messages %}",
                "{% endif %}",
                "{%- for m in messages -%}",
                "{% endfor %}",
                "{{ m.content }}",
                "\n",
                " x ",
            ]
            + ["{{- messages[0].role | upper -}}", "{# note #}", "{% set a = 'b' ~ 3 %}", "{{ a }}", "{{ 1 == 1.0 }}"]
            + ["{% else %}", "{% raw %}{{ x }}{% endraw %}", "{% filter lower %}A{% endfilter %}", "{{ loop.index }}"]
            + ["{% generation %}", "{% endgeneration %}", "{% macro f(x) %}", "{% endmacro %}", "{{ f('y') }}"]
            + [
                "{% set c %}",
                "{% endset %}",
                "{{ c }}",
                "{% break %}",
                "{{ messages[1:] | length }}",
                "{{ m in messages }}",
            ]
        ),
        max_size=10,
    )
)
def test_any_mixture_of_blocks_renders_as_in_transformers_or_fails_as_there(pieces):
    template = "".join(pieces)
    try:
        expected = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=True)[0][0]
    except Exception:
        expected = None
    try:
        found = chat_template.render(template, MESSAGES)
    except TokenizerError:
        found = None
    assert found == expected


# ---- what a model ships ------------------------------------------------------------------------------------------

SEVERAL = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]


@pytest.mark.parametrize("templates", [SEVERAL, {entry["name"]: entry["template"] for entry in SEVERAL}, "alone"])
@pytest.mark.parametrize("name", [None, "default", "tool_use"])
@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_of_several_templates_the_one_is_chosen_that_transformers_would_choose(templates, name, tools):
    if templates == "alone" and name == "tool_use":
        return  # transformers would take the name for a template
    given = templates if isinstance(templates, str) else {entry["name"]: entry["template"] for entry in SEVERAL}
    fast = PreTrainedTokenizerFast(tokenizer_object=tiny_models.byte_tokenizer(), chat_template=given)
    asked = None if templates == "alone" else name
    assert chat_template.choose(templates, name, tools) == fast.get_chat_template(asked, tools)


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_a_model_without_a_template_says_what_to_do(nothing):
    with pytest.raises(TokenizerError, match="no chat template; use generate with a plain prompt"):
        chat_template.choose(nothing)


def test_a_name_that_is_missing_is_named_with_those_that_are_there():
    with pytest.raises(TokenizerError, match="no chat template named 'rag'; it has default, tool_use"):
        chat_template.choose(SEVERAL, "rag")
    with pytest.raises(TokenizerError, match="no chat template named 'default'; it has tool_use"):
        chat_template.choose(SEVERAL[1:])


@pytest.mark.parametrize("broken", [[{"name": "default"}], ["default"], 5, [None], {"default": 5}])
def test_templates_that_are_no_templates_are_refused(broken):
    with pytest.raises(TokenizerError, match="chat template"):
        chat_template.choose(broken)


# ---- what a template is given ------------------------------------------------------------------------------------


def test_an_entry_that_is_none_counts_as_absent():
    assert chat_template.render("{{ 'content' in messages[0] }}", [{"role": "assistant", "content": None}]) == "False"


def test_data_comes_to_the_template_plain_with_its_texts_passed_through():
    class Kind(enum.IntEnum):
        ONE = 1

    class Loud(str):
        def __str__(self) -> str:
            return "loud"

    value = {"a": (Loud("x"), 1, None, True, 2.5, Kind.ONE, numpy.float64(0.5)), Loud("k"): {"n": ["y"]}}
    found = chat_template.plain(value, lambda text: text + "!")
    assert found == {"a!": ["x!", 1, None, True, 2.5, 1, 0.5], "k!": {"n!": ["y!"]}}
    assert [type(one) for one in found["a!"]] == [str, int, type(None), bool, float, int, float]


@pytest.mark.parametrize("thing", [object(), b"x", {1, 2}, len, datetime(2024, 1, 1), 1j])
def test_an_object_is_refused_wherever_it_stands(thing):
    for asked in (
        {"messages": [{"content": [thing]}]},
        {"messages": [], "tools": [{"x": thing}]},
        {"messages": [], "x": thing},
    ):
        with pytest.raises(TokenizerError, match=f"numbers, lists and mappings, not {type(thing).__name__}"):
            chat_template.render("", **asked)


def test_messages_nested_without_end_are_a_tokenizer_error():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TokenizerError, match="could not render"):
        chat_template.render("", [{"content": deep}])


def test_todays_date_can_be_asked_for():
    before = datetime.now().strftime("%Y")
    assert chat_template.render("{{ strftime_now('%Y') }}", [], False) in (before, datetime.now().strftime("%Y"))


REFUSING = {
    "its own refusal": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "a syntax error": ("{% for %}", "could not render"),
    "an unclosed block": ("{% if x %}", "could not render"),
    "an unknown filter": ("{{ messages | rot13 }}", "rot13"),
    "an undefined value's field": ("{{ nothing.at.all }}", "nothing"),
    "a refusal that is no text": ("{{ raise_exception(5) }}", "messages: 5"),
    "a namespace with Python's names": ("{% set n = namespace(__class__=1) %}", "begins with an underscore"),
    "a namespace given Python's names": (
        "{% set n = namespace() %}{% set n.__html__ = 1 %}",
        "begins with an underscore",
    ),
    "a sum of text and number": ("{{ messages[0].content + 1 }}", "could not render"),
    "a division by zero": ("{{ 1 // 0 }}", "could not render"),
    "a list without that entry": ("{{ messages[9].content }}", "could not render"),
    "a call of what is no function": ("{{ messages() }}", "could not render"),
    "a loop over a number": ("{% for x in 5 %}{% endfor %}", "could not render"),
    "a range without measure": ("{% for x in range(10**9) %}{% endfor %}", "could not render"),
    "a text without measure": ("{{ 'x' * 10**18 }}", "could not render"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "could not render"),
    "nesting without end": ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "could not render"),
    "another file": ("{% include '/etc/passwd' %}", "could not render"),
    "a bad format": ("{{ '%d' % 'x' }}", "could not render"),
}


@pytest.mark.parametrize("kind", REFUSING)
def test_a_template_that_fails_is_a_tokenizer_error(kind):
    template, sentence = REFUSING[kind]
    with pytest.raises(TokenizerError, match=sentence):
        chat_template.render(template, MESSAGES, True)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ strftime_now.__self__.purse.left }}",
    "{{ range.__self__ }}",
    "{{ dict.__self__.globals }}",
    "{{ ('{}' | attr('format')).__globals__ }}",
    "{{ 'x' | pay!(1) }}",
    "{{ cycler.mro()[1].__subclasses__() }}",
    "{{ '{0.purse}'.format(dict.__self__) }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': messages}) }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_reaches_no_python_and_changes_no_message(template):
    before = [dict(message) for message in MESSAGES]
    try:
        shown = chat_template.render(template, MESSAGES, True)
    except TokenizerError:
        shown = ""
    assert shown == ""
    assert before == MESSAGES


# ---- templates that ask for too much -----------------------------------------------------------------------------

LONG = "{% set a = 'x' * 1000000 %}"
NESTED = (
    "{% set n = namespace(x=['ha'], y=['ha'], t=('ha',)) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% set n.t = (n.t, n.t) %}{% endfor %}"
)
GREEDY = {
    "a text times a number": "{{ 'x' * 10**10 }}",
    "the same, written out": "{{ 'x' * 10000000000 }}",
    "a list times a number": "{{ [1] * 10**9 }}",
    "a power": "{{ 2**100000000 }}",
    "squares of squares": "{% set n = namespace(x=10) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling in a join": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "many at once": LONG + "{% set b = " + "~".join(["a"] * 1000) + " %}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width as a value": "{{ '%*d' % (10**9, 1) }}",
    "a precision": "{{ '%.1000000000f' % 1.5 }}",
    "one value many times": LONG + "{{ '" + "%(a)s" * 1000 + "' % {'a': a} }}",
    "a width for the filter": "{{ '%1000000000d' | format(1) }}",
    "a width for the method": "{{ '{:1000000000}'.format(1) }}",
    "a width within a width": "{{ '{0:999{1}}'.format(1, 999999) }}",
    "a field many times": LONG + "{{ '" + "{x}" * 1000 + "'.format_map({'x': a}) }}",
    "a method by its name": "{{ ('{:1000000000}' | attr('format'))(1) }}",
    "center": "{{ 'x' | center(width=1000000000) }}",
    "center through map": "{{ ['x'] | map('center', 1000000000) | list }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill as an entry": "{{ 'x'['zfill'](1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "replacing": LONG + "{{ a.replace('x', a) }}",
    "replacing by the filter": LONG + "{{ a | replace('', a) }}",
    "replacing by names": LONG + "{{ a | replace(new=a, old='x') }}",
    "a refund": "{% set b = [-10**15] | map('pay!') | list %}{{ 'x' * 10**10 }}",
    "joining": LONG + "{{ ([a] * 1000) | join(a) }}",
    "joining by the method": LONG + "{{ a.join([a] * 1000) }}",
    "joining what is made on the way": LONG + "{{ a.join(range(1000) | map('string')) }}",
    "indenting": "{{ ('\n' * 1000000) | indent(1000000) }}",
    "indenting by a text": LONG + "{{ ('\n' * 1000000) | indent(a) }}",
    "batches": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slices": "{{ [1] | slice(1000000000) | list }}",
    "indented json": "{{ [[1]] | tojson(indent=1000000000) }}",
    "separated json": LONG + "{{ ([1] * 100000) | tojson(separators=(a, a)) }}",
    "a list in itself, printed": NESTED + "{{ n.x }}",
    "a list in itself, joined": NESTED + "{{ n.x ~ '' }}",
    "a list in itself, as json": NESTED + "{{ n.x | tojson }}",
    "a list in itself, compared": NESTED + "{{ n.x == n.y }}",
    "a list in itself, tested": NESTED + "{{ [n.x] | select('equalto', n.y) | list }}",
    "a list in itself, looked for": NESTED + "{{ [n.y].index(n.x) }}",
    "a list in itself, formatted": NESTED + "{{ '{!r}'.format(n.x) }}",
    "a list in itself, as a message": NESTED + "{{ raise_exception(n.x) }}",
    "a list in itself, in a loop": NESTED + "{% for z in [n.x, n.y] %}{{ loop.changed(z) }}{% endfor %}",
    "a tuple in itself, as a key": NESTED + "{{ {n.t: 1} }}",
    "a tuple in itself, asked for": NESTED + "{{ {1: 1}[n.t] }}{{ {1: 1}.get(n.t) }}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
    "loops in loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "loops that skip all": "{% set l = [0] * 99999 %}{% for a in l %}{% for b in l if false %}{% endfor %}{% endfor %}",
    "a loop that does much": "{% for a in range(1000000) %}" + "{% if a %}{% endif %}" * 4000 + "{% endfor %}",
    "slices in a loop": "{% set l = [0] * 1000000 %}{% for a in l %}{% set b = l[1:] %}{% endfor %}",
    "searches in a loop": LONG + "{% for i in range(100000) %}{% if 'y' in a %}{% endif %}{% endfor %}",
    "tests in a loop": LONG + "{% for i in range(100000) %}{% if a is lower %}{% endif %}{% endfor %}",
    "filters in a loop": "{% set l = [0] * 1000000 %}{% for a in l %}{% set b = l | max %}{% endfor %}",
    "words": "{% set a = 'x ' * 45000000 %}{% set b = a.split() %}",
    "words as a title": "{% set a = 'x ' * 40000000 | title %}{{ ('x ' * 40000000) | title }}",
    "letters": "{% set a = ('ш' * 90000000) | list %}",
    "two calls of itself": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "two rounds": "{% for x in 'ab' recursive %}{% if loop.depth < 60 %}{{ loop('ab') }}{% endif %}{% endfor %}",
    "a text put together unseen": LONG + "{% set b %}{% for i in range(100000) %}{{ a }}{% endfor %}{% endset %}",
    "letters put together unseen": "{% set b %}{% for i in range(1000000) %}"
    + "y" * 50_000
    + "{% endfor %}{% endset %}",
    "a text without end": "{% for i in range(1000000) %}" + "y" * 5000 + "{% endfor %}",
    "a list of long texts": "{% set n = namespace(l=[]) %}{% for i in range(999) %}"
    "{% set n.l = n.l + ['x' * 1000000] %}{% endfor %}",
    "a long range": "{{ range(10**12) | length }}",
    "filler text": "{{ lipsum(n=100000000) }}",
    "rounding": "{{ 1.5 | round(precision=100000000, method='floor') }}",
    "a sum of lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) | length }}",
    "bytes of a number": "{{ (5).to_bytes(1000000000, 'big') }}",
    "a number of a million digits": "{{ ('1' * 10000000) | int(base=2) }}",
    "a translation": LONG + "{{ a.translate({120: a}) }}",
    "a wide date": "{{ strftime_now('%1000000000Y') }}",
    "a long template": "x" * 200_000,
    "a long sum": "{{ " + "+".join("1" * 30_000) + " }}",
    "blocks in blocks": "{% for a in b %}" * 30 + "{% endfor %}" * 30,
}


@pytest.mark.parametrize("kind", GREEDY)
def test_a_template_that_asks_for_too_much_is_refused_before_it_is_given(kind, monkeypatch):
    monkeypatch.setattr(template_sandbox, "LIMIT", 2_500_000)  # a fortieth, because memory is traced slowly
    tracemalloc.start()
    begun = time.process_time()
    try:
        with pytest.raises(TokenizerError, match="could not render"):
            chat_template.render(GREEDY[kind], MESSAGES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50_000_000
    assert time.process_time() - begun < 30  # far more than it takes; without a limit most of these run for years


@pytest.mark.parametrize("style", STYLES)
def test_a_long_conversation_stays_far_below_the_limit(style, monkeypatch):
    monkeypatch.setattr(template_sandbox, "LIMIT", template_sandbox.LIMIT // 4)
    words = "word " * 200
    messages = [
        {"role": role, "content": f"<think>{turn}</think>{words}"}
        for turn in range(250)
        for role in ("user", "assistant")
    ]
    documents = [{"title": "a", "text": "b\n" * 999}] * 20
    text = chat_template.render(STYLES[style], messages, tools=[WEATHER] * 20, documents=documents, **TOKENS)
    assert style == "documents" or text.count("word") == 200 * len(messages)


def test_a_refused_template_does_not_poison_the_next_rendering():
    for _ in range(2):
        with pytest.raises(TokenizerError):
            chat_template.render("{{ 'x' * 10**10 }}", MESSAGES)
        assert chat_template.render("{{ messages[0].content }}", MESSAGES) == "Be brief."


def test_a_template_that_fails_says_why_in_few_words():
    with pytest.raises(TokenizerError) as refused:
        chat_template.render("{{ raise_exception('x' * 100000) }}", MESSAGES)
    assert len(str(refused.value)) < 700
