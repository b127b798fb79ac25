"""unicron keeps LLM training earning: it sees a failure in-band and finishes the interrupted iteration."""

__version__ = "0.1.0"
