"""Chat templates render as in transformers, cannot leave their sandbox, and end."""

import pytest
from sample_tokenizers import demo_folder, demo_is_installed

from scheduler_service.text.chat_template import ChatTemplate, ChatTemplateError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "你好 <b>&amp;</b> 'x' \"y\" {{ 1 }}"},
    ],
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": " yes \n"},
        {"role": "user", "content": "\n\nand {% raw %}"},
    ],
]
# What templates of well-known families use: loop controls, namespaces, tojson, whitespace control.
TEMPLATES = [
    CHATML,
    "{{ bos_token }}{%- for m in messages -%}\n  {%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}\n"
    "  [{{ m.role | upper }}] {{ m.content | trim }}{{ eos_token }}\n{%- endfor -%}",
    "{% set ns = namespace(n=0, last='') %}{% for m in messages %}\n    {% set ns.n = ns.n + 1 %}\n"
    "    {% set ns.last = m['content'] %}\n{% endfor %}{{ ns.n }}: {{ ns.last | tojson }}"
    "{{ messages | tojson(indent=2) }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ loop.index0 }}{{ m.content }}{% if loop.last %}{% break %}{% endif %}"
    "{% endif %}{% endfor %}",
    "{% macro show(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{{ show(messages[-1]) }}"
    "{% if tools is not none %}T{% endif %}{% if tools %}t{% endif %}"
    "{{ messages[::-1] | map(attribute='role') | join(',') }}",
    "{{ strftime_now('%Y') | length }}{{ dict(a=1) }}{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ range(3) | list }}"
    "{{ messages[0].content.split(' ') | first }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
async def test_templates_render_as_in_transformers(source, conversation, add_generation_prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs, _ = render_jinja_template(
        [conversation], chat_template=source, add_generation_prompt=add_generation_prompt, **special
    )
    ours = await ChatTemplate(source, special).render(
        conversation, add_generation_prompt=add_generation_prompt
    )
    assert ours == theirs[0]


@pytest.mark.skipif(not demo_is_installed(), reason="the demo model is not installed")
@pytest.mark.parametrize("conversation", CONVERSATIONS)
async def test_the_demo_model_s_template_renders_as_in_transformers(conversation):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(demo_folder())
    template = ChatTemplate(reference.chat_template, reference.special_tokens_map)
    for add_generation_prompt in (False, True):
        theirs = reference.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert await template.render(conversation, add_generation_prompt=add_generation_prompt) == theirs


async def test_a_template_s_own_refusal_is_the_message():
    source = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('The user must speak first') }}{% endif %}"
    )
    with pytest.raises(ChatTemplateError, match=r"^The user must speak first$"):
        await ChatTemplate(source, {}).render([{"role": "tool", "content": ""}], add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__bases__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ lipsum.__globals__ }}",
        "{% include 'other' %}",
        "{% import 'other' as other %}",
        "{{ '%s' | format(messages[0].nothing.more) }}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 'a' * 2000000000 }}",
        "{{ [0] * 2000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ range(1000000000) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ 'xxxxxxxxxxxx' }}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
async def test_what_a_template_must_not_do_is_an_error(source, monkeypatch):
    monkeypatch.setattr("scheduler_service.text.chat_template._MAX_RENDER_S", 0.3)
    with pytest.raises(ChatTemplateError):
        await ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_a_template_that_is_not_valid_is_refused_when_it_is_compiled():
    with pytest.raises(ChatTemplateError, match="not valid"):
        ChatTemplate("{% for %}", {})


async def test_a_long_conversation_is_rendered_whole():
    content = "0123456789" * 20_000
    text = await ChatTemplate(CHATML, {}).render(
        [{"role": "user", "content": content}], add_generation_prompt=False
    )
    assert text == f"<|im_start|>user\n{content}<|im_end|>\n"
