"""Script and contract on two trees: the lanes, verdicts and receipts of the reproducer packs."""

__version__ = "0.1.0"
