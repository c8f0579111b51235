"""Chat templates that write tool calls as families of models do, around one skeleton, and that drop thoughts."""

_SKELETON = (
    "{% for t in tools or [] %}{{ t | tojson }}{{ '\\n' }}{% endfor %}"
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content }}"
    "{% if m.tool_calls %}CALLS{% else %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def skeleton(calls: str, end: str = "<|im_end|>\n") -> str:
    """Returns a template that writes calls as a piece of Jinja says, which reads m.tool_calls."""
    return _SKELETON.replace("CALLS", f"{calls}{{{{ {end!r} }}}}")


def each(call: str, before: str = "", between: str = "", after: str = "") -> str:
    """Returns a piece of Jinja that writes each call, `c`, and with `pairs` the `k` and `v` of its arguments."""
    separated = f"{{% if not loop.last %}}{{{{ {between!r} }}}}{{% endif %}}" if between else ""
    loop = f"{{% for one in m.tool_calls %}}{{% set c = one.function %}}{call}{separated}{{% endfor %}}"
    return f"{{{{ {before!r} }}}}{loop}{{{{ {after!r} }}}}"


def pairs(pair: str, between: str = "") -> str:
    separated = f"{{% if not loop.last %}}{{{{ {between!r} }}}}{{% endif %}}" if between else ""
    return f"{{% for k, v in c.arguments | items %}}{pair}{separated}{{% endfor %}}"


_RAW = "{{ v if v is string else v | tojson }}"
_PYTHON = "{{ v | tojson if v is mapping else v }}"  # lists, True and None as Python writes them
_GEMMA = (
    "{% macro write(v, d) %}{% if v is string %}{{ d + v + d }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, x in v | items %}{{ k }}:{{ write(x, d) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for x in v %}{{ write(x, d) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)

# By family: the template, and whether an answer may have several calls.
FAMILIES: dict[str, tuple[str, bool]] = {
    "hermes": (skeleton(each("{{ '<tool_call>\\n' }}{{ c | tojson }}{{ '\\n</tool_call>' }}", between="\n")), True),
    "arguments_first": (
        skeleton(each('<tool_call>{"arguments": {{ c.arguments | tojson }}, "name": "{{ c.name }}"}</tool_call>')),
        True,
    ),
    "openai_text": (  # arguments as a text of JSON, as in OpenAI's API
        skeleton(each('<c>{"function": {"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson | tojson }}}}')),
        True,
    ),
    "mistral_list": (skeleton(each("{{ c | tojson }}", "[TOOL_CALLS] [", ", ", "]"), "</s>"), True),
    "mistral_ids": (  # whose results refer to the ids of calls
        skeleton(each('{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, "id": "{{ one.id }}"}',
                      "[TOOL_CALLS][", ", ", "]"), "</s>").replace(
            "{{ m.content }}", "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
            "{{ raise_exception('ids have 9 characters') }}{% endif %}{{ m.content }}{{ m.tool_call_id }}"), True
    ),
    "mistral_args": (skeleton(each("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"), "</s>"), True),
    "granite": (skeleton(each("{{ c | tojson }}", "<|tool_call|>[", ", ", "]")), True),
    "command_r": (
        skeleton(each('{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", "parameters": '
                      "{{ c.arguments | tojson }}}", "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>")), True
    ),
    "llama3": (
        skeleton("{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
                 + each('{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'), "<|eot_id|>"), False
    ),
    "gpt_oss": (
        skeleton("{% set c = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ c.name }}"
                 "<|channel|>commentary json<|message|>{{ c.arguments | tojson }}", "<|call|>"), False
    ),
    "deepseek_v3": (
        skeleton(each("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}{{ '\\n```json\\n' }}"
                      "{{ c.arguments | tojson }}{{ '\\n```<｜tool▁call▁end｜>' }}",
                      "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
                 "<｜end▁of▁sentence｜>"), True
    ),
    "deepseek_v31": (
        skeleton(each("<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>",
                      "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"), "<｜end▁of▁sentence｜>"), True
    ),
    "deepseek_r1_0528": (  # takes arguments as text only
        skeleton(each("{{ '<｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' + c.arguments + '<｜tool▁call▁end｜>' }}",
                      "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"), "<｜end▁of▁sentence｜>"), True
    ),
    "deepseek_v32": (  # says whether a value is a text
        skeleton(each('<invoke name="{{ c.name }}">' + pairs(
            "<parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">" + _RAW + "</parameter>")
            + "</invoke>", "<calls>", "\n", "</calls>")), True
    ),
    "qwen3_coder": (
        skeleton(each("{{ '<tool_call>\\n<function=' + c.name + '>\\n' }}" + pairs(
            "{{ '<parameter=' + k + '>\\n' }}" + _RAW + "{{ '\\n</parameter>\\n' }}")
            + "{{ '</function>\\n</tool_call>' }}", between="\n")), True
    ),
    "glm": (
        skeleton(each("{{ '<tool_call>' + c.name + '\\n' }}" + pairs(
            "{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}" + _RAW + "{{ '</arg_value>\\n' }}") + "</tool_call>")),
        True,
    ),
    "minimax": (
        skeleton(each("{{ '<invoke name=\"' + c.name + '\">\\n' }}" + pairs(
            "{{ '<parameter name=\"' + k + '\">' }}" + _RAW + "{{ '</parameter>\\n' }}") + "{{ '</invoke>\\n' }}",
            "<minimax:tool_call>\n", "", "</minimax:tool_call>")), True
    ),
    "lfm2": (
        skeleton(each("{{ c.name }}(" + pairs("{{ k }}={% if v is string %}'{{ v }}'{% else %}" + _PYTHON
                                              + "{% endif %}", ", ") + ")",
                      "<|tool_call_start|>[", ", ", "]<|tool_call_end|>")), True
    ),
    "llama4": (  # nothing marks its calls
        skeleton(each("{{ c.name }}(" + pairs("{{ k }}={{ v | tojson }}", ", ") + ")", "[", ", ", "]")), True
    ),
    "olmo3": (
        skeleton(each("{{ c.name }}(" + pairs("{{ k }}={{ v | tojson }}", ", ") + ")", "<function_calls>", "\n",
                      "</function_calls>")), True
    ),
    "gemma4": (
        _GEMMA + skeleton(each("{{ '<|tool_call>call:' + c.name + '{' }}"
                               + pairs("{{ k }}:{{ write(v, '<|\"|>') }}", ",") + "{{ '}<tool_call|>' }}"),
                          "<|tool_response>"), True
    ),
    "functiongemma": (
        _GEMMA + skeleton(each("{{ '<start_function_call>call:' + c.name + '{' }}"
                               + pairs("{{ k }}:{{ write(v, '<escape>') }}", ",") + "{{ '}<end_function_call>' }}")),
        True,
    ),
}  # fmt: skip


def _dropping(prompt: str, kept: str) -> str:
    """Returns a template that leaves out thoughts before the last user turn.

    Args:
        prompt: what it begins an answer with, after its header.
        kept: the condition, in Jinja, under which a later answer is written with its thought, even an empty one.
    """
    call = "{{ '<tool_call>\\n' }}{{ c | tojson }}{{ '\\n</tool_call>' }}"
    return (
        "{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endif %}"
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set said, thought = m.content, m.reasoning_content or '' %}"
        "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
        "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
        "{% if m.role == 'tool' %}"
        "{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
        "{{ '\\n<tool_response>\\n' + said + '\\n</tool_response>' }}"
        "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
        "{% else %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' and loop.index0 > ns.last and (" + kept + ") %}"
        "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
        "{{ said }}"
        + each(call, between="\n").replace("m.tool_calls", "m.tool_calls or []")
        + "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n" + prompt.replace("\n", "\\n") + "' }}{% endif %}"
    )


DROPPING = {
    "qwen3": _dropping("", "loop.last or thought"),
    "qwen3_5": _dropping("<think>\n", "true"),
    "qwen3_5_nothink": _dropping("<think>\n\n</think>\n\n", "true"),
}
