"""Write docs/configuration.md and docs/metrics.md from what is declared in the code.

`make docs` runs it; tests compare the pages with the code.
"""

from pathlib import Path

from kvstore.config import Config
from kvstore.counters import Counters
from kvstore.metrics import METRICS, Counted
from kvstore.settings import Setting, section_help, settings, shown

DOCS = Path(__file__).resolve().parent
METRICS_HEAD = """\
# Metrics

<!-- Written by docs/generate.py from kvstore/metrics.py; do not edit by hand. -->

`kvstore serve --set metrics.address=127.0.0.1:9464` serves Prometheus metrics at `/metrics`. Every
series exists from the start, at 0. Counters only grow and start again with the process; rates and
shares are the reader's business:

* the share of prompt tokens that was found in the store, the number to watch:
  `hit / (hit + missed)` with hit = `sum(rate(kvstore_hit_tokens_total[5m]))` and
  missed = `sum(rate(kvstore_missed_tokens_total[5m]))`
* what was found is not always loaded: vLLM's look-ups cover the whole prompt, also what vLLM still
  has in its own prefix cache. What came from the store is counted there:
  `rate(vllm:kvstore_loaded_tokens_total[5m])`
* prefill seconds saved per second (an estimate, from prefill times that engines reported):
  `rate(kvstore_saved_prefill_seconds_total[5m])`
* wear: `rate(kvstore_host_to_nvme_bytes_total[1h])`

A request hit rate is not among them on purpose: it says nothing about the work saved. What engines
see (TTFT and ITL with and without a hit) is measured in the engines. A dashboard lies in
`docker/grafana/`.
"""
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

Engines (`KVClient`, `attach`, the vLLM connector) that are given no socket read two of the
variables: `KVSTORE_DAEMON__SOCKET`, and `KVSTORE_DAEMON__NAME` for the default socket of that name.
They read no file.

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


def metrics_page() -> str:
    """The page of metrics."""
    values: dict[str, list[str]] = {}
    for counter in Counters().snapshot():
        key, _, label = counter.partition(":")
        values.setdefault(key, []).append(f"`{label}`")
    lines = [METRICS_HEAD, "| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        label = f"`{metric.label}`" if metric.label else ""
        if isinstance(metric, Counted) and metric.label:
            label += ": " + ", ".join(values[metric.key])
        name = f"`{metric.name}{'_total' if metric.kind == 'counter' else ''}`"
        lines.append(f"| {name} | {metric.kind} | {label} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(page(), encoding="utf-8")
    (DOCS / "metrics.md").write_text(metrics_page(), encoding="utf-8")
