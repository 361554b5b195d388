"""A run as one HTML page."""

from zayajax.report.page import write_report

__all__ = ["write_report"]
