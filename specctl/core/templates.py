"""The text of a chat template: whether it is one, how it fails, and the day that it writes."""

from __future__ import annotations

import functools
import re
from datetime import datetime
from typing import Final

from specctl.errors import TargetError

DAY: Final = datetime(2026, 1, 1)
TEMPLATE_ERRORS: Final = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""How a template fails beside jinja2's TemplateError: it is a program, and meets a missing key or a None."""
_DATE: Final = re.compile(r"""\bstrftime_now\(\s*(['"])([^'"]*)\1\s*\)""")


def check_template(text: str) -> None:
    """Raises TargetError when `text` is no Jinja template."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[], chat_template=text)  # no chat: compiles and renders nothing
    except TemplateSyntaxError as error:
        raise TargetError(
            f"the chat template is no Jinja template: {error.message}",
            where=f"chat template, line {error.lineno}",
        ) from error


@functools.lru_cache(maxsize=8)
def on_fixed_day(text: str) -> str:
    """A template that writes today's date as one that writes `DAY`: else a folder that is resumed tomorrow would hold
    its rows twice, and two evaluations would not have the same prompts.
    """
    return _DATE.sub(lambda call: repr(DAY.strftime(call[2])), text)
