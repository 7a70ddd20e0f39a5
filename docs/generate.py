"""Write docs/configuration.md from the declared settings (`make docs`; a test compares them)."""

from pathlib import Path

from kvstore.config import Config
from kvstore.settings import Setting, section_help, settings, shown

PAGE = Path(__file__).resolve().parent / "configuration.md"
HEAD = """\
# Configuration

<!-- Written by docs/generate.py from kvstore/config.py; do not edit by hand. -->

Nothing needs configuring. What is given counts in this order, the last one wins:

1. the defaults below,
2. a TOML file: `kvstore serve --config FILE`, or the variable `KVSTORE_CONFIG` names it,
3. environment variables `KVSTORE_SECTION__KEY` (two underscores): `KVSTORE_HOST__BYTES=8GiB`,
4. flags: `--set section.key=value`, or one of its own (`--socket`, `--data-dir`, `--host-bytes`,
   `--nvme-bytes`).

An unknown setting, a value out of range and settings that cannot work together are refused at
start, in one line that names where the value came from and the way out. `kvstore config` prints the
effective configuration, `kvstore config --defaults` a file to start from.

Sizes are written `"64 MiB"` (1024-based) or `"10 GB"` (1000-based), times `"250ms"`, `"10s"`,
`"2min"`; plain numbers are bytes and seconds.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    section = ""
    for setting in settings().values():
        if setting.section != section:
            section = setting.section
            lines += [
                f"\n## {section}\n",
                f"{section_help(section)}\n",
                "| setting | default | takes | meaning |",
                "|---|---|---|---|",
            ]
        lines.append(row(setting))
    return "\n".join(lines) + "\n"


def row(setting: Setting) -> str:
    """One line of a section's table; what "0: automatic" means for the defaults is shown too."""
    declared = shown(setting, setting.default)
    effective = shown(setting, getattr(getattr(Config(), setting.section), setting.name))
    default = f"`{declared}`" + ("" if effective == declared else f" (here `{effective}`)")
    cells = (f"`{setting.name}`", default, setting.allowed, setting.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
