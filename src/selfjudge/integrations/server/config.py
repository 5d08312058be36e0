"""How the server decodes where a request says nothing else, what it accepts at most, and where it listens. Imports no
torch: an address that is not free is refused at once."""

import errno
import re
import socket
from dataclasses import dataclass

from selfjudge.decoding.rule_parser import OPEN_REQUEST, RuleRequest
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError, expect, first_line
from selfjudge.integrations.asgi import ALLOWED
from selfjudge.models.device import parse_memory
from selfjudge.types import ENGINES, check_settings, setting

BYTES_PER_TOKEN = 16  # text that fits has fewer, 4 or 5 in English; single tokens may have more: runs of spaces
ORIGIN = re.compile(r"https?://[\w.-]+(:\d+)?|https?://\[[0-9a-fA-F:]+\](:\d+)?")  # as browsers send it


@dataclass(frozen=True)
class ServerConfig:
    """Settings of `serve`; those without a range are checked against pair and judge when it starts."""

    default_rule: RuleRequest = OPEN_REQUEST  # rule, threshold, price and γ of requests that name none
    temperature: float = setting(0.0, "Temperature of requests that name none; 0 is greedy.", minimum=0, maximum=2)
    name: str | None = setting(None, "What clients call the model; the pair's name if not given.")
    api_key: str | None = setting(None, "Key of clients, or several with commas; else SELFJUDGE_API_KEY, or none.")
    engine: str = setting("auto", "What runs the models.", choices=ENGINES)
    allowed_host: tuple[str, ...] = setting((), "Another name of this server that clients may use; * is any.")
    cors_origin: tuple[str, ...] = setting((), "A site whose pages may ask: https://app.example.")
    log_format: str = setting("text", "Lines of the log: for people, or as JSON.", choices=("text", "json"))
    max_batch: int = setting(0, "Answers decoded at a time; 0: 8 on a CPU, up to 256 on CUDA.", minimum=0)
    max_queue: int = setting(256, "Requests that may wait, shared out among the keys; more get a 429.", minimum=1)
    max_context: int = setting(4096, "Most tokens of a prompt with its answer.", minimum=2)
    prefix_cache: str | None = setting(None, "Memory for prefixes of earlier prompts: a share, a size (1GB) or 0.")
    max_tokens: int = setting(1024, "Most tokens of an answer.", minimum=1)
    max_body: int = setting(1 << 20, "Most bytes of a request.", minimum=1)
    max_connections: int = setting(512, "Connections that may be open; more get a 503.", minimum=1)
    header_timeout: float = setting(10.0, "Seconds that a client has to send the head of a request in.", above=0)
    timeout: float = setting(600.0, "Seconds after which a request is given up.", above=0)
    grace: float = setting(30.0, "Seconds that running answers have to end in at SIGTERM.", minimum=0)
    shadow: float = setting(0.0, "Share of requests decoded both ways, to watch a certificate.", minimum=0, maximum=1)

    def check(self) -> None:
        """Refuse values that no server can have."""
        check_settings(self)
        if self.prefix_cache not in (None, "0"):
            parse_memory(self.prefix_cache, "prefix_cache")
        Sampling(self.temperature)
        if self.temperature and self.shadow:
            raise SelfJudgeError("`shadow` watches greedy answers, as they were certified: leave out `temperature`")
        for name in self.allowed_host:
            expect(ALLOWED.fullmatch(name), "allowed_host", "a name without scheme or port", name)
        for origin in self.cors_origin:
            expect(ORIGIN.fullmatch(origin), "cors_origin", "like https://app.example:8443", origin)
        if self.api_key is not None and not all(self.keys):
            raise SelfJudgeError("`api_key` is empty: give a key, or none at all")
        if len(set(self.keys)) < len(self.keys):
            raise SelfJudgeError("`api_key` names a key twice: give each once")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that clients may send; none if everybody is welcome."""
        return () if self.api_key is None else tuple(key.strip() for key in self.api_key.split(","))

    @property
    def prompt_bytes(self) -> int:
        """The most bytes of a prompt."""
        return BYTES_PER_TOKEN * self.max_context


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to that address, before the models are loaded; missing packages are noticed here, too."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SelfJudgeError(f"serving needs {error.name}: pip install fastapi prometheus_client uvicorn") from None
    if not 0 <= port < 1 << 16:
        raise SelfJudgeError(f"cannot listen on {host}:{port}: ports lie between 0 and 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        hint = "; choose another `port`" if error.errno == errno.EADDRINUSE else ""
        raise SelfJudgeError(f"cannot listen on {host}:{port}: {first_line(error)}{hint}") from None
    return listener
