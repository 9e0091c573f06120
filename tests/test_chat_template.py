"""Templates render as in transformers; whatever goes wrong in one is a TokenizerError; they reach nothing of ours."""

from __future__ import annotations

from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from llmfromscratch import chat_template
from llmfromscratch.errors import TokenizerError

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


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name, generation):
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        [MESSAGES], chat_template=TEMPLATES[name], add_generation_prompt=generation, **tokens
    )
    assert chat_template.render(TEMPLATES[name], MESSAGES, generation, **tokens) == expected[0]


def test_todays_date_can_be_asked_for():
    before = datetime.now().strftime("%Y")
    assert chat_template.render("{{ strftime_now('%Y') }}", [], False) in (before, datetime.now().strftime("%Y"))


REFUSING = {
    "its own refusal": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "a syntax error": ("{% for %}", "could not render"),
    "an unclosed block": ("{% if x %}", "could not render"),
    "an unknown filter": ("{{ messages | rot13 }}", "rot13"),
    "an undefined value's field": ("{{ nothing.at.all }}", "nothing"),
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
