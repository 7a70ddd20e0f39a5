"""A support desk in front of kvstore: a real model, long shared prompts, a crash in the middle.

`make demo` runs it with Gemma 3 270M, `make demo MODEL=tiny` with a small random model. Every
request runs twice,
without kvstore and with it, on the same model with the same prefill chunks; the outputs must be
the same tokens.
Exit code 1 on a difference.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import engine_adapter.transformers as kv
from bench.daemons import DaemonProcess
from bench.demo_models import MODELS, Tokens, load_model
from bench.harness import OUT

TEXTS = Path(__file__).parent / "support_desk"
NEW_TOKENS = 24
BLOCK_TOKENS = 128
FLUSH_SECONDS = 60.0
AFTER_CRASH_REQUESTS = 3


class FirstToken:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self._puts = 0
        self.at = 0.0

    def put(self, value: object) -> None:
        self._puts += 1
        if self._puts == 2:  # the first put is the prompt
            self.at = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to tell."""


@dataclass
class Outcome:
    """One request, run both ways."""

    user: str
    turn: int
    prompt_tokens: int
    host_tokens: int
    nvme_tokens: int
    seconds_without: float
    seconds_with: float
    is_same: bool
    answer: str

    @property
    def hit_tokens(self) -> int:
        return self.host_tokens + self.nvme_tokens


class Desk:
    """The model, attached, and what its requests took."""

    def __init__(self, model: Any, tokens: Tokens, attached: kv.Attached, console: Console) -> None:
        self._model = model
        self._tokens = tokens
        self._attached = attached
        self._console = console
        self.outcomes: list[Outcome] = []
        self.prompts: list[list[int]] = []

    def ask(self, user: str, turn: int, prompt: list[int]) -> Outcome:
        """Run one prompt without kvstore and with it."""
        with self._attached.paused():
            expected, without = self._generate(prompt)
        answer, seconds = self._generate(prompt)
        report = self._attached.last
        outcome = Outcome(
            user,
            turn,
            len(prompt),
            report.host_tokens,
            report.nvme_tokens,
            without,
            seconds,
            answer == expected,
            self._tokens.decode(answer),
        )
        self.outcomes.append(outcome)
        self.prompts.append(prompt)
        self._console.print(
            f"  {user:<6} turn {turn}: {len(prompt)} tokens, {outcome.hit_tokens} from cache, "
            f"first token after {seconds * 1e3:.0f} ms (without: {without * 1e3:.0f} ms)",
            highlight=False,
        )
        return outcome

    def _generate(self, prompt: list[int]) -> tuple[list[int], float]:
        """Greedy continuation and the time to its first token in seconds."""
        ids = torch.tensor([prompt])
        first = FirstToken()
        start = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            prefill_chunk_size=BLOCK_TOKENS,
            streamer=first,
        )
        return output[0, len(prompt) :].tolist(), first.at - start

    def settle(self) -> None:
        """Wait until what was computed is stored."""
        self._attached.flush(FLUSH_SECONDS)


def conversations(desk: Desk, tokens: Tokens) -> None:
    """All users' first turns, then all second turns: what serving many users looks like."""
    system = (TEXTS / "system.md").read_text() + "\n" + (TEXTS / "handbook.md").read_text()
    threads = json.loads((TEXTS / "conversations.json").read_text())
    history: dict[str, list[tuple[str, str]]] = {thread["user"]: [] for thread in threads}
    for turn in (0, 1):
        for thread in threads:
            said = history[thread["user"]]
            said.append(("Customer", thread["turns"][turn]))
            outcome = desk.ask(thread["user"], turn + 1, tokens.prompt(system, said))
            said.append(("Assistant", outcome.answer))
            desk.settle()


def after_a_crash(
    desk: Desk, daemon: DaemonProcess, attached: kv.Attached, console: Console
) -> None:
    """Flush, SIGKILL, a new daemon, and the same prompts: from NVMe now."""
    namespace = attached.namespace()
    for prompt in desk.prompts:
        namespace.flush(namespace.chain(prompt), deadline_seconds=FLUSH_SECONDS)
    console.print("\nthe daemon is killed (SIGKILL) and started again", style="bold")
    daemon.kill()
    seconds = daemon.start()
    if not attached.client.wait_connected(30.0):
        raise RuntimeError(f"the client did not come back: {attached.client.away_reason}")
    console.print(f"  serving again after {seconds:.2f} s", highlight=False)
    for outcome, prompt in list(zip(desk.outcomes, desk.prompts, strict=True))[
        -AFTER_CRASH_REQUESTS:
    ]:
        desk.ask(outcome.user, outcome.turn, prompt)


def table(outcomes: Sequence[Outcome], first_after_crash: int) -> Table:
    """What a reader looks at."""
    shown = Table(title="time to first token (TTFT)", title_justify="left")
    for name in ("user", "turn", "prompt tokens", "from host", "from NVMe"):
        shown.add_column(name, justify="left" if name == "user" else "right")
    for name in ("without, ms", "with, ms", "speed-up", "same output"):
        shown.add_column(name, justify="right")
    for index, outcome in enumerate(outcomes):
        if index == first_after_crash:
            shown.add_section()
        shown.add_row(
            outcome.user,
            str(outcome.turn),
            str(outcome.prompt_tokens),
            str(outcome.host_tokens),
            str(outcome.nvme_tokens),
            f"{outcome.seconds_without * 1e3:.0f}",
            f"{outcome.seconds_with * 1e3:.0f}",
            f"{outcome.seconds_without / outcome.seconds_with:.1f}x",
            "yes" if outcome.is_same else "NO",
        )
    return shown


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summary(outcomes: Sequence[Outcome], console: Console) -> int:
    """The closing lines; the number of outputs that differ."""
    asked = sum(outcome.prompt_tokens for outcome in outcomes)
    hit = sum(outcome.hit_tokens for outcome in outcomes)
    without = [outcome.seconds_without for outcome in outcomes]
    with_store = [outcome.seconds_with for outcome in outcomes]
    different = sum(not outcome.is_same for outcome in outcomes)
    lines = (
        f"tokens hit: {hit} of {asked} ({hit / asked:.0%}), "
        f"{sum(outcome.nvme_tokens for outcome in outcomes)} of them from NVMe",
        f"prefill seconds saved: {sum(without) - sum(with_store):.2f} of {sum(without):.2f}",
        f"TTFT P50 {statistics.median(without) * 1e3:.0f} → "
        f"{statistics.median(with_store) * 1e3:.0f} ms, "
        f"P95 {percentile(without, 0.95) * 1e3:.0f} → "
        f"{percentile(with_store, 0.95) * 1e3:.0f} ms (without → with kvstore)",
        f"outputs: {len(outcomes) - different} same, {different} different",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    return different


def main() -> int:
    """Run the demo; 1 when an output differs or nothing was hit after the crash."""
    parser = argparse.ArgumentParser(description=__doc__, prog="make demo")
    parser.add_argument("--model", choices=MODELS, default="gemma3")
    chosen = parser.parse_args()
    console = Console()
    folder = OUT / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with console.status("loading the model") as status:
        model, tokens = load_model(chosen.model, lambda text: status.update(text))
        status.update("starting the daemon")
        daemon = DaemonProcess(folder, {"host.bytes": "1GiB", "nvme.bytes_max": "4GiB"})
    with daemon, kv.attach(model, str(daemon.socket), block_tokens=BLOCK_TOKENS) as attached:
        if not attached.client.wait_connected(30.0):
            raise RuntimeError(f"cannot reach the daemon: {attached.client.away_reason}")
        desk = Desk(model, tokens, attached, console)
        console.print("a support desk: six customers, two turns each", style="bold")
        desk._generate(tokens.encode("warm up the processor " * 80))
        conversations(desk, tokens)
        before = len(desk.outcomes)
        after_a_crash(desk, daemon, attached, console)
        console.print()
        console.print(table(desk.outcomes, before))
    shutil.rmtree(folder, ignore_errors=True)
    different = summary(desk.outcomes, console)
    from_nvme = sum(outcome.nvme_tokens for outcome in desk.outcomes[before:])
    return int(different > 0 or from_nvme == 0)


if __name__ == "__main__":
    sys.exit(main())
