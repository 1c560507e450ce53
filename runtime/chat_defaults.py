"""Chat templates for files that bring none, by family: the turns that a family was trained with."""

from __future__ import annotations

# Gemma 1 to 3: turns of user and model; a system text stands before the first user's.
_GEMMA = """{{ bos_token }}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] in ['system', 'developer'] -%}
{%- set ns.system = ns.system + (message['content'] | trim) + '\\n\\n' -%}
{%- else -%}
{%- set role = 'model' if message['role'] in ['assistant', 'model'] else 'user' -%}
{{ '<start_of_turn>' + role + '\\n' }}
{%- if role == 'user' -%}{{ ns.system }}{%- set ns.system = '' -%}{%- endif -%}
{{ (message['content'] | trim) + '<end_of_turn>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

_BY_FAMILY = {"gemma3": _GEMMA}


def default_template(family: str) -> str:
    """Return the Jinja text for a family, ``""`` if there is none."""
    return _BY_FAMILY.get(family, "")
