"""`selfjudge serve --backend torch`: a small OpenAI-compatible server on our own loop, for machines without vLLM.

`rules` which rule a request gets · `scheduler` queue and batches, in a thread of their own · `schema` bodies of requests ·
`api` endpoints · `guard` key and size · `metrics`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import signal
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from selfjudge.decoding.rules import names_threshold
from selfjudge.decoding.text import Batch
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.integrations.server.metrics import Metrics
from selfjudge.integrations.server.rules import Asked, Rules
from selfjudge.integrations.server.scheduler import Limits, Scheduler
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.models.tokens import context_window

if TYPE_CHECKING:
    import uvicorn

__all__ = ["Limits", "listen", "serve"]


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address, taken before the models are loaded; also the place where missing packages are noticed."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SelfJudgeError(f"serving needs {error.name}: pip install 'selfjudge[serve]'") from None
    if not 0 <= port < 1 << 16:
        raise SelfJudgeError(f"cannot listen on {host}:{port}: ports lie between 0 and 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise SelfJudgeError(f"cannot listen on {host}:{port}: {first_line(error)}") from None
    return bound


def serve(
    pair: Pair,
    bound: socket.socket,
    *,
    judge: Judge | None = None,
    rule: str = "exact",
    theta: float | str | None = None,
    quality: float | None = None,
    gamma: int = 5,
    limits: Limits | None = None,
    name: str | None = None,
    api_key: str | None = None,
    temperature: float = 0.0,
    engine: str = "auto",
    notify: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT: then refuse new requests, finish those that run, and return.

    `rule`, `theta` (R if not given) or `quality`, `gamma` and `temperature` hold where a request says nothing else.
    """
    limits = limits or Limits()
    if not (limits.seconds > 0 and limits.grace >= 0):
        raise SelfJudgeError(
            f"--timeout must be more than 0 and --grace at least 0, not {limits.seconds} and {limits.grace}"
        )
    if temperature != 0 and not 0.01 <= temperature <= 2:
        raise SelfJudgeError(f"--temperature is 0 or lies between 0.01 and 2, not {temperature}")
    api_key = None if api_key is None else api_key.strip()
    if api_key == "":
        raise SelfJudgeError("the API key is empty: give one, or none at all")
    if quality is not None and theta is not None:
        raise SelfJudgeError("--quality chooses θ: leave out one of --quality and --theta")
    if (quality is not None or theta is not None) and (judge is None or names_threshold(rule)):
        reason = "there is no judge" if judge is None else f"{rule} names a threshold already"
        raise SelfJudgeError(f"{reason}: leave out --theta and --quality")
    if judge is not None:
        judge.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
        theta = judge.quality(quality) if quality is not None else "R" if theta is None else theta
    window = min(context_window(model) for model in (pair.target, pair.draft) if model is not None)
    context = min(limits.context, window)
    limits = dataclasses.replace(limits, context=context, tokens=min(limits.tokens, context - 1))
    metrics = Metrics()
    rules = Rules(pair, judge, rule, theta, gamma, max(20, gamma))
    own = rules.choose(Asked(), None)  # a wrong setting ends the program here, not the first request

    # so does a pair or judge that does not work; and the first request finds everything compiled
    batch = Batch(pair, rules.build(own), gamma=gamma, rows=1, length=context, engine=engine)
    batch.add([next(iter(pair.eos_ids), 0)], max_new_tokens=3)
    while len(batch):
        batch.step()
    batch.close()

    scheduler = Scheduler(pair, rules, limits, metrics, engine)
    scheduler.start()
    try:
        asyncio.run(
            _serve(pair, rules, limits, metrics, scheduler, bound, name or pair.name, api_key, temperature, notify)
        )
    finally:
        scheduler.stop()
        bound.close()


async def _serve(
    pair: Pair,
    rules: Rules,
    limits: Limits,
    metrics: Metrics,
    scheduler: Scheduler,
    bound: socket.socket,
    name: str,
    api_key: str | None,
    temperature: float,
    notify: Callable[[str], None] | None,
) -> None:
    import uvicorn

    from selfjudge.integrations.server.api import Service, make_app

    own = dataclasses.replace(pair, tokenizer=copy.deepcopy(pair.tokenizer))
    service = Service(name, own, rules, limits, metrics, scheduler, temperature)
    config = uvicorn.Config(
        make_app(service, api_key), log_level="warning", access_log=False, lifespan="off", server_header=False,
        timeout_graceful_shutdown=5, h11_max_incomplete_event_size=1 << 16,
    )  # fmt: skip
    server = _server(config)
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    def told_to_stop() -> None:
        if stopping:  # a second time: now
            server.should_exit = server.force_exit = True
        else:
            stopping.append(loop.create_task(_drain(server, scheduler, limits.grace)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop)
    if notify:
        bound.listen(128)  # whoever reads the line may come at once
        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        notify(f"serving {name} at http://{shown}:{port}/v1")
    await server.serve(sockets=[bound])


async def _drain(server: uvicorn.Server, scheduler: Scheduler, grace: float) -> None:
    """Refuse what is new, wait for what runs, at most `grace` seconds; then end the server."""
    scheduler.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace):
            while scheduler.busy:
                await asyncio.sleep(0.02)
    await asyncio.to_thread(scheduler.stop)
    server.should_exit = True


def _server(config: uvicorn.Config) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are ours: uvicorn would raise them again at the end, and the exit code would not be 0."""
            yield

    return Server(config)
