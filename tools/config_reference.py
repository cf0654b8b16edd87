"""docs/config.md, made from the schema:  python -m tools.config_reference > docs/config.md"""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from marble_rl.balancing.registry import RULES
from marble_rl.config import run as schema
from marble_rl.losses.registry import LOSSES
from marble_rl.section import sections_in

PLUGINS = {registry.section: registry for registry in (RULES, LOSSES)}
"""Sections whose keys depend on their `type`"""
HEADER = """# Config reference

Made from the schema by `make docs`. A config is a YAML file with these sections; only `model`, `prompts` and
`rewards` have no defaults. Any key can be overridden on the command line (`--set trainer.steps=10`,
`--set rewards.0.held_out=true`, `--set balance='{type: gdpo}'`). Unknown keys are errors. `marble config show CONFIG`
prints a config with all its defaults, `marble config check CONFIG` also checks its prompts and rewards; neither loads
a model.

File names in a config count from the folder that the config is in.
"""


def config_reference() -> str:
    """The whole page, as Markdown."""
    pages = [HEADER]
    for name, field in schema.RunConfig.model_fields.items():
        sections = sections_in(field.annotation)
        if name in PLUGINS:
            sections = [PLUGINS[name].settings_class(tag) for tag in PLUGINS[name].built_in]
        pages.append(f"## `{name}`")
        if len(sections) == 1:
            pages.append(_section(sections[0]))
            continue
        pages.append("One of these, chosen by `type`, or the import path `package.module:name` of one's own.")
        for section in sections:
            (tag,) = get_args(section.model_fields["type"].annotation)
            pages.append(f"### `type: {tag}`")
            pages.append(_section(section))
    return "\n\n".join(page.strip() for page in pages) + "\n"


def _section(section: type[BaseModel]) -> str:
    """One section's table, with the sections nested in it below."""
    lines = [_text(section.__doc__), "", "| key | type | default | |", "|---|---|---|---|"]
    nested: list[str] = []
    for name, field in section.model_fields.items():
        if name == "type" and get_origin(field.annotation) is Literal:
            continue
        lines.append(f"| `{name}` | {_type(field)} | {_default(field)} | {_text(field.description)} |")
        nested += [f"**{_title(name, inner)}**: {_section(inner)}" for inner in sections_in(field.annotation)]
    if lines[-1] == "|---|---|---|---|":
        lines = lines[:1]
    return "\n".join(lines) + "".join(f"\n\n{page}" for page in nested)


def _title(name: str, section: type[BaseModel]) -> str:
    """Variants are named by their `type`."""
    tag = section.model_fields.get("type")
    if tag is None or get_origin(tag.annotation) is not Literal:
        return f"`{name}`"
    return f"`{name}`, `type: {get_args(tag.annotation)[0]}`"


def _type(field: FieldInfo) -> str:
    return _type_name(field.annotation).replace("|", "\\|")


def _type_name(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f"`{value}`" for value in arguments)
    if hasattr(annotation, "__metadata__"):  # Annotated: the description states the constraint
        return _type_name(arguments[0])
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} x {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments:
        return " | ".join(dict.fromkeys(_type_name(argument) for argument in arguments))  # variants are mappings all
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    name: str = annotation.__name__
    return {"str": "text", "int": "integer", "float": "number", "bool": "true/false", "Path": "file"}.get(name, name)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "null"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if isinstance(field.default, tuple):
        return ", ".join(map(str, field.default))
    return f"`{field.default}`" if field.default not in ({}, []) else "none"


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(config_reference(), end="")
