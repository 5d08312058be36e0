"""`selfjudge report`: result folders become one page. Reads files only; needs no torch."""

from typing import TYPE_CHECKING

from selfjudge.types import lazy_exports

if TYPE_CHECKING:
    from selfjudge.report.demo import demo_page as demo_page
    from selfjudge.report.page import report as report

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
