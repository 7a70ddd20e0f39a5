"""A support desk in front of kvstore: a real model, long shared prompts, a crash in the middle.

`make demo` runs it with Gemma 3 270M, `make demo MODEL=tiny` with a small random model. Every
request runs without kvstore and with it, on the same model with the same prefill chunks; the
outputs must be the same tokens. Exit code 1 on a difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.status import Status
from rich.table import Table

import engine_adapter.transformers as kv
from bench.daemons import DaemonProcess
from bench.demo_models import MODELS, Tokens, load_model
from bench.harness import OUT, workspace

TEXTS = Path(__file__).parent / "support_desk"
NEW_TOKENS = 16
BLOCK_TOKENS = 128
FLUSH_SECONDS = 60.0
CONNECT_SECONDS = 30.0
DEADLINE_SECONDS = 20.0
"""Generous, so that a busy machine shows slow hits rather than none."""
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
    prompt: list[int]
    host_tokens: int
    nvme_tokens: int
    seconds_without: float
    seconds_with: float
    answer: list[int]
    """Without kvstore."""
    is_same: bool

    @property
    def hit_tokens(self) -> int:
        return self.host_tokens + self.nvme_tokens


class Desk:
    """The model, attached, and what its requests took."""

    def __init__(self, model: Any, attached: kv.Attached, tokens: Tokens, console: Console) -> None:
        self._model = model
        self._attached = attached
        self._tokens = tokens
        self._console = console
        self.outcomes: list[Outcome] = []

    def ask(self, user: str, turn: int, prompt: list[int], progress: Status) -> Outcome:
        """Run one prompt without kvstore, then with it."""
        progress.update(f"{user}, turn {turn}: without kvstore")
        with self._attached.paused():
            answer, seconds = self.generate(prompt)
        progress.update(f"{user}, turn {turn}: with kvstore")
        return self._with_kvstore(user, turn, prompt, answer, seconds)

    def again(self, earlier: Outcome) -> Outcome:
        """The same prompt with kvstore; it must still give what it gave without."""
        asked = (earlier.user, earlier.turn, earlier.prompt)
        return self._with_kvstore(*asked, earlier.answer, earlier.seconds_without)

    def _with_kvstore(
        self, user: str, turn: int, prompt: list[int], expected: list[int], without: float
    ) -> Outcome:
        answer, seconds = self.generate(prompt)
        report = self._attached.last
        outcome = Outcome(
            user,
            turn,
            prompt,
            report.host_tokens,
            report.nvme_tokens,
            without,
            seconds,
            expected,
            answer == expected,
        )
        self.outcomes.append(outcome)
        self._console.print(
            f"  {user:<5} turn {turn}: {outcome.hit_tokens} of {len(prompt)} tokens from cache, "
            f"TTFT {without * 1e3:.0f} → {seconds * 1e3:.0f} ms",
            highlight=False,
        )
        self._attached.flush(FLUSH_SECONDS)
        return outcome

    def generate(self, prompt: list[int]) -> tuple[list[int], float]:
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

    def conversations(self, progress: Status) -> None:
        """All users' first turns, then all second turns: what serving many users looks like."""
        system = (TEXTS / "system.md").read_text() + "\n" + (TEXTS / "handbook.md").read_text()
        threads = json.loads((TEXTS / "conversations.json").read_text())
        history: dict[str, list[tuple[str, str]]] = {thread["user"]: [] for thread in threads}
        for turn in (0, 1):
            for thread in threads:
                said = history[thread["user"]]
                said.append(("Customer", thread["turns"][turn]))
                prompt = self._tokens.prompt(system, said)
                outcome = self.ask(thread["user"], turn + 1, prompt, progress)
                said.append(("Assistant", self._tokens.decode(outcome.answer)))


def after_a_crash(
    desk: Desk, daemon: DaemonProcess, attached: kv.Attached, console: Console
) -> None:
    """Flush, SIGKILL, a new daemon, and the last prompts again: from NVMe now."""
    namespace = attached.namespace()
    for outcome in desk.outcomes:
        namespace.flush(namespace.chain(outcome.prompt), deadline_seconds=FLUSH_SECONDS)
    console.print("flushed to NVMe; the daemon is killed (SIGKILL) and started again", style="bold")
    daemon.kill()
    seconds = daemon.start()
    if not attached.client.wait_connected(CONNECT_SECONDS):
        raise RuntimeError(f"the client did not come back: {attached.client.away_reason}")
    console.print(f"  serving again after {seconds:.2f} s; the last requests once more:")
    for outcome in desk.outcomes[-AFTER_CRASH_REQUESTS:]:
        desk.again(outcome)


def table(outcomes: Sequence[Outcome], first_after_crash: int) -> Table:
    """What a reader looks at."""
    title = "prompt tokens, of them from cache by tier; time to first token (TTFT) in ms"
    shown = Table(title=title, title_justify="left")
    shown.add_column("user")
    for name in ("turn", "tokens", "host", "NVMe", "without", "with", "speed-up", "same output"):
        shown.add_column(name, justify="right")
    for index, outcome in enumerate(outcomes):
        if index == first_after_crash:
            shown.add_section()
        shown.add_row(
            outcome.user,
            str(outcome.turn),
            str(len(outcome.prompt)),
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
    asked = sum(len(outcome.prompt) for outcome in outcomes)
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
    if chosen.model == "tiny":
        torch.set_num_threads(1)  # two that wait for each other cost more than they compute
    with workspace(OUT / "demo") as folder:
        with console.status("loading the model") as progress:
            model, tokens = load_model(chosen.model, progress.update)
        daemon = DaemonProcess(folder, {"host.bytes": "1GiB", "nvme.bytes_max": "4GiB"})
        options = {
            "block_tokens": BLOCK_TOKENS,
            "deadline_seconds": DEADLINE_SECONDS,
            # The tiny model computes faster than anything loads.
            "plan": chosen.model != "tiny",
        }
        with daemon, kv.attach(model, daemon.socket, **options) as attached:
            if not attached.client.wait_connected(CONNECT_SECONDS):
                raise RuntimeError(f"cannot reach the daemon: {attached.client.away_reason}")
            desk = Desk(model, attached, tokens, console)
            console.print("a support desk: six customers, two turns each", style="bold")
            with console.status("warming up the processor") as progress:
                desk.generate(tokens.encode("warm up the processor " * 80))
                desk.conversations(progress)
            before = len(desk.outcomes)
            after_a_crash(desk, daemon, attached, console)
    console.print()
    console.print(table(desk.outcomes, before))
    different = summary(desk.outcomes, console)
    from_nvme = sum(outcome.nvme_tokens for outcome in desk.outcomes[before:])
    return int(different > 0 or from_nvme == 0)


if __name__ == "__main__":
    sys.exit(main())
