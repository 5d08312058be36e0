"""OpenAI's API over our own loop.

`config` settings and address · `server` start-up · `run` uvicorn, connections, signals · `guard` headers, key, size ·
`api` endpoints · `schema` bodies of requests · `completions` from body to response · `rules` of requests · `jobs` ·
`scheduler` queue and batches · `shadow` second answers · `errors` · `metrics` · `playground` the page at `/`.
"""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

if TYPE_CHECKING:
    from .config import ServerConfig as ServerConfig, listen as listen
    from .server import serve as serve

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"config": ["ServerConfig", "listen"], "server": ["serve"]})
