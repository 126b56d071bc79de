"""Calibration and evaluation text."""

from gsq_module.data.module import CalibrationData
from gsq_module.data.sources import HubDataset, PythonTopics, Speeches, TextFiles, TextSource
from gsq_module.data.wikipedia import WikipediaArticles

__all__ = ["CalibrationData", "HubDataset", "PythonTopics", "Speeches", "TextFiles", "TextSource", "WikipediaArticles"]
