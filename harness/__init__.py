"""One probe, two trees: the lanes, verdicts and receipts of the reproducer packs."""
