"""What an operator deploys is well-formed: by linters and schemas that are not ours.

Runs in an environment of its own (`make test-packaging`). No container engine is needed: the
images' install steps are done again in a plain virtual environment, the rest is validated.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml
from compose_spec import PyCompose

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
BIN = Path(sys.executable).parent


def said(command: list[str], **more: Any) -> str:
    """What a command printed; it must end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **more)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return str(done.stdout) + str(done.stderr)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu", "Dockerfile.vllm"])
def test_images_pass_the_linter(name: str) -> None:
    said([str(BIN / "hadolint"), str(DOCKER / name)])


def test_the_linter_finds_something(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM python\nRUN cd /tmp && sudo pip install x\n")
    assert subprocess.run([str(BIN / "hadolint"), str(wrong)], capture_output=True).returncode


def filled_in(text: str) -> str:
    """Compose variables replaced by their defaults."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_compose_file_follows_its_specification() -> None:
    found = PyCompose.from_yaml(filled_in((DOCKER / "compose.yaml").read_text()))
    found.validate()
    assert {"kvstore", "gateway", "vllm", "prometheus", "grafana"} <= set(found.service_names())
    with pytest.raises(ValueError, match="service"):
        PyCompose.from_yaml("services: {a: {image: x, portz: []}}")


def test_compose_mounts_files_that_exist() -> None:
    services = yaml.safe_load(filled_in((DOCKER / "compose.yaml").read_text()))["services"]
    mounted = [
        source
        for service in services.values()
        for source in (volume.split(":")[0] for volume in service.get("volumes", ()))
        if source.startswith(".")
    ]
    assert len(mounted) == 3
    assert all((DOCKER / source).is_dir() for source in mounted)


def test_volumes_belong_to_who_writes_them() -> None:
    """Where the image of its first user has no directory, Docker makes one of root's."""
    services = yaml.safe_load(filled_in((DOCKER / "compose.yaml").read_text()))["services"]
    seen: set[str] = set()
    for name, file in (("kvstore", "Dockerfile"), ("vllm", "Dockerfile.vllm")):
        made = " ".join(re.findall(r"install -d -o \w+ (.*)", (DOCKER / file).read_text())).split()
        for volume, target in (text.split(":")[:2] for text in services[name]["volumes"]):
            assert volume in seen or target in made, (name, target)
            seen.add(volume)
    assert seen == {"blocks", "run", "models"}


def test_kubernetes_manifest_follows_its_schema() -> None:
    manifest = yaml.safe_load((DOCKER / "kubernetes/vllm-with-kvstore.yaml").read_text())
    kubernetes_validate.validate(manifest, "1.29", strict=True)
    manifest["spec"]["template"]["spec"]["initContainers"][0]["argz"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.29", strict=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("name", ["kvstore", "kvstore-gateway"])
def test_units_are_understood(name: str, tmp_path: Path) -> None:
    for path in (DOCKER / "systemd").iterdir():
        text = path.read_text().replace("/opt/kvstore/bin/kvstore", "/bin/true")
        (tmp_path / path.name).write_text(text)
    out = said(["systemd-analyze", "verify", str(tmp_path / f"{name}.service")])
    assert f"{name}.service" not in out, out


def expressions() -> list[str]:
    rules = yaml.safe_load((DOCKER / "prometheus/rules.yml").read_text())
    found = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    board = json.loads((DOCKER / "grafana/dashboards/kvstore.json").read_text())
    for panel in board["panels"]:
        found += [target["expr"].replace("$instance", ".*") for target in panel["targets"]]
    return found


@pytest.mark.parametrize("expression", expressions())
def test_expressions_are_promql(expression: str) -> None:
    promql_parser.parse(expression)


@pytest.mark.timeout(600)
def test_the_images_install_steps_give_a_daemon_that_serves(tmp_path: Path) -> None:
    """What the Dockerfile runs, in a plain environment; then a start with only its own places."""
    steps = (DOCKER / "Dockerfile").read_text()
    assert "pip install --no-cache-dir --no-compile ." in steps, "the step that is done here"
    source = tmp_path / "src"
    source.mkdir()
    for name in re.findall(r"^COPY (?!--)(.+) \S+$", steps, re.MULTILINE):
        for part in name.split():
            where = ROOT / part
            copy = shutil.copytree if where.is_dir() else shutil.copy
            copy(where, source / part)  # type: ignore[operator]
    home = tmp_path / "kvstore"
    said([sys.executable, "-m", "venv", str(home)])
    install = [str(home / "bin/pip"), "install", "-q", "--no-cache-dir", "--no-compile", "."]
    said(install, cwd=source)
    bytes_used = sum(path.lstat().st_size for path in home.rglob("*"))
    assert bytes_used < 250 << 20, f"{bytes_used >> 20} MiB"
    settings = {
        "PATH": os.environ["PATH"],
        "KVSTORE_DAEMON__NAME": f"image-{os.getpid()}",
        "KVSTORE_DAEMON__SOCKET": str(tmp_path / "s"),
        "KVSTORE_DAEMON__DATA_DIR": str(tmp_path / "data"),
        "KVSTORE_HOST__BYTES": "16MiB",
        "KVSTORE_DAEMON__LOG_FORMAT": "json",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    daemon = subprocess.Popen([str(home / "bin/kvstore"), "serve"], env=settings, cwd="/")
    try:
        end = time.monotonic() + 60
        stat = [str(home / "bin/kvstore"), "stat"]
        while subprocess.run(stat, env=settings, capture_output=True).returncode:
            assert daemon.poll() is None
            assert time.monotonic() < end
            time.sleep(0.2)
    finally:
        daemon.terminate()
    assert daemon.wait(60) == 0
