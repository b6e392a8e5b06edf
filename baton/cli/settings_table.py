"""`python -m baton.cli.settings_table FILE`: the settings of every process as Markdown tables.

Replaces what stands between the two marks of FILE, so that docs/configuration.md says what the
settings classes say. Reads classes only, never a value from the environment.
"""

import sys
from pathlib import Path

from pydantic.fields import FieldInfo

from baton.cli.up_settings import UpSettings
from baton.cluster.settings import DecodeSettings, PrefillSettings, RouterSettings, Settings
from baton.cluster.values import format_size

BEGIN, END = "<!-- begin settings -->", "<!-- end settings -->"
TABLES: tuple[tuple[str, type[Settings]], ...] = (
    ("`baton up`", UpSettings),
    ("Router", RouterSettings),
    ("Prefill worker", PrefillSettings),
    ("Decode worker", DecodeSettings),
)


def tables() -> str:
    return "\n\n".join(_table(title, cls) for title, cls in TABLES)


def replace_tables(text: str) -> str:
    """`text` with fresh tables between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _table(title: str, cls: type[Settings]) -> str:
    rows = [_row(cls, name, field) for name, field in cls.model_fields.items()]
    head = ["| Flag | Default | Accepts | Meaning |", "|---|---|---|---|"]
    return "\n".join([f"### {title}: table `[{cls.table}]`", "", *head, *rows])


def _row(cls: type[Settings], name: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    flags = [f"--{name.replace('_', '-')}", str(extra.get("flag") or "")]
    shown = ", ".join(f"`{flag}`" for flag in flags if flag)
    accepts = extra.get("accepts", "")
    return f"| {shown} | {_default(name, field)} | {accepts} | {field.description} |"


def _default(name: str, field: FieldInfo) -> str:
    if field.default_factory is not None or field.default is None:
        return "–"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if name == "kv_memory":
        return format_size(field.default)
    return f"`{field.default}`"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(replace_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
