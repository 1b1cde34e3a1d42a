import json
from pathlib import Path

import pytest
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ssd.errors import FieldError, PromptSizeError, TokenizerError
from ssd.text import chat_template
from ssd.text.chat_template import ChatTemplate, load_template, render_chat, tool_format
from ssd.types import ChatTurn, ToolCall

TURNS = [ChatTurn("system", "Be brief."), ChatTurn("user", "2 < 3?")]
TEXT = """
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
    {{- '<' + message['role'] + '>' + message.content | trim }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}
"""
TEMPLATE = ChatTemplate(TEXT)


def configured(folder: Path, **config: object) -> ChatTemplate | None:
    """The template of a folder whose tokenizer has this configuration."""
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_template(folder)


def test_a_conversation_becomes_a_prompt_for_the_next_turn() -> None:
    assert render_chat(TEMPLATE, TURNS) == "<system>Be brief.<user>2 < 3?<assistant>"


def test_templates_see_the_variables_of_the_request() -> None:
    template = "{{ enable_thinking }}{{ unknown.a[0] }}{{ messages | length }}"
    arguments = json.dumps({"enable_thinking": False, "unknown": {"a": ["b"]}, "ignored": None})
    assert render_chat(ChatTemplate(template), TURNS, arguments=arguments) == "Falseb2"
    assert render_chat(ChatTemplate("{{ enable_thinking is defined }}"), TURNS) == "False"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_request_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(FieldError, match=f"{name}' is set by the server") as caught:
        render_chat(TEMPLATE, TURNS, arguments=json.dumps({name: []}))
    assert caught.value.field == "chat.template_arguments"


def test_templates_see_tools_and_calls_as_objects() -> None:
    template = """
    {%- for tool in tools %}{{ tool | tojson }};{% endfor %}
    {%- for message in messages %}
        {%- for call in message.tool_calls %}
            {{- call.id ~ call.function.name ~ call.function.arguments | tojson }}
        {%- endfor %}
        {{- message.tool_call_id ~ message.content }}
    {%- endfor %}"""
    turns = [
        ChatTurn("assistant", "", (ToolCall("1", "add", '{"a": "<é>"}'), ToolCall("2", "f", "{}"))),
        ChatTurn("tool", "3", tool_call_id="1"),
    ]
    tools = '[{"type": "function"}]'
    expected = '{"type": "function"};1add{"a": "<é>"}2f{}13'
    assert render_chat(ChatTemplate(template), turns, tools) == expected
    without = ChatTemplate("{{ tools is none }}{{ 'tool_calls' in messages[0] }}")
    assert render_chat(without, TURNS) == "TrueFalse"


@pytest.mark.parametrize("content", ["message['content']", "message.content"])
def test_a_template_can_test_whether_a_turn_has_only_calls(content: str) -> None:
    """As those of DeepSeek-R1-Distill do, which add the arguments to a text."""
    template = f"""
    {{%- for message in messages %}}
        {{%- if message.role == 'assistant' and {content} is none %}}
            {{%- for call in message.tool_calls %}}
                {{{{- '<call>' + call['function']['arguments'] + '</call>' }}}}
            {{%- endfor %}}
        {{%- endif %}}
        {{%- if message.role == 'assistant' and {content} is not none %}}
            {{{{- '<text>' + {content} }}}}
        {{%- endif %}}
    {{%- endfor %}}"""
    call = ToolCall("1", "add", '{"a": "é"}')
    turns = [ChatTurn("assistant", "", (call,)), ChatTurn("assistant", "x", (call,))]
    turns.append(ChatTurn("assistant", ""))
    expected = '<call>{"a": "é"}</call><text>x<text>'
    assert render_chat(ChatTemplate(template), turns) == expected


@pytest.mark.parametrize(
    "test",
    [
        *("m.content is none", "m['content'] is  not none", "m['content']is none"),
        *("m['content'] == none", "m.content != none", "m.get('content') is none"),
        '(m["content"]) is none',
    ],
)
def test_every_form_of_the_test_finds_no_content(test: str) -> None:
    turn = ChatTurn("assistant", "", (ToolCall("1", "f", "{}"),))
    template = f"{{% for m in messages %}}{{% if {test} or true %}}{{{{ m.content }}}}"
    template += "{% endif %}{% endfor %}"
    assert render_chat(ChatTemplate(template), [turn]) == "None"


@pytest.mark.parametrize(
    "test", ["m.reasoning_content is none", "m['content'] is not string", "has_content == none"]
)
def test_other_tests_find_an_empty_content(test: str) -> None:
    turn = ChatTurn("assistant", "", (ToolCall("1", "f", "{}"),))
    template = f"{{% for m in messages %}}{{% if {test} or true %}}<{{{{ m.content }}}}>"
    template += "{% endif %}{% endfor %}"
    assert render_chat(ChatTemplate(template), [turn]) == "<>"


def test_a_template_that_tests_a_content_can_need_a_text_in_another_turn() -> None:
    template = """
    {%- for m in messages %}
        {%- if m.role == 'user' and m.content is not none %}{{- 'U' + m.content }}{% endif %}
        {%- if m.role == 'assistant' %}{{- 'A' + m.content }}{% endif %}
        {%- if m.role == 'king' %}{{- raise_exception('no role king') }}{% endif %}
    {%- endfor %}"""
    turns = [ChatTurn("user", "q"), ChatTurn("assistant", "", (ToolCall("1", "f", "{}"),))]
    assert render_chat(ChatTemplate(template), turns) == "UqA"
    with pytest.raises(FieldError, match="no role king"):
        render_chat(ChatTemplate(template), [*turns, ChatTurn("king", "x")])


def test_arguments_are_json_before_and_after_a_text() -> None:
    turn = ChatTurn("assistant", "", (ToolCall("1", "f", '{"a": "é"}'),))
    template = "{% set given = messages[0].tool_calls[0].function.arguments %}"
    template += "{{ '<' + given + '>' }}{{ given + ';' }}{{ given.a }}"
    assert render_chat(ChatTemplate(template), [turn]) == '<{"a": "é"}>{"a": "é"};é'


def test_other_templates_find_a_text_in_a_turn_that_has_only_calls() -> None:
    """As the first one of Qwen3, which divides it at the end of the reasoning."""
    template = "{{ '</think>' in messages[0].content }}{{ messages[0].reasoning_content is none }}"
    turn = ChatTurn("assistant", "", (ToolCall("1", "f", "{}"),))
    assert render_chat(ChatTemplate(template), [turn]) == "FalseFalse"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("{", "not valid JSON"), ("[]", "not a JSON object"), ("[" * 99_999, "not valid JSON")],
    ids=["malformed", "list", "deep"],
)
def test_arguments_of_a_call_that_are_no_object_are_refused(arguments: str, words: str) -> None:
    turns = [ChatTurn("assistant", "", (ToolCall("1", "add", arguments),))]
    with pytest.raises(FieldError, match=words) as caught:
        render_chat(TEMPLATE, turns)
    assert caught.value.field == "chat.messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("<tool_call>", ""),
        ("{% if tools %}<tool_call><function=x>{% endif %}", ""),
        ('{{ tools }}<|start_header_id|>{"name": x, "parameters": y}', "llama3_json"),
        ("{{ tools }}<|start_header_id|>", ""),
        (None, ""),
    ],
)
def test_the_format_of_calls_is_found_in_the_template(template: str | None, expected: str) -> None:
    assert tool_format(None if template is None else ChatTemplate(template)) == expected


@pytest.mark.parametrize("text", [r'{"a": "\ud800"}', r'{"\udc00": 1}'])
def test_json_with_half_a_character_is_refused_by_its_field(text: str) -> None:
    calling = ChatTurn("assistant", "", (ToolCall("1", "f", text),))
    for turns, tools, arguments, field in (
        ([calling], "", "", "messages[0].tool_calls[0].function.arguments"),
        (TURNS, f"[{text}]", "", "tools"),
        (TURNS, "", text, "template_arguments"),
    ):
        with pytest.raises(FieldError, match="is not valid Unicode") as caught:
            render_chat(TEMPLATE, turns, tools, arguments)
        assert caught.value.field == f"chat.{field}"
    render_chat(TEMPLATE, TURNS, arguments=r'{"a": "\ud83d\ude00"}')


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    from_string = ImmutableSandboxedEnvironment.from_string

    def count(environment: ImmutableSandboxedEnvironment, source: str) -> Template:
        compiled.append(source)
        return from_string(environment, source)

    monkeypatch.setattr(ImmutableSandboxedEnvironment, "from_string", count)
    template = "compiled once: {{ messages[0].content }}"
    for turn in (ChatTurn("user", "a"), ChatTurn("user", "b")):
        assert render_chat(ChatTemplate(template), [turn]) == f"compiled once: {turn.content}"
    assert compiled == [template]


def test_conversations_do_not_affect_each_other() -> None:
    template = "{{ seen is defined }}{% set seen = messages %}{{ seen | length }}"
    assert [render_chat(ChatTemplate(template), TURNS) for _ in range(2)] == ["False2"] * 2


def test_templates_can_leave_a_loop() -> None:
    template = "{% for m in messages %}{{ m.role }}{% if loop.first %}{% break %}{% endif %}"
    template += "{% endfor %}"
    assert render_chat(ChatTemplate(template), TURNS) == "system"


def test_text_that_is_marked_for_training_is_rendered() -> None:
    template = "{% for m in messages %}\n    {% generation %}\n    {% set text = m.content %}\n"
    template += "<{{ text }}>\n    {%- endgeneration %}{{ text }}{% endfor %}"
    assert render_chat(ChatTemplate(template), TURNS) == "<Be brief.><2 < 3?>"
    with pytest.raises(FieldError, match="endgeneration"):
        render_chat(ChatTemplate("{% generation %}"), TURNS)


def test_without_a_template_chat_is_unsupported_by_name() -> None:
    with pytest.raises(FieldError) as caught:
        render_chat(None, TURNS)
    assert caught.value.field == "chat"


def test_a_template_can_reject_a_conversation() -> None:
    with pytest.raises(FieldError, match="no role king") as caught:
        render_chat(TEMPLATE, [ChatTurn("king", "x")])
    assert caught.value.field == "chat"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ render.__globals__ }}{{ raise_exception.__globals__['json'] }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ 'unclosed' ",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str) -> None:
    with pytest.raises(FieldError):
        render_chat(ChatTemplate(template), TURNS)


def test_a_template_file_comes_before_the_tokenizers_config(tmp_path: Path) -> None:
    assert configured(tmp_path, chat_template="from config") == ChatTemplate("from config")
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert load_template(tmp_path) == ChatTemplate("from file")


@pytest.mark.parametrize("content", [None, "{}", '{"chat_template": 3}'])
def test_a_folder_without_a_template_has_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)
    assert load_template(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        *(("tokenizer_config.json", content, "") for content in (b"{", b"[]", b"\xff")),
        ("chat_template.jinja", b"\xff", ": not UTF-8"),
    ],
)
def test_a_corrupt_file_is_an_error_that_names_it(
    tmp_path: Path, file: str, content: bytes, words: str
) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{file}{words}"):
        load_template(tmp_path)


def test_templates_see_the_special_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    template = configured(
        tmp_path,
        chat_template="{{ bos_token + messages[0].content + eos_token }}",
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
        pad_token=None,
        add_bos_token=True,
    )
    assert template is not None
    assert template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert render_chat(template, [ChatTurn("user", "hi")]) == "<s>hi</s>"


def test_special_tokens_can_be_in_the_older_map_of_them(tmp_path: Path) -> None:
    older = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    found = configured(tmp_path, chat_template="x", eos_token="<end>", pad_token=None)
    assert found is not None
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def test_a_model_can_have_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{% if tools %}<tool_call>{% endif %}"},
    ]
    template = configured(tmp_path, chat_template=named)
    assert render_chat(template, TURNS) == "plain"
    assert render_chat(template, TURNS, tools='[{"type": "function"}]') == "<tool_call>"
    assert tool_format(template) == "hermes"


def test_named_templates_can_be_files(tmp_path: Path) -> None:
    """``save_pretrained`` of transformers writes them so."""
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{% if tools %}<tool_call>{% endif %}")
    (more / "rag.jinja").write_bytes(b"\xff")
    assert load_template(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("plain")
    template = load_template(tmp_path)
    assert render_chat(template, TURNS) == "plain"
    assert render_chat(template, TURNS, tools='[{"type": "function"}]') == "<tool_call>"
    assert tool_format(template) == "hermes"
    (more / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"tool_use\.jinja: not UTF-8"):
        load_template(tmp_path)


def test_a_named_template_that_is_not_used_may_be_malformed(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "x"}, {"name": "rag", "template": None}]
    assert configured(tmp_path, chat_template=named) == ChatTemplate("x")


@pytest.mark.parametrize(
    "entry", ["text", None, {}, {"name": [], "template": "x"}, {"name": "default", "template": 3}]
)
def test_a_malformed_named_template_is_an_error_that_names_its_place(
    tmp_path: Path, entry: object
) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template\[1\] must be"):
        configured(tmp_path, chat_template=[{"name": "default", "template": "x"}, entry])


def test_templates_can_ask_for_the_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_now", lambda form: f"the date as {form}")
    template = "the date: {{ strftime_now('%d %b %Y') }}"
    assert render_chat(ChatTemplate(template), TURNS) == "the date: the date as %d %b %Y"


def test_templates_can_choose_the_form_of_json() -> None:
    template = "{{ messages[0].content | tojson(ensure_ascii=True, separators=(',', ':')) }}"
    assert render_chat(ChatTemplate(template), [ChatTurn("user", "é")]) == r'"\u00e9"'


def test_a_template_that_repeats_its_variables_is_stopped_at_the_bound() -> None:
    rendered: list[str] = []

    class Counted(str):
        def __str__(self) -> str:
            rendered.append("one")
            return "x" * 100

    text = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    turns = [ChatTurn("user", Counted())] * 50
    with pytest.raises(
        PromptSizeError, match=r"^chat: has over 1000 bytes after the chat template"
    ):
        render_chat(ChatTemplate(text), turns, max_characters=1000)
    assert len(rendered) == 11
    assert render_chat(ChatTemplate(text), turns[:10], max_characters=1000) == "x" * 1000
