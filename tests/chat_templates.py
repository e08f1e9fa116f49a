"""The shapes that public chat templates have, and the special tokens each needs."""

CHATML_GENERATION = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The first turn of the assistant is one token at the very start of the text.
ANSWER_FIRST = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
)

CHATML_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3_SPECIAL = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or m.role == 'system' %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') }}
{{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}
{{- '<|im_start|>assistant\\n' + content }}
{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- ('\\n' if content or not loop.first else '') + '<tool_call>\\n{"name": "' + call.function.name }}
{{- '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

MISTRAL_SPECIAL = ("[INST]", "[/INST]")
MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""

GEMMA_SPECIAL = ("<start_of_turn>", "<end_of_turn>")
GEMMA = """\
{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

DEEPSEEK_SPECIAL = ("<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<|call_begin|>", "<|call_end|>")
DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<|User|>result: ' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<|Assistant|>' + m.content.split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}
{{- '<|call_begin|>' + call.function.name + (call.function.arguments | tojson) + '<|call_end|>' }}
{%- endfor %}
{{- '<|end_of_sentence|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

GLM_SPECIAL = ("<|user|>", "<|assistant|>")
GLM = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

# Keeps only the last question and what follows it; earlier answers are nowhere in the text.
LAST_ROUND = (
    "{% for m in messages[-2:] %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n<|im_end|>\n' }}{% endfor %}"
