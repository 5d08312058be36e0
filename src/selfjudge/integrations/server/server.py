"""`selfjudge serve --backend torch`: a small OpenAI-compatible server on our own loop, for machines without vLLM."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace

import torch

from selfjudge.decoding.text import Batch
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.metrics import Metrics
from selfjudge.integrations.server.rules import Rules
from selfjudge.integrations.server.scheduler import LOG, Scheduler
from selfjudge.integrations.server.shadow import ShadowJobs
from selfjudge.integrations.shadow import Shadow
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.tune.monitor import watch
from selfjudge.tune.recipe import Recipe


def serve(
    pair: Pair,
    listener: socket.socket,
    config: ServerConfig | None = None,
    *,
    judge: Judge | None = None,
    recipe: Recipe | None = None,
    notify: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT: then refuse new requests, finish those that run, and return.

    `recipe` is the one that rule and γ of the config come from; `shadow` watches its certificate. `notify` is called
    with two lines once requests are welcome: where the API is, and where the playground.
    """
    from selfjudge.integrations.server.playground import describe
    from selfjudge.integrations.server.run import run

    scheduler = start_scheduler(pair, judge, config or ServerConfig(), recipe)
    described = None if recipe is None else describe(recipe)
    try:
        asyncio.run(run(scheduler.config.name or pair.name, scheduler, described, listener, notify))
    finally:
        scheduler.stop()
        listener.close()


def start_scheduler(pair: Pair, judge: Judge | None, config: ServerConfig, recipe: Recipe | None = None) -> Scheduler:
    """What the server decodes with, tried out and started; needs none of the packages for HTTP."""
    config.check()
    monitor = watch(recipe, config.shadow_keep) if config.shadow else None
    if judge is not None:
        judge.config.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
    rules = Rules(pair, judge, config.default_rule)
    context = min(config.max_context, pair.window)
    config = replace(config, max_context=context, max_tokens=min(config.max_tokens, context - 1))
    _try_out(pair, rules, config)
    scheduler = Scheduler(pair, rules, config, Metrics())
    if monitor is not None:
        registry = scheduler.metrics.registry
        shadow = Shadow(monitor, config.shadow, config.shadow_keep, LOG, registry)
        scheduler.shadow = ShadowJobs(shadow, rules, scheduler.metrics)
    if pair.target.device.type == "cuda":
        about = "Bytes on the device: in use, and set aside by torch."
        scheduler.metrics.gauge("device_memory_bytes", about, torch.cuda.memory_allocated, kind="allocated")
        scheduler.metrics.gauge("device_memory_bytes", about, torch.cuda.memory_reserved, kind="reserved")
    scheduler.start()
    return scheduler


def _try_out(pair: Pair, rules: Rules, config: ServerConfig) -> None:
    """Answer one prompt: what does not work ends the program here, and the first request finds everything compiled."""
    choice = rules.choose()
    batch = Batch(pair, choice.rule, gamma=choice.gamma, rows=1, length=config.max_context, engine=config.engine)
    batch.add([next(iter(pair.eos_ids), 0)], max_new_tokens=3)
    while len(batch):
        batch.step()
    batch.close()
