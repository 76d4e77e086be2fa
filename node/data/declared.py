"""What the files beside a tokenizer declare, and training does not use: it is kept for an export.

The file ``tokenizer_config.json`` goes with the tokenizer from an import to the run's folder, and from there
to an export. It is data of strangers: a chat template is passed on as text, and nothing here renders it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from node.data.tokenizer import FileTokenizer

log = logging.getLogger(__name__)

CONFIG_FILE = "tokenizer_config.json"
BASE_MODEL = "base_model"
"""Key of the name on the hub of the model from which a run starts."""
_TEMPLATE_FILE = "chat_template.jinja"
_MOST_BYTES, _MOST_TEMPLATE, _MOST_NAME = 2**25, 2**18, 200
"""Of a file beside the tokenizer, of its template (ten times the largest known), of a model's name."""


def declared_beside(file: Path, tokenizer: FileTokenizer) -> dict[str, Any]:
    """The begin and padding tokens, chat template and base model that the files beside `file` declare.

    The keys are those of ``tokenizer_config.json``. A token that `tokenizer` lacks is left out, and what has
    another form or is too long, with a warning.
    """
    config, ids = _object(file.with_name(CONFIG_FILE)), _object(file.with_name("config.json"))
    found: dict[str, Any] = {}
    for name in ("bos_token", "pad_token"):
        token, number = config.get(name), ids.get(f"{name}_id")
        token = token.get("content") if isinstance(token, dict) else token
        if token is None and type(number) is int:
            token = tokenizer.token(number)
        if isinstance(token, str) and tokenizer.number(token) is not None:
            found[name] = token
    template = _text(file.with_name(_TEMPLATE_FILE)) or config.get("chat_template")
    if template and _is_template(template):
        found["chat_template"] = template
    elif template:
        log.warning(
            "%s: its chat template is left out: it is no text of at most %d bytes", file, _MOST_TEMPLATE
        )
    base = config.get(BASE_MODEL)
    return found | ({BASE_MODEL: base} if isinstance(base, str) and len(base) <= _MOST_NAME else {})


def as_file(declared: dict[str, Any]) -> bytes:
    """The content of the ``tokenizer_config.json`` that :func:`declared_beside` reads as `declared`."""
    return (json.dumps(declared, ensure_ascii=False, indent=2) + "\n").encode()


def _is_template(found: object) -> bool:
    """Whether it is one template, or several with names, as transformers writes them."""
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    texts = [each.get(key) for each in named if isinstance(each, dict) for key in ("name", "template")]
    lengths = [len(text) for text in texts if isinstance(text, str)]
    return len(lengths) == 2 * len(named) and sum(lengths) <= _MOST_TEMPLATE


def _object(file: Path) -> dict[str, Any]:
    text = _text(file)
    try:
        tree = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        log.warning("%s is not used: %s", file, error)
        return {}
    return tree if isinstance(tree, dict) else {}


def _text(file: Path) -> str:
    """The text of `file`; "" if there is no such file or it cannot be read."""
    if not file.is_file():
        return ""
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        log.warning("%s is not used: %s", file, error)
        return ""
