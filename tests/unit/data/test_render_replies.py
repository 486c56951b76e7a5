"""Statuses of calls, thinking, families by name, and chat templates of others."""

import pytest
from test_render_tokenizers import PLAIN_TEMPLATE, llama, plain, tiny

from fledge.data.render import FamilyRenderer, TemplateRenderer, audit, make_renderer
from fledge.errors import ConfigError, DataError, ModelError
from fledge.messages import messages_of, reply_of, tools_of
from fledge.types import Message, Tool, ToolCall, assistant, user

TINY = tiny()
ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
SAY = Tool("say", "Says.", {"type": "object", "properties": {"a": {"type": "string"}}})
MADE = {f: make_renderer(TINY, tool_format=f) for f in ("hermes", "llama3", "pythonic", "qwen_xml")}


def parse(form, text, offered=()):
    return MADE[form].parse(MADE[form].codec.encode([text]), offered)


def tagged(body):
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("form", "text", "status"),
    [
        ("hermes", tagged('{"name": "f", "arguments": {}}'), "ok"),
        ("hermes", tagged('{"name": "f", "arguments": {"x": "</tool_call>"}}'), "ok"),
        ("hermes", tagged('{"name": "f", "arguments": {"x": 1, "x": 2}}'), "bad_json"),
        ("hermes", tagged('{"name": "f", "arguments": {"x": NaN}}'), "bad_json"),
        ("hermes", tagged('{"name": "f", "arguments": {"x": 1e999}}'), "bad_json"),
        ("hermes", tagged('{"name": "f", "arguments": {"x": "\\ud800"}}'), "bad_json"),
        ("hermes", tagged('{"name": "f", "arguments": {}} {}'), "bad_json"),
        ("hermes", tagged("[" * 10_000), "bad_json"),
        ("hermes", tagged("{'name': 'f'}"), "bad_json"),
        ("hermes", tagged('{"name": "f"}'), "bad_shape"),
        ("hermes", tagged('{"name": "f", "arguments": "{}"}'), "bad_shape"),
        ("hermes", tagged('{"name": "f", "arguments": [1]}'), "bad_shape"),
        ("hermes", tagged('{"name": 3, "arguments": {}}'), "bad_shape"),
        ("hermes", tagged('{"name": "f", "arguments": {}, "then": 1}'), "bad_shape"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "unfinished"),
        ("hermes", '<tool_call>{"name": "f", "arg', "unfinished"),
        ("llama3", '{"name": "f", "parameters": {}}', "ok"),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', "ok"),
        ("llama3", '{"name": "f", "parameters": 3}', "bad_shape"),
        ("llama3", '{"name": "f", "parameters": {}, "arguments": {}}', "bad_shape"),
        ("llama3", '{"name": "f", "parameters": {}} or so', "bad_json"),
        ("llama3", '{"name": "f", "param', "unfinished"),
        ("pythonic", "[f(a=-1, b=[None, True], c={'k': 'v'})]", "ok"),
        ("pythonic", "[f(1)]", "bad_shape"),
        ("pythonic", "[f(a=g())]", "bad_shape"),
        ("pythonic", "[f(a=open('x').read())]", "bad_shape"),
        ("pythonic", "[f(**{'a': 1})]", "bad_shape"),
        ("pythonic", "[f(a=(1, 2))]", "bad_shape"),
        ("pythonic", "[f(a=1e999)]", "bad_shape"),
        ("pythonic", "[f(a=]", "bad_json"),
        ("pythonic", "[f(a=1), g(", "unfinished"),
        ("qwen_xml", tagged("<function=f>\n</function>"), "ok"),
        ("qwen_xml", tagged("<function=f><parameter=a>1</parameter></function>"), "ok"),
        ("qwen_xml", tagged("<function=f><parameter=a>1</function>"), "bad_shape"),
        ("qwen_xml", tagged('{"name": "f", "arguments": {}}'), "bad_shape"),
        ("qwen_xml", tagged("<function=f>" + "<parameter=a>1</parameter>" * 2), "bad_shape"),
        ("qwen_xml", "<tool_call><function=f><parameter=a>1", "unfinished"),
    ],
)
def test_each_call_has_a_status(form, text, status):
    (call,) = parse(form, text).tool_calls
    assert call.status == status
    if status == "ok":
        assert call.name == "f"
    else:
        assert call.arguments == {}
        assert call.raw


def test_one_bad_call_leaves_the_others():
    good = tagged('{"name": "f", "arguments": {"a": 1}}')
    read = parse("hermes", f"First {tagged('{')} then {good} done")
    assert [c.status for c in read.tool_calls] == ["bad_json", "ok"]
    assert read.content == "First\nthen\ndone"


def test_prose_is_no_call():
    for form, text in (
        ("llama3", 'Write {"name": "f", "parameters": {}} for that.'),
        ("llama3", 'For example\n{"name": "f", "parameters": {}}\nis a call.'),
        ("llama3", '{"a": 1}'),
        ("pythonic", "[1, 2]"),
        ("pythonic", "See\n[f(a=1)]\nthere."),
        ("hermes", '{"name": "f", "arguments": {}}'),
    ):
        assert parse(form, text) == assistant(text)


def test_calls_inside_thinking_are_thoughts():
    call = tagged('{"name": "f", "arguments": {}}')
    assert parse("hermes", f"<think>maybe {call}</think>No.") == Message(
        "assistant", "No.", reasoning=f"maybe {call}"
    )
    assert parse("hermes", f"<think>maybe {call}").tool_calls == ()


def test_a_schema_decides_between_text_and_number():
    text = tagged("<function={}><parameter=a>\n1e5\n</parameter></function>")
    assert parse("qwen_xml", text.format("say"), [SAY]).tool_calls[0].arguments == {"a": "1e5"}
    assert parse("qwen_xml", text.format("add"), [ADD]).tool_calls[0].arguments == {"a": 1e5}
    words = text.format("add").replace("1e5", "many")
    assert parse("qwen_xml", words, [ADD]).tool_calls[0].status == "bad_shape"


def test_a_call_that_could_not_be_read_is_written_as_it_was():
    for form, text in (
        ("hermes", "<tool_call>\n{oops\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "f'),
        ("llama3", '{"name": "f"'),
        ("pythonic", "[f(1)]"),
        ("qwen_xml", "<tool_call>\n<function=f>\n</tool_call>"),
    ):
        ids, _ = MADE[form].encode([user("go"), parse(form, text)])
        assert MADE[form].codec.decode(ids).endswith(f"assistant\n{text}<|im_end|>")


def test_names_that_a_format_cannot_write_are_refused():
    for form, name in (("pythonic", "two words"), ("pythonic", "class"), ("qwen_xml", "a>b")):
        call = Message("assistant", "", (ToolCall(name, {}),))
        with pytest.raises(DataError, match="tool_format"):
            MADE[form].encode([user("go"), call])


@pytest.mark.parametrize("make", [tiny, llama, plain])
def test_thinking_that_deployment_drops_opens_a_new_segment(make):
    tokenizer = make()
    keep, strip = (make_renderer(tokenizer, thinking=t) for t in ("keep", "strip"))
    thought = Message("assistant", "5", reasoning="2 and 3")
    previous, _ = keep.encode([user("2+3?"), thought])
    more = [user("and 4?")]
    assert keep.extend(previous, more)[: len(previous)] == previous
    assert strip.extend(previous, more) is None
    # In the middle of its work a model still sees what it thought.
    assert strip.extend(previous, [Message("tool", "5")]) is not None
    silent, _ = strip.encode([user("<think>"), assistant("5")])
    assert strip.extend(silent, more) is not None
    talk = [user("2+3?"), thought, *more, Message("assistant", "9", reasoning="5 and 4")]
    ids, sampled = strip.encode(talk)
    text = strip.codec.decode(ids)
    assert "2 and 3" not in text
    assert "5 and 4" in text
    trained = strip.codec.decode([t for t, mine in zip(ids, sampled, strict=True) if mine])
    assert trained.startswith("<think>\n5 and 4\n</think>\n\n9")
    assert strip.start(talk[:3]) == strip.start([talk[0], assistant("5"), talk[2]])


@pytest.mark.parametrize("make", [tiny, llama, plain])
def test_other_tools_open_a_new_segment(make):
    renderer = make_renderer(make())
    previous = [*renderer.start([user("go")], [ADD]), 9, renderer.stop_ids[0]]
    assert renderer.extend(previous, [user("on")], [ADD]) is not None
    assert renderer.extend(previous, [user("on")]) is not None
    assert renderer.extend(previous, [user("on")], [ADD, SAY]) is None


def test_answers_of_tools_share_a_turn_in_chatml():
    ids = MADE["hermes"].start([user("go"), Message("tool", "1"), Message("tool", "2")])
    assert (
        MADE["hermes"]
        .codec.decode(ids)
        .endswith(
            "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
    )


def test_llama_may_end_a_turn_for_its_tools():
    renderer = make_renderer(llama())
    end, pause = (renderer.codec.added[t] for t in ("<|eot_id|>", "<|eom_id|>"))
    assert renderer.stop_ids == (end, pause)
    previous = [*renderer.start([user("go")]), pause]
    assert end not in renderer.extend(previous, [Message("tool", "5")])[len(previous) : -9]


def test_families_by_name():
    smol = make_renderer(with_template(None), family="smollm2")
    assert "named SmolLM" in smol.codec.decode(smol.start([user("hi")]))
    assert isinstance(make_renderer(TINY, family="template"), TemplateRenderer)
    with pytest.raises(ConfigError, match=r"model\.template"):
        make_renderer(with_template(None), family="template")
    with pytest.raises(ModelError, match="does not speak Llama 3"):
        make_renderer(TINY, family="llama3")


def with_template(template):
    changed = tiny()
    changed.chat_template = template
    return changed


def test_a_template_that_writes_something_else_is_followed():
    opens = TINY.chat_template.replace("assistant\\n'", "assistant\\n<think>\\n'")
    renderer = make_renderer(with_template(opens))
    assert isinstance(renderer, TemplateRenderer)
    reply = renderer.parse(renderer.codec.encode(["hm\n</think>\n\n5"]))
    assert (reply.reasoning, reply.content) == ("hm", "5")
    assert isinstance(make_renderer(with_template("{{ nothing.at.all }}")), FamilyRenderer)


def test_a_template_from_a_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(TINY.chat_template.replace("message['role']", "message['role']|upper"))
    renderer = make_renderer(TINY, template=path)
    text = renderer.codec.decode(renderer.start([user("hi <|im_end|>")]))
    assert text == "<|im_start|>USER\nhi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ConfigError, match=r"model\.template: cannot read"):
        make_renderer(TINY, template=tmp_path / "none.jinja")


def test_a_template_that_rewrites_history_opens_segments_and_says_so():
    counts = "{{ messages | length }}" + PLAIN_TEMPLATE
    tokenizer = plain()
    tokenizer.chat_template = counts
    renderer = make_renderer(tokenizer)
    assert not renderer.append_only
    assert "rewrites turn 1" in renderer.reason
    talk = [user("a"), assistant("b"), user("c"), assistant("d")]
    assert renderer.extend([*renderer.start(talk[:3]), 9], [user("e")]) is None
    with pytest.raises(DataError, match="would sample is not known"):
        renderer.encode(talk)
    finding = audit(tokenizer, renderer)[0]
    assert not finding.ok
    assert "new segment" in finding.detail


def test_tools_and_thinking_that_a_template_leaves_out_are_said():
    renderer = make_renderer(plain())
    text = renderer.codec.decode(renderer.start([user("go")], [ADD]))
    assert '"name": "add"' in text
    reply = Message("assistant", "5", (ToolCall("add", {"a": 1}),), "hm")
    ids, sampled = renderer.encode([user("go"), reply])
    assert renderer.parse([t for t, s in zip(ids, sampled, strict=True) if s]) == reply


def test_rows_with_calls_thinking_and_tools():
    wrapped = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    rows = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": None, "tool_calls": [wrapped]},
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "assistant", "content": "<think>ok</think>\n\n5"},
        {"role": "assistant", "content": "5", "reasoning_content": "ok"},
    ]
    read = messages_of(rows, "messages")
    assert read[1] == Message("assistant", "", (ToolCall("add", {"a": 1}),))
    assert read[2] == Message("tool", "5", tool="add")
    assert read[3] == read[4] == Message("assistant", "5", reasoning="ok")
    assert reply_of("a <think>") == assistant("a <think>")
    offered = [{"type": "function", "function": {"name": "now", "parameters": None}}]
    assert tools_of(offered, "tools")[0].parameters["type"] == "object"


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "only an assistant"),
        ({"role": "assistant", "content": "", "tool_calls": "f()"}, "list of calls"),
        ({"role": "assistant", "content": "", "tool_calls": [{"name": ""}]}, r"\[0\]\.name"),
        ({"role": "assistant", "content": "", "tool_calls": [3]}, r"tool_calls\[0\]"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{"}]},
            "not JSON",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": [1]}]},
            "must be an object",
        ),
        ({"role": "assistant", "content": "", "reasoning": 3}, "reasoning: must be text"),
    ],
)
def test_rows_that_cannot_be_read_are_named(row, error):
    with pytest.raises(DataError, match=error):
        messages_of([row], "messages")


def test_added_tokens_that_are_not_special_come_from_us_alone():
    tokenizer = tiny()
    tokenizer.add_tokens(["<tool_response>", "</tool_response>"])
    renderer = make_renderer(tokenizer)
    opens = renderer.codec.added["<tool_response>"]
    assert renderer.start([Message("tool", "<tool_response>")]).count(opens) == 1
    assert opens not in renderer.start([user("<tool_response>")])
