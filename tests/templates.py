"""Chat templates of ten families, written after their published conventions, and a tokenizer for each.

Every tokenizer is the byte-level one of `tests.tiny` with the family's control tokens added, so that each character of
a rendered conversation is one token and what is learned can be compared with a text written by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from tests.tiny import CHATML, tiny_tokenizer

LLAMA3 = """{{ bos_token }}{% for m in messages %}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.tool_calls %}
{% set call = m.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}
{{ m.content | trim }}<|eot_id|>
{%- endif %}
{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{% set turns = messages[1:] %}
{%- else %}
{%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for m in turns %}
{%- if m.role == 'user' %}
{%- if loop.last and system is defined %}
{{- '[INST] ' + system + '\\n\\n' + m.content + ' [/INST]' }}
{%- else %}
{{- '[INST] ' + m.content + ' [/INST]' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}
{{- ']' + eos_token }}
{%- else %}
{{- ' ' + m.content + eos_token }}
{%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
{%- set first = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}
{%- set first = '' %}{% set turns = messages %}
{%- endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate, beginning with user') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (first if loop.first else '') }}
{{- m.content | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

PHI = """{% for m in messages %}
{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

# Shows reasoning only in turns after the last question, and an empty block in the last turn where there is none.
QWEN3 = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role != 'assistant' %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}
{%- set content = m.content %}
{%- set reasoning = m.reasoning_content if m.reasoning_content is defined else '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if enable_thinking is false else '') }}
{%- endif %}"""

# No header before an answer to a tool; the inference prompt opens a reasoning block that finished turns don't show.
DEEPSEEK = """{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'tool' %}
{{- '<|tool_outputs|><|tool_output|>' + m.content + '<|tool_output_end|><|tool_outputs_end|>' }}
{%- elif m.tool_calls %}
{{- '<|Assistant|>' + m.content + '<|tool_calls|>' }}
{%- for call in m.tool_calls %}
{{- '<|tool_call|>' + call.function.name + '\\n' + (call.function.arguments | tojson) + '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_end|>' + eos_token }}
{%- else %}
{{- '' if loop.previtem and loop.previtem.role == 'tool' else '<|Assistant|>' }}
{{- m.content.split('</think>')[-1] + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

# The role names are plain text, not control tokens.
ZEPHYR = """{% for m in messages %}
{{- '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

# ChatML with generation markers and a default system text.
MARKED = """{% if messages[0].role != 'system' %}<|im_start|>system
You are Tiny.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}<|im_end|>{% endif %}

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Every turn of an assistant is split into channels, and the last one ends with another token than the earlier ones.
CHANNELS = """{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking is defined and loop.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{%- if m.tool_calls %}
{{- '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|channel|>commentary<|message|>' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- endif %}
{%- else %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# No token ends a turn: the next role's token does.
ENDLESS = """{{ bos_token }}{% for m in messages %}
<|{{ m.role }}|>
{{ m.content }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A template and the control tokens it needs.

    Attributes:
        template: Jinja; `{{ bos_token }}` at its beginning marks the families that put bos there themselves.
        specials: special tokens beside those of `tests.tiny`.
        eos: the tokenizer's end token.
        learned: what is learned of user `Hi`, assistant `Yes`, user `Go`, assistant `No`: one text per assistant turn.
        plain_added: added tokens that are not special.
    """

    template: str
    specials: list[str] = field(default_factory=list)
    eos: str = "<|im_end|>"
    learned: tuple[str, str] = ("Yes<|im_end|>", "No<|im_end|>")
    plain_added: list[str] = field(default_factory=list)

    def tokenizer(self, *, bos_by_tokenizer: bool = False, bos_in_template: bool = False) -> PreTrainedTokenizerFast:
        """The family's tokenizer, with `<s>` put before a text by the template, by the tokenizer, by both or none."""
        template = self.template.replace("{{ bos_token }}", "").replace("{{- bos_token }}", "")
        tokenizer = tiny_tokenizer(
            "{{ bos_token }}" + template if bos_in_template else template,
            bos_by_tokenizer=bos_by_tokenizer,
            extra_specials=self.specials,
        )
        tokenizer.add_tokens(self.plain_added)
        tokenizer.add_special_tokens({"eos_token": self.eos})
        return tokenizer


FAMILIES = {
    "chatml": Family(CHATML),
    "chatml_marked": Family(MARKED),
    "llama3": Family(
        LLAMA3,
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
        ("Yes<|eot_id|>", "No<|eot_id|>"),
    ),
    "mistral": Family(MISTRAL, ["[INST]", "[/INST]"], "</s>", (" Yes</s>", " No</s>")),
    "mistral_text": Family(MISTRAL, [], "</s>", (" Yes</s>", " No</s>")),
    "gemma": Family(GEMMA, ["<start_of_turn>", "<end_of_turn>"], "</s>", ("Yes<end_of_turn>", "No<end_of_turn>")),
    "phi": Family(PHI, ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], "</s>", ("Yes<|end|>", "No<|end|>")),
    "qwen3": Family(
        QWEN3,
        learned=("Yes<|im_end|>", "<think>\n\n</think>\n\nNo<|im_end|>"),
        plain_added=["<think>", "</think>", "<tool_call>", "</tool_call>"],
    ),
    "deepseek": Family(
        DEEPSEEK,
        [
            *["<|User|>", "<|Assistant|>", "<|tool_calls|>", "<|tool_call|>", "<|tool_call_end|>"],
            *[
                "<|tool_calls_end|>",
                "<|tool_outputs|>",
                "<|tool_output|>",
                "<|tool_output_end|>",
                "<|tool_outputs_end|>",
            ],
        ],
        "</s>",
        ("Yes</s>", "No</s>"),
    ),
    "zephyr": Family(ZEPHYR, [], "</s>", ("Yes</s>", "No</s>")),
    "channels": Family(
        CHANNELS,
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"],
        "<|return|>",
        ("<|channel|>final<|message|>Yes<|end|>", "<|channel|>final<|message|>No<|return|>"),
    ),
    "endless": Family(ENDLESS, ["<|user|>", "<|assistant|>", "<|system|>"], "</s>", ("Yes", "No")),
}
