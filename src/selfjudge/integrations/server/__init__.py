"""OpenAI's API over our own loop.

`config` settings · `address` · `server` start-up · `run` uvicorn and signals · `api` endpoints · `answers` whole or
streamed · `service` requests become jobs · `rules` which rule a request gets · `scheduler` queue and batches ·
`schema` bodies of requests · `errors` · `connection` heads and their time · `guard` headers, key and size · `metrics` ·
`playground` the page at `/`.
"""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

if TYPE_CHECKING:
    from .address import listen as listen
    from .config import ServerConfig as ServerConfig
    from .server import serve as serve

__getattr__, __dir__, __all__ = lazy_exports(
    __name__, {"address": ["listen"], "config": ["ServerConfig"], "server": ["serve"]}
)
