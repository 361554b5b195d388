"""A run as one HTML page."""

from zayajax.report.goodput import goodput
from zayajax.report.page import write_report

__all__ = ["goodput", "write_report"]
