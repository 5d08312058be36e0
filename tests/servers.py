"""Servers for tests: a real process, asked over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoTokenizer

from conftest import tiny_model
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from warm import Process

WINDOW = 4096


@dataclass
class Server:
    process: Process
    port: int
    log: list[str]
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        if key not in self.clients:  # each reads the certificates of all authorities
            self.clients[key] = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=600)
        return self.clients[key]

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, **options: Any
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body, decoded where it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            data = body if isinstance(body, bytes) or body is None or options else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})}, **options)
            response = connection.getresponse()
            text = response.read().decode()
            kept = {k.lower(): v for k, v in response.getheaders()}
            return response.status, kept, json.loads(text) if "json" in kept.get("content-type", "") else text
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all labels, or over those that have these values."""
        lines = [line for line in self.send("GET", "/metrics")[2].splitlines() if line.startswith(f"selfjudge_{name}")]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line[10 + len(name)] in " {" and all(f'{key}="{value}"' in line for key, value in labels.items())
        )

    def wait_for(self, name: str, value: float) -> None:
        limit = time.monotonic() + 300
        while time.monotonic() < limit:
            if self.metric(name) == value:
                return
            time.sleep(0.01)
        raise AssertionError(f"{name} is {self.metric(name)}, not {value}: {self.log}")

    def wait_until_idle(self) -> None:
        for name in ("queue_depth", "running", "batches"):
            self.wait_for(name, 0)


@contextlib.contextmanager
def servers() -> Iterator[Callable[..., Server]]:
    """Starts servers that end with the context."""
    started: list[Server] = []

    def begin(*arguments: str, **environment: str) -> Server:
        process, log = Process(["serve", "--port", "0", *arguments], **environment), list[str]()
        for line in process.stderr:
            log.append(line)
            if line.startswith("serving") or '"message": "serving' in line:
                break
        else:
            raise AssertionError(f"the server did not start: {log}")
        port = int(log[-1].split(":")[-1].split("/")[0])
        threading.Thread(target=lambda: log.extend(process.stderr), daemon=True).start()
        started.append(Server(process, port, log))
        return started[-1]

    try:
        yield begin
    finally:
        for server in started:
            server.process.kill()
            server.process.wait()


def save(folder: Path, tokenizer: Any, noise: float = 0.0, **options: Any) -> str:
    """A model whose answers never end by themselves: it has no use for special tokens."""
    model = tiny_model(seed=1, max_position_embeddings=WINDOW, **options)
    with torch.no_grad():
        torch.manual_seed(1)
        for p in model.parameters():
            p.add_(torch.randn_like(p) * noise * p.std().nan_to_num(0.0))
        model.get_output_embeddings().weight[tokenizer.all_special_ids] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def endless_pair(checkpoints: dict[str, str], root: Path) -> list[str]:
    """Target, a draft that often agrees, and a judge, as options of the command; answers end at their length alone."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["target"])
    target, draft = save(root / "target", tokenizer), save(root / "draft", tokenizer, noise=0.08)
    judge = Judge(
        JudgeConfig(32, target, thresholds={"F": 0.4, "R": 0.6}, quality_curve=((0.5, 0.3), (0.9, 0.8))),
        torch.randn(32, generator=torch.Generator().manual_seed(3)),
    )
    judge.save_pretrained(root / "judge")
    return ["--target", target, "--draft", draft, "--judge", str(root / "judge"), "--name", "tiny", "--gamma", "3"]
